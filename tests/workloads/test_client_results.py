"""Load clients' results, in the form that each tool writes, as requests and as traces."""

import gzip
import json

import numpy as np
import pytest

from workloads import TraceError, read_trace
from workloads.reading.client_results import client_tool, read_client_run

VLLM = {
    "request_rate": 2.0, "input_lens": [10, 20, 30], "output_lens": [3, 1, 2], "ttfts": [0.1, 0.2, 0.0],
    "itls": [[0.01, 0.03], [], []], "start_times": [7000.5, 7000.0, 7001.0], "errors": ["", "", "timed out"],
}  # fmt: skip
SGLANG = {**VLLM, "dataset_name": "random", "random_range_ratio": 0.5}
del SGLANG["start_times"]


def guidellm_request(start, first, last, prompt=8, output=5):
    timings = {
        "request_start": start, "first_token_iteration": first, "last_token_iteration": last, "request_end": last,
    }  # fmt: skip
    return {"info": {"timings": timings}, "prompt_tokens": prompt, "output_tokens": output}


GUIDELLM = {
    "metadata": {"guidellm_version": "0.8.1"},
    "benchmarks": [{"requests": {"successful": [guidellm_request(5.0, 5.25, 6.25)], "errored": [{}]}}],
}


def aiperf_record(start_ns, ttft_ms, e2e_ms, **more):
    def value(number):
        return {"value": number, "unit": ""}

    metrics = {
        "usage_prompt_tokens": value(64), "usage_completion_tokens": value(3), "output_sequence_length": value(5),
        "time_to_first_token": value(ttft_ms), "request_latency": value(e2e_ms),
        "inter_chunk_latency": value([10.0, 20.0]),
    }  # fmt: skip
    metadata = {"request_start_ns": start_ns, "record_processor_id": "r", "benchmark_phase": "profiling", **more}
    return {"metadata": metadata, "metrics": metrics}


def written(folder, content, name="result.json"):
    file = folder / name
    lines = content if isinstance(content, list) else [content]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def test_vllms_benchmark_in_the_order_of_sending(tmp_path):
    run = read_client_run(written(tmp_path, VLLM))
    assert (run.tool, run.rate, run.left_out) == ("vllm_bench", 2.0, 1)
    assert run.sent_s.tolist() == [0.0, 0.5]
    assert run.output_tokens.tolist() == [1, 3]
    np.testing.assert_allclose(run.ttft_s, [0.2, 0.1])
    np.testing.assert_allclose(run.tpot_s, [np.nan, 0.02])
    trace = read_trace(written(tmp_path, VLLM))
    assert trace.arrival_ns.tolist() == [0, 500_000_000]
    assert trace.notes == ("1 requests without an answer are left out",)


def test_sglangs_benchmark_keeps_no_times_of_sending(tmp_path):
    file = written(tmp_path, SGLANG)
    assert read_client_run(file).sent_s is None
    with pytest.raises(TraceError, match="arrivals poisson:2"):
        read_trace(file)
    assert len(read_trace(file, arrivals="poisson:2")) == 2


def test_guidellm_counts_to_the_last_token(tmp_path):
    run = read_client_run(written(tmp_path, GUIDELLM))
    assert (run.tool, run.left_out) == ("guidellm", 1)
    assert (run.ttft_s[0], run.e2e_s[0], run.tpot_s[0]) == (0.25, 1.25, 0.25)


def test_aiperf_counts_tokens_as_the_server_did_and_leaves_warm_up_out(tmp_path):
    records = [
        aiperf_record(2_000_000_000, 40.0, 70.0),
        aiperf_record(1_500_000_000, 30.0, 60.0),
        aiperf_record(1_000_000_000, 500.0, 700.0, benchmark_phase="warmup"),
    ]
    file = written(tmp_path, records, "records.jsonl")
    run = read_client_run(file)
    assert run.output_tokens.tolist() == [3, 3]
    np.testing.assert_allclose(run.sent_s, [0.0, 0.5])
    np.testing.assert_allclose(run.tpot_s, [0.015, 0.015])
    np.testing.assert_allclose(run.gaps_s[0], [0.01, 0.02])
    packed = tmp_path / "records.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert read_client_run(packed).output_tokens.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**VLLM, "ttfts": [0.1]}, "unequal length"),
        ({**VLLM, "ttfts": [0.1, -0.2, 0.0]}, "TTFT -0.2"),
        ({**VLLM, "ttfts": ["soon", 0.1, 0.1]}, "ttfts"),
        ({**VLLM, "errors": ["x", "x", "x"]}, "no request that got an answer"),
        ({"ttfts": [1], "input_lens": []}, "output_lens"),
        ({**GUIDELLM, "benchmarks": []}, "0 benchmarks"),
        ({**aiperf_record(1, 1.0, 2.0), "metrics": {}}, "usage_prompt_tokens"),
        (aiperf_record("now", 1.0, 2.0), "request_start_ns"),
    ],
)
def test_what_a_client_did_not_write_is_refused(tmp_path, content, message):
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path, content))


def test_other_files_are_no_clients(tmp_path):
    assert client_tool(written(tmp_path, {"prompt_tokens": 3, "output_tokens": 4})) is None
    assert client_tool(tmp_path) is None
    assert client_tool(tmp_path / "missing.json") is None


@pytest.mark.originals
def test_samples_of_real_clients(tmp_path):
    from tests.shared_data import shared

    folder = shared("client_samples")
    tools = {file.name: client_tool(file) for file in folder.iterdir()}
    assert tools["vllm_bench_rate1_full_no_texts.json"] == "vllm_bench"
    assert tools["sglang_bench_cut.json"] == "sglang_bench"
    assert tools["guidellm_cut.json"] == "guidellm"
    assert tools["aiperf_records_3.jsonl"] == "aiperf"
    run = read_client_run(folder / "vllm_bench_rate1_full_no_texts.json")
    assert float(np.mean(run.ttft_s)) * 1e3 == pytest.approx(14.777787849834567)
    assert float(np.nanmean(run.tpot_s)) * 1e3 == pytest.approx(3.590106847012)
