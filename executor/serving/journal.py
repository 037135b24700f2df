"""What a killed process leaves behind: one line of JSON for each request that has ended, written as it ends.

A run folder is written whole or not at all, at the end. Until then the journal beside it says what finished; it is
removed once the folder is there. kill -9, a lost machine or a full disk leave it where it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from executor.errors import ExecutorError

if TYPE_CHECKING:
    from policies import Track


class Journal:
    """Beside `out`, named OUT.unfinished.jsonl: a first line about the run, then a line per request.

    A journal that an earlier run left there is kept under the next free name. Raises ExecutorError if the place cannot
    be written.
    """

    def __init__(self, out: Path, about: Mapping[str, Any]) -> None:
        self.path = out.with_name(out.name + ".unfinished.jsonl")
        self.kept: Path | None = None
        """Where the journal of an earlier run went, if there was one."""
        self.stopped = ""
        """Why nothing more is written, if so."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self.kept = _free_name(out)
                os.replace(self.path, self.kept)
            self._file: IO[str] = self.path.open("w", encoding="utf-8", buffering=1)
            self._write(about)
        except OSError as error:
            raise ExecutorError(f"{self.path}: cannot be written: {error.strerror}") from error

    def ended(self, track: Track) -> None:
        """Note a request that has ended, however it did. Times: seconds since the run began, None: none.

        A disk that has become full ends the journal and not the run: its folder may still find room, or says why not.
        """
        if self.stopped:
            return
        try:
            self._note(track)
        except OSError as error:
            self.stopped = error.strerror or type(error).__name__

    def _note(self, track: Track) -> None:
        self._write(
            {
                "request": track.request.id,
                "status": track.status,
                "reason": track.reason,
                "prompt_tokens": track.request.prompt_tokens,
                "output_tokens": track.delivered,
                "arrival_s": track.request.arrival_ns / 1e9,
                "first_token_s": _seconds(track.first_token_ns),
                "finished_s": _seconds(track.finished_ns),
                "preemptions": track.preemptions,
            }
        )

    def remove(self) -> None:
        """The run folder is there and says all of it. A second run into it may have taken this journal for an earlier
        one's, put it aside, and have its own in this place: that one stays."""
        own = os.fstat(self._file.fileno())
        with suppress(OSError):  # what a full disk did not take is not needed any more
            self._file.close()
        aside = self.path.with_suffix("").name
        for path in (self.path, *self.path.parent.glob(f"{escape(aside)}.*.jsonl")):
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), own):
                    path.unlink()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def _seconds(at_ns: int) -> float | None:
    return at_ns / 1e9 if at_ns >= 0 else None


def _free_name(out: Path) -> Path:
    number = 1
    while (path := out.with_name(f"{out.name}.unfinished.{number}.jsonl")).exists():
        number += 1
    return path
