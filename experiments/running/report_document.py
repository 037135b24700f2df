"""A report as a list of blocks, written once as Markdown and once as one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.errors import ExperimentError
from policies.edges.output_file import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; }
th { border-bottom: 2px solid #888; } th:first-child, td:first-child { text-align: left; }
td.good { color: #0a6b2d; } td.bad { color: #b00020; font-weight: 600; }
img { max-width: 100%; } figcaption { color: #555; font-size: 13px; } figure { margin: 1.5rem 0; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; } code { background: #f3f3f3; padding: 0 .2em; }
"""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """One paragraph, plain text."""

    text: str


@dataclass(frozen=True)
class Bullets:
    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """The first column is text, the rest numbers as text. marks: cell text -> "good" or "bad", for colour."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    marks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Picture:
    """A matplotlib figure. name: of its files, without an ending."""

    name: str
    figure: Figure
    caption: str


Block = Heading | Text | Bullets | Table | Picture


def write_document(folder: Path, name: str, blocks: Sequence[Block]) -> list[Path]:
    """Write NAME.md, NAME.html and figures/ into a folder, each file whole or not at all; returns the two."""
    from metrics.drawing.figure_style import house_style, save

    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        with house_style():
            for block in blocks:
                if isinstance(block, Picture):
                    save(block.figure, folder / "figures", block.name)
        written = []
        for suffix, text in ((".md", as_markdown(blocks)), (".html", as_html(blocks, folder / "figures"))):
            target = folder / f"{name}{suffix}"
            write_text(target, text, ExperimentError)
            written.append(target)
    except OSError as error:
        raise ExperimentError(f"{folder}: cannot write the report there: {error.strerror}") from None
    return written


def as_markdown(blocks: Sequence[Block]) -> str:
    """Figures are linked as figures/NAME.png."""
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"{'#' * block.level} {block.text}")
        elif isinstance(block, Text):
            parts.append(block.text)
        elif isinstance(block, Bullets):
            parts.append("\n".join(f"- {item}" for item in block.items))
        elif isinstance(block, Table):
            lines = [block.header, ["---", *["---:"] * (len(block.header) - 1)], *block.rows]
            parts.append("\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines))
        else:
            parts.append(f"![{block.caption}](figures/{block.name}.png)\n\n*{block.caption}*")
    return "\n\n".join(parts) + "\n"


def as_html(blocks: Sequence[Block], figures: Path) -> str:
    """One file; figures are read from the PNG files of the folder `figures` and put inside."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "Report")
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
    ]
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"<h{block.level}>{_inline(block.text)}</h{block.level}>")
        elif isinstance(block, Text):
            parts.append(f"<p>{_inline(block.text)}</p>")
        elif isinstance(block, Bullets):
            parts.append("<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in block.items) + "</ul>")
        elif isinstance(block, Table):
            parts.append(_html_table(block))
        else:
            picture = base64.b64encode((figures / f"{block.name}.png").read_bytes()).decode("ascii")
            caption = html.escape(block.caption)
            parts.append(
                f'<figure><img alt="{caption}" src="data:image/png;base64,{picture}">'
                f"<figcaption>{caption}</figcaption></figure>"
            )
    return "\n".join([*parts, "</body></html>\n"])


def _html_table(block: Table) -> str:
    def cells(line: Sequence[str], tag: str) -> str:
        found = []
        for cell in line:
            mark = block.marks.get(cell)
            found.append(f"<{tag}{f' class={mark}' if mark else ''}>{_inline(cell)}</{tag}>")
        return "<tr>" + "".join(found) + "</tr>"

    body = "".join(cells(line, "td") for line in block.rows)
    return f"<table><thead>{cells(block.header, 'th')}</thead><tbody>{body}</tbody></table>"


def _inline(text: str) -> str:
    """Escaped, with `code` marked."""
    parts = html.escape(text).split("`")
    return "".join(part if at % 2 == 0 else f"<code>{part}</code>" for at, part in enumerate(parts))


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|")
