"""Chunks beside decodes for a file: dealing blocks one by one takes 50 us a batch, so a fit does it once for its grid.

The grid gets knots between the measured ones along chunk and batch sizes, where blocks fill processors.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from profiler.operators.fitting.attention_fit import AttentionFit
from profiler.operators.laws.lattice import Lattice, with_knots
from profiler.operators.laws.smooth_batch_law import batch_us

TABLED_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
TABLED_DECODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Where `tabled` deals blocks besides the measured coordinates."""


def tabled(fit: AttentionFit) -> AttentionFit:
    """The same fit without `mixed_law`: what it adds to batch_law is put into the grid."""
    if fit.mixed_law is None:
        return fit
    tokens, prefix, decodes, context = fit.misses["mixed"].axes
    axes = (with_knots(tokens, TABLED_TOKENS), prefix, with_knots(decodes, TABLED_DECODES), context)
    nodes = np.meshgrid(*axes, indexing="ij", sparse=True)
    ratio = fit.batch_us(*nodes) / batch_us(fit.batch_law, fit.heads, fit.sms, *nodes)
    return replace(fit, mixed_law=None, misses={**fit.misses, "mixed": Lattice(axes, np.log(ratio))})
