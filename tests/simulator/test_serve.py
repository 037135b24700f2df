"""The simulator behind the HTTP door: what clients see, what ends requests, and that a session is a run like any other."""

from __future__ import annotations

import gc
import json
import re
import socket
import time

import numpy as np
import pytest

from metrics import read_run
from simulator import replay
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from tests.door_client import serving
from workloads import read_trace
from workloads.door.options import DoorOptions

for needed in ("starlette", "uvicorn", "prometheus_client", "tokenizers"):
    pytest.importorskip(needed, reason="the extra `serve` is not installed")

FAST = {"model": "llama-3.1-8b", "gpu": "h100", "cost_model": "roofline", "policy": "vllm_v1", "max_model_len": 4096}


def session(out=None, door=None, answer_lengths=None, **settings):
    from simulator.serving.served import ServedSimulation

    options = DoorOptions(**{"port": 0, "drain": 0.0, **(door or {})})
    return ServedSimulation(ReplayConfig(**{**FAST, **settings}), options, out=out, answer_lengths=answer_lengths)


@pytest.fixture(scope="module")
def client():
    with serving(session()) as client:
        yield client


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def test_a_stream_has_one_chunk_with_text_for_every_token_then_usage_and_done(client):
    *chunks, usage, done = client.events(
        "/v1/completions",
        {"prompt": "Hello", "max_tokens": 7, "ignore_eos": True, "stream_options": {"include_usage": True}},
    )
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert len(texts) == 7
    assert all(texts)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 6 + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 7
    assert done == "[DONE]"
    _, cut = client.json("/tokenize", {"prompt": "".join(texts)})
    assert cut["count"] == 7, "an answer is cut into the tokens that it was made of"


def test_a_chat_streams_its_role_with_the_first_token(client):
    *chunks, done = client.events(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 3}
    )
    assert [sorted(chunk["choices"][0]["delta"]) for chunk in chunks] == [["content", "role"], ["content"], ["content"]]
    assert done == "[DONE]"


def test_an_answer_that_does_not_stream_counts_its_tokens(client):
    status, answer = client.json("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4}, x_request_id="mine-1")
    assert status == 200
    assert answer["id"] == "cmpl-mine-1"
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_stop_text_ends_the_answer_and_is_no_part_of_it(client):
    body = {"prompt": "Hello", "max_tokens": 400, "stop": [" the", "o"]}
    status, answer = client.json("/v1/completions", body)
    choice = answer["choices"][0]
    assert (status, choice["finish_reason"]) == (200, "stop")
    assert "o" not in choice["text"]
    assert answer["usage"]["completion_tokens"] < 400


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", b'{"prompt": ', 400, None),
        ("/v1/completions", b"[1, 2]", 400, None),
        ("/v1/completions", b"[" * 100_000, 400, None),
        ("/v1/completions", {"max_tokens": 3}, 400, "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [1 << 40]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 5000}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "n": 2}, 400, "n"),
        ("/v1/completions", {"prompt": "a", "stop": [3]}, 400, "stop"),
        ("/v1/completions", {"prompt": "a", "stream_options": {}}, 400, "stream_options"),
        ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "king"}]}, 400, "messages[0]"),
        ("/nowhere", {}, 404, None),
        ("/v1/models/none", None, 404, "model"),
    ],
)
def test_what_cannot_be_served_is_refused_in_openais_shape(client, path, body, status, param):
    found, answer = client.json(path, body)
    assert found == status
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["message"]
    assert "/work" not in error["message"]
    assert "Traceback" not in error["message"]


def test_unknown_fields_are_accepted(client):
    status, _ = client.json("/v1/completions", {"prompt": "a", "max_tokens": 1, "min_p": 0.1, "frobnicate": {"a": 1}})
    assert status == 200


def test_metrics_count_what_was_served_under_vllms_names(client):
    before = client.metrics()
    client.json("/v1/completions", {"prompt": [1] * 40, "max_tokens": 9, "ignore_eos": True})
    after = client.metrics()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["vllm:generation_tokens_total"] == 9
    assert grown["vllm:prompt_tokens_total"] == 40
    assert grown["vllm:time_to_first_token_seconds_count"] == 1
    assert grown["vllm:inter_token_latency_seconds_count"] == 8
    assert grown["vllm:e2e_request_latency_seconds_count"] == 1
    assert grown["vllm:iteration_tokens_total_sum"] == 40 + 8
    parts = ("queue", "prefill", "decode")
    assert sum(grown[f"vllm:request_{part}_time_seconds_sum"] for part in parts) == pytest.approx(
        grown["vllm:e2e_request_latency_seconds_sum"]
    )
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert f"vllm:{name}" in after
    for name in ("prefix_cache_queries_total", "prefix_cache_hits_total"):
        assert f"vllm:{name}" in after


