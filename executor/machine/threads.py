"""How many threads the model runs on: one number for PyTorch, which the C++ kernels read from it when a step begins."""

from __future__ import annotations

from executor.errors import ExecutorError

MOST_THREADS = 4096
"""More than any machine has; PyTorch fails with an exception of its own at numbers that C cannot hold."""


def check_threads(threads: int | None) -> None:
    """Raises ExecutorError for a number that no machine could run; None means PyTorch's own."""
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ExecutorError(f"--threads: found {threads}, expected 1 to {MOST_THREADS}")


def set_threads(threads: int | None) -> None:
    """Give PyTorch so many threads in this process; None leaves its own number."""
    check_threads(threads)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
