"""Every value of every kind of structured file becomes each of the values that no one can mean, or is left out.

The file stays what it is otherwise, so the readers get past its beginning. `LEAF_VALUES=all` tries every value at every
place (by hand, half an hour), otherwise one at each place in turn.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hardening.command_line import TooLong, assert_sound, at_most, needs_posix, run
from tests.hardening.test_hostile_files import SHAPE
from tests.metrics.sample_runs import three_requests

pytestmark = needs_posix
ALL = os.environ.get("LEAF_VALUES") == "all"
GONE = object()
VALUES: tuple[Any, ...] = (
    GONE,
    None,
    True,
    "",
    "x",
    "²",
    "a\nb",
    "../..",
    -1,
    0,
    0.5,
    1e308,
    1e-308,
    -1e-9,
    10**18,
    10**400,
    math.nan,
    math.inf,
    [],
    {},
    [[]],
    [1, "x"],
    {"x": 1},
    "9" * 5_000,
)


def bent(document: Any, first: int = 0) -> Iterator[tuple[str, Any]]:
    """(what was done, the document with one value changed); of a list, its first and last entries are changed.

    first: the place in VALUES at which the turns begin, where one value is tried at each place.
    """
    for turn, path in enumerate(leaves(document)):
        chosen = VALUES if ALL else [VALUES[(first + turn * 5) % len(VALUES)]]
        for value in chosen:
            changed = json.loads(json.dumps(document))
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            if value is GONE:
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            yield f"{'.'.join(map(str, path))} = {'gone' if value is GONE else repr(value)[:30]}", changed


def leaves(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(document, dict):
        for key in document:
            yield from leaves(document[key], (*path, key))
    elif isinstance(document, list) and document:
        for key in sorted({0, len(document) - 1}):
            yield from leaves(document[key], (*path, key))


def toml(table: dict[str, Any]) -> str | None:
    """As TOML; None for what TOML cannot say (null)."""
    try:
        return "".join(f"{json.dumps(key)} = {_inline(value)}\n" for key, value in table.items())
    except TypeError:
        return None


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_inline(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) > 10**300:
        return str(value)
    if value is None:
        raise TypeError
    return json.dumps(value)


def as_json(content: Any) -> str:
    return json.dumps(content)


TRACE = "arrival_s,prompt_tokens,output_tokens\n0,40,3\n1,9,3\n"
BENCH = {
    "request_rate": "inf",
    "input_lens": [100, 50],
    "output_lens": [3, 1],
    "ttfts": [0.5, 0.25],
    "itls": [[0.1, 0.3], []],
    "errors": ["", ""],
}
ROPE = {
    "rope_theta": 1e4,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    },
}
PRICE = {
    "gpu": "h100",
    "amount": 3.6,
    "currency": "EUR",
    "per": "GPU-hour",
    "provider": "S",
    "date": "2026-01-31",
    "source": "a",
}


def _named(file: str, name: str) -> dict[str, Any]:
    return {name: tomllib.loads(Path(file).read_text(encoding="utf-8"))[name]}


def _fit() -> dict[str, Any]:
    return json.loads(Path("profiler/data/fitted/a6000.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _iterations(stages: int = 1) -> dict[str, Any]:
    """A cost model of whole iterations, or that of a pipeline whose stages lie beside it."""
    from profiler.iterations.iteration_file import write_fit
    from profiler.iterations.iteration_model import AMOUNTS, ROW_TERMS, Bounds, IterationFit
    from profiler.iterations.staged_model import StagedFit, write_staged

    bounds = Bounds(64, 8, 1, 64, 0, 8, 128, 1024)
    one = IterationFit(
        "a cpu",
        "nano",
        "float32",
        "native",
        (1.0,) * len(ROW_TERMS),
        (1.0,) * len(AMOUNTS),
        (1.0,) * 4,
        (1.0, 1.0),
        bounds,
        resampled=((1.0,) * (len(ROW_TERMS) + len(AMOUNTS)),) * 2,
        drift=0.01,
        phases=5.0,
        errors={"shapes": 70.0},
        noise={"median": 0.1},
    )
    file = Path("made.json")
    if stages == 1:
        write_fit(one, file)
    else:
        write_staged(StagedFit((one,) * stages, ((1.0, 1.0),) * (stages - 1), (1.0,) * 4, (1.0, 1.0), {"a": 1}), file)
    return json.loads(file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _packing() -> dict[str, Any]:
    whole = json.loads(Path("profiler/data/kv_compression_cpu.json").read_text(encoding="utf-8"))
    return {**whole, "prices": {"kivi4": whole["prices"]["kivi4"]}}


Door = tuple[Callable[[], Any], str, Callable[[Any], "str | None"], Callable[[Path], tuple[object, ...]]]
REPLAY = ("simulator", "replay", "t.csv")
CAPACITY = ("experiments", "capacity", "t.csv", "--smallest", "--slo", "ttft_p99=9", "--workers", 0, "--gpus", "h100")
DOORS: dict[str, Door] = {
    "gpu": (lambda: _named("profiler/data/hardware.toml", "h100"), "gpu.toml", toml, lambda f: (*REPLAY, "--gpu", f)),
    "model": (
        lambda: _named("profiler/data/models.toml", "nano"),
        "model.toml",
        toml,
        lambda f: (*REPLAY, "--model", f),
    ),
    "Hugging Face config": (
        lambda: {**SHAPE, **ROPE},
        "m/config.json",
        as_json,
        lambda f: (*REPLAY, "--model", f.parent),
    ),
    "fitted costs": (_fit, "a6000.json", as_json, lambda f: (*REPLAY, "--model", "llama-13b", "--cost-model", f)),
    "fitted iterations": (
        _iterations,
        "i.json",
        as_json,
        lambda f: (*REPLAY, "--model", "nano", "--cost-model", f, "--num-blocks", 99),
    ),
    "fitted stages": (
        lambda: _iterations(2),
        "made.json",
        as_json,
        lambda f: (*REPLAY, "--model", "nano", "--cost-model", f, "--pp", 2, "--num-blocks", 99),
    ),
    "costs of packing": (
        _packing,
        "pack.json",
        as_json,
        lambda f: (*REPLAY, "--kv-compression", "kivi4", "--kv-compression-cost", f),
    ),
    "settings of a replay": (
        lambda: {
            "policy": "chunked",
            "token_budget": 640,
            "model": "nano",
            "gpu": "h100",
            "knobs": {"chunk_size": 64},
            "pp": 2,
            "layer_split": [2, 2],
            "slo": "ttft_p99=2",
            "warmup": "1s",
            "failures": ["0@1"],
            "replicas": 2,
        },
        "run.toml",
        toml,
        lambda f: (*REPLAY, "--config", f),
    ),
    "sweep": (
        lambda: {
            "trace": {"file": "t.csv", "seed": 2},
            "base": {"model": "nano", "knobs": {"chunk_size": 64}},
            "space": {"policy": ["chunked"], "chunk_size": [64, 128], "hardware.memory_bandwidth": [1e12, 2e12]},
        },
        "sweep.toml",
        toml,
        lambda f: ("experiments", "sweep", f, "--workers", 0, "--out", f.parent / "sweep"),
    ),
    "price book": (lambda: {"price": [PRICE]}, "book.toml", toml, lambda f: (*CAPACITY, "--price-book", f)),
    "benchmark": (
        lambda: BENCH,
        "bench.json",
        as_json,
        lambda f: (
            "experiments",
            "validate",
            "--against",
            f,
            "--model",
            "nano",
            "--gpu",
            "h100",
            "--cost-model",
            "roofline",
            "--num-blocks",
            100,
            "--out",
            f.parent / "v",
        ),
    ),
    "a run's config": (
        lambda: json.loads(Path("run/config.json").read_text()),
        "run/config.json",
        as_json,
        lambda f: ("metrics", "bubbles", "run"),
    ),
    "a run's config, again": (
        lambda: json.loads(Path("run/config.json").read_text()),
        "run/config.json",
        as_json,
        lambda f: ("metrics", "show", "run", "--warmup", "1"),
    ),
    "a run's summary": (
        lambda: json.loads(Path("run/summary.json").read_text()),
        "run/summary.json",
        as_json,
        lambda f: ("metrics", "diff", "run", "good"),
    ),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("profiler", "examples"):
        (tmp_path / name).symlink_to(Path(name).resolve())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(TRACE)
    shutil.copyfile("profiler/data/fitted/a6000.npz", "a6000.npz")
    return tmp_path


@pytest.mark.parametrize("name", DOORS)
def test_every_value_of_a_file_may_be_anything(name: str, place: Path) -> None:
    from metrics import summarise, write_run

    made, file_name, text_of, words = DOORS[name]
    for folder in ("run", "good"):
        write_run(
            place / folder,
            three_requests(),
            {"policy": "chunked", "replay": {"slo": "ttft_p99=2"}, "num_blocks": 9},
            summarise(three_requests()),
        )
    good = made()
    file = place / file_name
    file.parent.mkdir(exist_ok=True)
    text = text_of(good)
    assert text is not None
    file.write_text(text, encoding="utf-8")
    first = run(*words(file))
    assert first.code == 0, first.err
    faults = []
    for what, document in bent(good):
        text = text_of(document)
        if text is None:
            continue
        file.write_text(text, encoding="utf-8")
        shutil.rmtree(place / "sweep", ignore_errors=True)
        try:
            with at_most(20):
                assert_sound(run(*words(file)))
        except (Exception, TooLong) as error:
            faults.append(f"{what}: {type(error).__name__}: {str(error)[-300:]}")
            print(faults[-1], flush=True)
    assert faults == [], f"{len(faults)}:\n" + "\n".join(faults)
