"""Engines under load of which only means were published: closed loops, and constant rates behind HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.board.entries import LATENCIES, rounded

if TYPE_CHECKING:
    from experiments.vllm.whole_engines import Predicted


FEW_BITS_EVERY = 5
"""Of rows with experts and few bits the board has every so many-th: `experiments engines` has all of them."""


def engine_entries(every: int = 1) -> list[dict[str, Any]]:
    """Rows whose kernels a shipped fit knows, copies left out; `every`: only each so many-th one."""
    from experiments.vllm.whole_engines import ABLATION, known_loops, known_rates, predict_loop, predict_rate

    loops = known_loops()
    plain = [run for run in loops if run.dtype == "bf16"][::every]
    few = [run for run in loops if run.dtype != "bf16"][:: every * FEW_BITS_EVERY]
    rows = [predict_loop(run, ABLATION[0]) for run in (*plain, *few)]
    rows += [predict_rate(run, ABLATION[0]) for run in known_rates()]
    return [_row(row) for row in rows]


def _row(row: Predicted) -> dict[str, Any]:
    scaled = {
        side: rounded(
            {f"{key}_mean_ms" if key in LATENCIES else "requests_per_s": value * (1e3 if key in LATENCIES else 1)
             for key, value in values.items()}
        )
        for side, values in (("measured", row.measured), ("predicted", row.predicted))
    }  # fmt: skip
    band = [float(f"{1e3 * edge:.4g}") for edge in row.ttft_band] if row.ttft_band is not None else None
    return {"run": row.id, "half": row.half, "group": row.group, **scaled, "ttft_band_ms": band}


def groups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median absolute errors by engine, and by half where an engine has rows of both."""
    found = []
    for name, half in sorted({(row["group"], row["half"]) for row in rows}):
        some = [row for row in rows if (row["group"], row["half"]) == (name, half)]
        banded = [row for row in some if row["ttft_band_ms"] is not None]
        inside = sum(
            row["ttft_band_ms"][0] <= row["measured"]["ttft_mean_ms"] <= row["ttft_band_ms"][1] for row in banded
        )
        found.append(
            {
                "group": name,
                "half": half,
                "rows": len(some),
                "median_error": {key: _median_error(some, f"{key}_mean_ms") for key in LATENCIES},
                "ttft_in_band": inside if banded else None,
            }
        )
    return found


def _median_error(rows: list[dict[str, Any]], name: str) -> float:
    from statistics import median

    return float(f"{median(abs(row['predicted'][name] / row['measured'][name] - 1) for row in rows):.4g}")
