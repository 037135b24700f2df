"""Answer one prompt through the engine itself: a trace of one request, streamed as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.model.loading import find_model
from executor.model.tokenizer import load_tokenizer
from executor.serving.replay import load_for, replay_live
from workloads.trace import Trace


@dataclass(frozen=True)
class Answer:
    """ended_by: "stop token" or "length". tokens_per_s: of the tokens after the first."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    output_tokens: int
    first_token_s: float
    tokens_per_s: float
    ended_by: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def generate(
    prompt: str,
    config: LiveConfig,
    *,
    max_tokens: int,
    chat: bool = True,
    on_text: Callable[[str], None] | None = None,
) -> Answer:
    """Answer `prompt` with the config's model. on_text: called with every new piece of text.

    Raises ExecutorError for a model without a tokenizer, or a prompt that leaves no room for an answer.
    """
    if max_tokens < 1:
        raise ExecutorError(f"max_tokens: found {max_tokens}, expected at least 1")
    config = replace(config, ignore_eos=False)
    source = find_model(config.model)
    tokenizer = load_tokenizer(source)
    ids = tokenizer.encode(tokenizer.chat(prompt) if chat else prompt)
    room = source.spec.max_position - len(ids)
    if not ids or room < 1:
        raise ExecutorError(
            f"prompt: {len(ids)} tokens; expected 1 to {source.spec.max_position - 1} for {config.model}"
        )
    most = min(max_tokens, room)
    trace = Trace("prompt", np.zeros(1), np.array([len(ids)]), np.array([most]), np.array([most]), prompt_ids=[ids])
    said: list[int] = []
    shown = ""

    def on_token(_: int, token: int) -> None:
        nonlocal shown
        said.append(token)
        text = tokenizer.decode(said)
        # A character may be spread over several tokens; the replacement sign marks one that is not whole yet.
        if on_text is not None and not text.endswith("\ufffd"):
            on_text(text[len(shown) :])
            shown = text

    loaded = load_for(config, len(ids) + most)
    run = replay_live(trace, config, loaded=loaded, on_token=on_token, stop_ids=tokenizer.stop_ids)
    output = run.answers.get(0, [])
    if run.outcome.stopped_by:
        raise KeyboardInterrupt
    reasons = run.tables.column("requests", "reason")
    if len(reasons) and str(reasons[0]):
        raise ExecutorError(f"the prompt could not be answered: {reasons[0]}")
    first = float(run.tables.column("requests", "first_token_s")[0])
    whole = float(run.tables.column("requests", "finished_s")[0])
    stopped = bool(output) and output[-1] in tokenizer.stop_ids
    rate = (len(output) - 1) / (whole - first) if len(output) > 1 else 0.0
    text = tokenizer.decode(output[:-1] if stopped else output)
    return Answer(text, output, len(ids), len(output), first, rate, "stop token" if stopped else "length")
