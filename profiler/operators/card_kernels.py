"""What a card's kernel tables tell beside dense products and attention: experts by number format, latent attention,
collectives among devices, quantising. One file a card, readable JSON beside its numbers (`write_card`, `read_card`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.edges.output_file import whole_file
from profiler.errors import ProfileError
from profiler.experts.expert_fit import ExpertFit, ExpertTable
from profiler.experts.expert_law import ExpertLaw, ExpertShape
from profiler.experts.routing import TILES, Spread
from profiler.operators.fitting.checked_json import Entry
from profiler.operators.fitting.model_file import read_document, read_values, readable
from profiler.operators.latent_attention import LatentFit
from profiler.operators.laws.lattice import Lattice
from profiler.operators.laws.row_curves import RowCurve

Array = NDArray[np.float64]

FORMAT = "charioteer kernels of experts"
VERSION = 1
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "alltoall")
DIGITS = 11
"""Binary digits that are kept of a measured time: 0.05 %."""


@dataclass(frozen=True)
class CardKernels:
    """experts: by number format. latent: by (format of the projections, dtype of what is kept). collectives: by
    (operation, devices), over bytes of the whole message. scaling: microseconds over rows that finding the scale of
    each row takes when it is quantised, by its width."""

    gpu: str
    experts: Mapping[str, ExpertFit] = field(default_factory=dict)
    latent: Mapping[tuple[str, str], LatentFit] = field(default_factory=dict)
    collectives: Mapping[tuple[str, int], RowCurve] = field(default_factory=dict)
    scaling: Mapping[int, RowCurve] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def experts_in(self, number_format: str) -> ExpertFit:
        """ProfileError, with the formats that were measured, for another one."""
        if number_format not in self.experts:
            known = ", ".join(self.experts) or "none"
            raise ProfileError(
                f"gpu {self.gpu}: experts in {number_format} were not measured on this card, expected one of {known}; "
                "take another --weight-dtype, or --cost-model roofline"
            )
        return self.experts[number_format]

    def latent_in(self, weights: str, kv_dtype: str) -> LatentFit:
        """ProfileError, with what was measured, for another one."""
        if (weights, kv_dtype) not in self.latent:
            known = ", ".join(f"{one} over {kept}" for one, kept in self.latent) or "none"
            raise ProfileError(
                f"gpu {self.gpu}: latent attention in {weights} over {kv_dtype} was not measured on this card, "
                f"expected one of {known}; take --cost-model roofline"
            )
        return self.latent[weights, kv_dtype]


def write_card(card: CardKernels, path: Path) -> None:
    """PATH (.json) and its .npz, each whole or not at all."""
    if path.suffix != ".json":
        raise ProfileError(f"{path}: found suffix {path.suffix!r}, expected .json")
    pieces: list[NDArray[np.float32]] = []
    kept: dict[bytes, list[int]] = {}

    def keep(values: Any, exact: bool = False) -> list[int]:
        share, power = np.frexp(np.asarray(values, float))
        rounded = np.ldexp(np.round(share * 2**DIGITS) / 2**DIGITS, power)
        piece = np.asarray(values if exact else rounded, np.float32)
        key = repr(piece.shape).encode() + piece.tobytes()
        if key not in kept:
            kept[key] = [sum(one.size for one in pieces), *piece.shape]
            pieces.append(piece)
        return kept[key]

    def curve(one: RowCurve) -> dict[str, Any]:
        return {"rows": keep(one.rows, exact=True), "us": keep(one.us)}

    def table(one: ExpertTable, kernels: list[str], spreads: list[str]) -> list[Any]:
        shape = one.shape
        sizes = [shape.hidden, shape.width, shape.experts, shape.top_k, shape.ways, int(shape.gated)]
        return [
            kernels.index(one.kernel),
            sizes,
            [spreads.index(s) for s in one.spreads],
            keep(one.tokens, exact=True),
            keep(one.us),
        ]

    experts = []
    for fit in card.experts.values():
        kernels = sorted(fit.laws)
        spreads = sorted({spread for one in fit.tables for spread in one.spreads})
        experts.append(
            {
                "format": fit.number_format,
                "kernels": kernels,
                "spreads": spreads,
                "laws": [fit.laws[kernel].as_dict() for kernel in kernels],
                "errors": {key: dict(value) for key, value in fit.errors.items()},
                "tables": [table(one, kernels, spreads) for one in fit.tables],
            }
        )
    document = {
        "format": FORMAT,
        "version": VERSION,
        "gpu": card.gpu,
        "provenance": dict(card.provenance),
        "experts": experts,
        "latent": [
            {
                "weights": weights,
                "kv_dtype": kv_dtype,
                "heads": heads,
                "decode": {
                    "axes": [keep(axis, exact=True) for axis in fit.decode[heads].axes],
                    "us": keep(np.exp(fit.decode[heads].values)),
                },
                "prefill": {
                    "rows": keep(fit.prefill[heads].axes[0], exact=True),
                    "us": keep(np.exp(fit.prefill[heads].values)),
                },
            }
            for (weights, kv_dtype), fit in card.latent.items()
            for heads in sorted(fit.decode)
        ],
        "collectives": [
            {"operation": operation, "devices": devices, **curve(one)}
            for (operation, devices), one in card.collectives.items()
        ],
        "scaling": [{"width": width, **curve(one)} for width, one in card.scaling.items()],
    }
    with whole_file(path.with_suffix(".npz"), ProfileError) as part:
        with part.open("wb") as file:
            values = np.concatenate([piece.reshape(-1) for piece in pieces]) if pieces else np.zeros(1, np.float32)
            np.savez_compressed(file, values=values)
        document["arrays_sha256"] = hashlib.sha256(part.read_bytes()).hexdigest()
        with whole_file(path, ProfileError) as text:
            text.write_text(readable(document), encoding="utf-8")


@lru_cache(maxsize=4)
def read_card(path: Path) -> CardKernels:
    """Read and check a file of `write_card`; raises ProfileError with the file and the entry at fault."""
    document = read_document(path)
    entry = Entry(path, "", document)
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        found = f"{document.get('format')!r} version {document.get('version')!r}"
        raise ProfileError(f"{path}: found {found}, expected {FORMAT!r} version {VERSION}")
    arrays = read_values(path.with_suffix(".npz"), entry.text("arrays_sha256"))
    latent: dict[tuple[str, str], tuple[dict[int, Lattice], dict[int, Lattice]]] = {}
    for item in entry.items("latent"):
        decode, prefill = latent.setdefault((item.text("weights"), item.text("kv_dtype")), ({}, {}))
        heads = item.count("heads", least=1)
        decode[heads] = _log_lattice(Entry(path, f"{item.where}.decode", item.values.get("decode")), arrays)
        curve = _curve(Entry(path, f"{item.where}.prefill", item.values.get("prefill")), arrays)
        prefill[heads] = Lattice([curve.rows], np.log(curve.us))
    return CardKernels(
        gpu=entry.text("gpu"),
        experts={fit.number_format: fit for fit in (_experts(item, arrays) for item in entry.items("experts"))},
        latent={key: LatentFit(*key, decode=decode, prefill=prefill) for key, (decode, prefill) in latent.items()},
        collectives={
            (item.text("operation"), item.count("devices", least=2)): _curve(item, arrays)
            for item in entry.items("collectives")
        },
        scaling={item.count("width", least=1): _curve(item, arrays) for item in entry.items("scaling")},
        provenance=entry.mapping("provenance"),
    )


def _experts(entry: Entry, arrays: Array) -> ExpertFit:
    kernels, spreads = entry.values.get("kernels"), entry.values.get("spreads")
    for key, names in (("kernels", kernels), ("spreads", spreads)):
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            entry.fail(key, names, "a list of names")
    for name in spreads or ():
        Spread.parse(name)
    laws = {}
    given = entry.values.get("laws")
    if not isinstance(given, list) or len(given) != len(kernels or ()):
        entry.fail("laws", given, "one for each kernel")
    for kernel, values in zip(kernels or (), given or (), strict=True):
        laws[kernel] = _law(Entry(entry.path, f"{entry.where}.laws.{kernel}", values))
    tables = []
    rows = entry.values.get("tables")
    if not isinstance(rows, list):
        entry.fail("tables", rows, "a list of layers")
    for number, row in enumerate(rows or ()):
        where = f"tables[{number}]"
        if not isinstance(row, list) or len(row) != 5:
            entry.fail(where, row, "[kernel, sizes, spreads, tokens, us]")
        kernel, sizes, of_spreads, tokens_at, us_at = row
        good = (
            isinstance(sizes, list)
            and len(sizes) == 6
            and all(type(size) is int and 0 <= size < 1 << 30 for size in sizes)
        )
        if not good or min(sizes[:5]) < 1 or sizes[2] % sizes[4]:
            entry.fail(where, sizes, "hidden, width, experts, top_k, ways and gated, as whole numbers")
        for key, one, among in (("kernel", [kernel], kernels), ("spreads", of_spreads, spreads)):
            if not isinstance(one, list) or not all(type(at) is int and 0 <= at < len(among or ()) for at in one):
                entry.fail(where, one, f"numbers of {key}")
        tokens, us = entry.cut(where, tokens_at, arrays), entry.cut(where, us_at, arrays)
        if (
            tokens.ndim != 1
            or (np.diff(tokens) <= 0).any()
            or tokens[0] < 1
            or us.shape != (len(of_spreads), len(tokens))
        ):
            entry.fail(where, us.shape, "ascending tokens, and a time for each of them under every spread")
        if (us <= 0).any():
            entry.fail(where, "a time out of bounds", "microseconds above 0")
        shape = ExpertShape(*sizes[:5], gated=bool(sizes[5]))
        assert kernels is not None
        assert spreads is not None
        tables.append(ExpertTable(kernels[kernel], shape, tuple(spreads[at] for at in of_spreads), tokens, us))
    errors = {
        key: Entry(entry.path, f"errors.{key}", value).numbers("p90") for key, value in entry.mapping("errors").items()
    }
    return ExpertFit(entry.text("format"), laws, tuple(tables), errors)


def _law(law: Entry) -> ExpertLaw:
    shares = law.values.get("efficiency")
    if not isinstance(shares, list) or len(shares) != len(TILES):
        law.fail("efficiency", shares, f"{len(TILES)} shares")
    each = Entry(law.path, f"{law.where}.efficiency", {str(at): share for at, share in enumerate(shares or [])})
    return ExpertLaw(
        memory=law.number("memory", 1e-6, 2.0),
        efficiency=tuple(each.number(str(at), 1e-6, 2.0) for at in range(len(TILES))),
        launch=law.number("launch", 0.0, 1e6),
        per_expert=law.number("per_expert", 0.0, 1e6),
        rows=law.number("rows", 1e-6, 2.0),
        weight_bytes=law.number("weight_bytes", 0.1, 8.0),
        flops_per_us=law.number("flops_per_us", 1.0, 1e15),
        bytes_per_us=law.number("bytes_per_us", 1.0, 1e15),
        sms=law.count("sms", least=1),
    )


def _curve(entry: Entry, arrays: Array) -> RowCurve:
    rows, us = entry.array("rows", arrays), entry.array("us", arrays)
    if rows.ndim != 1 or rows.shape != us.shape or (np.diff(rows) <= 0).any() or rows[0] < 0 or (us <= 0).any():
        entry.fail("us", us.shape, "ascending rows, and microseconds above 0 for each")
    return RowCurve("", 0, 0, rows, us)


def _log_lattice(entry: Entry, arrays: Array) -> Lattice:
    places = entry.values.get("axes")
    if not isinstance(places, list) or len(places) != 2:
        entry.fail("axes", places, "two axes")
    axes = [entry.cut("axes", place, arrays) for place in places or []]
    us = entry.array("us", arrays)
    if any(axis.ndim != 1 or (np.diff(axis) <= 0).any() for axis in axes) or us.shape != tuple(map(len, axes)):
        entry.fail("us", us.shape, "a time at every node of two ascending axes")
    if (us <= 0).any():
        entry.fail("us", "a time out of bounds", "microseconds above 0")
    return Lattice(axes, np.log(us))
