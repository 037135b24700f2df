"""How far along long work is, on stderr: a bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

_EVERY_S = 15.0


class Progress:
    """progress(done, total, failed) as work goes on; what was done before the first call tells nothing of the rate."""

    def __init__(self, what: str, unit: str, *, quiet: bool = False) -> None:
        self.what, self.unit = what, unit
        self.quiet = quiet
        self._began = self._said = time.monotonic()
        self._before: int | None = None
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, done: int, total: int, failed: int = 0) -> None:
        now = time.monotonic()
        if self._before is None:
            self._before, self._began, self._said = done, now, now
        if self.quiet:
            return
        if sys.stderr.isatty():
            self._draw(done, total, failed, now)
        elif now - self._said >= _EVERY_S or done == total:
            self._said = now
            print(self.line(done, total, failed, now), file=sys.stderr, flush=True)

    def line(self, done: int, total: int, failed: int, now: float) -> str:
        """As `sweep: 37 of 200 points, 2 failed, 41 s left`."""
        text = f"{self.what}: {done} of {total} {self.unit}" + (f", {failed} failed" if failed else "")
        left = self._left_s(done, total, now)
        return text if left is None else f"{text}, {_spoken(left)} left"

    def _left_s(self, done: int, total: int, now: float) -> float | None:
        here = done - (self._before or 0)
        if not here or done >= total:
            return None
        return (now - self._began) / here * (total - done)

    def _draw(self, done: int, total: int, failed: int, now: float) -> None:
        if self._bar is None:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            from metrics.drawing.text_tables import terminal

            self._bar = Bar(
                TextColumn("{task.description}", markup=False), BarColumn(), console=terminal(None, stderr=True)
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done, total=total, description=self.line(done, total, failed, now))

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _spoken(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
