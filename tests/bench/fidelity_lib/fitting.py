"""Coefficients of a GPU class from its runs: robust least squares in log space, with priors; numpy only.

Minimised is  sum_i w_i^2 rho((log predicted - log measured) / 0.1) + sum_k (log c_k - log start_k)^2 / spread_k^2,
rho the soft L1 of large residuals, w_i = (runs of the source)^(-1/4) scaled to mean 1, so that a large source does not
decide alone. Levenberg-Marquardt over forward differences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tests.bench.fidelity_lib.steps import COEFFICIENTS, Array, Batch, predict

SCALE = 0.1


def weights(b: Batch) -> Array:
    """The weight of each case by the size of its source."""
    sizes = Counter(case.source for case in b.cases)
    w = np.array([sizes[case.source] ** -0.25 for case in b.cases])
    return w / w.mean()


def fit(
    b: Batch,
    *,
    start: Mapping[str, float] | None = None,
    free: Sequence[str] | None = None,
    off: frozenset[str] = frozenset(),
    source_spread: float | None = None,
    rounds: int = 25,
) -> dict[str, float]:
    """The coefficients that fit these cases best, all others at their start.

    source_spread: each source also has a level of its own (spread in log), as a nuisance: it keeps one badly tuned
    source from bending the physics, and is thrown away.
    """
    prior = {name: k.start for name, k in COEFFICIENTS.items()} | dict(start or {})
    names = list(free if free is not None else COEFFICIENTS)
    spreads = np.array([COEFFICIENTS[name].spread for name in names])
    w = weights(b) / SCALE
    sources = sorted({case.source for case in b.cases}) if source_spread else []
    place = np.array([sources.index(case.source) if sources else 0 for case in b.cases])

    def coefficients(z: Array) -> dict[str, float]:
        return prior | {
            name: prior[name] * float(np.exp(np.clip(v, -4, 4))) for name, v in zip(names, z, strict=False)
        }

    def residuals(z: Array) -> Array:
        log_s = np.log(predict(b, coefficients(z), off))
        penalties = z[: len(names)] / spreads
        if source_spread:
            levels = z[len(names) :]
            log_s = log_s + levels[place]
            penalties = np.concatenate([penalties, levels / source_spread])
        return np.concatenate([soft(w * (log_s - b.log_seconds)), penalties])

    z = minimise(residuals, np.zeros(len(names) + len(sources)), rounds)
    return coefficients(z)


def soft(r: Array) -> Array:
    """Residuals whose squares are the soft L1: 2 (sqrt(1 + r^2) - 1)."""
    return np.sign(r) * np.sqrt(2 * (np.sqrt(1 + r * r) - 1))


def minimise(residuals: Callable[[Array], Array], z: Array, rounds: int) -> Array:
    """The z of the least sum of squares near the start, by Levenberg-Marquardt."""
    damping, now = 1e-2, residuals(z)
    cost = float(now @ now)
    for _ in range(rounds):
        jacobian = np.empty((now.size, z.size))
        for k in range(z.size):
            moved = z.copy()
            moved[k] += 1e-4
            jacobian[:, k] = (residuals(moved) - now) / 1e-4
        normal, slope = jacobian.T @ jacobian, jacobian.T @ now
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -slope)
            tried = residuals(z + step)
            tried_cost = float(tried @ tried)
            if tried_cost < cost:
                break
            damping *= 4
        else:
            return z
        gained = cost - tried_cost
        z, now, cost, damping = z + step, tried, tried_cost, max(damping / 5, 1e-6)
        if gained < 1e-4 * cost:
            return z
    return z
