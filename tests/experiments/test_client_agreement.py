"""What a load client has measured, beside the run folder of the session that it measured."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from experiments.errors import ExperimentError
from experiments.validation.client_agreement import compare_with_client
from simulator.config import ReplayConfig
from tests.door_client import serving
from workloads.door.options import DoorOptions
from workloads.reading.client_results import read_client_run

for needed in ("starlette", "uvicorn", "prometheus_client", "tokenizers"):
    pytest.importorskip(needed, reason="the extra `serve` is not installed")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A session of three requests, the first of them a client's warm-up, and the result in vLLM's form."""
    from simulator.serving.served import ServedSimulation

    place = tmp_path_factory.mktemp("client")
    config = ReplayConfig(model="llama-3.1-8b", gpu="h100", cost_model="roofline", policy="vllm_v1", max_model_len=2048)
    rows = []
    with serving(ServedSimulation(config, DoorOptions(port=0, drain=0.0), out=place / "run")) as client:
        for tokens in (3, 8, 12):
            began, times = time.perf_counter(), []
            body = {"prompt": [9] * 30, "max_tokens": tokens, "stream": True}
            response = client.send("/v1/completions", body)
            while line := response.readline():
                if b'"text"' in line:
                    times.append(time.perf_counter())
            rows.append((began, times))
    rows = rows[1:]
    result = {
        "request_throughput": 1,
        "total_input_tokens": 60,
        "request_rate": 1.0,
        "start_times": [began for began, _ in rows],
        "input_lens": [30, 30],
        "output_lens": [8, 12],
        "ttfts": [times[0] - began for began, times in rows],
        "itls": [np.diff(times).tolist() for _, times in rows],
    }
    (place / "result.json").write_text(json.dumps(result))
    return place


def test_the_clients_times_are_the_runs_and_what_lies_between_them(measured):
    found = compare_with_client(measured / "run", read_client_run(measured / "result.json"))
    assert (found.requests, found.unmatched) == (2, 0)
    assert (found.ttft_s > 0).all(), "a client hears of a token after the engine had it"
    assert (found.e2e_s > 0).all()
    assert (found.written_e2e_s <= found.e2e_s).all()
    assert set(found.as_dict()) == {"requests", "unmatched", "ttft_s", "tpot_s", "e2e_s", "written_e2e_s"}


def test_another_sessions_result_is_refused(measured, tmp_path):
    result = json.loads((measured / "result.json").read_text())
    result["output_lens"] = [5, 6]
    (tmp_path / "other.json").write_text(json.dumps(result))
    with pytest.raises(ExperimentError, match="expected the run that this client measured"):
        compare_with_client(measured / "run", read_client_run(tmp_path / "other.json"))