def test_models_health_and_tokenize(client):
    status, models = client.json("/v1/models")
    assert (status, models["data"][0]["id"], models["data"][0]["max_model_len"]) == (200, "llama-3.1-8b", 4096)
    assert client.send("/health").status == 200
    status, cut = client.json("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})
    assert cut["count"] == len(cut["tokens"])
    _, text = client.json("/detokenize", {"tokens": client.json("/tokenize", {"prompt": "Good day"})[1]["tokens"]})
    assert text == {"prompt": "Good day"}


def test_a_client_that_leaves_frees_its_memory_at_once_and_is_recorded(tmp_path):
    served = session(tmp_path / "run")
    with serving(served) as client:
        response = client.send("/v1/completions", {"prompt": [1] * 1000, "max_tokens": 3000, "stream": True})
        response.read(200)
        assert client.metrics()["vllm:kv_cache_usage_perc"] > 0
        response.close()
        response.connection.close()
        until(lambda: client.metrics()["vllm:num_requests_running"] == 0)
        assert client.metrics()["vllm:kv_cache_usage_perc"] == 0
    run = read_run(tmp_path / "run")
    assert run.column("requests", "status").tolist() == ["aborted"]
    assert run.column("requests", "reason").tolist() == ["client disconnected"]
    assert run.config["served"]["counts"]["disconnects"] == 1


def test_a_session_replays_from_its_own_trace_to_the_nanosecond(tmp_path):
    settings = {"prefix_caching": True, "replicas": 2, "router": "round_robin"}
    with serving(session(tmp_path / "run", **settings)) as client:
        waiting = [
            client.send("/v1/completions", {"prompt": [7] * (200 + 30 * i), "max_tokens": 20 + i, "stream": True})
            for i in range(6)
        ]
        tokens = [response.read().count(b'"text"') for response in waiting]
    assert tokens == [20 + i for i in range(6)]
    served = read_run(tmp_path / "run")
    again = replay(read_trace(tmp_path / "run" / "trace.parquet"), ReplayConfig(**{**FAST, **settings}))
    for column in ("request", "arrival_s", "first_token_s", "finished_s", "output_tokens", "cached_tokens", "replica"):
        order = np.argsort(served.column("requests", "request"))
        same = np.argsort(again.tables.column("requests", "request"))
        assert np.array_equal(
            served.column("requests", column)[order], again.tables.column("requests", column)[same]
        ), column
    assert served.iterations.num_rows == again.tables.iterations.num_rows
    assert served.column("requests", "cached_tokens").sum() > 0


def test_openais_user_is_the_tenant_of_a_session(tmp_path):
    with serving(session(tmp_path / "run", policy="vtc")) as client:
        for user in ("acme", None, "x"):
            body = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True} | ({"user": user} if user else {})
            assert client.json("/v1/completions", body)[0] == 200
        status, answer = client.json("/v1/completions", {"prompt": [5], "user": 7})
        assert (status, answer["error"]["param"]) == (400, "user")
    assert read_run(tmp_path / "run").column("requests", "tenant").tolist() == ["acme", None, "x"]
    assert read_trace(tmp_path / "run" / "trace.parquet").tenant == ["acme", None, "x"]


def test_every_token_is_on_the_wire_once(tmp_path):
    import pyarrow.parquet as pq

    with serving(session(tmp_path / "run")) as client:
        for count in (1, 2, 30):
            assert len(client.events("/v1/completions", {"prompt": "a", "max_tokens": count})) == count + 1
    wire = pq.read_table(tmp_path / "run" / "wire.parquet").to_pandas()
    assert wire.groupby("request").size().tolist() == [1, 2, 30]
    assert (wire.written_s >= wire.time_s).all()


def test_more_than_may_be_in_flight_are_told_when_to_come_again():
    with serving(session(door={"max_inflight": 1})) as client:
        first = client.send("/v1/completions", {"prompt": "a", "max_tokens": 4000, "stream": True})
        second = client.send("/v1/completions", {"prompt": "a"})
        assert second.status == 429
        assert int(second.headers["Retry-After"]) >= 1
        assert json.loads(second.read())["error"]["type"] == "rate_limit_error"
        first.close()


def test_a_ladder_that_rejects_says_429_and_its_own_wait():
    served = session(ladder="all", max_wait_s=0.5, gpu="a100", num_blocks=4000)
    with serving(served) as client:
        body = {"prompt": [1] * 4000, "max_tokens": 90, "stream": True}
        streams = []
        for _ in range(80):
            response = client.send("/v1/completions", body)
            if response.status == 429:
                break
            streams.append(response)
        assert response.status == 429
        message = json.loads(response.read())["error"]["message"]
        assert f"retry after {response.headers['Retry-After']} s" in message
        for stream in streams:
            stream.close()


