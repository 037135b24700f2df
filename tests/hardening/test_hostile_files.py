"""Every option that takes a file meets every monster: refused in one line with exit code 2, or a sound run; never more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from policies.edges.input_file import checked_file, read_json, read_text, read_toml
from tests.hardening.command_line import assert_sound, needs_posix, run
from tests.hardening.monsters import beside, monsters

pytestmark = needs_posix
TRACE = Path("examples/trace.csv")
SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}
REPLAY = ("simulator", "replay", TRACE, "--limit", 3)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good run, a good fitted model and a good model folder to spoil."""
    folder = tmp_path_factory.mktemp("good")
    assert run("simulator", "replay", TRACE, "--limit", 5, "--out", folder / "run").code == 0
    for suffix in ("json", "npz"):
        (folder / "fit").mkdir(exist_ok=True)
        shutil.copyfile(f"profiler/data/fitted/h100.{suffix}", folder / "fit" / f"h100.{suffix}")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE))
    return folder


def _run_door(name: str) -> tuple[str, Callable[..., tuple[object, ...]]]:
    return Path(name).suffix, lambda m, at, good: ("metrics", "diff", good / "run", beside(at, name, m, good / "run"))


def _import_door(kind: str, folder: str, name: str) -> tuple[str, Callable[..., tuple[object, ...]]]:
    return Path(name).suffix, lambda m, at, good: (
        "profiler",
        "import",
        kind,
        beside(at / folder, name, m),
        "--out",
        at / "o.csv",
    )


DOORS: dict[str, tuple[str, Callable[..., tuple[object, ...]]]] = {
    "trace": (".csv", lambda m, at, good: ("workloads", "describe", m)),
    "config.toml": (".toml", lambda m, at, good: (*REPLAY, "--config", m)),
    "config.json": (".json", lambda m, at, good: (*REPLAY, "--config", m)),
    "gpu": (".toml", lambda m, at, good: (*REPLAY, "--gpu", m)),
    "model.toml": (".toml", lambda m, at, good: (*REPLAY, "--model", m)),
    "model folder": (".json", lambda m, at, good: (*REPLAY, "--model", beside(at, "config.json", m))),
    "cost model": (".json", lambda m, at, good: (*REPLAY, "--cost-model", m)),
    "cost model's arrays": (
        ".npz",
        lambda m, at, good: (*REPLAY, "--cost-model", beside(at, "h100.npz", m, good / "fit") / "h100.json"),
    ),
    "policy file": (".py", lambda m, at, good: (*REPLAY, "--policy", f"{m}:Mine")),
    "sweep": (".toml", lambda m, at, good: ("experiments", "sweep", m, "--out", at / "sweep", "--workers", 0)),
    "price book": (".toml", lambda m, at, good: ("experiments", "capacity", TRACE, "--price-book", m)),
    "profile.csv": (".csv", lambda m, at, good: ("profiler", "fit", m, "--out", at / "o.json", "--gpu", "h100")),
    "profile.parquet": (".parquet", lambda m, at, good: ("profiler", "fit", m, "--out", at / "o.json")),
    "fit report": (".json", lambda m, at, good: ("profiler", "report", m)),
    "step log": (".jsonl", lambda m, at, good: ("profiler", "refine", "rtx4090", "--run", m, "--out", at / "o.json")),
    "published": (
        ".csv",
        lambda m, at, good: ("profiler", "published", "--data", beside(at, "sarathi_table2_step_times.csv", m)),
    ),
    "kernel tables": (
        ".parquet",
        lambda m, at, good: ("profiler", "rates", "--kernels", beside(at, "h100_sxm/gemm_perf.parquet", m)),
    ),
    "splitwise": _import_door("splitwise", "", "../perf_model.csv"),
    "distserve": _import_door("distserve", "", "../fits.csv"),
    "vidur mlp": _import_door("vidur", "h100/x/llama-3.1-8b", "mlp.csv"),
    "vidur attention": _import_door("vidur", "h100/x/llama-3.1-8b", "attention.csv"),
    "llmservingsim": _import_door("llmservingsim", "h100/llama-3.1-8b", "tp1/dense.csv"),
    "llmservingsim meta": _import_door("llmservingsim", "h100/llama-3.1-8b", "meta.yaml"),
    "llmservingsim v0": _import_door("llmservingsim-v0", "h100/x/llama-3.1-8b", "tp1/layers.csv"),
    "aiconfigurator": _import_door("aiconfigurator", "h100_sxm", "gemm_perf.parquet"),
    **{
        f"run's {name}": _run_door(name)
        for name in ("config.json", "summary.json", "requests.parquet", "tokens.parquet")
    },
    "no run": ("", lambda m, at, good: ("metrics", "show", m)),
    "report": (
        ".json",
        lambda m, at, good: ("metrics", "report", beside(at, "config.json", m, good / "run"), "--out", at / "r.html"),
    ),
    "lengths": (".csv", lambda m, at, good: ("workloads", "generate", at / "g.csv", "--lengths", m, "--requests", 3)),
    "drawn lengths": (
        ".csv",
        lambda m, at, good: ("workloads", "generate", at / "g.csv", "--prompt", f"empirical:{m}", "--requests", 3),
    ),
    "arrivals": (
        ".csv",
        lambda m, at, good: ("workloads", "generate", at / "g.csv", "--arrivals", f"trace:{m}", "--requests", 3),
    ),
    "servegen": (
        ".csv",
        lambda m, at, good: ("workloads", "describe", beside(at, "chunk-0-trace.csv", m), "--trace-format", "servegen"),
    ),
    "vllm steps": (
        ".jsonl",
        lambda m, at, good: (
            "experiments",
            "parity",
            m,
            m,
            "--token-budget",
            512,
            "--num-blocks",
            99,
            "--block-size",
            16,
            "--max-num-seqs",
            8,
        ),
    ),
    "benchmark": (".json", lambda m, at, good: ("experiments", "validate", "--against", m, "--out", at / "v")),
    "request log": (".jsonl", lambda m, at, good: ("experiments", "validate", "--against", m, "--out", at / "v")),
    "vllm run": (".json", lambda m, at, good: ("experiments", "fidelity", "--run", beside(at, "meta.json", m))),
}


