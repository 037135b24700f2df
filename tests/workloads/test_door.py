"""Parts of the HTTP door by themselves: texts that stop answers, clients that read slowly, how late things are."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.door.answers import Answer, Outlet
from workloads.door.asks import RefusedError, wanted_of
from workloads.door.contract import Ask, DoorError, Lateness
from workloads.door.options import DoorOptions
from workloads.door.replies import Reply
from workloads.door.words import Words, built_in_words, words_of_folder

for needed in ("tokenizers", "jinja2"):
    pytest.importorskip(needed, reason="the extra `serve` is not installed")

WORDS = built_in_words()


def wanted(**body):
    return wanted_of({"prompt": "a", **body}, WORDS, chat=False, max_model_len=100, vocab=5000)


def said(pieces: list[str], stops: list[str]) -> tuple[str, str, int]:
    """What an answer of these pieces says, why it ends, and after how many of them."""
    texts = dict(enumerate(pieces))
    answer = Answer(Ask(0, [1], len(pieces)), Reply(wanted(stop=stops), "cmpl-1", "m"), texts.__getitem__, frozenset())
    for number in texts:
        if answer.take(number, last=number == len(pieces) - 1):
            break
    return "".join(answer.text), answer.finish, answer.tokens


@settings(max_examples=60)
@given(
    st.lists(st.text("abc", max_size=4), min_size=1, max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
)
def test_a_stop_text_is_found_however_tokens_cut_it(pieces, stops):
    whole = "".join(pieces)
    ends = [(whole.find(stop)) for stop in stops if stop in whole]
    text, finish, tokens = said(pieces, stops)
    if not ends:
        assert (text, finish, tokens) == (whole, "length", len(pieces))
        return
    assert finish == "stop"
    # The first token with which any stop text is whole ends the answer, before the earliest of those then there.
    shown = "".join(pieces[:tokens])
    assert not any(stop in "".join(pieces[: tokens - 1]) for stop in stops)
    assert text == shown[: min(shown.find(stop) for stop in stops if stop in shown)]


def test_a_slow_reader_gets_everything_in_order_and_holds_up_nobody():
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        taken, gate = [], loop.create_future()

        async def send(message) -> None:
            if message["body"] == b"2":
                await gate
            taken.append((message["body"], message["more_body"]))

        outlet = Outlet(send, loop)
        for number in range(1, 5):
            outlet.write(b"%d" % number)
        assert taken == [(b"1", True)]
        assert outlet.stuck_since is not None
        outlet.write(b"5", last=True)
        gate.set_result(None)
        await asyncio.wait_for(outlet.flushed(), 5)
        assert b"".join(body for body, _ in taken) == b"12345"
        assert [more for _, more in taken] == [True] * (len(taken) - 1) + [False]
        assert outlet.stuck_since is None

    asyncio.run(scene())


def test_lateness_knows_quantiles_to_five_percent():
    late = Lateness()
    for ms in range(1, 101):
        late.late(ms * 1_000_000)
    facts = late.facts()
    assert facts["count"] == 100
    assert facts["mean_s"] == pytest.approx(0.0505)
    assert facts["p50_s"] == pytest.approx(0.050, rel=0.06)
    assert facts["p99_s"] == pytest.approx(0.099, rel=0.06)
    assert facts["max_s"] == 0.1


def test_the_built_in_tokenizer_cuts_its_own_answers_as_they_were_made(tmp_path):
    ids = [WORDS.answers[(i * 37) % len(WORDS.answers)] for i in range(300)]
    assert WORDS.encode(WORDS.decode(ids)) == ids
    stream = WORDS.stream()
    assert "".join(map(stream, ids)) == WORDS.decode(ids)
    for text in ("naïve — 東京 🚀\n\ttab", "", " "):
        assert WORDS.decode(WORDS.encode(text)) == text
    WORDS.write(tmp_path)
    again = words_of_folder(tmp_path)
    assert again.encode("Hello there") == WORDS.encode("Hello there")
    assert again.stop_ids == WORDS.stop_ids[:1]
    assert again.chat([{"role": "user", "content": "Hi"}]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_chat_template_cannot_reach_out_of_its_sandbox():
    words = Words(WORDS.inner, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(DoorError, match="chat template"):
        words.chat([{"role": "user", "content": "Hi"}])


def test_limits_count_the_prompt():
    assert wanted(prompt=[1] * 90, max_tokens=10).max_tokens == 10
    assert wanted(prompt=[1] * 90).max_tokens == 10, "sixteen by default, or what is left"
    with pytest.raises(RefusedError, match="maximum context length is 100") as refused:
        wanted(prompt=[1] * 90, max_tokens=11)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("option", "value"),
    [("port", 70_000), ("max_inflight", 0), ("drain", -1.0), ("api_key", "  "), ("tokenizer", "nowhere")],
)
def test_a_door_is_not_opened_with_settings_that_make_no_sense(option, value):
    with pytest.raises(DoorError):
        DoorOptions(**{option: value}).words()
