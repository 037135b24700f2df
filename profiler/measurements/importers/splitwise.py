"""Splitwise's perf_model.csv: whole prompt and token iterations, one line a run.

Traps: times are milliseconds; repeats are separate lines (their spread is the measurement's own noise); runs with long
outputs stop early, so prompt_time and token_time are used and never e2e_time / token_size; token_time is a mean over
the output, so its context lies half an output beyond the prompt.
"""

from __future__ import annotations

from pathlib import Path

from profiler.errors import ProfileError
from profiler.measurements.importers.tables import read_csv
from profiler.measurements.profile import Profile, chunk_text, make_profile

LONGEST_OUTPUT = 1024
"""Longer outputs stopped early."""


def read(path: Path, model: str | None = None, tensor_parallel: int | None = None) -> Profile:
    """Profile of the file; model and tensor_parallel keep only their rows."""
    import pandas as pd

    numbers = ["prompt_size", "batch_size", "token_size", "prompt_time", "token_time", "tensor_parallel"]
    table = read_csv(path, numbers, ["model", "hardware"])
    if model is not None:
        table = table[table["model"] == model]
    if tensor_parallel is not None:
        table = table[table["tensor_parallel"] == tensor_parallel]
    keys = ["model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size"]
    rows = []
    for (name, device, degree, prompt, batch, output), runs in table.groupby(keys, sort=True):
        half = int(prompt + min(output, LONGEST_OUTPUT) // 2)
        shapes = {
            "prompt_time": {"chunks": chunk_text([(int(prompt), 0)] * int(batch)), "rows": prompt * batch},
            "token_time": {
                "decodes": batch,
                "rows": batch,
                "decode_context_total": half * batch,
                "decode_context_max": half,
            },
        }
        for column, shape in shapes.items():
            times = runs[column].to_numpy(float) * 1e-3
            spread = {"median_s": float(pd.Series(times).median()), "min_s": times.min(), "max_s": times.max()}
            run = {"model": name, "device": device, "tensor_parallel": degree, "repeats": len(times)}
            rows.append({**run, **shape, **spread})
    if not rows:
        raise ProfileError(f"{path}: no row of model {model}, tp {tensor_parallel}")
    out = pd.DataFrame(rows)
    out["operator"], out["dtype"], out["backend"] = "iteration", "float16", "Splitwise, eager"
    provenance = {"source": "Splitwise", "licence": "MIT, mutinifni/splitwise-sim", "measured": "whole iterations"}
    return make_profile(out, provenance, str(path))
