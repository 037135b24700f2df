"""Engines calibrated from outside: what made the logs is found again, and what they cannot tell is said."""

import json

import numpy as np
import pytest

from experiments.calibration.from_outside import calibrate_engine, engine_file
from experiments.errors import ExperimentError
from policies.work.batch import BatchShape
from profiler import load_cost_model
from profiler.errors import ProfileError
from profiler.measurements.served_steps import read_served_steps
from profiler.operators.named_engines import load_engine
from simulator import ReplayConfig, replay
from workloads import Trace

BASE = ReplayConfig(policy="vllm_v1", model="llama-3.1-8b", gpu="h100")


def fpm(prompts, tokens, decodes, held, wall_s):
    work = {
        "num_prefill_requests": prompts, "sum_prefill_tokens": tokens, "sum_prefill_kv_tokens": 0,
        "num_decode_requests": decodes, "sum_decode_kv_tokens": held, "var_decode_kv_tokens": 0.0,
    }  # fmt: skip
    return {
        "timestamp": 1,
        "event": {"schema": "dynamo.fpm.trace.v1", "fpm": {"wall_time": wall_s, "scheduled_requests": work}},
    }


def written(folder, records, name="steps.jsonl"):
    file = folder / name
    file.write_text("\n".join(json.dumps(record) for record in records))
    return file


def test_scales_and_host_time_are_found_in_steps(tmp_path):
    cost = load_cost_model(BASE.model, BASE.gpu)
    records = []
    for number in range(200):
        decodes = 1 + 7 * number % 120
        tokens = 300 + 11 * number % 900 if number % 3 == 0 else 0
        held = decodes * (200 + number)
        chunks = ((tokens, 0),) if tokens else ()
        device = cost.stage_ns(BatchShape(chunks, decodes, held, held // decodes, 0, decodes + len(chunks))) / 1e9
        wall = device * (1.3 if tokens else 1.1) + 400e-6 + 15e-6 * (decodes + len(chunks))
        records.append(fpm(len(chunks), tokens, decodes, held, wall))
    found = calibrate_engine([written(tmp_path, records)], BASE)
    wanted = {
        "prefill_scale": 1.3, "decode_scale": 1.1, "host_before_us": 400, "host_before_sequence_us": 15,
    }  # fmt: skip
    for name, value in wanted.items():
        assert found.terms[name].value == pytest.approx(value, rel=0.02), name
    assert found.held_out["step"] < 0.002
    assert found.values()["host_after_us"] == 0


def test_decodes_of_one_size_cannot_tell_a_scale_from_host_time(tmp_path):
    records = [fpm(0, 0, 8, 8 * 500, 0.01)] * 60 + [fpm(0, 0, 0, 0, 0.0)]
    found = calibrate_engine([written(tmp_path, records)], BASE)
    assert any("host_before_us and decode_scale cannot be told apart" in line for line in found.warnings)
    assert set(found.terms) >= {"decode_scale"}
    assert found.errors["step"] < 1e-6


def test_vllms_iteration_log_is_followed_from_step_to_step(tmp_path):
    line = (
        "(APIServer pid=0) INFO 11-30 [loggers.py:199] Engine 000: Iteration({}): {} context requests, {} context "
        "tokens, {} generation requests, {} generation tokens, iteration elapsed time: {} ms, KV cache usage: 0.1%"
    )
    file = tmp_path / "server.log"
    rows = [(1, 2, 30, 0, 0, 5.0), (2, 0, 0, 2, 2, 1.5), (3, 0, 0, 1, 1, 1.25), (4, 0, 0, 0, 0, 0.0)]
    file.write_text("started\n" + "\n".join(line.format(*row) for row in rows))
    steps = read_served_steps(file)
    assert [shape.chunks for shape in steps.shapes] == [((15, 0), (15, 0)), (), ()]
    assert [shape.decode_context_total for shape in steps.shapes] == [0, 30, 16]
    assert steps.elapsed_s.tolist() == [0.005, 0.0015, 0.00125]
    assert steps.left_out == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"event": {"schema": "dynamo.fpm.trace.v1"}}, "line 1: found no dynamo"),
        ({"event": {"schema": "dynamo.fpm.trace.v1", "fpm": {"wall_time": "long"}}}, "line 1: wall_time"),
        (fpm(1.5, 3, 0, 0, 1.0), "line 1: num_prefill_requests"),
        (fpm(0, 0, 0, 0, 0.0), "no step with work"),
    ],
)
def test_a_step_log_that_makes_no_sense_is_refused(tmp_path, record, message):
    with pytest.raises(ProfileError, match=message):
        read_served_steps(written(tmp_path, [record]))


def client_result(folder, rate, seed, terms, count=24):
    """What `vllm bench serve` would have written of a server with these terms."""
    rng = np.random.default_rng(seed)
    sent = np.rint(np.cumsum(rng.exponential(1 / rate, count)) * 1e9).astype(np.int64)
    prompts, outputs = rng.integers(50, 1500, count), rng.integers(2, 60, count)
    tables = replay(Trace("t", sent, prompts, outputs, outputs), BASE, engine="vllm:0.11", terms=terms).tables
    columns = {
        name: tables.column("requests", name) for name in ("request", "arrival_s", "first_token_s", "finished_s")
    }
    order = np.argsort(columns["request"])
    arrival, first, end = (columns[name][order] for name in ("arrival_s", "first_token_s", "finished_s"))
    content = {
        "request_rate": rate, "input_lens": prompts.tolist(), "output_lens": outputs.tolist(),
        "ttfts": (first - arrival).tolist(), "start_times": (arrival + 7000).tolist(),
        "itls": [[(e - f) / (o - 1)] * (o - 1) for e, f, o in zip(end, first, outputs.tolist(), strict=True)],
    }  # fmt: skip
    return written(folder, [content], f"rate{rate}.json")


def test_front_end_and_decode_scale_are_found_in_clients_results(tmp_path):
    truth = {"front_before_us": 9000, "front_after_us": 3000, "decode_scale": 1.2, "prefill_scale": 0.9}
    files = [client_result(tmp_path, rate, seed, truth) for seed, rate in enumerate((3, 9))]
    base = ReplayConfig(policy="vllm_v1", model=BASE.model, gpu=BASE.gpu, engine="vllm:0.11")
    found = calibrate_engine(files, base)
    assert found.terms["front_us"].value == pytest.approx(12_000, rel=0.1)
    assert found.terms["decode_scale"].value == pytest.approx(1.2, rel=0.03)
    assert found.terms["prefill_scale"].value == pytest.approx(0.9, rel=0.1)
    assert max(found.held_out.values()) < 0.1
    file = tmp_path / "mine.toml"
    file.write_text(engine_file(found, "vllm:0.11", "mine"))
    engine = load_engine(file)
    assert engine.label == "mine, CALIBRATED on rate3, rate9"
    assert engine.terms["front_before_us"] == engine.terms["front_after_us"] == pytest.approx(6000, rel=0.1)
    assert engine.knobs == load_engine("vllm:0.11").knobs


def test_one_load_is_said_to_leave_nothing_to_judge_by(tmp_path):
    found = calibrate_engine([client_result(tmp_path, 8, 0, {"front_before_us": 9000}, count=12)], BASE)
    assert any("one load" in line for line in found.warnings)
    assert not found.held_out


def test_a_file_that_is_neither_log_nor_result_is_refused(tmp_path):
    file = tmp_path / "x.json"
    file.write_text("{}")
    with pytest.raises(ExperimentError, match="neither a step log"):
        calibrate_engine([file], BASE)
