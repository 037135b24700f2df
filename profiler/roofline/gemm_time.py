"""The time of one matrix product from specifications alone: bytes, or waves of output tiles."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from profiler.roofline.constants import RooflineConstants
from profiler.specs.dtypes import dtype_bytes
from profiler.specs.hardware import Hardware
from profiler.specs.model_spec import Gemm

Floats = NDArray[np.float64]

TILE_N = 128
SPLITS_OF_K = (1, 2, 4, 8)


def gemm_ns(
    gemm: Gemm,
    rows: Floats,
    hardware: Hardware,
    constants: RooflineConstants,
    dtype: str,
    activation: int,
    tile: int,
    weight: float | None = None,
) -> Floats:
    """One GEMM: the slower of its bytes and its waves of output tiles; K may be split where that fills waves better.

    A wave is one tile of `tile` x 128 outputs on every SM; a wave that is not full takes as long as a full one.
    dtype: in which products are made. activation: bytes of an output element. weight: of a weight with its scales, as
    wide as the products by default.
    """
    flops_per_ns = hardware.peak(dtype) * constants.matmul_efficiency / 1e9
    bytes_per_ns = hardware.memory_bandwidth * constants.memory_efficiency / 1e9
    tiles = np.ceil(rows / tile) * -(-gemm.n // TILE_N)
    wave_ns = 2.0 * tile * TILE_N * gemm.k * hardware.sms / flops_per_ns
    inputs = min(dtype_bytes(dtype), activation)
    weight = dtype_bytes(dtype) if weight is None else weight
    moved = gemm.n * gemm.k * weight + rows * (gemm.k * inputs + gemm.n * activation)
    candidates = []
    for split in SPLITS_OF_K:
        waves_ns = np.ceil(tiles * split / hardware.sms) * (wave_ns / split)
        partial_bytes = 0.0 if split == 1 else 8.0 * split * gemm.n  # float32 partial sums, written and read
        candidates.append(np.maximum(waves_ns, (moved + rows * partial_bytes) / bytes_per_ns))
    fastest: Floats = np.minimum.reduce(candidates)
    return fastest + constants.kernel_ns
