"""The live executor beside transformers and vLLM's CPU build: the same requests, weights, dtype and threads, in turn.

    python benchmarks/engine.py                                     # ours and transformers
    python benchmarks/engine.py --vllm-python /path/to/venv/bin/python --dtype bfloat16 --json

Every engine is a process of its own that loads once and then serves the whole mix whenever it is told to, one engine at
a time, round after round; only then do the ratios mean anything on a machine whose speed drifts. The best round counts,
the spread over the rounds is printed beside it.

The mix: 64 requests at time 0, prompts of 128-1024 tokens, outputs of 16-128, random weights of the shape `tiny`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_inputs import read_mix, write_inputs

ROOT = Path(__file__).resolve().parents[1]

Server = Callable[[], dict[str, Any]]


# Engines: each returns a function that serves the whole mix once and says what it produced.


def ours(folder: Path, options: argparse.Namespace) -> Server:
    sys.path.insert(0, str(ROOT))
    import numpy as np
    import torch

    from executor.model.loading import load_model
    from executor.serving.replay import replay_live
    from workloads.trace import Trace

    torch.set_num_threads(options.threads)
    mix = read_mix(folder)
    prompt, output = [len(ids) for ids, _ in mix], [count for _, count in mix]
    trace = Trace("mix", np.zeros(len(mix)), np.array(prompt), np.array(output), np.array(output))
    longest = max(p + o for p, o in zip(prompt, output))
    loaded = load_model(
        str(folder),
        device="cpu",
        dtype=options.dtype,
        kernels=options.kernels,
        attention=options.attention,
        max_tokens=longest,
        trim_last_layer=not options.whole_last_layer,
    )

    def serve() -> dict[str, Any]:
        run = replay_live(
            trace,
            loaded=loaded,
            policy="vllm_v1",
            token_budget=options.budget,
            max_num_seqs=64,
            prompts=lambda row: np.asarray(mix[row][0], np.int64),
            as_fast_as_possible=True,
            ahead=options.ahead,
        )
        steps = np.array(run.outcome.host_ns) / 1e3
        busy = sum(run.tables.column("iterations", "device_s"))
        return {
            "wall_s": run.outcome.wall_s,
            "cpu_s": run.outcome.cpu_s,
            "answers": [run.answers[row] for row in range(len(mix))],
            "steps": len(steps),
            "host_us_per_step_median": float(np.median(steps)),
            "host_share": 1.0 - busy / run.outcome.wall_s,
            "kernels": loaded.model.kernels.name,
            "attention": loaded.model.attention.name,
        }

    return serve


def transformers_static(folder: Path, options: argparse.Namespace, batch: int) -> Server:
    """`generate` over left-padded batches in arrival order, each until its longest answer is done."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    mix = read_mix(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def serve() -> dict[str, Any]:
        wall, cpu = time.perf_counter(), time.process_time()
        answers = []
        for start in range(0, len(mix), batch):
            group = mix[start : start + batch]
            width, most = max(len(ids) for ids, _ in group), max(count for _, count in group)
            ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in group])
            mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in group])
            out = model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False, eos_token_id=None)
            answers += [row[width : width + count].tolist() for row, (_, count) in zip(out, group)]
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "answers": answers}

    return serve


def vllm(folder: Path, options: argparse.Namespace) -> Server:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    mix = read_mix(folder)
    engine = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        enforce_eager=True,
        max_num_seqs=64,
        max_num_batched_tokens=options.budget,
        max_model_len=2048,
        enable_prefix_caching=False,
        block_size=128,
        disable_log_stats=True,
        gpu_memory_utilization=0.3,
    )
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in mix]
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids, _ in mix]

    def serve() -> dict[str, Any]:
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "answers": answers}

    return serve


