"""One layer of Llama-3.1-8B on an H100, worked out on paper: every FLOP, byte, tile, wave and microsecond of two batches.

From the model card: hidden 4096, 32 query heads and 8 KV heads of 128, FFN 14336, vocabulary 128,256, 32 layers.
From the datasheet: 989.5 TFLOP/s in bfloat16, 3.35 TB/s, 132 processors, 450 GB/s of NVLink in one direction.
With the constants that docs/concepts/costs.md states: GEMMs 0.80 of peak (791.6 TFLOP/s), attention 0.55 (544.2), memory 0.80
(2.68 TB/s), KV 0.70 (2.345), links 0.75 (337.5 GB/s), 3 us a kernel, 5 us an all-reduce.

A tile of 128 x 128 outputs over K = 4096 is 2 x 128 x 128 x 4096 = 134,217,728 FLOPs; a wave of 132 takes 22.381 us.
"""

from __future__ import annotations

import pytest

from policies.work.batch import BatchShape
from profiler import load_cost_model

LAYERS = 32

CHUNK = BatchShape(((2048, 0),), sampled=1)
DECODES = BatchShape((), 64, 64 * 1000, 1000, sampled=64)

PAPER: dict[tuple[int, str], dict[str, float]] = {
    (1, "chunk"): {
        # [2048, 4096] x [4096, 6144]: 16 x 48 tiles on 132 are 5.8, so 6 waves of 22.381 us; bytes 92.3 MB, 34.4 us.
        "qkv": 6 * 22.381 + 3,
        # x [4096, 4096]: 16 x 32 = 512 tiles, 3.9: 4 waves.
        "attention_out": 4 * 22.381 + 3,
        # x [4096, 28672] (gate and up): 3,584 tiles, 27.2: 28 waves; K in two halves 54.3: 55 half waves, less by half a
        # wave. Its partial sums, 2 x 8 bytes x 2048 x 28672 = 940 MB, take 351 us, the rest 138 us: still the waves.
        "ffn_up": 55 * 22.381 / 2 + 3,
        # [2048, 14336] x [14336, 4096]: 512 tiles in 4 waves, each 3.5 times as deep.
        "ffn_down": 4 * 22.381 * 3.5 + 3,
        # Two norms read input and residual, write sum and normed: 4 x 4096 each. Rotary reads and writes 4096 + 1024, the
        # cache is given 2 x 1024, the activation reads 2 x 14336 and writes 14336. 88,064 numbers of 2 bytes a row:
        # 360.7 MB, 134.59 us, and five kernels.
        "norms_activations": 134.593 + 5 * 3,
        # 2048 x 2049 / 2 = 2,098,176 pairs x 4 x 128 x 32 = 34.38 GFLOP at 544.2 TFLOP/s; KV 16.8 MB, 7.2 us.
        "prefill_attention": 63.166 + 3,
    },
    (1, "decodes"): {
        # One tile of rows. qkv: 48 tiles, one wave, of which 84 processors have nothing; K in two halves: 96 half tiles in
        # one half wave of 11.19 us, so bytes decide: 50.33 MB of weights, 1.31 MB of rows, 6.29 MB of partial sums.
        "qkv": 57.934 / 2.68 + 3,
        # 33.55 + 1.05 + 4.19 MB, in two halves as well.
        "attention_out": 38.797 / 2.68 + 3,
        # 224 tiles are two waves; bytes 234.88 + 4.19 MB take longer.
        "ffn_up": 239.075 / 2.68 + 3,
        # In halves: 117.44 + 2.36 + 4.19 MB.
        "ffn_down": 123.994 / 2.68 + 3,
        # 64 rows of 176,128 bytes: 11.27 MB.
        "norms_activations": 11.272 / 2.68 + 5 * 3,
        # 64 contexts of 1000 are read, 64 tokens written and read, 4,096 bytes a token: 262.67 MB; split, then combined.
        "decode_attention": 262.668 / 2.345 + 2 * 3,
    },
    (4, "chunk"): {
        # A fourth of the outputs: 16 x 12 = 192 tiles, 1.45: 2 waves; in halves 2.9: 3 half waves.
        "qkv": 3 * 22.381 / 2 + 3,
        "attention_out": 4 * 22.381 / 4 + 3,  # a fourth of K
        "ffn_up": 7 * 22.381 + 3,  # 896 tiles, 6.8
        "ffn_down": 4 * 22.381 * 3.5 / 4 + 3,
        # Norms are not split: 32,768 + (12,288 + 43,008) / 4 = 46,592 numbers a row, 190.84 MB.
        "norms_activations": 190.841 / 2.68 + 5 * 3,
        "prefill_attention": 63.166 / 4 + 3,
        # After attention and after the FFN: 2 x 3/4 of 2048 x 4096 x 2 bytes = 25.17 MB over every link.
        "all_reduce": 2 * (25.166 / 0.3375 + 5),
    },
    (4, "decodes"): {
        # 12 tiles; K in four: 48 quarter tiles in one quarter wave of 5.6 us; bytes 12.58 + 0.72 + 3.15 MB take longer.
        "qkv": 16.450 / 2.68 + 3,
        "attention_out": 13.238 / 2.68 + 3,  # 8.39 + 0.66 MB, and 4.19 MB of partial sums of two halves
        "ffn_up": 60.162 / 2.68 + 3,  # 58.72 + 1.44 MB against one wave of 22.381 us
        "ffn_down": 34.537 / 2.68 + 3,  # 29.36 + 0.98 + 4.19 MB
        "norms_activations": 5.964 / 2.68 + 5 * 3,
        "decode_attention": 262.668 / 4 / 2.345 + 2 * 3,
        "all_reduce": 2 * (0.786432 / 0.3375 + 5),
    },
}


@pytest.mark.parametrize(("tp", "batch"), PAPER)
def test_a_layer_costs_what_paper_and_pencil_say(tp: int, batch: str) -> None:
    parts = load_cost_model("llama-3.1-8b", "h100", cost_model="roofline", tp=tp).breakdown(
        CHUNK if batch == "chunk" else DECODES
    )
    paper = PAPER[tp, batch]
    for name, us in paper.items():
        if name == "all_reduce":  # the embedding's own stands with the embedding
            assert parts["embedding"] > us / 2 * 1e3
        assert parts[name] / 1e3 / LAYERS == pytest.approx(us, rel=2e-4), name
    whole = sum(parts.values())
    around = sum(
        parts.get(name, 0)
        for name in (
            "host_before",
            "host_after",
            "embedding",
            "head",
            "sampling",
            "gather_logits",
        )
    )
    assert (whole - around) / 1e3 / LAYERS == pytest.approx(sum(paper.values()), rel=2e-4)


def test_the_head_is_read_whole_for_one_row() -> None:
    """128,256 x 4096 weights of 2 bytes are 1,050.67 MB: 392.04 us; its row in and out 0.26 MB; two kernels."""
    parts = load_cost_model("llama-3.1-8b", "h100", cost_model="roofline").breakdown(CHUNK)
    assert parts["head"] / 1e3 == pytest.approx((1050.673 + 0.265 + 0.016) / 2.68 + 2 * 3, rel=2e-4)
    # 128,256 logits, 18 bytes each, in four kernels.
    assert parts["sampling"] / 1e3 == pytest.approx(2.3086 / 2.68 + 4 * 3, rel=2e-4)
    # One sequence: 65 + 12 us before; one sampled row: 40 + 8 us after.
    assert (parts["host_before"], parts["host_after"]) == (77_000, 48_000)
