"""The calls that we make to FlashAttention: with its published signatures, on a stand-in that computes by the formula.

No GPU is needed: the stand-in says whether the arguments mean what we think; whether the package agrees, only a device
can tell (tests marked cuda).
"""

from __future__ import annotations

import inspect
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from executor.attention.flash_attn import FlashAttention, find_generations
from executor.attention.reference import ReferenceAttention
from executor.errors import ExecutorError
from executor.kv_memory.pool import KVCache
from profiler.specs.model_spec import ModelSpec
from tests.executor.batches import blocks_needed, make_step

SIZES = {1: 256, 2: 256, 3: 16, 4: 16}


def formula(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, length: int, scale: float, window: tuple[int | None, ...]
) -> Tensor:
    """Bottom-right causal attention of q [rows, heads, d] over `length` tokens; k and v [blocks, size, kv heads, d]."""
    rows, share = q.shape[0], q.shape[1] // k.shape[2]
    if length == 0:
        return torch.zeros_like(q)
    used = table[: -(-length // k.shape[1])].long()
    keys, values = (part[used].flatten(0, 1)[:length].repeat_interleave(share, 1).float() for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    at, row = torch.arange(length)[None, :], torch.arange(length - rows, length)[:, None]
    seen = at <= row
    if window[0] is not None and window[0] >= 0:
        seen &= at >= row - window[0]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def packed(q, k, v, starts, tables, lengths, scale, window):  # type: ignore[no-untyped-def]
    out = torch.full_like(q, float("nan"))  # memory as it is found: rows beyond the last one are never written
    bounds = starts.tolist()
    for index, length in enumerate(lengths):
        rows = slice(bounds[index], bounds[index + 1])
        out[rows] = formula(q[rows], k, v, tables[index], int(length), scale, window)
    return out


def batched(q, k, v, tables, lengths, scale, window):  # type: ignore[no-untyped-def]
    parts = [formula(q[i], k, v, tables[i], int(n), scale, window) for i, n in enumerate(lengths)]
    return torch.stack(parts)


def torch_varlen(
    out,
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):  # type: ignore[no-untyped-def]
    assert enable_gqa
    assert num_splits == 1
    assert window_size[1] == 0
    assert int(cu_seq_q.diff().max()) <= max_q
    assert cu_seq_k.diff().tolist() == seqused_k.tolist()
    out.copy_(packed(query, key, value, cu_seq_q, block_table, seqused_k, scale, window_size))


def second_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):  # type: ignore[no-untyped-def]
    assert causal
    assert k.shape[1] % 256 == 0
    assert k.stride(-1) == q.stride(-1) == 1
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    return packed(q, k, v, cu_seqlens_q, block_table, cu_seqlens_k.diff(), softmax_scale, window_size)


def second_cached(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):  # type: ignore[no-untyped-def]
    assert k_cache.shape[1] % 256 == 0
    return batched(q, k_cache, v_cache, block_table, cache_seqlens, softmax_scale, window_size)


def third_cached(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):  # type: ignore[no-untyped-def]
    if cu_seqlens_q is None:
        return batched(q, k_cache, v_cache, page_table, cache_seqlens, softmax_scale, window_size)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    return packed(q, k_cache, v_cache, cu_seqlens_q, page_table, cache_seqlens, softmax_scale, window_size)


def fourth_varlen(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    **others,
):  # type: ignore[no-untyped-def]
    assert not others
    if cu_seqlens_q is None:
        return batched(q, k, v, page_table, seqused_k, softmax_scale, window_size), None
    return packed(q, k, v, cu_seqlens_q, page_table, seqused_k, softmax_scale, window_size), None


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    two, three, four = ModuleType("flash_attn"), ModuleType("flash_attn_interface"), ModuleType("flash_attn.cute")
    two.__dict__.update(flash_attn_varlen_func=second_varlen, flash_attn_with_kvcache=second_cached, cute=four)
    three.__dict__.update(flash_attn_with_kvcache=third_cached)
    four.__dict__.update(flash_attn_varlen_func=fourth_varlen)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn_out", torch_varlen)
    for module in (two, three, four):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("generation", [1, 2, 3, 4])
def test_chunks_and_decodes_are_handed_over_as_the_reference_means_them(generation: int, window: int | None) -> None:
    block_size = SIZES[generation]
    spec = ModelSpec(
        name="small",
        layers=1,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=8,
        vocab=64,
        max_position=4096,
        sliding_window=window,
    )
    step = make_step([(20, 0), (9, 31)], [3, 99], block_size=block_size, dummies=2)
    cache = KVCache(spec, blocks_needed(step) + 1, block_size, torch.float32, torch.device("cpu"))
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(1)))
    wide = torch.randn(step.rows, 2 * spec.q_size, generator=torch.Generator().manual_seed(2))
    q = wide[:, : spec.q_size]
    expected, got = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
    ReferenceAttention(spec).attend(0, q, expected, step, cache)
    backend = FlashAttention(spec, generation=generation)
    backend.attend(0, q, got, step, cache)
    assert backend.name == f"flash_attn{generation}"
    assert float((got - expected).abs().max()) < 2e-6


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("generation", [1, 2, 3, 4])
def test_padded_rows_of_a_graph_get_no_memory_that_nobody_has_written(generation: int) -> None:
    """A batch of 29 chunk rows and two decodes in a graph of 48 and four, as a replay finds it."""
    from executor.batches.device_arrays import Sizes, pack
    from executor.model.cuda_graphs import static_step

    size = SIZES[generation]
    spec = ModelSpec(
        name="small", layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=8, vocab=64, max_position=4096
    )
    batch = make_step([(20, 0), (9, 31)], [3, 99], block_size=size)
    sizes = Sizes(52, 48, 4, 4, 7, 16, 8, batch.tables.shape[1])
    step, buffer = static_step(sizes, size, torch.device("cpu"), trimmed=False)
    buffer.copy_(torch.from_numpy(pack(batch, sizes)))
    cache = KVCache(spec, blocks_needed(batch) + 1, size, torch.float32, torch.device("cpu"))
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(1)))
    q = torch.randn(52, spec.q_size, generator=torch.Generator().manual_seed(2))
    useful = [*range(29), 48, 49]
    expected, got = torch.empty(31, spec.q_size), torch.full_like(q, 7.0)
    ReferenceAttention(spec).attend(0, q[useful], expected, batch, cache)
    FlashAttention(spec, generation=generation).attend(0, q, got, step, cache)
    assert float((got[useful] - expected).abs().max()) < 2e-6
    assert bool((got[[row for row in range(52) if row not in useful]] == 0).all())