def serve_orders(engine: str, folder: Path, options: argparse.Namespace) -> None:
    """The life of an engine's process: load, warm up on the whole mix once if asked, then serve a round per line."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to stderr: stdout is for replies
    if engine == "ours":
        serve = ours(folder, options)
    elif engine == "vllm":
        serve = vllm(folder, options)
    else:
        serve = transformers_static(folder, options, int(engine.rpartition("-")[2]))
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        if line.strip() == "go":
            print(json.dumps(serve()), file=replies, flush=True)


class Process:
    """One engine's process, idle until `round` is called."""

    def __init__(self, engine: str, python: str, folder: Path, arguments: list[str], threads: int) -> None:
        self.engine = engine
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._log = (folder / f"{engine}.log").open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [python, __file__, "--serve", engine, "--folder", str(folder), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def _reply(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = Path(self._log.name).read_text(encoding="utf-8", errors="replace")[-2000:]
            raise SystemExit(f"error: {self.engine} died:\n{tail}")
        return line

    def wait_ready(self) -> None:
        while self._reply().strip() != "ready":
            pass

    def round(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        reply: dict[str, Any] = json.loads(self._reply())
        return reply

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def machine_rate(threads: int) -> float:
    """fp32 FLOP/s of PyTorch's matrix product, best of several: the floor's yardstick, taken between the rounds."""
    import torch

    torch.set_num_threads(threads)
    a, b = torch.randn(1536, 1536), torch.randn(1536, 1536)
    best = float("inf")
    for _ in range(12):
        began = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - began)
    return 2 * 1536**3 / best


def agreement(ours_answers: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of tokens up to the first difference of each answer: after it, two greedy answers go their own ways."""
    equal = total = 0
    for a, b in zip(ours_answers, theirs):
        total += len(a)
        equal += next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return equal / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="", help="comma-separated: ours, vllm, transformers-8, transformers-1")
    parser.add_argument("--vllm-python", help="an interpreter that can import vllm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=64, help="only the first so many requests")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--whole-last-layer", action="store_true")
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_orders(options.serve, options.folder, options)
        return
    engines = [name for name in options.engines.split(",") if name] or [
        "ours",
        *(["vllm"] if options.vllm_python else []),
        "transformers-8",
        "transformers-1",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        work = write_inputs(folder, options.model, options.limit)
        result = compare(engines, folder, options, work)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print_table(result)


def compare(engines: list[str], folder: Path, options: argparse.Namespace, work: dict[str, Any]) -> dict[str, Any]:
    arguments = ["--dtype", options.dtype, "--budget", str(options.budget), "--threads", str(options.threads)]
    arguments += ["--kernels", options.kernels, "--attention", options.attention]
    arguments += ["--whole-last-layer"] * options.whole_last_layer + ["--ahead"] * options.ahead
    processes = []
    rounds: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    rates = []
    try:
        for engine in engines:
            python = options.vllm_python if engine == "vllm" and options.vllm_python else sys.executable
            processes.append(Process(engine, python, folder, arguments, options.threads))
            processes[-1].wait_ready()  # one after the other: loading is work too
        for number in range(options.rounds):
            rates.append(machine_rate(options.threads))
            for process in processes:
                rounds[process.engine].append(process.round())
                reply = rounds[process.engine][-1]
                print(f"round {number + 1} {process.engine}: {reply['wall_s']:.2f} s", file=sys.stderr, flush=True)
        rates.append(machine_rate(options.threads))
    finally:
        for process in processes:
            process.end()
    rate = max(rates)
    floor = (work["linear_flop"] + work["attention_flop"]) / rate
    table = {}
    for engine, replies in rounds.items():
        walls = sorted(reply["wall_s"] for reply in replies)
        best = min(replies, key=lambda reply: reply["wall_s"])
        table[engine] = {
            "wall_s": walls[0],
            "wall_median_s": walls[len(walls) // 2],
            "wall_worst_s": walls[-1],
            "cpu_s": min(reply["cpu_s"] for reply in replies),
            "output_tokens_per_s": work["output_tokens"] / walls[0],
            "times_the_fp32_floor": walls[0] / floor,
            **{key: value for key, value in best.items() if key not in ("wall_s", "cpu_s", "answers")},
        }
        if "ours" in rounds and engine != "ours":
            table[engine]["ours_is_faster_by"] = walls[0] / min(reply["wall_s"] for reply in rounds["ours"])
            table[engine]["ours_needs_less_cpu_by"] = table[engine]["cpu_s"] / min(r["cpu_s"] for r in rounds["ours"])
            table[engine]["same_tokens_as_ours"] = agreement(rounds["ours"][0]["answers"], best["answers"])
    return {
        "model": options.model,
        "dtype": options.dtype,
        "token_budget": options.budget,
        "threads": options.threads,
        "rounds": options.rounds,
        **work,
        "machine_fp32_gflops_per_s": rate / 1e9,
        "fp32_floor_s": floor,
        "engines": table,
    }


def print_table(result: dict[str, Any]) -> None:
    print(
        f"{result['model']} {result['dtype']}, {result['requests']} requests, {result['prompt_tokens']} prompt and "
        f"{result['output_tokens']} output tokens, budget {result['token_budget']}, {result['threads']} threads, "
        f"best of {result['rounds']} rounds"
    )
    print(
        f"floor {result['fp32_floor_s']:.2f} s: {result['linear_flop'] / 1e12:.2f} TFLOP in linear layers and "
        f"{result['attention_flop'] / 1e12:.2f} in attention at {result['machine_fp32_gflops_per_s']:.0f} fp32 GFLOP/s"
    )
    print(
        f"{'engine':<16}{'wall s':>8}{'median':>8}{'CPU s':>8}{'tok/s':>8}{'x floor':>9}{'ours faster':>13}{'same':>7}"
    )
    for engine, row in result["engines"].items():
        ratio, same = row.get("ours_is_faster_by"), row.get("same_tokens_as_ours")
        print(
            f"{engine:<16}{row['wall_s']:>8.2f}{row['wall_median_s']:>8.2f}{row['cpu_s']:>8.2f}"
            f"{row['output_tokens_per_s']:>8.0f}{row['times_the_fp32_floor']:>9.2f}"
            + (f"{ratio:>12.2f}x{same:>7.1%}" if ratio else "")
        )
    mine = result["engines"].get("ours")
    if mine:
        print(
            f"ours: {mine['steps']} steps, kernels {mine['kernels']}, attention {mine['attention']}, host "
            f"{mine['host_us_per_step_median']:.0f} us a step (median), {mine['host_share']:.2%} of the wall time"
        )


if __name__ == "__main__":
    main()
