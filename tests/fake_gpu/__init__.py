"""A GPU that is not there: PyTorch's CUDA on a CPU build, with a device's rules enforced and times made up.

`python -m tests.fake_gpu MODULE ARGUMENTS` runs a command of the project on it. See `device.FakeGpu` for the rules.
"""

from tests.fake_gpu.device import FakeGpu

__all__ = ["FakeGpu"]
