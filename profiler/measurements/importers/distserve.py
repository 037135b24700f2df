"""DistServe's fitted step times: a line for prefill and two for decoding, evaluated at the sizes its own profiler
visited.

Traps: these are fits, not measurements; times are milliseconds. Prefill is a + b * tokens + c * (sum of squared prompt
lengths); decoding is a + b * (tokens of context in all) + c * requests, with other coefficients above a batch
threshold.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import ProfileError
from profiler.measurements.importers.tables import read_csv
from profiler.measurements.profile import Profile, make_profile

if TYPE_CHECKING:
    import pandas as pd

PROMPTS = (64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 4, 16, 64, 128)
CONTEXTS = (128, 512, 1024)


def read(
    path: Path, system: str | None = None, model: str | None = None, tensor_parallel: int | None = None
) -> Profile:
    """Profile of the table's iterations; system, model and tensor_parallel keep only their rows."""
    import pandas as pd

    numbers = ["tensor_parallel", "a_ms", "b_ms", "c_ms", "small_large_batch_threshold"]
    table = read_csv(path, numbers, ["system", "model", "gpu", "phase"])
    for column, wanted in (("system", system), ("model", model), ("tensor_parallel", tensor_parallel)):
        if wanted is not None:
            table = table[table[column] == wanted]
    rows = []
    for _, fit in table.iterrows():
        rows += _evaluated(fit, str(path))
    if not rows:
        raise ProfileError(f"{path}: no row of system {system}, model {model}, tp {tensor_parallel}")
    provenance = {
        "source": "DistServe",
        "licence": "Apache-2.0, LLMServe/DistServe",
        "measured": "step times evaluated from published fits, not measured ones",
    }
    return make_profile(pd.DataFrame(rows), provenance, str(path))


def _evaluated(fit: pd.Series, where: str) -> list[dict[str, Any]]:
    a, b, c = (float(fit[key]) * 1e-3 for key in ("a_ms", "b_ms", "c_ms"))
    phase, threshold = str(fit["phase"]), float(fit["small_large_batch_threshold"])
    common = {
        "device": fit["gpu"],
        "model": str(fit["model"]).rsplit("/", 1)[-1],
        "dtype": "float16",
        "operator": "iteration",
        "backend": f"{fit['system']} fit",
        "tensor_parallel": fit["tensor_parallel"],
    }
    rows: list[dict[str, Any]] = []
    if phase == "prefill":
        for prompt in PROMPTS:
            rows.append({**common, "chunks": f"{prompt}:0", "rows": prompt, "median_s": a + b * prompt + c * prompt**2})
        return rows
    if phase not in ("decoding_smallbs", "decoding_largebs"):
        raise ProfileError(f"{where}: phase: found {phase!r}, expected prefill, decoding_smallbs or decoding_largebs")
    for batch in BATCHES:
        if (batch <= threshold) != (phase == "decoding_smallbs"):
            continue
        for context in CONTEXTS:
            total = batch * context
            shape = {"decodes": batch, "rows": batch, "decode_context_total": total, "decode_context_max": context}
            rows.append({**common, **shape, "median_s": a + b * total + c * batch})
    return rows
