"""How our figures look: paper sizes, embedded fonts, one colour per policy everywhere, readable without colour too.

Figures are made without pyplot, so drawing has no global state and needs no display. Every figure is saved as PDF (for
print, fonts embedded as TrueType) and PNG (for the screen).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from metrics.run_folder.columns import MetricsError
from policies.edges.missing_glyphs import drawable
from policies.edges.output_file import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SINGLE_COLUMN_IN = 3.35
DOUBLE_COLUMN_IN = 7.0

LEGEND_POINTS = 7
SOFT_INK = "#595959"
_LETTER = 0.55
"""Width of a letter, of the font size."""

RC = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": LEGEND_POINTS,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.4,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "savefig.dpi": 200,
    "figure.constrained_layout.use": True,
}


class LineStyle(NamedTuple):
    """Colour (told apart by colour-blind readers), dashes and marker (told apart in grey)."""

    colour: str
    dashes: tuple[float, ...]
    marker: str

    def line(self) -> dict[str, Any]:
        """Keyword arguments of `Axes.plot`."""
        return {"color": self.colour, "linestyle": (0, self.dashes) if self.dashes else "-"}


SOLID: tuple[float, ...] = ()

POLICY_STYLES: dict[str, LineStyle] = {
    "request_level": LineStyle("#000000", (1, 1), "x"),
    "orca": LineStyle("#56B4E9", (6, 1.2), "P"),
    "prefill_priority": LineStyle("#D55E00", (7, 1.2, 2, 1.2), "o"),
    "chunked": LineStyle("#0072B2", SOLID, "s"),
    "decode_maximal": LineStyle("#009E73", (4, 1.4), "^"),
    "dynamic_chunk": LineStyle("#CC79A7", (4, 1.2, 1, 1.2), "D"),
    "vllm_v1": LineStyle("#E69F00", (1.6, 1), "v"),
    "slo_aware": LineStyle("#882255", (6, 1.2, 1, 1.2, 1, 1.2), "<"),
    "shortest_prompt_first": LineStyle("#7F7F7F", (2.5, 1.2), ">"),
    "predicted_sjf": LineStyle("#332288", (3, 1, 1, 1), "h"),
    "weighted_fair": LineStyle("#999933", (6, 2), "*"),
    "vtc": LineStyle("#44AA99", (1, 1.6), "d"),
    "most_in_time": LineStyle("#661100", (4, 1.4, 4, 3), "8"),
}
"""The Okabe-Ito colours, extended by six; a policy keeps its own in every figure."""

_SPARE = (
    LineStyle("#AA4499", SOLID, "p"),
    LineStyle("#B15928", (5, 1, 1, 1), "X"),
    LineStyle("#6A3D9A", (2, 1), "H"),
    LineStyle("#B2182B", (8, 1.5), "1"),
    LineStyle("#1B7837", (3, 1.5, 3, 3), "2"),
)
"""For policies of one's own and further settings of a known one: none of the house's colours."""


def styles_for(labels: Mapping[str, str | None]) -> dict[str, LineStyle]:
    """A style per label. labels: label -> the policy behind it, or None if unknown.

    The first label of a known policy gets that policy's style; further labels of the same policy and unknown ones
    take the spare styles, then those of policies that are not in the figure.
    """
    styles: dict[str, LineStyle] = {}
    taken: set[LineStyle] = set()
    for label, policy in labels.items():
        own = POLICY_STYLES.get(policy or label)
        if own is not None and own not in taken:
            styles[label] = own
            taken.add(own)
    free = [style for style in (*_SPARE, *POLICY_STYLES.values()) if style not in taken]
    for position, label in enumerate(label for label in labels if label not in styles):
        styles[label] = free[position % len(free)]
    return {label: styles[label] for label in labels}


def new_figure(
    width_in: float, height_in: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, Any]:
    """A figure and its axes (an array [rows, columns]), in our style. Call inside `house_style()`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def house_style() -> Any:
    """Context in which figures are made and saved."""
    import matplotlib

    return matplotlib.rc_context(RC)  # type: ignore[arg-type]


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write name.pdf and name.png, each whole or not at all."""
    written = []
    for suffix in (".pdf", ".png"):
        target = folder / f"{name}{suffix}"
        with whole_file(target, MetricsError) as scratch:
            # Without a date the same run gives the same bytes.
            figure.savefig(scratch, metadata={"CreationDate": None} if suffix == ".pdf" else None)
        written.append(target)
        figure.set_layout_engine("none")  # laid out once is enough; it takes as long as drawing
    return written


FOOTNOTE_POINTS = 5.0


def costs_said(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the costs of these runs rest on, as their configs know it."""
    told = [(config.get("cost_model"), config.get("cost_evidence")) for config in configs]
    words: dict[str, list[str]] = {}
    for name, found in told:
        if isinstance(found, Mapping):
            words.setdefault(str(name), []).append(str(found.get("words")))
    return [f"Costs: {name} ({_spanned(each)})." for name, each in words.items()]


