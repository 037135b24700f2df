"""Coverage-guided fuzzing of whatever reads files and texts from outside, by hand and for minutes at a time:

    pip install atheris
    python tests/hardening/fuzz.py trace --seconds 300

A target may refuse its input with its folder's own exception, in one line of at most 1,500 characters; anything else
(another exception, ten seconds, two gigabytes) ends the fuzzing and leaves the input as `crash-...` in the folder
`--kept` (found/TARGET unless said otherwise), from which the next run of the target starts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
OWN = ("policies", "workloads", "metrics", "profiler", "simulator", "experiments", "executor")
TEXT_FORMS = (
    "poisson:1",
    "gamma:1,2",
    "closed:2,1",
    "step:1,2",
    "diurnal:9,0.5",
    "zipf:0.4,1,9",
    "quantiles:50=1,90=2",
    "lognormal:9,1,1,99",
    "ttft_p99=2,tbt_p99=0.2",
    "chat:ttft=1,tbt=0.1;batch:ttft=60",
    "0@1+2",
    "512:0x3 128:1024",
    "30s",
    "0:10",
    "20,12",
    "2.5 EUR",
    "4:tp=2,gpu=h100",
)


def file_target(
    name: str, read: Callable[[Path], object], companions: tuple[Path, ...] = ()
) -> Callable[[bytes], None]:
    """Hands the input to a reader as a file of this name, with other files beside it."""
    folder = Path(tempfile.mkdtemp(prefix="charioteer-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    for companion in companions:
        shutil.copy(companion, folder / companion.name)
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)

    def run(content: bytes) -> None:
        file.write_bytes(content)
        read(file)

    return run


def _traces() -> tuple[Callable[[bytes], None], list[bytes]]:
    from workloads import read_trace

    seeds = [
        b"arrival_s,prompt_tokens,output_tokens\n0,5,5\n1.5,9,3\n",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
        b'{"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [1, 2]}\n',
        b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n",
        b'[{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5, "session": "a", "priority": 1}]',
    ]
    return file_target("t", read_trace), seeds


def _profiles() -> tuple[Callable[[bytes], None], list[bytes]]:
    from profiler.measurements.profile import make_profile, read_profile, write_profile
    from tests.profiler.test_profile import ROWS

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "p.csv"
        write_profile(make_profile(ROWS, {"source": "test"}), file)
        return file_target("p.csv", read_profile), [file.read_bytes()]


def _model_files() -> tuple[Callable[[bytes], None], list[bytes]]:
    from profiler.operators.fitting.model_file import read_model

    data = ROOT / "profiler/data/fitted"
    return file_target("a6000.json", read_model, (data / "a6000.npz",)), [(data / "a6000.json").read_bytes()]


def _configs() -> tuple[Callable[[bytes], None], list[bytes]]:
    from simulator.commands.options import read_config_file
    from simulator.config import ReplayConfig

    seeds = [
        b'policy = "chunked"\npp = 2\nlayer_split = [16, 16]\n[knobs]\nchunk_size = 64\n',
        b'fail = ["0@1+2"]\nreplicas = 3\nslo = "ttft_p99=2"\n',
    ]
    return file_target("c.toml", lambda file: ReplayConfig.from_dict(read_config_file(file))), seeds


def _shapes() -> tuple[Callable[[bytes], None], list[bytes]]:
    from profiler import load_model_spec
    from tests.hardening.test_every_leaf import ROPE, SHAPE

    return file_target("m/config.json", lambda file: load_model_spec(file.parent)), [
        json.dumps({**SHAPE, **ROPE}).encode()
    ]


def _gpus() -> tuple[Callable[[bytes], None], list[bytes]]:
    from profiler import load_hardware

    whole = (ROOT / "profiler/data/hardware.toml").read_text(encoding="utf-8")
    return file_target("gpu.toml", load_hardware), [("[h100]" + whole.split("[h100]")[1].split("[h200]")[0]).encode()]


def _gguf() -> tuple[Callable[[bytes], None], list[bytes]]:
    from executor.model.gguf_file import GgufFile
    from tests.hardening.monsters import CONTENTS

    return file_target("m.gguf", GgufFile), [content for name, content in CONTENTS.items() if name.startswith("GGUF")]


def _step_logs() -> tuple[Callable[[bytes], None], list[bytes]]:
    from profiler.operators.fitting.calibrated_on_a_run import read_step_log

    line = {"prefill": [[5, 0]], "decode": [9, 4], "exec_ms": 9.5, "sched_ms": 1.5, "update_ms": 0.5}
    return file_target("s.jsonl", read_step_log), [json.dumps(line).encode() + b"\n"]


def _texts() -> tuple[Callable[[bytes], None], list[bytes]]:
    from experiments.capacity.prices import read_prices
    from metrics.drawing.perfetto import parse_window
    from metrics.measures.slo import check_statistics
    from policies.slo_aware import parse_classes
    from profiler.measurements.profile import parse_chunks
    from profiler.specs.layer_split import parse_split
    from simulator.cluster.failures import parse_failures
    from simulator.cluster.pools import parse_pool
    from workloads.generating import arrival_processes as arrivals
    from workloads.generating import lengths
    from workloads.generating import rate_profiles as rates

    parsers: list[Callable[[str], object]] = [
        arrivals.parse,
        lengths.parse,
        rates.parse,
        parse_classes,
        parse_window,
        parse_split,
        parse_chunks,
        parse_pool,
        lambda text: check_statistics(text, None),
        lambda text: check_statistics(None, text),
        lambda text: parse_failures([text], 3),
        lambda text: read_prices(text, None),
    ]

    def run(content: bytes) -> None:
        text = content.decode("utf-8", "surrogateescape")
        if text.startswith(("trace:", "empirical:")):
            return
        for parse in parsers:
            refused(lambda parse=parse: parse(text))  # type: ignore[misc]

    return run, [form.encode() for form in TEXT_FORMS]


TARGETS: dict[str, Callable[[], tuple[Callable[[bytes], None], list[bytes]]]] = {
    "trace": _traces,
    "profile": _profiles,
    "model": _model_files,
    "config": _configs,
    "shape": _shapes,
    "gpu": _gpus,
    "gguf": _gguf,
    "steps": _step_logs,
    "texts": _texts,
}


def refused(call: Callable[[], Any]) -> None:
    """Run it; a refusal as it should be is fine, everything else comes out."""
    try:
        call()
    except ValueError as error:
        if type(error).__module__.partition(".")[0] not in OWN:
            raise
        text = str(error)
        assert len(text) <= 1500, f"a message of {len(text)} characters: {text[:200]}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("target", choices=TARGETS)
    options.add_argument("--seconds", type=int, default=300)
    options.add_argument("--kept", type=Path, help="Folder for inputs that reach new code, and for what was found.")
    asked = options.parse_args()
    import atheris  # type: ignore[import-not-found]

    kept = asked.kept or Path("found") / asked.target
    kept.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports(include=list(OWN)):
        call, seeds = TARGETS[asked.target]()
        for seed in seeds:  # what is imported on first use is instrumented too, and costs no input its ten seconds
            refused(lambda seed=seed: call(seed))  # type: ignore[misc]
    for number, seed in enumerate(seeds):
        (kept / f"seed-{number}").write_bytes(seed)
    warnings.simplefilter("ignore")
    arguments = [
        sys.argv[0],
        str(kept),
        f"-artifact_prefix={kept}/",
        f"-max_total_time={asked.seconds}",
        "-timeout=10",
        "-rss_limit_mb=3000",
        "-max_len=65536",
        "-print_final_stats=1",
    ]
    atheris.Setup(arguments, lambda content: refused(lambda: call(content)))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
