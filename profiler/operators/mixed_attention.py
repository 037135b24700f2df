"""Attention of models whose layers differ in their windows or heads: tables of every kind, weighed by its share of the
layers, behind the interface of one (`profiler.operators.attention_tables.AttentionTables`). Times are of the mean
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from profiler.operators.attention_tables import Array, AttentionTables, Column


class MixedLookup:
    """The scalar forms."""

    def __init__(self, parts: Sequence[tuple[float, AttentionTables]]) -> None:
        self._parts = [(share, tables.lookup) for share, tables in parts]

    def decode_ns(self, decodes: int, total: int, largest: int) -> float:
        ns = 0.0
        for share, lookup in self._parts:
            ns = ns + share * lookup.decode_ns(decodes, total, largest)
        return ns

    def batch_ns(self, chunks: Sequence[tuple[int, int]], decodes: int, total: int, largest: int) -> float:
        ns = 0.0
        for share, lookup in self._parts:
            ns = ns + share * lookup.batch_ns(chunks, decodes, total, largest)
        return ns


class MixedTables:
    """parts: (share of the layers, their tables)."""

    def __init__(self, parts: Sequence[tuple[float, AttentionTables]]) -> None:
        self.parts = tuple(parts)
        self.lookup = MixedLookup(parts)

    def each(self, change: Callable[[AttentionTables], AttentionTables]) -> MixedTables:
        """The same with every kind's tables changed."""
        return MixedTables([(share, change(tables)) for share, tables in self.parts])

    def decode_ns_of(self, decodes: Column, total: Column, largest: Column) -> Array:
        ns: Any = 0.0
        for share, tables in self.parts:
            ns = ns + share * tables.decode_ns_of(decodes, total, largest)
        found: Array = ns
        return found

    def batch_ns_of(
        self, tokens: Column, prefix: Column, offsets: Column, decodes: Column, total: Column, largest: Column
    ) -> tuple[Array, Column]:
        ns: Any = 0.0
        prompts = tokens
        for share, tables in self.parts:
            one, prompts = tables.batch_ns_of(tokens, prefix, offsets, decodes, total, largest)
            ns = ns + share * one
        return ns, prompts


def kinds_of(attention: AttentionTables | MixedTables) -> list[AttentionTables]:
    """The tables of every kind of layer."""
    return [tables for _, tables in attention.parts] if isinstance(attention, MixedTables) else [attention]


def changed(
    attention: AttentionTables | MixedTables, change: Callable[[AttentionTables], AttentionTables]
) -> AttentionTables | MixedTables:
    """The same with the tables of every kind changed."""
    return attention.each(change) if isinstance(attention, MixedTables) else change(attention)
