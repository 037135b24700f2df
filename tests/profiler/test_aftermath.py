"""What chunks leave to the steps after them: carried in order, fitted back, and the same on both paths of a replica."""

import numpy as np
import pytest

from policies import BatchShape
from profiler.iterations.aftermath import FEATURES, PRICES, STEPS, after, extra_ns, fit_aftermath, in_order, merged

MIXED = BatchShape(((100, 50),), 2, 1000, 600, 0, 3)
DECODES = BatchShape((), 3, 1153, 601, 0, 3)


def test_what_is_owed_by_hand() -> None:
    # 100 rows at 1,000 ns, halved by every step; no context, so nothing for the contexts' part.
    prices = [1000.0, 0, 0, 0, 0, 0, 0, 0, 0.5, 0.5]
    assert extra_ns(prices, MIXED)[::-1][:4] == [100_000, 50_000, 25_000, 12_500]
    assert extra_ns(prices, MIXED, 2.0)[-1] == 200_000
    assert extra_ns(prices, DECODES) == [] == extra_ns([], MIXED)
    # 1,152 tokens of context afterwards at 1,024 ns each 1,024 tokens and row.
    prices = [0, 0, 0, 0, 1024.0, 0, 0, 0, 0.5, 0.25]
    assert extra_ns(prices, MIXED)[::-1][:2] == [115_200, 28_800]


def test_the_batch_afterwards() -> None:
    assert after(MIXED) == BatchShape((), 3, 1000 + 2 + 150, 601, 0, 3)
    assert after(MIXED._replace(sampled=2)) == BatchShape((), 2, 1002, 601, 0, 2)


def test_an_earlier_and_larger_debt_is_kept() -> None:
    assert merged([], [1, 2]) == [1, 2]
    assert merged([5, 9], [1, 2, 3]) == [1, 5, 9]
    assert merged([1, 7, 2], [3, 4]) == [1, 7, 4]


class _Leaves:
    def aftermath(self, shape: BatchShape) -> list[int]:
        return [1, 2, 4]


def test_paid_by_decodes_in_order() -> None:
    shapes = [DECODES, MIXED, DECODES, MIXED, DECODES, DECODES, DECODES, DECODES]
    assert in_order(_Leaves(), shapes).tolist() == [0, 0, 4, 0, 4, 2, 1, 0]
    assert not in_order(object(), shapes).any()


def test_prices_are_found_again() -> None:
    rng = np.random.default_rng(0)
    true = [800.0, 200.0, 0.0, 20.0, 10.0, 0.0, 0.0, 0.0, 0.5, 0.8]
    led, steps, base, device = [], [], [], []
    for _ in range(60):
        decodes = int(rng.integers(1, 16))
        shape = BatchShape(
            ((int(rng.integers(8, 1024)), int(rng.integers(0, 2000))),),
            decodes,
            decodes * int(rng.integers(50, 2000)),
            2000,
            0,
            decodes,
        )
        owed = extra_ns(true, shape)[::-1]
        for step in range(1, 9):
            led.append(shape)
            steps.append(step)
            base.append(1e6 + 1.5e5 * decodes)
            device.append((base[-1] * 1.03 + owed[step - 1]) * rng.normal(1.0, 0.02))
    prices = fit_aftermath(led, np.array(steps), np.array(device), np.array(base))
    assert len(prices) == PRICES == 2 * len(FEATURES) + 2
    found = np.array([extra_ns(prices, shape)[STEPS - step] for shape, step in zip(led, steps)])
    owed = np.array([extra_ns(true, shape)[STEPS - step] for shape, step in zip(led, steps)])
    assert found.sum() == pytest.approx(owed.sum(), rel=0.1)
    first = np.array(steps) == 1
    assert np.median(np.abs(found[first] / owed[first] - 1)) < 0.1
    # Nothing to be seen, or too few to see it by: nothing is charged.
    assert fit_aftermath(led, np.array(steps), np.array(base), np.array(base)) == []
    assert fit_aftermath(led[:40], np.array(steps[:40]), np.array(device[:40]), np.array(base[:40])) == []