@pytest.mark.usefixtures("stand_ins")
def test_each_device_tries_the_generations_made_for_it() -> None:
    assert find_generations(90)[0] == [3, 4, 2, 1]
    assert find_generations(100)[0] == [4, 2, 1]
    assert find_generations(120)[0] == [2, 1], "generation 4 has no paged kernel for 12.0"
    assert find_generations(80)[0] == [2, 1]
    assert find_generations(75)[0] == []


@pytest.mark.usefixtures("stand_ins")
def test_the_cute_that_version_2_carries_is_not_generation_4(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, page_table=None):  # type: ignore[no-untyped-def]
        raise AssertionError("called")

    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_varlen_func", early)
    found, reason = find_generations(100)
    assert found == [2, 1]
    assert "flash_attn.cute.flash_attn_varlen_func has no max_seqlen_q" in reason


@pytest.mark.usefixtures("stand_ins")
def test_the_generation_that_runs_is_taken_and_the_other_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that imports raises on this device, the second computes."""
    from executor.attention import make_attention

    def broken(*arguments: object, **options: object) -> Tensor:
        raise RuntimeError("no kernel image is available for execution on the device")

    broken.__signature__ = inspect.signature(fourth_varlen)  # type: ignore[attr-defined]
    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_varlen_func", broken)
    monkeypatch.setattr("executor.attention.flash_attn._capability", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(FlashAttention, "why_not", classmethod(lambda cls, *asked: ""))
    spec = ModelSpec(
        name="small", layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=8, vocab=64, max_position=512
    )
    cpu = torch.device("cpu")
    backend = make_attention("flash_attn", spec, cpu, torch.float32, torch.float32, block_size=256)
    assert backend.name == "flash_attn2"
    assert "flash_attn4 chunks: RuntimeError: no kernel image" in backend.passed_over


@pytest.mark.usefixtures("stand_ins")
def test_a_decode_of_generation_2_reads_nothing_back_and_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's paged kvcache function takes the longest length to the host."""
    from tests.executor.recorded_graph import RecordedGraph

    two = sys.modules["flash_attn"]
    monkeypatch.setattr(two, "flash_attn_varlen_func", lambda q, k, v, **options: torch.zeros_like(q))
    monkeypatch.setattr(
        two, "flash_attn_with_kvcache", lambda q, *rest, **options: q * options["cache_seqlens"].max().item()
    )
    spec = ModelSpec(
        name="small", layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=8, vocab=64, max_position=512
    )
    step = make_step([], [3, 9], block_size=256)
    cache = KVCache(spec, 3, 256, torch.float32, torch.device("cpu"))
    q = torch.ones(2, spec.q_size)
    out = torch.ones_like(q)
    backend = FlashAttention(spec, generation=2)

    def attend() -> Tensor:
        backend.attend(0, q, out, step, cache)
        return out

    assert bool((RecordedGraph().capture(attend) == 0).all())