def _meet(door: tuple[str, Callable[..., tuple[object, ...]]], tmp_path: Path, good: Path) -> None:
    suffix, arguments = door
    for name, monster in monsters(tmp_path / "monsters", suffix).items():
        try:
            assert_sound(run(*arguments(monster, tmp_path / "at", good)))
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("door", DOORS)
def test_every_file_that_a_command_takes_may_be_a_monster(door: str, tmp_path: Path, good: Path) -> None:
    _meet(DOORS[door], tmp_path, good)


class ThreeTokens:
    """A tokenizer that finds three tokens in everything."""

    @staticmethod
    def encode(text: str) -> list[int]:
        return [1, 2, 3]


def _executor_readers(at: Path, good: Path) -> dict[str, tuple[str, Callable[[Path], object]]]:
    """What the executor reads, called without the model around it, which takes seconds to make."""
    from executor.commands.commands import _config_file
    from executor.model.loading import ModelSource, find_model
    from executor.model.tokenizer import load_tokenizer
    from executor.serving.prompts import file_prompts
    from workloads import read_trace

    torch = pytest.importorskip("torch")
    trace = read_trace(TRACE).head(1)

    def weights(name: str) -> Callable[[Path], object]:
        return lambda m: find_model(str(beside(at, name, m, good / "model"))).weights(
            0, torch.float32, torch.device("cpu")
        )

    return {
        "config": (".toml", _config_file),
        "config of a run": (".json", _config_file),
        "gguf": (".gguf", lambda m: find_model(str(m))),
        "safetensors": (".safetensors", weights("model.safetensors")),
        "index of shards": (".json", weights("model.safetensors.index.json")),
        "tokenizer": (".json", lambda m: load_tokenizer(ModelSource("folder", None, beside(at, "tokenizer.json", m)))),
        "prompts": (".txt", lambda m: file_prompts(m, trace, ThreeTokens, 100)),
    }


def test_every_file_that_the_executor_reads_may_be_a_monster(tmp_path: Path, good: Path) -> None:
    pytest.importorskip("torch")
    from executor.errors import ExecutorError
    from profiler.errors import ProfileError

    said: dict[str, str] = {}
    for door, (suffix, read) in _executor_readers(tmp_path / "at", good).items():
        for name, monster in monsters(tmp_path / door, suffix).items():
            try:
                read(monster)
            except (ExecutorError, ProfileError) as error:
                said[f"{door}, {name}"] = str(error)
            except OSError:
                pass  # the command line makes one line of it
            except Exception as error:
                raise AssertionError(f"{door}, {name}: {type(error).__name__}: {error}") from error
    assert [where for where, text in said.items() if len(text) > 1500 or "\n" in text] == []


def test_shards_outside_the_model_folder_are_not_opened(tmp_path: Path, good: Path) -> None:
    pytest.importorskip("torch")
    from executor.errors import ExecutorError
    from executor.model.weights import tensor_homes

    for escape in ("../other/model.safetensors", "/etc/passwd", "..", "a/b.safetensors", ""):
        index = json.dumps({"weight_map": {"model.embed_tokens.weight": escape}})
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ExecutorError, match="expected the name of a file beside it"):
            tensor_homes(tmp_path)


@pytest.mark.parametrize("read", [read_text, read_json, read_toml, checked_file])
def test_the_one_reader_of_outside_files_refuses_in_one_line(read: Callable[..., object], tmp_path: Path) -> None:
    class OutsideError(Exception):
        pass

    said: dict[str, str] = {}
    for name, monster in monsters(tmp_path / "m", ".x", some=False).items():
        try:
            read(monster, OutsideError)
        except OutsideError as error:
            said[name] = str(error)
    assert [name for name, text in said.items() if len(text) > 1500 or "\n" in text] == []
    (tmp_path / "long.x").write_bytes(b"a" * 1000)
    with pytest.raises(OutsideError, match=r"found 1,000 bytes, expected at most 999"):
        read(tmp_path / "long.x", OutsideError, 999)
    with pytest.raises(OutsideError, match="a name that no file can have"):
        read("a\0b", OutsideError)
