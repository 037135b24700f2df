"""What a rank holds: slices of the very weights that one process has, plans that survive the wire, and one clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from executor.distributed.clocks import Exchange, RankClock, offset_of
from executor.distributed.layout import Layout, Shard
from executor.distributed.plans import read_plan, step_bytes
from executor.distributed.shard_weights import shard_weights
from executor.distributed.sharded_engine import activated_experts, stage_times
from executor.errors import ExecutorError
from executor.model.loading import ModelSource
from executor.model.sampler import Sampling
from executor.model.weights import Weights, folder_weights, random_weights
from profiler.errors import ProfileError
from profiler.specs.model_spec import ModelSpec
from tests.executor.batches import make_step

SPEC = ModelSpec(
    name="small",
    layers=5,
    hidden=32,
    heads=8,
    kv_heads=2,
    head_dim=4,
    intermediate=42,
    vocab=61,
    max_position=512,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    qk_norm=True,
)
CPU = torch.device("cpu")


def put_together(source: ModelSource, layout: Layout, spec: ModelSpec) -> Weights:
    """The whole model from what all ranks hold."""
    ranks = [Shard(spec, layout, rank) for rank in range(layout.world)]
    held = [shard_weights(source, shard, 3, torch.float32, CPU) for shard in ranks]
    d, kv_copies = spec.head_dim, max(1, layout.tp // spec.kv_heads)
    layers = []
    for stage in range(layout.pp):
        members = layout.ranks_of(stage)
        for index in range(layout.split[stage]):
            parts = [held[rank].layers[index] for rank in members]

            def rows(name: str, sizes: Callable[[Shard], tuple[int, ...]]) -> Tensor:
                cut = [getattr(p, name).split(sizes(ranks[r])) for p, r in zip(parts, members)]  # noqa: B023
                copies = [1] + [kv_copies] * 2 if name.startswith("qkv") else [1, 1]
                return torch.cat([torch.cat([c[i] for c in cut][:: copies[i]]) for i in range(len(cut[0]))])

            def qkv(s: Shard) -> tuple[int, ...]:
                return (s.spec.q_size, s.spec.kv_size, s.spec.kv_size)

            def ffn(s: Shard) -> tuple[int, ...]:
                return (s.spec.intermediate, s.spec.intermediate)

            whole = replace(
                parts[0],
                qkv=rows("qkv", qkv),
                gate_up=rows("gate_up", ffn),
                attention_out=torch.cat([p.attention_out for p in parts], 1),
                down=torch.cat([p.down for p in parts], 1),
            )
            if parts[0].qkv_bias is not None:
                whole = replace(
                    whole,
                    qkv_bias=rows("qkv_bias", qkv),
                    gate_up_bias=rows("gate_up_bias", ffn),
                    attention_out_bias=sum(p.attention_out_bias for p in parts),
                    down_bias=sum(p.down_bias for p in parts),
                )
            assert parts[0].q_norm is None or parts[0].q_norm.shape == (d,)
            layers.append(whole)
    first, last = layout.ranks_of(0), layout.ranks_of(layout.pp - 1)
    norm = held[last[0]].final_norm
    assert norm is not None
    return Weights(
        torch.cat([held[rank].embedding for rank in first]), layers, norm, torch.cat([held[rank].head for rank in last])
    )


def assert_equal(ours: Weights, theirs: Weights) -> None:
    assert torch.equal(ours.embedding, theirs.embedding)
    assert torch.equal(ours.head, theirs.head)
    assert torch.equal(ours.final_norm, theirs.final_norm)
    assert len(ours.layers) == len(theirs.layers)
    for one, other in zip(ours.layers, theirs.layers):
        for name, value in vars(other).items():
            assert (value is None) == (getattr(one, name) is None), name
            assert value is None or torch.equal(getattr(one, name), value), name


@pytest.mark.parametrize(("tp", "pp", "tied"), [(1, 2, True), (2, 1, False), (4, 2, True), (2, 5, False)])
def test_random_shards_are_the_slices_of_the_whole(tp: int, pp: int, tied: bool) -> None:
    spec = replace(SPEC, tied_embeddings=tied)
    layout = Layout.of(spec, tp, pp)
    whole = random_weights(spec, 3, torch.float32, CPU)
    assert_equal(put_together(ModelSource("spec", spec, None), layout, spec), whole)


def test_shards_of_a_folder_with_merged_matrices_are_its_slices(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    spec = replace(SPEC, qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False)
    whole = random_weights(spec, 9, torch.float32, CPU)
    tensors = {"model.embed_tokens.weight": whole.embedding, "lm_head.weight": whole.head}
    tensors["model.norm.weight"] = whole.final_norm
    for index, layer in enumerate(whole.layers):
        at = f"model.layers.{index}."
        tensors |= {
            at + "self_attn.qkv_proj.weight": layer.qkv,
            at + "self_attn.o_proj.weight": layer.attention_out,
            at + "mlp.gate_up_proj.weight": layer.gate_up,
            at + "mlp.down_proj.weight": layer.down,
            at + "input_layernorm.weight": layer.attention_norm,
            at + "post_attention_layernorm.weight": layer.ffn_norm,
        }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    layout = Layout.of(spec, 2, 2)
    assert_equal(put_together(ModelSource("folder", spec, tmp_path), layout, spec), whole)
    assert_equal(whole, folder_weights(tmp_path, spec, torch.float32, CPU))


def test_layouts_that_cannot_be_are_refused_in_one_line() -> None:
    with pytest.raises(ExecutorError, match="--tp 3: the 8 attention heads of small are no multiple of it"):
        Layout.of(SPEC, 3, 1)
    with pytest.raises(ExecutorError, match="--tp 4: the 6 KV heads of small can neither be split"):
        Layout.of(replace(SPEC, heads=24, kv_heads=6), 4, 1)
    with pytest.raises(ExecutorError, match="--pp 6: small has 5 layers"):
        Layout.of(SPEC, 1, 6)
    with pytest.raises(ProfileError, match="layer_split"):
        Layout.of(SPEC, 1, 2, (4, 2))
    assert Layout.of(SPEC, 1, 2).split == (3, 2)  # as the simulator deals them
    shard = Shard(SPEC, Layout.of(SPEC, 8, 1), 5)
    assert shard.heads == (5, 6)
    assert shard.kv_heads == (1, 2)


def test_a_plan_is_the_same_on_the_other_side() -> None:
    step = make_step([(20, 0), (7, 33)], [12, 40, 3], dummies=2, block_size=8)
    sampling = [Sampling(0.5, 4, 0.9, seed=row) for row in range(5)]
    plan = read_plan(step_bytes(7, step, 8, sampling, [3, 9]))
    assert (plan.number, plan.sampling, plan.poison) == (7, sampling, [3, 9])
    there = plan.step
    for name in (
        "positions",
        "slots",
        "token_ids",
        "chunk_row",
        "chunk_tokens",
        "chunk_prefix",
        "decode_row",
        "decode_context",
        "sampled_rows",
    ):
        assert np.array_equal(getattr(there, name), getattr(step, name)), name
    assert plan.positions == step.positions[step.sampled_rows].tolist()
    for name, lengths in (
        ("chunk_table", step.chunk_tokens + step.chunk_prefix),
        ("decode_table", step.decode_context + 1),
    ):
        for ours, theirs, length in zip(getattr(there, name), getattr(step, name), lengths):
            blocks = -(-int(length) // 8)
            assert np.array_equal(there.tables[ours, :blocks], step.tables[theirs, :blocks])
    assert np.array_equal(there.tables[there.sampled_table, 0], step.tables[step.sampled_table, 0])


def test_the_fastest_exchange_gives_the_offset_and_bounds_its_error() -> None:
    true = 5_000_000
    exchanges = [
        Exchange(at, at + true + out, at + out + back)
        for at, out, back in [(0, 90, 300), (900, 50, 30), (2000, 400, 20)]
    ]
    offset = offset_of(exchanges)
    assert offset.error_ns == 40
    assert abs(offset.offset_ns - true) <= offset.error_ns
    # A clock that gains 1 part in 10,000 between the two estimates.
    after = offset._replace(at_ns=offset.at_ns + 10**9, offset_ns=offset.offset_ns + 10**5)
    clock = RankClock(1, offset, after)
    rank_0 = np.array([offset.at_ns, offset.at_ns + 5 * 10**8, after.at_ns])
    there = rank_0 + offset.offset_ns + (rank_0 - offset.at_ns) // 10_000
    assert np.abs(clock.to_rank_0(there) - rank_0).max() <= 20
    assert np.array_equal(RankClock(1, offset, after, same=True).to_rank_0(there), there)


def test_a_stage_takes_from_its_first_start_with_all_ranks_to_its_last_end_and_never_runs_before_its_input() -> None:
    layout = Layout(2, 2, (1, 1))
    clock = [
        RankClock(rank, offset_of([Exchange(0, 0, 0)]), offset_of([Exchange(0, 0, 0)]), same=True) for rank in (1, 2, 3)
    ]
    logs = [
        np.array([[0, 10, 10, 20, 5, 8, 2], [1, 12, 20, 30, 5, 9, 2]]),
        np.array([[0, 11, 12, 21, 5, 8, 2], [1, 12, 21, 29, 5, 9, 2]]),
        np.array([[0, 24, 24, 50, 5, 4, 1], [1, 33, 50, 60, 5, 0, 0]]),
        np.array([[0, 19, 19, 49, 5, 4, 1], [1, 34, 49, 61, 5, 0, 0]]),
    ]
    times, cpu = stage_times(layout, logs, clock, 10)
    assert times[:, 0].tolist() == [[1, 2, 11], [2, 11, 20]]
    assert times[:, 1].tolist() == [[14, 14, 40], [24, 40, 51]]
    assert cpu.tolist() == [20, 20]
    # Two layers and one with experts; nothing was sampled in the second batch, so the last layer had no rows.
    assert activated_experts(layout, logs).tolist() == [12 / 3, 9 / 2]
    assert np.isnan(activated_experts(layout, [log * (np.arange(7) < 5) for log in logs])).all()
    early = [*logs[:2], logs[2] - np.array([0, 9, 9, 0, 0, 0, 0]), logs[3] - np.array([0, 9, 9, 0, 0, 0, 0])]
    times, _ = stage_times(layout, early, clock, 10)
    assert times[0, 1, 1] == times[0, 0, 2]
