"""What a model is, as far as its cost and its memory are concerned: the shape of a decoder, dense or of experts.

Everything that can be derived is derived (parameters, bytes, FLOPs, the GEMMs of a layer), so that one set of facts
serves roofline, fits, memory planning and the executor. `profiler.specs.model_config` reads them from names and files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from policies.edges.settings import check_settings, listed
from profiler.errors import ProfileError
from profiler.specs.dtypes import canonical_dtype, dtype_bytes
from profiler.specs.number_format import FORMATS, format_of_dtype, weight_format


class Gemm(NamedTuple):
    """One linear layer on one device: [rows, k] x [k, n]."""

    name: str
    n: int
    k: int

    @property
    def weights(self) -> int:
        return self.n * self.k


class AttentionKind(NamedTuple):
    """Layers whose attention is alike. layers: how many. window: tokens that they look back, 0 for all. value_dim: of
    a value, which latent attention has narrower than its keys."""

    layers: int
    window: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def pair_flops(self) -> int:
        """FLOPs of one query-key pair in one layer, over all heads: its score and its share of the values."""
        return 2 * self.heads * (self.head_dim + self.value_dim)

    def kv_heads_per_device(self, tp: int) -> int:
        """KV heads on one of tp devices: beyond their number they are replicated, not split."""
        return max(1, self.kv_heads // tp)


BLOCK = 128
"""Side of the blocks that share a scale in block-wise fp8."""
LARGEST = 1 << 40
"""No width, depth or length of a model comes near it; products of larger ones overflow a float."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer, dense or with experts (mixture of experts, MoE).

    layers, hidden, heads, kv_heads, head_dim, intermediate, vocab: sizes; heads * head_dim may differ from hidden.
    gated: three FFN matrices (gate, up, down) instead of two.
    qkv_bias, out_bias, mlp_bias: biases of q/k/v, of the attention output, of the FFN matrices.
    qk_norm: RMSNorm over head_dim on queries and keys (Qwen3).
    norm: "rmsnorm" (one vector) or "layernorm" (weight and bias); norms_per_layer: 2, or 1 where a parallel block
        shares one.
    parallel_attention: attention and FFN read the same input and are added together (Falcon, GPT-J, Phi).
    position: "rope", "learned" or "alibi"; rope_theta, rope_scaling (the Hugging Face dictionary with `rope_type`)
        and rotary_fraction (share of head_dim that is rotated) belong to "rope".
    sliding_window: tokens that attention may look back, None for all. sliding_layers: in how many layers, None for all.
    full_kv_heads, full_head_dim: of the layers without a window where these have their own (Gemma); 0: as the others.
        full_keys_only: their values are their keys, which one matrix makes.
    kv_latent: width of the one vector that keys and values of a token are compressed to (multi-head latent attention,
        DeepSeek-V2), 0 without. Beside it every token keeps rope_dim rotary elements, which all heads share; head_dim
        is that of a query, its rope_dim included, value_dim that of a value. q_latent: width to which queries are
        compressed on their way, 0 for none.
    attention_sinks: each head has one learned logit more in its softmax (gpt-oss). qk_norm_whole: the norms of queries
        and keys go over all heads together (MiniMax), not head by head.
    experts: routed experts of every expert layer, 0 for a dense model. top_k: how many of them each token goes to.
        expert_intermediate: FFN width of one routed expert. shared_intermediate: FFN width of the experts that every
        token goes to, all of them together; 0 without. shared_gate: their output is scaled by a sigmoid of the token
        (Qwen2-MoE). norm_topk: the weights of a token's top_k experts are made to sum to 1. dense_layers: numbers of
        the layers that have a dense FFN of `intermediate` instead. Without any, `intermediate` is the expert's width.
        router_bias: a bias a routed expert in each router. expert_bias: biases in all matrices of the experts.
    quantisation, weight_bits: how the blocks' linear layers are stored, and the bits that one of their weights takes
        with its share of scales; "" and None where all is in `dtype`. weight_format: in which of
        `profiler.specs.number_format.FORMATS`. quantised: "blocks", or "experts" where routed experts alone are.
    kv_cache_dtype: what the checkpoint asks its keys and values to be stored in; "" for the dtype of the activations.
    dtype: the checkpoint's own dtype. architecture: the Hugging Face class name.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    gated: bool = True
    activation: str = "silu"
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    norms_per_layer: int = 2
    parallel_attention: bool = False
    position: str = "rope"
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rotary_fraction: float = 1.0
    sliding_window: int | None = None
    sliding_layers: int | None = None
    full_kv_heads: int = 0
    full_head_dim: int = 0
    full_keys_only: bool = False
    kv_latent: int = 0
    q_latent: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    attention_sinks: bool = False
    qk_norm_whole: bool = False
    dtype: str = "bfloat16"
    experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    shared_gate: bool = False
    norm_topk: bool = True
    dense_layers: tuple[int, ...] = ()
    router_bias: bool = False
    expert_bias: bool = False
    quantisation: str = ""
    weight_bits: float | None = None
    weight_format: str = ""
    quantised: str = "blocks"
    kv_cache_dtype: str = ""
    architecture: str = "LlamaForCausalLM"
    source: str = ""

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_position")
        for key in sizes:
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
                found = repr(value)[:40]
                raise ProfileError(f"model {self.name}: {key}: found {found}, expected a whole number of 1 to 2^40")
        check_settings(self, ProfileError, named=lambda key: f"model {self.name}: {key}")
        if self.heads % self.kv_heads:
            raise ProfileError(f"model {self.name}: {self.heads} heads cannot share {self.kv_heads} kv_heads evenly")
        for key, allowed in (("norm", ("rmsnorm", "layernorm")), ("position", ("rope", "learned", "alibi"))):
            if getattr(self, key) not in allowed:
                found = getattr(self, key)
                raise ProfileError(f"model {self.name}: {key}: found {found!r}, expected one of {', '.join(allowed)}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ProfileError(f"model {self.name}: sliding_window: found {self.sliding_window}, expected at least 1")
        if self.sliding_layers is not None and not (self.sliding_window and 0 <= self.sliding_layers <= self.layers):
            raise ProfileError(
                f"model {self.name}: sliding_layers: found {self.sliding_layers}, expected at most the {self.layers} "
                "layers, beside a sliding_window"
            )
        self._check_experts()
        self._check_attention()
        if self.quantised not in ("blocks", "experts"):
            raise ProfileError(f"model {self.name}: quantised: found {self.quantised!r}, expected blocks or experts")
        if self.weight_format and self.weight_format not in FORMATS:
            known = ", ".join(FORMATS)
            raise ProfileError(f"model {self.name}: weight_format: found {self.weight_format!r}, expected {known}")
        if self.weight_bits is not None and not 0 < self.weight_bits <= 64:
            raise ProfileError(
                f"model {self.name}: weight_bits: found {self.weight_bits}, expected more than 0, at most 64"
            )
        if not self.norm_eps >= 0.0:
            raise ProfileError(f"model {self.name}: norm_eps: found {self.norm_eps}, expected at least 0")
        if not self.rope_theta > 0.0:
            raise ProfileError(f"model {self.name}: rope_theta: found {self.rope_theta}, expected more than 0")
        if not 0.0 < self.rotary_fraction <= 1.0:
            share = self.rotary_fraction
            raise ProfileError(f"model {self.name}: rotary_fraction: found {share}, expected more than 0, at most 1")

    def _check_experts(self) -> None:
        where = f"model {self.name}"
        # A TOML file and a config.json have lists.
        object.__setattr__(self, "dense_layers", listed(f"{where}: dense_layers", self.dense_layers, int, ProfileError))
        for key in ("experts", "top_k", "expert_intermediate", "shared_intermediate"):
            if not 0 <= getattr(self, key) <= LARGEST:
                found = str(getattr(self, key))[:40]
                raise ProfileError(f"{where}: {key}: found {found}, expected a whole number of 0 to 2^40")
        if not self.experts:
            extra = ("top_k", "expert_intermediate", "shared_intermediate", "shared_gate", "dense_layers")
            if given := [key for key in extra if getattr(self, key)]:
                raise ProfileError(f"{where}: {given[0]} belongs to a model with experts, and experts is 0")
            return
        if not 1 <= self.top_k <= self.experts:
            raise ProfileError(f"{where}: top_k: found {self.top_k}, expected 1 to the {self.experts} experts")
        if not self.expert_intermediate:
            raise ProfileError(f"{where}: expert_intermediate: found 0, expected the FFN width of one expert")
        numbers = self.dense_layers
        if list(numbers) != sorted(set(numbers)) or not all(0 <= number < self.layers for number in numbers):
            raise ProfileError(
                f"{where}: dense_layers: found {list(numbers)[:8]}, expected rising numbers of 0 to {self.layers - 1}"
            )

    def _check_attention(self) -> None:
        where = f"model {self.name}"
        for key in ("full_kv_heads", "full_head_dim", "kv_latent", "q_latent", "rope_dim", "value_dim"):
            if not 0 <= getattr(self, key) <= LARGEST:
                found = str(getattr(self, key))[:40]
                raise ProfileError(f"{where}: {key}: found {found}, expected a whole number of 0 to 2^40")
        if self.full_kv_heads and self.heads % self.full_kv_heads:
            raise ProfileError(f"{where}: {self.heads} heads cannot share {self.full_kv_heads} full_kv_heads evenly")
        if not self.kv_latent:
            if given := [key for key in ("q_latent", "rope_dim", "value_dim") if getattr(self, key)]:
                raise ProfileError(f"{where}: {given[0]} belongs to latent attention, and kv_latent is 0")
        elif not 0 < self.rope_dim < self.head_dim:
            raise ProfileError(f"{where}: rope_dim: found {self.rope_dim}, expected 1 to less than {self.head_dim}")
        elif self.sliding_window or self.full_head_dim or self.full_kv_heads:
            raise ProfileError(f"{where}: found latent attention beside windows, expected one of them")

    # A mapping field cannot be hashed, and a spec is a natural cache key; two specs with equal shapes are equal.
    def __hash__(self) -> int:
        return hash((self.name, self.layers, self.hidden, self.heads, self.kv_heads, self.intermediate, self.vocab))

    @property
    def context_length(self) -> int:
        """Longest context that the model is made for: its positions, times the factor by which its rope scaling
        stretches them where max_position does not count that already (as vLLM derives max_model_len)."""
        scaling = self.rope_scaling or {}
        factor, kind = scaling.get("factor"), scaling.get("rope_type", scaling.get("type", "default"))
        if kind in ("default", "llama3", "longrope", "su") or not isinstance(factor, int | float) or factor <= 1:
            return self.max_position
        original = scaling.get("original_max_position_embeddings") if kind == "yarn" else None
        return int((original or self.max_position) * factor)

    @cached_property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """Kinds of layers by their attention, those with a window first; layers sum to the model's."""
        value = self.value_dim or self.head_dim
        window = self.sliding_window or 0
        sliding = (self.layers if self.sliding_layers is None else self.sliding_layers) if window else 0
        kinds = []
        if sliding:
            kinds.append(AttentionKind(sliding, window, self.heads, self.kv_heads, self.head_dim, value))
        if sliding < self.layers:
            head = self.full_head_dim or self.head_dim
            value = self.full_head_dim or value
            kv_heads = self.full_kv_heads or self.kv_heads
            kinds.append(AttentionKind(self.layers - sliding, 0, self.heads, kv_heads, head, value))
        return tuple(kinds)

    @property
    def q_size(self) -> int:
        """Elements of a token's queries; where kinds of layers differ, in those of the first kind."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys in one layer (values have as many)."""
        return self.kv_heads * self.head_dim

    @property
    def latent(self) -> bool:
        """Whether keys and values are compressed to one vector a token (multi-head latent attention)."""
        return self.kv_latent > 0

    @cached_property
    def norm_params(self) -> int:
        """Parameters of one norm over the hidden state."""
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    @property
    def expert_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - len(self.dense_layers) if self.experts else 0

    def has_experts(self, layer: int) -> bool:
        """Whether layer number `layer` (from 0) has routed experts."""
        return self.experts > 0 and layer not in self.dense_layers

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert of one layer."""
        return self._matrices * self.hidden * self.expert_intermediate

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def embedding_params(self) -> int:
        """Token embedding, and the position table where positions are learned."""
        learned = self.max_position * self.hidden if self.position == "learned" else 0
        return self.vocab * self.hidden + learned

    @property
    def head_params(self) -> int:
        """The output matrix: [vocab, hidden], counted whether or not it is tied."""
        return self.vocab * self.hidden

    @cached_property
    def params(self) -> int:
        """Parameters as published: tied matrices count once."""
        return self._params(self.experts)

    @cached_property
    def active_params(self) -> int:
        """Parameters that one token meets: top_k of the routed experts, all of everything else."""
        return self._params(self.top_k)

    def _params(self, experts: int) -> int:
        head = 0 if self.tied_embeddings else self.head_params
        blocks = self._block_weights(1) + self._routed_weights(experts) + self._small_params(1, experts)
        return blocks + self.embedding_params + self.norm_params + head

    def check_tp(self, tp: int, *, expert_ways: int | None = None, whole_experts: bool = False) -> None:
        """Raise unless the model splits evenly over `tp` devices (KV heads may be replicated).

        expert_ways: devices that routed experts are split over, tp by default (tp times the data-parallel ranks
        otherwise). whole_experts: each of these has whole experts (expert parallel), instead of a part of every one.
        """
        if tp < 1:
            raise ProfileError(f"tp: found {tp}, expected at least 1")
        ways = tp if expert_ways is None else expert_ways
        widths = [self.intermediate] if self.expert_layers < self.layers else []
        widths += [self.shared_intermediate] if self.shared_intermediate else []
        if self.heads % tp or any(width % tp for width in widths):
            wide = " and ".join(map(str, widths))
            raise ProfileError(
                f"tp: found {tp}, expected a divisor of {self.name}'s {self.heads} heads and its FFN of {wide or tp}"
            )
        if self.experts:
            self._check_expert_ways(ways, whole_experts)
        for kind in self.attention_kinds:
            if not self.latent and kind.kv_heads % tp and tp % kind.kv_heads:
                raise ProfileError(
                    f"tp: {tp} neither divides nor is a multiple of {self.name}'s {kind.kv_heads} KV heads"
                )

    def _check_expert_ways(self, ways: int, whole: bool) -> None:
        where = f"{self.name} over {ways} devices"
        if whole:
            if self.experts % ways:
                raise ProfileError(f"ep: {where}: expected a divisor of its {self.experts} experts")
            return
        if self.expert_intermediate % ways:
            raise ProfileError(f"tp: {where}: expected a divisor of its experts' FFN of {self.expert_intermediate}")
        each = self.expert_intermediate // ways
        if self.weight_format == "fp8_block" and each % BLOCK:
            raise ProfileError(
                f"tp: {where}: {self.expert_intermediate} / {ways} = {each} is no multiple of its blocks of {BLOCK}; "
                "take fewer devices, or whole experts on each (--ep)"
            )

    def kv_heads_per_device(self, tp: int = 1) -> int:
        """KV heads on one device, in layers of the first kind: beyond kv_heads devices they are replicated, not
        split."""
        self.check_tp(tp, whole_experts=True, expert_ways=1)
        return max(1, self.kv_heads // tp)

    def gemms(self, tp: int = 1) -> tuple[Gemm, ...]:
        """Linear layers of one layer of a dense model on one of `tp` devices (Megatron split; q/k/v and gate/up fused).
        ProfileError for a model whose layers differ: of experts, or in their attention."""
        self.refuse_experts("the products of a dense layer were asked for")
        if len({kind[2:] for kind in self.attention_kinds}) > 1:
            raise ProfileError(f"model {self.name}: the products of one layer were asked for, and its layers differ")
        return (*self.attention_gemms(tp), *self.ffn_gemms(tp))

    def attention_gemms(self, tp: int = 1, kind: AttentionKind | None = None) -> tuple[Gemm, ...]:
        """The linear layers around attention, which every layer of a kind (the first by default) has.

        Latent attention has its compressions on every device; kv_up makes the keys and values of all heads, for prompts
        in full and for decodes absorbed into queries and outputs.
        """
        self.check_tp(tp, whole_experts=True, expert_ways=1)
        kind = kind or self.attention_kinds[0]
        heads = kind.heads // tp
        out = Gemm("attention_out", self.hidden, heads * kind.value_dim)
        if self.latent:
            queries = heads * kind.head_dim
            down = (
                (Gemm("q_down", self.q_latent, self.hidden), Gemm("q_up", queries, self.q_latent))
                if self.q_latent
                else (Gemm("q_up", queries, self.hidden),)
            )
            keys_values = heads * (kind.head_dim - self.rope_dim + kind.value_dim)
            kv_down = Gemm("kv_down", self.kv_latent + self.rope_dim, self.hidden)
            return *down, kv_down, Gemm("kv_up", keys_values, self.kv_latent), out
        matrices = 1 if self.full_keys_only and not kind.window else 2
        kv = matrices * kind.kv_heads_per_device(tp) * kind.head_dim
        return Gemm("qkv", heads * kind.head_dim + kv, self.hidden), out

    def ffn_gemms(self, tp: int = 1) -> tuple[Gemm, ...]:
        """The two matrix products of a dense layer's FFN."""
        return self._ffn(self.intermediate // tp, "ffn")

    def shared_gemms(self, tp: int = 1) -> tuple[Gemm, ...]:
        """Those of the experts of an expert layer that every token goes to; none where there are none."""
        return self._ffn(self.shared_intermediate // tp, "shared") if self.shared_intermediate else ()

    def _ffn(self, width: int, name: str) -> tuple[Gemm, ...]:
        return (
            Gemm(f"{name}_up", width * (2 if self.gated else 1), self.hidden),
            Gemm(f"{name}_down", self.hidden, width),
        )

    def _block_weights(self, tp: int) -> int:
        """Weights of all blocks' linear layers on one device, routed experts left out. Routers are not among them:
        nobody quantises or splits them."""
        weights = sum(
            kind.layers * sum(gemm.weights for gemm in self.attention_gemms(tp, kind)) for kind in self.attention_kinds
        )
        dense = self.layers - self.expert_layers
        weights += dense * sum(gemm.weights for gemm in self.ffn_gemms(tp)) if dense else 0
        return weights + self.expert_layers * sum(gemm.weights for gemm in self.shared_gemms(tp))

    def _routed_weights(self, experts: int, ways: int = 1, whole: bool = False) -> int:
        """Weights of `experts` routed experts in each layer that has some, on one of the devices that they are split
        over."""
        if whole:
            return self.expert_layers * -(-experts // ways) * self.expert_params
        return self.expert_layers * experts * self._matrices * self.hidden * (self.expert_intermediate // ways)

    @property
    def _router_params(self) -> int:
        """Of one expert layer: the router's matrix, and the vector of the shared experts' gate."""
        return self.hidden * (self.experts + int(self.shared_gate)) + self.experts * int(self.router_bias)

    def head_gemm(self, tp: int = 1) -> Gemm:
        """The output head on one of `tp` devices (vocabulary rounded up to a multiple of tp)."""
        return Gemm("head", -(-self.vocab // tp), self.hidden)

    def _small_params(self, tp: int, experts: int, ways: int = 1) -> int:
        """Biases, norms and routers of all layers on one device (norms, routers and row-parallel biases are
        replicated)."""
        biases = 0
        if self.qkv_bias:
            biases += self.q_size // tp + 2 * self.kv_heads_per_device(tp) * self.head_dim
        if self.out_bias:
            biases += self.hidden
        if self.mlp_bias:
            biases += self.intermediate // tp * (2 if self.gated else 1) + self.hidden
        if self.attention_sinks:
            biases += self.heads // tp
        norms = self.layers * (biases + self.norms_per_layer * self.norm_params)
        if self.latent:
            norms += self.layers * (self.kv_latent + self.q_latent)
        elif self.qk_norm_whole:
            norms += self.layers * (self.q_size + self.kv_size) // tp
        elif self.qk_norm:
            norms += sum(kind.layers * 2 * kind.head_dim for kind in self.attention_kinds)
        of_experts = self._matrices * self.expert_intermediate + self.hidden - self.expert_intermediate
        return norms + self.expert_layers * (
            self._router_params + (-(-experts // ways) * of_experts if self.expert_bias else 0)
        )

    def weight_bytes(
        self,
        dtype: str = "bfloat16",
        tp: int = 1,
        *,
        layers: int | None = None,
        embedding: bool = True,
        head: bool = True,
        expert_ways: int | None = None,
        whole_experts: bool = False,
    ) -> int:
        """Bytes of weights on one device that holds `layers` layers (all by default) of a `tp`-way split.

        A stage in the middle of a pipeline holds neither embedding nor head; a tied matrix is held once where one
        device needs both. Where layers differ, a part of the layers holds its share of the mean. expert_ways,
        whole_experts: as `check_tp` has them.
        """
        self.check_tp(tp, expert_ways=expert_ways, whole_experts=whole_experts)
        layers, ways = self.layers if layers is None else layers, tp if expert_ways is None else expert_ways
        blocks = -(-layers * self._block_weights(tp) // self.layers)
        routed = -(-layers * self._routed_weights(self.experts, ways, whole_experts) // self.layers)
        count = -(-layers * self._small_params(tp, self.experts, ways) // self.layers)
        shard = self.head_gemm(tp).weights
        if embedding:
            count += shard + (self.embedding_params - self.vocab * self.hidden)
        if head:
            count += self.norm_params + (0 if embedding and self.tied_embeddings else shard)
        if self.weight_bits is None:
            return (blocks + routed + count) * dtype_bytes(dtype)
        few, plain = (routed, blocks + count) if self.quantised == "experts" else (routed + blocks, count)
        return math.ceil(few * self.weight_bits / 8) + plain * max(2, dtype_bytes(dtype))

    def served_as(self, dtype: str = "auto", weight_dtype: str = "auto") -> tuple[ModelSpec, str]:
        """The model with its weights as they are served, and the dtype of its activations.

        dtype: "auto" is the checkpoint's own; one of 8 bits asks for weights of that kind beside 16-bit activations.
        weight_dtype: a name as `with_weights` takes it; it decides over `dtype`.
        """
        if dtype == "auto":
            return self.with_weights(weight_dtype), self.plain_dtype
        few = format_of_dtype(dtype)
        if few and weight_dtype == "auto" and self.weight_bits is None:
            return self.with_weights(few), self.plain_dtype
        return self.with_weights(weight_dtype), self.plain_dtype if few else canonical_dtype(dtype)

    def least_read_bytes(self, dtype: str = "bfloat16") -> int:
        """Bytes of weights that an iteration reads at least, over all devices: of routed experts the top_k."""
        whole = self._routed_weights(self.experts) - self._routed_weights(self.top_k)
        bits = self.weight_bits if self.weight_bits is not None else 8 * dtype_bytes(dtype)
        width = max(2, dtype_bytes(dtype)) if self.weight_bits is not None else dtype_bytes(dtype)
        # The embedding is looked up, not read; a tied matrix is read whole by the output head all the same.
        looked_up = 0 if self.tied_embeddings else self.embedding_params
        return self.weight_bytes(dtype) - math.ceil(whole * bits / 8) - looked_up * width

    def with_weights(self, weight_dtype: str) -> ModelSpec:
        """The same model with its linear layers stored otherwise: a format of `profiler.specs.number_format.FORMATS`,
        or a 16-bit dtype for weights that are not quantised. "auto": as the checkpoint says. Raises ProfileError."""
        name = weight_format(weight_dtype)
        if name == "auto" or name == self.weight_format:
            return self
        if name not in FORMATS:
            return replace(self, quantisation="", weight_bits=None, weight_format="", quantised="blocks", dtype=name)
        known = FORMATS[name]
        # What a format leaves alone, no other form of the same model quantises either.
        return replace(self, quantisation=known.words, weight_bits=known.bits, weight_format=name)

    def refuse_quantised(self, what: str, instead: str) -> None:
        """ProfileError for `what` where weights are quantised; instead: what to pass."""
        if self.weight_bits is not None:
            size = self.weight_bytes(self.plain_dtype) / 2**30
            raise ProfileError(
                f"model {self.name}: its weights are quantised ({self.quantisation}; {size:.1f} GiB), and {what}; "
                f"{instead}"
            )

    @property
    def plain_dtype(self) -> str:
        """Dtype of whatever is not quantised: the checkpoint's own where that has 16 bits."""
        return self.dtype if self.dtype in ("bfloat16", "float16") else "bfloat16"

    def kv_dtype(self, dtype: str = "bfloat16", kv_dtype: str = "auto") -> str:
        """Of keys and values: as asked for; else as the checkpoint asks, else that of the activations."""
        if kv_dtype != "auto":
            return canonical_dtype(kv_dtype)
        if self.kv_cache_dtype:
            return canonical_dtype(self.kv_cache_dtype)
        return canonical_dtype(dtype) if dtype_bytes(dtype) >= 2 else "bfloat16"

    def kv_bytes_per_token(self, kv_dtype: str = "bfloat16", tp: int = 1, *, layers: int | None = None) -> int:
        """Bytes of keys and values that one token of context takes on one device, in all layers or in so many of the
        mean one. The vector of latent attention is on every device whole."""
        layers = self.layers if layers is None else layers
        if self.latent:
            return layers * (self.kv_latent + self.rope_dim) * dtype_bytes(kv_dtype)
        self.check_tp(tp, whole_experts=True, expert_ways=1)
        each = [kind.layers * 2 * kind.kv_heads_per_device(tp) * kind.head_dim for kind in self.attention_kinds]
        return -(-layers * sum(each) // self.layers) * dtype_bytes(kv_dtype)

    def kv_tokens_held(self, tokens: Any) -> Any:
        """Tokens of KV that a context of `tokens` (a number or an array) holds, in the mean over layers by their bytes:
        a layer with a sliding window keeps that many at most."""
        if self.sliding_window is None:
            return tokens
        size = {kind: kind.layers * kind.kv_heads * kind.head_dim for kind in self.attention_kinds}
        share = sum(size[kind] for kind in size if kind.window) / sum(size.values())
        within = (tokens + self.sliding_window - abs(tokens - self.sliding_window)) / 2  # the smaller, of arrays too
        return share * within + (1 - share) * tokens

    def refuse_mixed_windows(self) -> None:
        """ProfileError where only some layers have a window: costs and kernels here know one kind of layer."""
        if self.sliding_layers not in (None, self.layers):
            raise ProfileError(
                f"model {self.name}: {self.sliding_layers} of {self.layers} layers have a sliding window; their memory "
                "is counted, but costs know one kind of layer: pass a TOML or config of the model with the window in "
                "all layers or in none"
            )

    def refuse_experts(self, what: str) -> None:
        """ProfileError for `what` where the model has routed experts."""
        if self.experts:
            raise ProfileError(f"model {self.name}: {self.experts} experts, top {self.top_k}: {what}")

    def linear_flops_per_token(self, *, layers: int | None = None) -> int:
        """FLOPs of the linear layers for one row, whole model, output head left out (see head_flops_per_row): of the
        routed experts the top_k that it goes to."""
        layers = self.layers if layers is None else layers
        weights = self._block_weights(1) + self._routed_weights(self.top_k)
        weights += self.expert_layers * self.hidden * (self.experts + int(self.shared_gate))
        return 2 * layers * weights // self.layers

    @property
    def head_flops_per_row(self) -> int:
        return 2 * self.head_params

    def attended(self, tokens: int, prefix: int = 0) -> int:
        """Query-key pairs of one causal chunk: each token sees the prefix, the chunk before it, and itself.

        With a sliding window of w, a query sees at most w keys, itself included.
        """
        return attended(tokens, prefix, self.sliding_window or 0)

    def attention_flops(self, tokens: int, prefix: int = 0) -> int:
        """FLOPs of attention for one chunk over all layers: QK^T and PV, 2 * head_dim multiply-adds a pair and head."""
        return sum(
            kind.layers * kind.pair_flops * attended(tokens, prefix, kind.window) for kind in self.attention_kinds
        )

    def summary(self) -> dict[str, Any]:
        """Plain data for config.json: the fields that differ from their defaults, and the derived sizes."""
        row: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        row["rope_scaling"] = dict(self.rope_scaling) if self.rope_scaling else None
        row["params"] = self.params
        return row


def attended(tokens: int, prefix: int, window: int) -> int:
    """Query-key pairs of one causal chunk under a window (0 for none)."""
    if not window or tokens + prefix <= window:
        return tokens * prefix + tokens * (tokens + 1) // 2
    growing = max(0, min(tokens, window - prefix))  # queries that still see everything before them
    return growing * prefix + growing * (growing + 1) // 2 + (tokens - growing) * window
