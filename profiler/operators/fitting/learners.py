"""What a law misses, learnt from its shapes: boosted trees, and Gaussian processes of each shape's neighbours.

A learner is shown coordinates and log(measured / law) and predicts the latter at other shapes.
`profiler.judging.compare_learners` holds both beside interpolation and beside a forest that knows no law.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SAMPLE = 200
"""Rows that a Gaussian process learns its scales from; all rows serve as neighbours."""
NEIGHBOURS = 40
GROUP = 2000
MOST_ROWS = 12_000
"""Rows that trees are grown on."""


class Learner(Protocol):
    def fit(self, points: Array, misses: Array) -> Learner: ...

    def __call__(self, points: Array) -> Array: ...


class Boosting:
    """Histogram gradient boosting (scikit-learn) on the absolute error, which outliers do not bend."""

    def fit(self, points: Array, misses: Array) -> Boosting:
        from sklearn.ensemble import HistGradientBoostingRegressor

        kept = np.random.default_rng(0).permutation(len(misses))[:MOST_ROWS]
        self._trees = HistGradientBoostingRegressor(
            loss="absolute_error", learning_rate=0.2, max_iter=80, min_samples_leaf=8, random_state=0
        ).fit(points[kept], misses[kept])
        return self

    def __call__(self, points: Array) -> Array:
        return np.asarray(self._trees.predict(points))


class Trees:
    """Extremely randomised trees (scikit-learn): a mean of near-repeats, where boosting follows each of them."""

    def fit(self, points: Array, misses: Array) -> Trees:
        kept = np.random.default_rng(0).permutation(len(misses))[:MOST_ROWS]
        self._trees = self._untrained().fit(points[kept], misses[kept])
        return self

    def __call__(self, points: Array) -> Array:
        return np.asarray(self._trees.predict(points))

    def _untrained(self) -> Any:
        from sklearn.ensemble import ExtraTreesRegressor

        return ExtraTreesRegressor(n_estimators=20, min_samples_leaf=3, random_state=0)


class Forest(Trees):
    """A random forest, as Vidur (MLSys 2024, section 4.3) trains on an operator's times without a law."""

    def _untrained(self) -> Any:
        from sklearn.ensemble import RandomForestRegressor

        return RandomForestRegressor(n_estimators=30, min_samples_leaf=1, random_state=0)


class GaussianProcess:
    """A Gaussian process (Matern 3/2, a length an axis, noise) conditioned on the nearest measured shapes.

    Its scales maximise the likelihood of a sample; each prediction then solves for its own neighbours, so that
    thousands of rows cost seconds.
    """

    def fit(self, points: Array, misses: Array) -> GaussianProcess:
        from scipy.spatial import cKDTree
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

        self._mean = float(np.median(misses))
        spread = max(float(np.std(misses)), 1e-4)
        values = (misses - self._mean) / spread
        sample = np.random.default_rng(0).permutation(len(misses))[:SAMPLE]
        axes = points.shape[1]
        kernel = ConstantKernel(1.0, (1e-2, 1e2)) * Matern(np.full(axes, 2.0), (0.1, 1e2), nu=1.5)
        found = GaussianProcessRegressor(kernel + WhiteKernel(0.05, (1e-4, 1.0)), random_state=0)
        with warnings.catch_warnings():
            # A coordinate that decides nothing has a length at its bound.
            warnings.simplefilter("ignore")
            fitted = found.fit(points[sample], values[sample]).kernel_
        self._lengths = np.broadcast_to(fitted.k1.k2.length_scale, (axes,))
        self._signal, self._noise = float(fitted.k1.k1.constant_value), float(fitted.k2.noise_level)
        self._points, self._values, self._spread = points / self._lengths, values, spread
        self._tree = cKDTree(self._points)
        return self

    def __call__(self, points: Array) -> Array:
        scaled = points / self._lengths
        found = np.empty(len(points))
        count = min(NEIGHBOURS, len(self._values))
        for start in range(0, len(points), GROUP):
            part = scaled[start : start + GROUP]
            near = self._tree.query(part, count)[1].reshape(len(part), count)
            known = self._points[near]
            among = self._covariance(known[:, :, None, :] - known[:, None, :, :])
            among += self._noise * np.eye(count)
            to = self._covariance(known - part[:, None, :])
            weights = np.linalg.solve(among, to[..., None])[..., 0]
            found[start : start + GROUP] = (weights * self._values[near]).sum(axis=1)
        return np.asarray(self._mean + self._spread * found)

    def _covariance(self, apart: Array) -> Array:
        far = np.sqrt(3.0) * np.sqrt(np.square(apart).sum(axis=-1))
        return np.asarray(self._signal * (1.0 + far) * np.exp(-far))
