"""Trace files as they come: every public format, found by content, with the numbers that its project publishes."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from tests.shared_data import ORIGINALS, shared
from workloads import Trace, TraceError, read_trace, write_trace

TRACES = ORIGINALS / "traces"
CARRIED = Path(__file__).parents[2] / "profiler/data/facts/traces"
NS = 1_000_000_000


def lines(path: Path, *rows: str) -> Path:
    path.write_text("".join(row + "\n" for row in rows))
    return path


def test_azure_conversation_has_its_published_quantiles() -> None:
    trace = read_trace(CARRIED / "azure2023_conv.parquet")
    assert len(trace) == 19_366
    assert trace.arrival_ns[:3].tolist() == [0, 4_314_579_000, 4_541_877_000]
    assert np.percentile(trace.prompt_tokens, [50, 99], method="lower").tolist() == [1020, 4142]
    assert np.percentile(trace.output_tokens, [50, 90, 99], method="lower").tolist() == [129, 424, 601]
    assert trace.max_output_tokens.tolist() == trace.output_tokens.tolist()


def test_rows_of_the_original_azure_trace_are_those_carried() -> None:
    original = read_trace(TRACES / "azure2023/AzureLLMInferenceTrace_conv.csv")
    assert (original.source_format, len(original)) == ("azure", 200)
    assert original.same_requests(read_trace(CARRIED / "azure2023_conv.parquet").head(200))


@pytest.mark.originals
def test_all_rows_of_the_original_traces_are_those_carried() -> None:
    for name, path in {
        "azure2023_conv": "azure2023/AzureLLMInferenceTrace_conv.csv",
        "azure2023_code": "azure2023/AzureLLMInferenceTrace_code.csv",
        "mooncake_conversation": "mooncake/conversation_trace.jsonl",
    }.items():
        assert read_trace(shared(f"traces/{path}")).same_requests(read_trace(CARRIED / f"{name}.parquet"))


def test_vidurs_form_of_the_azure_trace_is_the_same_trace() -> None:
    azure = read_trace(TRACES / "azure2023/AzureLLMInferenceTrace_conv.csv")
    vidur = read_trace(TRACES / "azure2023/vidur_splitwise_conv.csv")
    assert vidur.source_format == "vidur"
    assert vidur.prompt_tokens.tolist() == azure.prompt_tokens.tolist()
    assert np.abs(vidur.arrival_ns - azure.arrival_ns).max() <= 1000


def test_mooncake_keeps_hashes_and_ties() -> None:
    trace = read_trace(TRACES / "mooncake/conversation_trace.jsonl")
    assert (trace.source_format, len(trace), trace.hash_tokens) == ("mooncake", 300, 512)
    assert trace.request(1).prefix_hashes[:3] == (0, 14, 15)
    assert len(trace.request(0).prefix_hashes) == 14 == -(-trace.prompt_tokens[0] // 512)
    whole = read_trace(CARRIED / "mooncake_conversation.parquet")
    assert len(whole) == 12_031
    assert whole.arrival_ns[-1] == 3_536_999 * 1_000_000
    assert len(np.unique(whole.arrival_ns)) < len(whole) / 5
    assert whole.head(300).same_requests(trace)


def test_spreading_ties_keeps_order_and_never_reaches_the_next_time() -> None:
    tied = read_trace(TRACES / "mooncake/conversation_trace.jsonl")
    spread = read_trace(TRACES / "mooncake/conversation_trace.jsonl", spread_ties=True, seed=3)
    again = read_trace(TRACES / "mooncake/conversation_trace.jsonl", spread_ties=True, seed=3)
    assert spread.arrival_ns.tolist() == again.arrival_ns.tolist()
    assert spread.arrival_ns.tolist() != tied.arrival_ns.tolist()
    assert spread.prompt_tokens.tolist() == tied.prompt_tokens.tolist()
    assert (spread.arrival_ns >= tied.arrival_ns).all()
    later = tied.arrival_ns > tied.arrival_ns[:, None]
    following = np.where(later.any(1), tied.arrival_ns[later.argmax(1)], np.iinfo(np.int64).max)
    assert (spread.arrival_ns < following).all()


def test_vllm_logs_arrive_when_they_were_queued() -> None:
    path = TRACES / "vllm_runs/RTXPRO6000/Llama-3.1-8B/requests.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    trace = read_trace(path)
    assert (trace.source_format, len(trace)) == ("vllm", 40)
    assert trace.prompt_tokens[0] == 2358
    assert trace.arrival_ns[1] == round((rows[1]["queued_ts"] - rows[0]["queued_ts"]) * NS)


def test_vllm_step_logs_are_read() -> None:
    at_once = read_trace(ORIGINALS / "vllm_cpu_steps/reqs_fp32_t2q_512.jsonl")
    assert (at_once.source_format, len(at_once)) == ("vllm_steps", 64)
    assert (at_once.prompt_tokens.sum(), at_once.output_tokens.sum()) == (39_754, 4_481)
    assert at_once.arrival_ns.tolist() == [0] * 64


def test_lengths_without_times_need_an_arrival_process() -> None:
    path = TRACES / "lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
    with pytest.raises(TraceError, match=r"no arrival times.*poisson:5\.5"):
        read_trace(path)
    trace = read_trace(path, arrivals="poisson:5.5", seed=1)
    assert len(trace) == 600
    assert trace.source_format == "lengths"
    assert len(trace) / (trace.arrival_ns[-1] / NS) == pytest.approx(5.5, rel=0.1)


def test_burstgpt_failures_are_left_out_counted_and_said(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "burst.csv",
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,7,1.5,ChatGPT,472,18,490,Conversation log",
        "45,7,0,ChatGPT,1087,0,1087,Conversation log",
        "118,,3,GPT-4,417,276,693,API log",
    )
    trace = read_trace(path)
    assert trace.source_format == "burstgpt"
    assert trace.arrival_ns.tolist() == [5 * NS, 118 * NS]
    assert trace.session == ["7", None]
    assert trace.notes == ("1 of 3 requests left out: they failed (0 response tokens).",)


def test_burstgpt_with_a_unit_in_its_column_name_as_the_note_advises_is_still_burstgpt(tmp_path: Path) -> None:
    """Times in ms, read as seconds at first: 20 requests, one every 40,000 s; the third failed."""
    rows = [f"{40_000 * row},ChatGPT,{10 + row},{0 if row == 2 else 5}" for row in range(20)]
    columns = "Model,Request tokens,Response tokens"
    doubted, advised = read_trace(lines(tmp_path / "b.csv", f"Timestamp,{columns}", *rows)), "timestamp_ms"
    assert any(f"or name it {advised}" in note for note in doubted.notes)
    renamed = read_trace(lines(tmp_path / "c.csv", f"{advised},{columns}", *rows))
    assert (renamed.source_format, len(renamed), len(doubted)) == ("burstgpt", 19, 19)
    assert renamed.arrival_ns.tolist() == [at // 1000 for at in doubted.arrival_ns.tolist()]
    assert renamed.notes == ("1 of 20 requests left out: they failed (0 response tokens).",)


@pytest.mark.parametrize(
    "header", ["arrival_ms,ISL,OSL", "Timestamp (ms),Input Tokens,Output Tokens", "t_ms,inputLen,outputLen"]
)
def test_units_and_spellings_of_column_names(tmp_path: Path, header: str) -> None:
    trace = read_trace(lines(tmp_path / "t.csv", header, "500,374,44", "2500,5,6"))
    assert trace.arrival_ns.tolist() == [NS // 2, 5 * NS // 2]
    assert trace.output_tokens.tolist() == [44, 6]


@pytest.mark.parametrize(
    ("header", "step", "other"),
    [
        ("Timestamp,Request tokens,Response tokens", 1700, "ms"),
        ("Timestamp,prompt,output", 2, ""),
        ("Timestamp_s,prompt,output", 1700, ""),
        ("timestamp,input_length,output_length", 100, ""),
        ("arrived_at,num_prefill_tokens,num_decode_tokens", 1700, ""),
    ],
)
def test_a_rate_that_another_unit_would_explain_is_noted_with_span_and_rate(
    tmp_path: Path, header: str, step: int, other: str
) -> None:
    file = tmp_path / "t.csv"
    file.write_text(header + "\n" + "".join(f"{row * step},100,5\n" for row in range(12)))
    notes = read_trace(file).notes
    assert len(notes) == bool(other)
    if other == "ms":
        assert "read as s: 12 requests in 18,700 s, one every 1,700 s." in notes[0]
        assert "pass --time-unit ms or name it timestamp_ms (s where this is right)" in notes[0]


SECONDS = """{"timestamp": 0.0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3.2, "input_length": 700, "output_length": 8, "hash_ids": [0, 2]}
{"timestamp": 6.4, "input_length": 550, "output_length": 6, "hash_ids": [3, 4]}
"""


@pytest.mark.parametrize(
    ("text", "gap_ns", "said"),
    [
        (SECONDS, 3_200_000_000, "read as s"),  # milliseconds have no tenths where gaps are of three of them
        (SECONDS.replace("3.2", "3200").replace("6.4", "6400").replace("0.0", "0"), 3_200_000_000, ""),
        ("timestamp,input_length,output_length\n" + "".join(f"{row},100,5\n" for row in range(12)), NS, "read as s"),
        ("timestamp,prompt,output\n" + "".join(f"{row * 1700},100,5\n" for row in range(12)), 17 * NS // 10, "as ms"),
        ("timestamp,prompt,output\n" + "".join(f"{row * 0.3},100,5\n" for row in range(12)), 3 * NS // 10, ""),
    ],
)
def test_a_unit_is_told_by_fractions_gaps_and_lengths_and_the_other_can_be_forced(
    tmp_path: Path, text: str, gap_ns: int, said: str
) -> None:
    file = tmp_path / "t"
    file.write_text(text)
    trace = read_trace(file)
    assert trace.arrival_ns[1] == gap_ns
    assert len(trace.notes) == bool(said)
    assert not said or said in trace.notes[0]
    raw = read_trace(file, time_unit="s").arrival_ns[1]
    assert read_trace(file, time_unit="us").arrival_ns[1] == raw // 1_000_000
    assert read_trace(file, time_unit="s").notes == ()


def test_tokens_per_hash_are_said_by_a_column_an_option_or_the_lengths(tmp_path: Path) -> None:
    row = '{{"arrival_s": 0, "prompt_tokens": {}, "output_tokens": 5, "hash_ids": {}{}}}\n'
    file = tmp_path / "t.jsonl"

    def read(*rows: str, **options: int) -> Trace:
        file.write_text("".join(rows))
        return read_trace(file, **options)  # type: ignore[arg-type]

    assert read(row.format(70, [1, 2, 3, 4, 5], ', "block_size": 16')).hash_tokens == 16
    told = read(row.format(130, [1, 2, 3], ""), row.format(65, [1, 2], ""))
    assert told.hash_tokens == 64
    assert "taken for 64 prompt tokens" in told.notes[0]
    assert "--hash-tokens N" in told.notes[0]
    forced = read(row.format(130, [1, 2, 3], ""), hash_tokens=50)
    assert (forced.hash_tokens, forced.notes) == (50, ())
    with pytest.raises(TraceError, match="at most one hash per 128 prompt tokens"):
        read(row.format(130, [1, 2, 3], ""), hash_tokens=128)


def test_clock_readings_count_from_the_first(tmp_path: Path) -> None:
    header = "timestamp,prompt_tokens,output_tokens"
    trace = read_trace(lines(tmp_path / "t.csv", header, "1787267980123,5,5", "1787267981123,5,5"))
    assert trace.arrival_ns.tolist() == [0, NS]
    assert "read as ms" in trace.notes[0]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_marks_line_ends_and_delimiters_do_not_matter(tmp_path: Path, mark: str, end: str, delimiter: str) -> None:
    rows = ["arrival_s,prompt_tokens,output_tokens", "0.25,5,6", "", "1,7,8"]
    path = tmp_path / "t.csv"
    path.write_bytes((mark + end.join(rows).replace(",", delimiter)).encode())
    trace = read_trace(path)
    assert trace.arrival_ns.tolist() == [NS // 4, NS]
    assert trace.output_tokens.tolist() == [6, 8]


def test_zones_and_nine_digits_of_dates(tmp_path: Path) -> None:
    rows = ["2023-11-16T18:17:03.123456789+01:00", "2023-11-16T17:17:04.123456790Z"]
    path = lines(tmp_path / "t.csv", "timestamp,prompt_tokens,output_tokens", *(f"{row},5,5" for row in rows))
    assert read_trace(path).arrival_ns.tolist() == [0, NS + 1]


def everything() -> Trace:
    return Trace(
        "all",
        np.array([0, 1, 2_000_000_003]),
        np.array([5, 600, 7]),
        np.array([1, 2, 3]),
        np.array([4, 5, 6]),
        prefix_hashes=[(1,), (1, 2), ()],
        hash_tokens=512,
        session=["a", None, 'b, "quoted" ü'],
        priority=np.array([-1, 0, 2]),
        slo=["fast", "slow", None],
        tenant=["acme", None, "key=7"],
        program=[None, "p", "p"],
        predicted_tokens=np.array([0, 9, 3]),
        abort_ns=np.array([-1, 2, 3_000_000_000]),
        turn=np.array([0, 0, 1]),
        after_row=np.array([-1, -1, 0]),
        think_ns=np.array([-1, -1, 2_000_000_003]),
    )


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet", ".csv.gz", ".jsonl.gz"])
def test_a_written_trace_reads_back_equal(tmp_path: Path, ending: str) -> None:
    trace = everything()
    again = read_trace(write_trace(trace, tmp_path / f"all{ending}"))
    np.testing.assert_array_equal(np.maximum(trace.think_ns, 0), again.think_ns)
    again = Trace(**{**vars(again), "think_ns": trace.think_ns})
    assert again.same_requests(trace)


def test_skipping_bad_rows_says_which_and_why(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.csv", "arrival_s,prompt_tokens,output_tokens", "0,5,5", "1,0,5", "2,5", "3,5,5")
    trace = read_trace(path, on_bad_row="skip")
    assert trace.arrival_ns.tolist() == [0, 3 * NS]
    assert trace.notes[0].startswith("2 bad rows skipped: row 2 (line 3), column 'prompt_tokens': found '0'")


def test_sorting_is_stable_and_said(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.csv", "arrival_s,prompt_tokens,output_tokens", "2,1,1", "1,2,1", "1,3,1")
    trace = read_trace(path, on_unsorted="sort")
    assert trace.prompt_tokens.tolist() == [2, 3, 1]
    assert "Sorted by arrival" in trace.notes[0]


def test_a_forced_format_must_be_there(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.csv", "arrival_s,prompt_tokens,output_tokens", "2,1,1")
    assert read_trace(path, trace_format="csv").source_format == "csv"
    for wrong in ("azure", "jsonl", "nonsense"):
        with pytest.raises(TraceError, match="expected"):
            read_trace(path, trace_format=wrong)


def test_a_json_array_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([{"arrival_s": 1.5, "prompt_tokens": 3, "output_tokens": 4, "session": 12}]))
    trace = read_trace(path)
    assert trace.arrival_ns.tolist() == [3 * NS // 2]
    assert trace.session == ["12"]


def test_gz_of_several_members_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"arrival_s,prompt_tokens,output_tokens\n0,1,1\n") + gzip.compress(b"1,2,2\n"))
    assert len(read_trace(path)) == 2


def test_columns_that_nothing_is_taken_from_are_named(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "t.csv", "arrival_s,prompt_tokens,output_tokens,deadline,timestamp", "0,5,5,9,1", "1,5,5,9,2"
    )
    assert read_trace(path).notes == ("Not used: columns 'deadline', 'timestamp'.",)
    rows = [json.dumps({"arrival_s": row, "prompt_tokens": 5, "output_tokens": 5}) for row in range(150)]
    rows[149] = rows[149].replace("}", ', "priority": 3}')
    late = read_trace(lines(tmp_path / "t.jsonl", *rows))
    assert late.priority is None
    assert late.notes == (
        "Not used, because no row of the first 100 has it: 'priority'; give the first row a null there.",
    )
    rows[0] = rows[0].replace("}", ', "priority": null}')
    assert read_trace(lines(tmp_path / "t.jsonl", *rows)).priority.tolist() == [0] * 149 + [3]  # type: ignore[union-attr]
