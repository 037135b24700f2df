"""How an engine speculates: who drafts tokens, how many, and what that costs in memory and budget.

Drafts are verified by the model itself in one pass (Leviathan et al., Fast Inference from Transformers via Speculative
Decoding, ICML 2023). Which of them are accepted is nothing that a policy knows: the sampler says it in a live engine,
an acceptance process in a simulated one.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.edges.errors import PolicyError

METHODS = ("ngram", "draft", "eagle")

MOST_DRAFTS = 64


@dataclass(frozen=True)
class Speculation:
    """method: ngram (drafts are looked up in the request's own tokens, on the host), draft (a small model of its own),
    eagle (a head of the model). tokens: most drafts of one step, k."""

    method: str
    tokens: int

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise PolicyError(f"speculation: found method {self.method!r}, expected one of {', '.join(METHODS)}")
        if not 1 <= self.tokens <= MOST_DRAFTS:
            raise PolicyError(f"speculation: found {self.tokens} drafts a step, expected 1 to {MOST_DRAFTS}")

    @classmethod
    def parse(cls, text: str) -> Speculation:
        """`ngram:4`, `draft:3`, `eagle:4`; PolicyError for anything else."""
        method, colon, tokens = text.strip().partition(":")
        if not colon or not tokens.isascii() or not tokens.isdigit() or len(tokens) > 4:
            raise PolicyError(f"speculation: found {text!r}, expected a method and its drafts a step, such as ngram:4")
        return cls(method, int(tokens))

    def __str__(self) -> str:
        return f"{self.method}:{self.tokens}"

    @property
    def lookahead(self) -> int:
        """KV slots taken beyond what a step computes: a drafting model writes its own keys and values there (vLLM,
        num_lookahead_tokens); n-grams are looked up on the host and need none."""
        return 0 if self.method == "ngram" else self.tokens

    @property
    def input_slots(self) -> int:
        """Tokens of the budget that every scheduled request costs beyond its own: a draft model's input keeps one more
        (vLLM, max_num_new_slots_for_drafting)."""
        return 1 if self.method == "draft" else 0

    @property
    def drops_last_hit(self) -> bool:
        """Whether the last block of a prefix hit is computed again: EAGLE needs the hidden state before its first
        token, which no cache keeps (vLLM, use_eagle_block_drop)."""
        return self.method == "eagle"
