"""A client's result beside the run folder of the session that it measured: request by request, how far apart they are.

Both saw the same requests, so their times differ by what lies between them: the wire, and the client's own loop. What
the server wrote when (`wire.parquet`) tells the two apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.errors import ExperimentError
from metrics import RunTables, read_run
from workloads.door.session import WIRE
from workloads.reading.client_results import ClientRun

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Agreement:
    """Client minus engine, in seconds a request (TPOT: per token). written_e2e_s: client minus the last writing.

    requests: compared ones; unmatched: answered requests of one side that the other has not.
    """

    requests: int
    unmatched: int
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    written_e2e_s: Floats | None

    def as_dict(self) -> dict[str, Any]:
        """P50, P95 and the largest of each difference, in seconds."""
        rows: dict[str, Any] = {"requests": self.requests, "unmatched": self.unmatched}
        for name in ("ttft_s", "tpot_s", "e2e_s", "written_e2e_s"):
            values = getattr(self, name)
            if values is not None and len(values):
                rows[name] = {
                    "p50": float(np.median(values)),
                    "p95": float(np.quantile(values, 0.95)),
                    "max": float(values.max()),
                }
        return rows


def compare_with_client(folder: Path, client: ClientRun) -> Agreement:
    """Pair a client's requests with a served run's, in the order in which they were sent.

    Clients send a request or more before they measure, so the run's last ones are compared. Raises ExperimentError
    where lengths of answers show that the two are not of one session.
    """
    run = read_run(folder)
    rows = _finished(run)
    count = min(len(rows["request"]), len(client.ttft_s))
    unmatched = len(client.ttft_s) - count
    rows = {name: column[len(column) - count :] for name, column in rows.items()}
    pairs = _pairs(rows, client, count)
    same = np.array([rows["output_tokens"][mine] == client.output_tokens[theirs] for mine, theirs in pairs], bool)
    if count == 0 or same.mean() < 0.9:
        raise ExperimentError(
            f"{folder}: found {int(same.sum())} of {count} answers as long as {client.name} says, expected the "
            "run that this client measured"
        )
    mine, theirs = (np.array(side) for side in zip(*pairs))
    mine, theirs = mine[same], theirs[same]
    arrival, first, last = (rows[name][mine] for name in ("arrival_s", "first_token_s", "finished_s"))
    more = rows["output_tokens"][mine] > 1
    tokens = np.maximum(rows["output_tokens"][mine] - 1, 1)
    tpot = client.tpot_s[theirs] - (last - first) / tokens
    written = _last_written(folder, rows["request"][mine])
    return Agreement(
        len(mine),
        unmatched + int((~same).sum()),
        client.ttft_s[theirs] - (first - arrival),
        tpot[more],
        client.e2e_s[theirs] - (last - arrival),
        None if written is None else client.e2e_s[theirs] - (written - arrival),
    )


def _finished(run: RunTables) -> dict[str, NDArray[Any]]:
    names = ("request", "arrival_s", "first_token_s", "finished_s", "prompt_tokens", "output_tokens")
    columns = {name: run.column("requests", name) for name in names}
    done = np.flatnonzero(run.column("requests", "status") == "finished")
    done = done[np.argsort(columns["arrival_s"][done], kind="stable")]
    return {name: column[done] for name, column in columns.items()}


def _pairs(rows: dict[str, NDArray[Any]], client: ClientRun, count: int) -> list[tuple[int, int]]:
    """Rows of the run and of the client: by order, and by length where requests sent together arrived in another."""
    left = dict.fromkeys(range(count))
    pairs = []
    for theirs in range(count):
        wanted = (int(client.prompt_tokens[theirs]), int(client.output_tokens[theirs]))
        near = [mine for _, mine in zip(range(8), left)]
        lengths = [(int(rows["prompt_tokens"][mine]), int(rows["output_tokens"][mine])) for mine in near]
        mine = near[lengths.index(wanted)] if wanted in lengths else near[0]
        del left[mine]
        pairs.append((mine, theirs))
    return pairs


def _last_written(folder: Path, requests: NDArray[Any]) -> Floats | None:
    from pyarrow import parquet

    if not (folder / WIRE).is_file():
        return None
    wire = parquet.read_table(folder / WIRE, columns=["request", "written_s"])
    last: dict[int, float] = dict(zip(wire["request"].to_pylist(), wire["written_s"].to_pylist()))
    return np.array([last.get(int(number), np.nan) for number in requests])
