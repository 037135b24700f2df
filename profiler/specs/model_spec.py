"""What a model is, as far as its cost and its memory are concerned: the shape of a decoder, dense or of experts.

Everything that can be derived is derived (parameters, bytes, FLOPs, the GEMMs of a layer), so that one set of facts
serves roofline, fits, memory planning and the executor. `profiler.specs.model_config` reads them from names and files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from policies.edges.settings import check_settings, listed
from profiler.errors import ProfileError
from profiler.specs.dtypes import dtype_bytes


class Gemm(NamedTuple):
    """One linear layer on one device: [rows, k] x [k, n]."""

    name: str
    n: int
    k: int

    @property
    def weights(self) -> int:
        return self.n * self.k


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
    experts: routed experts of every expert layer, 0 for a dense model. top_k: how many of them each token goes to.
        expert_intermediate: FFN width of one routed expert. shared_intermediate: FFN width of the experts that every
        token goes to, all of them together; 0 without. shared_gate: their output is scaled by a sigmoid of the token
        (Qwen2-MoE). norm_topk: the weights of a token's top_k experts are made to sum to 1. dense_layers: numbers of
        the layers that have a dense FFN of `intermediate` instead. Without any, `intermediate` is the expert's width.
    quantisation, weight_bits: how the blocks' linear layers are stored, and the bits that one of their weights takes
        with its share of scales; "" and None where all is in `dtype`.
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
    dtype: str = "bfloat16"
    experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    shared_gate: bool = False
    norm_topk: bool = True
    dense_layers: tuple[int, ...] = ()
    quantisation: str = ""
    weight_bits: float | None = None
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

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys in one layer (values have as many)."""
        return self.kv_heads * self.head_dim

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
        blocks = self._linear_weights(1, experts) + self._small_params(1)
        return blocks + self.embedding_params + self.norm_params + head

    def check_tp(self, tp: int) -> None:
        """Raise unless the model splits evenly over `tp` devices (KV heads may be replicated)."""
        if tp < 1:
            raise ProfileError(f"tp: found {tp}, expected at least 1")
        widths = [self.intermediate] if self.expert_layers < self.layers else []
        widths += [width for width in (self.expert_intermediate, self.shared_intermediate) if width]
        if self.heads % tp or any(width % tp for width in widths):
            wide = " and ".join(map(str, widths))
            raise ProfileError(
                f"tp: found {tp}, expected a divisor of {self.name}'s {self.heads} heads and its FFN of {wide}"
            )
        if self.kv_heads % tp and tp % self.kv_heads:
            raise ProfileError(f"tp: {tp} neither divides nor is a multiple of {self.name}'s {self.kv_heads} KV heads")

    def kv_heads_per_device(self, tp: int = 1) -> int:
        """KV heads on one device: beyond kv_heads devices they are replicated, not split."""
        self.check_tp(tp)
        return max(1, self.kv_heads // tp)

    def gemms(self, tp: int = 1) -> tuple[Gemm, ...]:
        """Linear layers of one layer of a dense model on one of `tp` devices (Megatron split; q/k/v and gate/up fused).
        ProfileError for a model with experts, whose layers have no such list."""
        self.refuse_experts("the products of a dense layer were asked for")
        return (*self.attention_gemms(tp), *self.ffn_gemms(tp))

    def attention_gemms(self, tp: int = 1) -> tuple[Gemm, ...]:
        """The linear layers around attention, which every layer has."""
        self.check_tp(tp)
        q = self.q_size // tp
        kv = self.kv_heads_per_device(tp) * self.head_dim
        return Gemm("qkv", q + 2 * kv, self.hidden), Gemm("attention_out", self.hidden, q)

    def ffn_gemms(self, tp: int = 1) -> tuple[Gemm, ...]:
        """The two matrix products of a dense layer's FFN."""
        ffn = self.intermediate // tp
        return Gemm("ffn_up", ffn * (2 if self.gated else 1), self.hidden), Gemm("ffn_down", self.hidden, ffn)

    def _linear_weights(self, tp: int, experts: int) -> int:
        """Weights of all blocks' linear layers on one device, `experts` of the routed experts counted. Routers are not
        among them: nobody quantises or splits them."""
        weights = self.layers * sum(gemm.weights for gemm in self.attention_gemms(tp))
        dense = self.layers - self.expert_layers
        weights += dense * sum(gemm.weights for gemm in self.ffn_gemms(tp)) if dense else 0
        width = experts * (self.expert_intermediate // tp) + self.shared_intermediate // tp
        return weights + self.expert_layers * self._matrices * self.hidden * width

    @property
    def _router_params(self) -> int:
        """Of one expert layer: the router's matrix, and the vector of the shared experts' gate."""
        return self.hidden * (self.experts + int(self.shared_gate))

    def head_gemm(self, tp: int = 1) -> Gemm:
        """The output head on one of `tp` devices (vocabulary rounded up to a multiple of tp)."""
        return Gemm("head", -(-self.vocab // tp), self.hidden)

    def _small_params(self, tp: int) -> int:
        """Biases, norms and routers of all layers on one device (norms, routers and row-parallel biases are
        replicated)."""
        biases = 0
        if self.qkv_bias:
            biases += self.q_size // tp + 2 * self.kv_heads_per_device(tp) * self.head_dim
        if self.out_bias:
            biases += self.hidden
        if self.mlp_bias:
            biases += self.intermediate // tp * (2 if self.gated else 1) + self.hidden
        qk = 2 * self.head_dim if self.qk_norm else 0
        layers = self.layers * (biases + qk + self.norms_per_layer * self.norm_params)
        return layers + self.expert_layers * self._router_params

    def weight_bytes(
        self,
        dtype: str = "bfloat16",
        tp: int = 1,
        *,
        layers: int | None = None,
        embedding: bool = True,
        head: bool = True,
    ) -> int:
        """Bytes of weights on one device that holds `layers` layers (all by default) of a `tp`-way split.

        A stage in the middle of a pipeline holds neither embedding nor head; a tied matrix is held once where one
        device needs both. Where only some layers have experts, a part of the layers holds its share of the mean.
        """
        layers = self.layers if layers is None else layers
        linear = -(-layers * self._linear_weights(tp, self.experts) // self.layers)
        count = -(-layers * self._small_params(tp) // self.layers)
        shard = self.head_gemm(tp).weights
        if embedding:
            count += shard + (self.embedding_params - self.vocab * self.hidden)
        if head:
            count += self.norm_params + (0 if embedding and self.tied_embeddings else shard)
        if self.weight_bits is not None:
            return math.ceil(linear * self.weight_bits / 8) + count * max(2, dtype_bytes(dtype))
        return (linear + count) * dtype_bytes(dtype)

    def refuse_quantised(self, what: str, instead: str) -> None:
        """ProfileError for `what` where weights are quantised; instead: what to pass."""
        if self.weight_bits is not None:
            size = self.weight_bytes(self.dtype if self.dtype in ("bfloat16", "float16") else "bfloat16") / 2**30
            raise ProfileError(
                f"model {self.name}: its weights are quantised ({self.quantisation}; {size:.1f} GiB), and {what}; "
                f"{instead}"
            )

    def kv_bytes_per_token(self, kv_dtype: str = "bfloat16", tp: int = 1, *, layers: int | None = None) -> int:
        """Bytes of keys and values that one token of context takes on one device."""
        layers = self.layers if layers is None else layers
        return 2 * layers * self.kv_heads_per_device(tp) * self.head_dim * dtype_bytes(kv_dtype)

    def kv_tokens_held(self, tokens: Any) -> Any:
        """Tokens of KV that a context of `tokens` (a number or an array) holds, in the mean over layers: a layer with a
        sliding window keeps that many at most."""
        if self.sliding_window is None:
            return tokens
        share = (self.layers if self.sliding_layers is None else self.sliding_layers) / self.layers
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
        weights = self._linear_weights(1, self.top_k) + self.expert_layers * self._router_params
        return 2 * layers * weights // self.layers

    @property
    def head_flops_per_row(self) -> int:
        return 2 * self.head_params

    def attended(self, tokens: int, prefix: int = 0) -> int:
        """Query-key pairs of one causal chunk: each token sees the prefix, the chunk before it, and itself.

        With a sliding window of w, a query sees at most w keys, itself included.
        """
        window = self.sliding_window
        if window is None or tokens + prefix <= window:
            return tokens * prefix + tokens * (tokens + 1) // 2
        growing = max(0, min(tokens, window - prefix))  # queries that still see everything before them
        return growing * prefix + growing * (growing + 1) // 2 + (tokens - growing) * window

    def attention_flops(self, tokens: int, prefix: int = 0) -> int:
        """FLOPs of attention for one chunk over all layers: QK^T and PV, 2 * head_dim multiply-adds a pair and head."""
        return 4 * self.layers * self.q_size * self.attended(tokens, prefix)

    def summary(self) -> dict[str, Any]:
        """Plain data for config.json: the fields that differ from their defaults, and the derived sizes."""
        row: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        row["rope_scaling"] = dict(self.rope_scaling) if self.rope_scaling else None
        row["params"] = self.params
        return row