def test_a_key_is_asked_of_everybody_but_health():
    with serving(session(door={"api_key": "secret"})) as client:
        assert client.send("/health").status == 200
        status, answer = client.json("/v1/models")
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert client.json("/v1/models", authorization="Bearer wrong")[0] == 401
        assert client.json("/v1/models", authorization="Bearer secret")[0] == 200


def test_large_bodies_and_slow_senders_are_sent_away():
    with serving(session(door={"max_body_mib": 0.01, "header_timeout": 0.3})) as client:
        assert client.json("/v1/completions", {"prompt": "a" * 20_000})[0] == 413
        for half in (b"POST /v1/completions HTT", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 90\r\n\r\n{"):
            with socket.create_connection((client.host, client.port), timeout=5) as connection:
                connection.sendall(half)
                answer = b""
                while part := connection.recv(4096):
                    answer += part
            assert answer == b"" or b" 408 " in answer.splitlines()[0]


def test_who_does_not_read_is_withdrawn_and_nobody_waits_for_it():
    served = session(door={"reader_timeout": 0.2}, max_model_len=60_000, policy="vllm_v1")
    with serving(served) as client:
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        lazy.connect((client.host, client.port))
        # All of it at once: 50,000 tokens whose answers were withheld until the end would fill any buffer.
        body = json.dumps(
            {"prompt": "a", "max_tokens": 50_000, "stream": True, "stream_options": {"continuous_usage_stats": True}}
        )
        lazy.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        until(lambda: served.door.answers)
        answer = next(iter(served.door.answers.values()))
        until(lambda: answer.outlet is not None)
        answer.outlet.stuck_since = -1e9  # as if its client had not read for long
        assert len(client.events("/v1/completions", {"prompt": "b", "max_tokens": 5})) == 6
        until(lambda: served.door.counts["slow_readers"] >= 1)
        until(lambda: not served.door.answers)
        lazy.close()


def test_a_server_that_stops_lets_requests_end_and_then_aborts_them(tmp_path):
    served = session(tmp_path / "run", door={"drain": 0.3})
    with serving(served) as client:
        response = client.send("/v1/completions", {"prompt": "a", "max_tokens": 4000, "stream": True})
        response.read(10)
        served.server.stop("SIGTERM")
        rest = response.read()
    assert b"shutting down" in rest
    assert rest.rstrip().endswith(b"data: [DONE]")
    run = read_run(tmp_path / "run")
    assert run.column("requests", "status").tolist() == ["aborted"]
    assert run.column("requests", "output_tokens")[0] >= rest.count(b'"text"') > 0


def test_fleets_with_pools_and_failures_are_behind_the_same_door(tmp_path):
    served = session(
        tmp_path / "run",
        pools=({"role": "prefill", "replicas": "1"}, {"role": "decode", "replicas": "2"}),
        failures=("1@0.5+0.2",),
    )
    with serving(served) as client:
        streams = [
            client.send("/v1/completions", {"prompt": [3] * 500, "max_tokens": 120, "stream": True}) for _ in range(6)
        ]
        assert [stream.read().count(b'"text"') for stream in streams] == [120] * 6
        assert 'vllm:num_requests_running{engine="2"' in client.send("/metrics").read().decode()
    run = read_run(tmp_path / "run")
    assert run.column("requests", "status").tolist() == ["finished"] * 6
    assert len(set(run.column("segments", "replica").tolist())) >= 2


def test_answers_have_the_lengths_that_the_session_was_given():
    with serving(session(answer_lengths="fixed:11")) as client:
        _, short = client.json("/v1/completions", {"prompt": "a", "max_tokens": 50})
        _, cut = client.json("/v1/completions", {"prompt": "a", "max_tokens": 5})
        _, forced = client.json("/v1/completions", {"prompt": "a", "max_tokens": 20, "ignore_eos": True})
    found = [
        (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) for answer in (short, cut, forced)
    ]
    assert found == [(11, "stop"), (5, "length"), (20, "length")]


def test_the_reference_simulator_has_no_clock_to_serve_by():
    with pytest.raises(SimulationError, match="--reference"):
        session(reference=True)


def test_openais_own_client_reads_answers_streams_and_errors(client):
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    own = openai.OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0)
    answer = own.chat.completions.create(
        model="llama-3.1-8b", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=5
    )
    assert answer.usage.completion_tokens == 5
    stream = own.completions.create(
        model="llama-3.1-8b", prompt="Hi", max_tokens=6, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len([chunk for chunk in chunks if chunk.choices]) == 6
    assert chunks[-1].usage.completion_tokens == 6
    with pytest.raises(openai.NotFoundError):
        own.completions.create(model="other", prompt="Hi")
    with pytest.raises(openai.BadRequestError):
        own.completions.create(model="llama-3.1-8b", prompt="Hi", max_tokens=-1)


def test_ranks_of_a_replica_stream_their_own_tokens():
    with serving(session(dp=2, gpu="h200")) as client:
        streams = [
            client.send("/v1/completions", {"prompt": [i] * 50, "max_tokens": 15, "stream": True}) for i in range(4)
        ]
        chunks = [stream.read().split(b"\n\n") for stream in streams]
    assert [len([chunk for chunk in each if b'"text"' in chunk]) for each in chunks] == [15] * 4


def test_prompts_that_begin_alike_meet_on_one_replica_of_four(tmp_path):
    with serving(session(tmp_path / "run", replicas=4, router="prefix_affinity", prefix_caching=True)) as client:
        for turn in range(3):
            for family in (1, 2):
                body = {"prompt": [family] * 400 + [turn] * 20, "max_tokens": 2}
                assert client.json("/v1/completions", body)[0] == 200
        hits = client.metrics()["vllm:prefix_cache_hits_total"]
        pool = re.search(
            r'cache_config_info{.*engine="3".*(num_gpu_blocks="\d+")', client.send("/metrics").read().decode()
        )[1]
    run = read_run(tmp_path / "run")
    where = run.column("requests", "replica").tolist()
    assert len(set(where[0::2])) == len(set(where[1::2])) == 1
    assert hits == run.column("requests", "cached_tokens").sum() == 2 * 2 * 400
    assert pool == f'num_gpu_blocks="{run.config["num_blocks"]}"'


def test_a_fleet_grows_behind_the_door_as_it_is_told():
    scaling = {"most": 3, "by": "queue", "interval_s": 0.1, "startup_s": 0.1, "queue_high": 0.5}
    served = session(autoscale=scaling, max_num_seqs=1)
    with serving(served) as client:
        streams = [client.send("/v1/completions", {"prompt": "a", "max_tokens": 150, "stream": True}) for _ in range(6)]
        assert [stream.read().count(b'"text"') for stream in streams] == [150] * 6
        assert len(served.engine.loads()) > 1


def test_nothing_is_kept_of_requests_that_have_ended():
    from workloads.door.answers import Answer

    served = session()
    with serving(served) as client:
        for number in range(12):
            response = client.send("/v1/completions", {"prompt": "a", "max_tokens": 40, "stream": number % 2 == 0})
            if number % 3:
                response.read()
            response.close()
            response.connection.close()
        until(lambda: not served.door.answers and not served.engine._growing)

        def alive() -> int:
            gc.collect()
            return sum(isinstance(thing, Answer) and thing.ask.number < 12 for thing in gc.get_objects())

        until(lambda: not served.engine.cluster.replicas[0].scheduler.tracks)
        until(lambda: alive() == 0)


def test_an_engine_that_breaks_tells_everybody_and_ends_the_session(tmp_path):
    (tmp_path / "broken.py").write_text(
        "from policies import PolicyError\nfrom policies.chunked import Chunked\n\n\n"
        "class Broken(Chunked):\n"
        "    def plan(self, queues, draft, kv, host, now_ns):\n"
        "        if kv.total_blocks - kv.free_blocks > 20:\n"
        '            raise PolicyError("policy Broken: cannot go on")\n'
        "        super().plan(queues, draft, kv, host, now_ns)\n"
    )
    served = session(tmp_path / "run", policy=f"{tmp_path}/broken.py:Broken")

    def serve_one():
        with serving(served) as client:
            answers.append(client.json("/v1/completions", {"prompt": [1] * 600, "max_tokens": 5}))

    answers = []
    with pytest.raises(SimulationError, match="policy Broken: cannot go on"):
        serve_one()
    [(status, answer)] = answers
    assert status == 500
    assert answer["error"]["message"] == "policy Broken: cannot go on"


def test_a_front_end_delays_what_clients_see_as_a_replay_says(tmp_path):
    settings = {"terms": {"front_before_us": 30_000, "front_after_us": 20_000, "front_token_us": 50}}
    with serving(session(tmp_path / "run", **settings)) as client:
        began = time.perf_counter()
        response = client.send("/v1/completions", {"prompt": [4] * 64, "max_tokens": 10, "stream": True})
        response.read(1)
        assert time.perf_counter() - began > 0.05
        assert response.read().count(b'"text"') == 10
    served = read_run(tmp_path / "run")
    again = replay(read_trace(tmp_path / "run" / "trace.parquet"), ReplayConfig(**{**FAST, **settings}))
    for column in ("arrival_s", "first_token_s", "finished_s"):
        assert served.column("requests", column).tolist() == again.tables.column("requests", column).tolist()
