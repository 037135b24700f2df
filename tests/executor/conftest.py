"""One thread for the tiny tensors of these tests: fork and join would cost more than the work, above all on busy cores.

Where there is no GPU, Triton kernels are interpreted: the variable counts only if it is set before triton's first import.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Asked of torch, not of /proc: in a sandbox a GPU has no entry there, and its kernels would be interpreted unnoticed.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
