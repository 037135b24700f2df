"""What a client has sent, checked: a body of /v1/completions or /v1/chat/completions becomes a `Wanted`.

Fields that are not known are accepted, as OpenAI's servers do; a known one with a value that cannot be served is
refused in OpenAI's form of errors, with its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workloads.door.contract import DoorError
from workloads.door.words import Words

MOST_STOPS = 16
MOST_SEED = 1 << 63
MOST_PROMPT_CHARACTERS_A_TOKEN = 256
"""A text of more characters a token than any tokenizer packs is longer than the model can read: refused unread."""
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class RefusedError(Exception):
    """A request that is not served: an HTTP status, and OpenAI's four words about it. retry_s: when to come again."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param, self.code = message, status, kind, param, code
        self.retry_s = retry_s

    def as_dict(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Wanted:
    """One checked request. chat: its form. stops: texts that end the answer, not part of it."""

    chat: bool
    model: str
    prompt_ids: Sequence[int]
    max_tokens: int
    stream: bool
    include_usage: bool
    running_usage: bool
    ignore_eos: bool
    stops: tuple[str, ...]
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    priority: int
    user: str = ""


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request's body. Raises RefusedError."""
    try:
        found = json.loads(body)
    except RecursionError:
        raise RefusedError("the body is nested too deeply, expected a JSON object of a few levels") from None
    except ValueError as error:
        where = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise RefusedError(f'the body is no JSON{where}, expected an object such as {{"prompt": "Hello"}}') from None
    if not isinstance(found, dict):
        raise RefusedError(f"the body is a JSON {_kind(found)}, expected an object")
    return found


def wanted_of(body: Mapping[str, Any], words: Words, *, chat: bool, max_model_len: int, vocab: int) -> Wanted:
    """Check a body's fields and cut its prompt into tokens. Raises RefusedError."""
    read = _Reader(body)
    stream = read.flag("stream")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise read.wrong("stream_options", "an object")
    if options is not None and not stream:
        raise RefusedError("stream_options goes with stream: true", param="stream_options")
    options = _Reader(options or {}, "stream_options.")
    if (n := read.whole("n", 1, least=1)) != 1:
        raise RefusedError(f"n: found {n}, expected 1: one answer a request", param="n")
    if (best_of := read.whole("best_of", 1, least=1)) != 1:
        raise RefusedError(f"best_of: found {best_of}, expected 1", param="best_of")
    for name in ("logprobs", "echo", "top_logprobs", "prompt_logprobs", "use_beam_search"):
        if body.get(name) not in (None, False, 0):
            raise RefusedError(f"{name}: found {_shown(body[name])}, expected none: it is not served here", param=name)
    ids = _chat_ids(body, words, max_model_len) if chat else prompt_ids(body.get("prompt"), words, max_model_len)
    bad = next((token for token in ids if not 0 <= token < vocab), None)
    if bad is not None:
        expected = f"0 to {vocab - 1}, the model's vocabulary"
        raise RefusedError(f"prompt: found token id {bad}, expected {expected}", param="prompt")
    room = max_model_len - len(ids)
    if room < 1:
        raise RefusedError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {len(ids)} "
            "tokens; expected at least one fewer.",
            param="messages" if chat else "prompt",
            code="context_length_exceeded",
        )
    limit = "max_completion_tokens" if chat and body.get("max_completion_tokens") is not None else "max_tokens"
    most = read.whole(limit, min(room, room if chat else 16), least=1)
    if most > room:
        raise RefusedError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {most} output "
            f"tokens and your prompt has {len(ids)} tokens; expected {limit} of at most {room}.",
            param=limit,
            code="context_length_exceeded",
        )
    seed = read.whole("seed", None, least=-MOST_SEED, most=MOST_SEED)
    return Wanted(
        chat=chat,
        model=read.text("model"),
        prompt_ids=ids,
        max_tokens=most,
        stream=stream,
        include_usage=options.flag("include_usage"),
        running_usage=options.flag("continuous_usage_stats"),
        ignore_eos=read.flag("ignore_eos"),
        stops=read.stops(),
        temperature=read.number("temperature", 1.0, 0.0, 1e6),
        top_p=read.number("top_p", 1.0, 0.0, 1.0, above=True),
        top_k=max(0, read.whole("top_k", 0, least=-1)),
        seed=seed,
        priority=read.whole("priority", 0, least=-(1 << 31), most=1 << 31),
        user=read.text("user"),
    )


