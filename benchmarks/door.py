"""How late the HTTP door writes: streams of a simulated engine, read by a client of plain sockets on the other core.

    python benchmarks/door.py --streams 100 --tokens 600 [--idle 1000] [--seconds 600]

The server runs on one core (`--core`), the client on the others. The client counts every token of every stream, so a
lost or doubled one shows; the server's own record says how late each was written, and how late its clock was. A step of
the engine chosen here takes about 50 ms: 100 streams get 20 tokens/s each. `--idle` opens so many connections that send
nothing. With `--seconds` streams follow each other for so long, some of them leaving in the middle, and the server's
memory is read before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENGINE = ["--model", "llama-3.1-70b", "--gpu", "a100", "--tp", "2", "--policy", "vllm_v1", "--max-model-len", "8192"]
SHARE_THAT_LEAVES = 0.1


async def stream(host: str, port: int, tokens: int, leave_after: int | None = None) -> int:
    """One request; returns the tokens that came."""
    reader, writer = await asyncio.open_connection(host, port)
    body = json.dumps({"prompt": [1, 2, 3, 4], "max_tokens": tokens, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\n\r\n{body}".encode())
    came, rest = 0, b""
    while data := await reader.read(1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        came += sum(b'"text": "' in line for line in lines)
        if leave_after is not None and came >= leave_after:
            break
    writer.close()
    return came


async def idle_connections(host: str, port: int, count: int) -> list[asyncio.StreamWriter]:
    return [(await asyncio.open_connection(host, port))[1] for _ in range(count)]


async def drive(host: str, port: int, args: argparse.Namespace) -> tuple[int, int, int]:
    """Returns streams that ended whole, streams that left, tokens lost or doubled."""
    idle = await idle_connections(host, port, args.idle)
    draw, end = random.Random(0), time.monotonic() + args.seconds
    whole = left = wrong = 0

    async def user() -> None:
        nonlocal whole, left, wrong
        while True:
            leaves = args.seconds > 0 and draw.random() < SHARE_THAT_LEAVES
            length = draw.randint(args.tokens // 2, args.tokens) if args.seconds > 0 else args.tokens
            came = await stream(host, port, length, length // 2 if leaves else None)
            if leaves:
                left += 1
            else:
                whole += 1
                wrong += abs(came - length)
            if time.monotonic() >= end:
                return

    await asyncio.gather(*(user() for _ in range(args.streams)))
    for writer in idle:
        writer.close()
    return whole, left, wrong


def memory_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--idle", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    out = Path(tempfile.mkdtemp()) / "run"
    command = [sys.executable, "-m", "simulator", "serve", *ENGINE, "--port", "0", "--out", str(out)]
    server = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=lambda: on_core(args.core)
    )
    assert server.stderr is not None
    line = next(text for text in server.stderr if text.startswith("serving at"))
    address = line.split()[2].removeprefix("http://")
    host, port = address.split(":")
    os.sched_setaffinity(0, set(os.sched_getaffinity(0)) - {args.core} or {args.core})
    before = memory_mib(server.pid)
    started = time.monotonic()
    held: list[float] = []

    async def watched() -> tuple[int, int, int]:
        driving = asyncio.ensure_future(drive(host, int(port), args))
        while not driving.done():
            held.append(memory_mib(server.pid))
            await asyncio.wait({driving}, timeout=10)
        return driving.result()

    whole, left, wrong = asyncio.run(watched())
    took, after = time.monotonic() - started, memory_mib(server.pid)
    cpu = sum(os.times()[:2])
    server.send_signal(signal.SIGTERM)
    server.wait(60)
    config = json.loads((out / "config.json").read_text())
    served = config["served"]
    found = {
        "streams": whole,
        "left": left,
        "tokens_lost_or_doubled": wrong,
        "seconds": took,
        "wire_lag": served["wire_lag"],
        "clock_lag": served["clock_lag"],
        "memory_mib_every_10_s": [before, *held, after],
        "client_cpu_s": cpu,
        "notes": served["notes"],
    }
    if args.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{whole} streams ended, {left} left in the middle, {wrong} tokens lost or doubled, {took:.1f} s")
    for name in ("wire_lag", "clock_lag"):
        lag = served[name]
        print(f"{name}: p50 {lag['p50_s'] * 1e3:.2f} ms, p99 {lag['p99_s'] * 1e3:.2f}, max {lag['max_s'] * 1e3:.2f}")
    print("server memory every 10 s, MiB:", *(round(mib) for mib in (before, *held, after)))
    for note in served["notes"]:
        print(f"note: {note}")


def on_core(core: int) -> None:
    os.sched_setaffinity(0, {core})


if __name__ == "__main__":
    main()
