"""Money, only where somebody gives a price: no price is built in, and none is printed without its date and source.

Prices of accelerators differ by provider, region, commitment and month, so every amount carries a band of 30 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

from experiments.errors import ExperimentError
from policies.edges.input_file import read_toml
from policies.edges.settings import check_value, shown

BAND = 0.30
PER = "GPU-hour"


@dataclass(frozen=True)
class Price:
    """Amount of a currency for one GPU-hour. gpu: whose ("" for whatever GPU is asked about)."""

    amount: float
    currency: str
    gpu: str = ""
    per: str = PER
    provider: str = ""
    region: str = ""
    commitment: str = ""
    date: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.amount, bool) or not isinstance(self.amount, int | float) or not 1e-9 <= self.amount <= 1e12:
            raise ExperimentError(f"price: amount: found {shown(self.amount)}, expected a number above 0")
        if not isinstance(self.currency, str) or not self.currency.strip():
            raise ExperimentError(f"price: currency: found {shown(self.currency)}, expected one such as EUR")
        for field in fields(self)[1:]:
            check_value(f"price: {field.name}", getattr(self, field.name), (str,), ExperimentError)
        if self.per != PER:
            raise ExperimentError(f"price: per: found {shown(self.per)}, expected {PER}")

    def of_gpu_seconds(self, gpu_seconds: float) -> float:
        return self.amount * gpu_seconds / 3600

    def spoken(self) -> str:
        """The price with everything known of it."""
        where = ", ".join(text for text in (self.provider, self.region, self.commitment) if text)
        return (
            f"{self.amount:g} {self.currency} per {self.per}{f' ({where})' if where else ''}, "
            f"{self.date or 'no date given'}, source: {self.source or 'none given'}"
        )

    def band(self, gpu_seconds: float) -> str:
        """`1.20 EUR (0.84 to 1.56)` for so many GPU-seconds."""
        value = self.of_gpu_seconds(gpu_seconds)
        low, high = value * (1 - BAND), value * (1 + BAND)
        digits = min(8, 1 - math.floor(math.log10(value))) if 0 < value < 1 else 2
        return f"{value:.{digits}f} {self.currency} ({low:.{digits}f} to {high:.{digits}f})"


def read_prices(price: str | None, book: str | Path | None) -> list[Price]:
    """The prices that a command was given: `2.5 EUR`, `amount=2.5,currency=EUR,date=2026-01-31,...`, or a TOML book."""
    found = [_parse(price)] if price else []
    return found + (_read_book(Path(book)) if book else [])


def prices_for(prices: list[Price], gpu: str) -> list[Price]:
    """Those that are about this GPU, or about none in particular."""
    return [price for price in prices if not price.gpu or price.gpu.lower() == gpu.lower()]


def _parse(text: str) -> Price:
    parts = text.split()
    if len(parts) == 2 and "=" not in text:
        return _price({"amount": _number(parts[0]), "currency": parts[1], "source": "given as --price"}, "--price")
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            found = shown(part.strip())
            raise ExperimentError(f"--price: found {found}, expected `2.5 EUR` or key=value pairs with commas")
        values[key.strip()] = _number(value) if key.strip() == "amount" else value.strip()
    return _price({"source": "given as --price", **values}, "--price")


def _read_book(file: Path) -> list[Price]:
    content = read_toml(file, ExperimentError)
    rows = content.get("price")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or set(content) != {"price"}:
        raise ExperimentError(f"{file}: expected [[price]] tables and nothing else")
    prices = []
    for number, row in enumerate(rows, 1):
        where = f"{file}, price {number}"
        for key in ("gpu", "date", "source"):
            if not row.get(key):
                raise ExperimentError(f"{where}: found no {key}; a price without {key} is not worth keeping")
        prices.append(_price(row, where))
    return prices


def _price(values: Mapping[str, Any], where: str) -> Price:
    known = [field.name for field in fields(Price)]
    for key in values:
        if key not in known:
            raise ExperimentError(f"{where}: found key {shown(key)}, expected some of {', '.join(known)}")
    for key in ("amount", "currency"):
        if key not in values:
            raise ExperimentError(f"{where}: found no {key}")
    cleaned = dict(values)
    if "date" in cleaned:
        try:
            cleaned["date"] = date.fromisoformat(str(cleaned["date"])).isoformat()
        except ValueError:
            found = cleaned["date"]
            raise ExperimentError(f"{where}: date: found {shown(found)}, expected one such as 2026-01-31") from None
    try:
        return Price(**cleaned)
    except ExperimentError as error:
        raise ExperimentError(f"{where}: {error}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