def test_graphs_of_generation_3_share_no_pool() -> None:
    from executor.model.cuda_graphs import Buckets, CudaCapture, GraphedModel
    from executor.model.loading import load_model
    from tests.fake_gpu import FakeGpu

    with FakeGpu():
        loaded = load_model("nano", device="cuda", kernels="triton", attention="triton", max_tokens=64)
        cache = loaded.new_cache(4, 16)
        pools = []
        for shares in (True, False):
            loaded.model.attention.shares_graph_pool = shares
            capture = GraphedModel(loaded.model, cache, Buckets(blocks=4))._new_capture()
            assert isinstance(capture, CudaCapture)
            pools.append(capture._own_pool)
        assert pools == [False, True]


def test_a_package_without_its_compiled_half_is_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn_interface", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn_out", lambda out, query: None)
    found, reason = find_generations(90)
    assert found == []
    assert "flash_attn" in reason
    assert "no paging before PyTorch 2.12" in reason


def test_pytorchs_own_copy_needs_no_package_and_has_the_signature_of_the_stand_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    parameters = inspect.signature(varlen.varlen_attn_out).parameters
    if "block_table" not in parameters:
        pytest.skip("this PyTorch has no paged varlen_attn")
    for name in ("flash_attn", "flash_attn_interface", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, None)
    assert find_generations(90)[0] == [1]
    assert list(parameters) == list(inspect.signature(torch_varlen).parameters)


@pytest.mark.usefixtures("stand_ins")
def test_generation_2_refuses_small_blocks_in_words() -> None:
    spec = ModelSpec(
        name="small", layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=8, vocab=64, max_position=64
    )
    step = make_step([(3, 0)], [])
    cache = KVCache(spec, 9, 16, torch.float32, torch.device("cpu"))
    q = torch.zeros(3, spec.q_size)
    with pytest.raises(ExecutorError, match="multiples of 256 tokens, found --block-size 16"):
        FlashAttention(spec, generation=2).attend(0, q, q.clone(), step, cache)


def test_the_installed_package_has_the_signatures_of_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python side of flash-attn 2.8 with its compiled half replaced by an empty module."""
    if find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    if find_spec("flash_attn_2_cuda") is None:
        monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", ModuleType("flash_attn_2_cuda"))
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    for theirs, ours in ((flash_attn_varlen_func, second_varlen), (flash_attn_with_kvcache, second_cached)):
        assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters)
