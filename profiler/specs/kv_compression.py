"""What compressed keys and values weigh: the same numbers for the executor's pool and for the simulator's.

Old tokens are packed in groups of a block's tokens; the last `window` tokens of every request stay in full precision.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.edges.settings import whole_number
from profiler.errors import ProfileError
from profiler.specs.model_spec import ModelSpec

CODINGS = ("kivi", "delta")

_SCALE_BYTES = 2 + 2
"""A float16 scale and a float16 offset."""


@dataclass(frozen=True)
class Compression:
    """coding: kivi (keys per channel over a group's tokens, values per token) or delta (differences of neighbours, per
    token). bits per element: 2, 4 or 8. group: tokens that are packed together, the executor's KV block. window: most
    recent tokens of a request in full precision."""

    coding: str = "kivi"
    bits: int = 4
    group: int = 32
    window: int = 128

    def __post_init__(self) -> None:
        if self.coding not in CODINGS:
            raise ProfileError(f"compression: found coding {self.coding!r}, expected one of {', '.join(CODINGS)}")
        if self.bits not in (2, 4, 8):
            raise ProfileError(f"compression: found {self.bits} bits, expected 2, 4 or 8")
        if self.group < 2 or self.window < 0:
            raise ProfileError("compression: expected groups of at least 2 tokens and a window of at least 0")

    @classmethod
    def parse(cls, text: str, group: int, window: int) -> Compression:
        """`kivi4` or `delta8`: a coding and its bits."""
        coding = text.rstrip("0123456789")
        bits = whole_number(text[len(coding) :])
        if coding not in CODINGS or bits is None:
            raise ProfileError(f"--kv-compression: found {text!r}, expected a coding and its bits, as kivi4 or delta8")
        return cls(coding, bits, group, window)

    def group_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of one packed group in one layer, keys and values together."""
        if self.coding == "delta":
            coded = (self.group - 1) * (head_dim * self.bits // 8 + _SCALE_BYTES)
            return 2 * kv_heads * (coded + 2 * head_dim)
        codes = self.group * head_dim * self.bits // 8
        return kv_heads * (2 * codes + head_dim * _SCALE_BYTES + self.group * _SCALE_BYTES)

    def packed_bytes_per_token(self, model: ModelSpec) -> float:
        """Of old tokens, in all layers."""
        return model.layers * self.group_bytes(model.kv_heads, model.head_dim) / self.group

    def old_tokens(self, tokens: int) -> int:
        """Of so many tokens of a request, those that are packed: whole groups beyond the window."""
        return max(0, tokens - self.window) // self.group * self.group

    def bytes_of(self, model: ModelSpec, tokens: int, kv_dtype: str = "bfloat16") -> float:
        """KV bytes of a request with so many tokens: whole old groups packed, the rest in full precision."""
        old = self.old_tokens(tokens)
        full = model.kv_bytes_per_token(kv_dtype)
        return old * self.packed_bytes_per_token(model) + (tokens - old) * full

    def moved_block_bytes(self, model: ModelSpec, full_bytes_per_token: float) -> float:
        """Bytes of a block on its way to host memory: a request is mostly old then; a thousand old tokens stand for it.

        full_bytes_per_token: of the same layers in full precision on all devices together.
        """
        packed = 1000 * self.packed_bytes_per_token(model) + self.window * full_bytes_per_token
        return packed / (1000 + self.window) * self.group

    def ratio(self, model: ModelSpec, tokens: int, kv_dtype: str = "bfloat16") -> float:
        """How many times smaller a request of so many tokens becomes."""
        return tokens * model.kv_bytes_per_token(kv_dtype) / self.bytes_of(model, tokens, kv_dtype)