def _spanned(words: Sequence[str]) -> str:
    """What runs of one cost model rest on: their own words, or the range of their measured shares."""
    different = list(dict.fromkeys(words))
    found = [re.match(r"partly measured: (\d+) %", each) for each in different]
    shares = [int(each[1]) for each in found if each]
    if len(different) > 1 and len(shares) == len(different):
        return f"partly measured: {min(shares)} to {max(shares)} %"
    return " | ".join(different)


def footnote(figure: Figure, said: Sequence[str]) -> Figure:
    """The figure with these lines below it."""
    if said:
        letters = letters_in(float(figure.get_figwidth()), FOOTNOTE_POINTS)
        text = "\n".join(shown_name(line, letters) for line in dict.fromkeys(said))
        figure.supxlabel(text, x=0.01, ha="left", fontsize=FOOTNOTE_POINTS, color=SOFT_INK)
    return figure


def shown_name(name: str, letters: int = 0) -> str:
    """A name as matplotlib draws it unchanged: no formula between two $, no first _ that would keep it out of a legend,
    no letter that the fonts lack (matplotlibrc's `font.family` may list more than one).

    letters: where lines are broken, 0 for nowhere.
    """
    from matplotlib import font_manager, rcParams

    text = drawable(name, font_manager, rcParams["font.family"])
    lines = textwrap.wrap(text, letters) if letters else [text]
    text = "\n".join(lines).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def letters_in(width_in: float, font_points: float = LEGEND_POINTS) -> int:
    """About how many letters fit into a width."""
    return max(8, int(width_in * 72 / (font_points * _LETTER)))


def legend_above(figure: Figure, axes: Axes, count: int, per_row: int = 4) -> None:
    """One legend for the whole figure, above it; at most `per_row` labels side by side, fewer where they are long.

    The figure grows by what the legend needs beyond one line, so that panels keep their height.
    """
    handles, labels = axes.get_legend_handles_labels()
    width_in = figure.get_figwidth()
    # Line, gap and column spacing take about six letters more; broken words may be of wide letters alone.
    most = int(0.88 * letters_in(width_in)) - 6
    labels = ["\n".join(textwrap.wrap(label, most)) for label in labels]
    longest = max((len(line) for label in labels for line in label.split("\n")), default=0)
    columns = max(1, min(count, per_row, letters_in(width_in) // (6 + longest)))
    rows = -(-len(labels) // columns)
    # Columns are filled one after another.
    lines = max(
        (sum(label.count("\n") + 1 for label in labels[at : at + rows]) for at in range(0, len(labels), rows or 1)),
        default=1,
    )
    figure.set_figheight(figure.get_figheight() + (lines - 1) * 1.5 * LEGEND_POINTS / 72)
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, columnspacing=1.4)


def say_empty(ax: Axes, why: str) -> None:
    """Say in an empty panel why it is empty, in place of ticks that measure nothing."""
    ax.text(0.5, 0.5, why, transform=ax.transAxes, ha="center", va="center", color=SOFT_INK)
    ax.set_xticks([])
    ax.set_yticks([])
