"""The JSON of answers in OpenAI's form: whole ones, and the chunks of a stream made from a prefix and a suffix.

Only the text of a chunk changes from token to token, so the rest of it is written once a request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from workloads.door.asks import Wanted

DONE = b"data: [DONE]\n\n"


class Reply:
    """How one request is answered. name: its id. prompt_tokens: as they were counted; cached: of them, once known."""

    def __init__(self, wanted: Wanted, name: str, model: str) -> None:
        self.wanted, self.name, self.model = wanted, name, model
        self.created = int(time.time())
        self.prompt_tokens = len(wanted.prompt_ids)
        self.cached = 0
        head = {
            "id": name,
            "object": "chat.completion.chunk" if wanted.chat else "text_completion",
            "created": self.created,
            "model": model,
        }
        # Everything before the text, and everything after it while the answer goes on.
        self._head = json.dumps(head)[:-1]
        if wanted.chat:
            self._first = f'data: {self._head}, "choices": [{{"index": 0, "delta": {{"role": "assistant", "content": '
            self._next = f'data: {self._head}, "choices": [{{"index": 0, "delta": {{"content": '
            self._after = '}, "logprobs": null, "finish_reason": '
        else:
            self._first = self._next = f'data: {self._head}, "choices": [{{"index": 0, "text": '
            self._after = ', "logprobs": null, "finish_reason": '
        self._started = False

    def chunk(self, text: str, finish: str | None, output_tokens: int) -> bytes:
        """One event of a stream; finish: why the answer ends with it, or None."""
        before = self._next if self._started else self._first
        self._started = True
        end = "null" if finish is None else f'"{finish}"'
        usage = ""
        if self.wanted.running_usage:
            usage = f', "usage": {json.dumps(self.usage(output_tokens))}'
        elif self.wanted.include_usage:
            usage = ', "usage": null'
        return f"{before}{json.dumps(text)}{self._after}{end}}}]{usage}}}\n\n".encode()

    def last(self, output_tokens: int) -> bytes:
        """What ends a stream: the usage, if it was asked for, and the mark of the end."""
        if not self.wanted.include_usage:
            return DONE
        usage = json.dumps(self.usage(output_tokens))
        return f'data: {self._head}, "choices": [], "usage": {usage}}}\n\n'.encode() + DONE

    def whole(self, text: str, finish: str, output_tokens: int) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        if self.wanted.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return {
            "id": self.name,
            "object": "chat.completion" if self.wanted.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            "usage": self.usage(output_tokens),
        }

    def usage(self, output_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": self.prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def error_event(error: Mapping[str, Any]) -> bytes:
    """A stream that cannot go on says why, and ends."""
    return f"data: {json.dumps(error)}\n\n".encode() + DONE