def prompt_ids(prompt: Any, words: Words, max_model_len: int) -> Sequence[int]:
    """Token ids of a prompt as OpenAI allows it: a text, token ids, or a list of one of these."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _of_text(prompt, words, max_model_len, "prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(entry, str | list) for entry in prompt):
        raise RefusedError(f"prompt: found {len(prompt)} prompts, expected one a request", param="prompt")
    what = "nothing" if prompt is None else _shown(prompt)
    raise RefusedError(f"prompt: found {what}, expected a text or a list of token ids", param="prompt")


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a chat with plain texts as contents. Raises RefusedError."""
    if not isinstance(messages, list) or not messages:
        raise RefusedError("messages: expected a list of at least one object with role and content", param="messages")
    checked = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise RefusedError(f"{where}: found a JSON {_kind(message)}, expected an object", param=where)
        role = message.get("role")
        if role not in CHAT_ROLES:
            raise RefusedError(
                f"{where}.role: found {_shown(role)}, expected one of {', '.join(CHAT_ROLES)}", param=where
            )
        checked.append({**message, "role": role, "content": _content(message.get("content"), where)})
    return checked


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) and part.get("type") in ("text", "input_text") else None
            if not isinstance(text, str):
                raise RefusedError(f"{where}.content: found a part that is no text; only texts are served", param=where)
            texts.append(text)
        return "".join(texts)
    raise RefusedError(f"{where}.content: found a JSON {_kind(content)}, expected a text", param=where)


def _chat_ids(body: Mapping[str, Any], words: Words, max_model_len: int) -> Sequence[int]:
    messages = checked_messages(body.get("messages"))
    answer = body.get("add_generation_prompt", True) is not False
    try:
        text = words.chat(messages, answer=answer)
    except DoorError as error:
        raise RefusedError(str(error), param="messages") from None
    return _of_text(text, words, max_model_len, "messages")


def _of_text(text: str, words: Words, max_model_len: int, param: str) -> Sequence[int]:
    if len(text) > max_model_len * MOST_PROMPT_CHARACTERS_A_TOKEN:
        raise RefusedError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {len(text):,} "
            "characters.",
            param=param,
            code="context_length_exceeded",
        )
    try:
        ids = words.encode(text)
    except DoorError as error:
        raise RefusedError(str(error), param=param) from None
    if not ids:
        raise RefusedError(f"{param}: found an empty text, expected at least one token", param=param)
    return ids


class _Reader:
    """Fields of one object by type and bounds; null means the default."""

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self._body, self._prefix = body, prefix

    def wrong(self, name: str, expected: str) -> RefusedError:
        name, found = self._prefix + name, _shown(self._body[name])
        return RefusedError(f"{name}: found {found}, expected {expected}", param=name)

    def flag(self, name: str) -> bool:
        value = self._body.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return bool(value)

    def text(self, name: str) -> str:
        value = self._body.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value or ""

    def whole(self, name: str, default: Any, *, least: int, most: int = 1 << 62) -> Any:
        value = self._body.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
            value = int(value)
        if type(value) is not int or not least <= value <= most:
            bound = f"{least} or more" if most == 1 << 62 else f"{least} to {most}"
            raise self.wrong(name, f"a whole number of {bound}")
        return value

    def number(self, name: str, default: float, least: float, most: float, *, above: bool = False) -> float:
        value = self._body.get(name)
        if value is None:
            return default
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or not least <= value <= most or (above and value == least):
            raise self.wrong(name, f"a number {'above' if above else 'from'} {least:g} to {most:g}")
        return float(value)

    def stops(self) -> tuple[str, ...]:
        value = self._body.get("stop")
        texts = [value] if isinstance(value, str) else value or []
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise self.wrong("stop", "a text, or a list of texts, none empty")
        if len(texts) > MOST_STOPS:
            raise RefusedError(f"stop: found {len(texts)} texts, expected at most {MOST_STOPS}", param="stop")
        return tuple(texts)


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
