"""Folds by configuration, figures per source, and the naive lines that a cost model has to beat."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from tests.bench.fidelity_lib.cases import COMPOSED, Case, model_flops
from tests.bench.fidelity_lib.steps import Array

Predictor = Callable[[list[int]], Callable[[list[int]], Array]]
"""From the indices to fit on, the function from indices to predicted seconds."""

REPEAT = 0.03
"""Runs that differ by less are not ordered: repeats of one run differ as much."""


def folds(cases: Sequence[Case], count: int = 5, seed: int = 0) -> Iterator[tuple[list[int], list[int]]]:
    """(fit, test) indices; all runs of one configuration lie in one fold."""
    names = sorted({case.configuration for case in cases}, key=repr)
    order = np.random.default_rng(seed).permutation(len(names))
    fold_of = {name: int(order[i]) % count for i, name in enumerate(names)}
    for fold in range(count):
        test = [i for i, case in enumerate(cases) if fold_of[case.configuration] == fold]
        yield [i for i in range(len(cases)) if i not in set(test)], test


def halves(cases: Sequence[Case], source: str, seed: int = 0) -> tuple[list[int], list[int]]:
    """(fit, test) indices: all other sources and a random half of this one's configurations; the other half."""
    own = [case for case in cases if case.source == source]
    if len({case.configuration for case in own}) < 2:
        return [], []
    _, test_own = next(folds(own, 2, seed))
    where = [i for i, case in enumerate(cases) if case.source == source]
    test = [where[i] for i in test_own]
    return [i for i in range(len(cases)) if i not in set(test)], test


def cross_validated(cases: Sequence[Case], predictor: Predictor, seed: int = 0) -> Array:
    """The prediction of each case by a fit that never saw its configuration."""
    found = np.full(len(cases), np.nan)
    for fit, test in folds(cases, seed=seed):
        found[test] = predictor(fit)(test)
    return found


def left_out(cases: Sequence[Case], predictor: Predictor) -> Array:
    """The prediction of each case by a fit that never saw its source."""
    found = np.full(len(cases), np.nan)
    for source in sorted({case.source for case in cases}):
        test = [i for i, case in enumerate(cases) if case.source == source]
        fit = [i for i, case in enumerate(cases) if case.source != source]
        if fit:
            found[test] = predictor(fit)(test)
    return found


def ape(cases: Sequence[Case], predicted: Array) -> Array:
    """Absolute percentage errors."""
    return 100 * np.abs(predicted / np.array([case.step_s for case in cases]) - 1)


def macro(cases: Sequence[Case], predicted: Array) -> float:
    """The mean over (label, GPU) of their mean absolute percentage errors."""
    errors, groups = ape(cases, predicted), defaultdict(list)
    for case, error in zip(cases, errors, strict=True):
        groups[case.label, case.gpu].append(error)
    return float(np.mean([np.mean(each) for each in groups.values()]))


def kendall(cases: Sequence[Case], predicted: Array) -> tuple[float | None, int]:
    """Kendall's tau over pairs of the same source, model, sequence, GPUs and global batch, and their number."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, case in enumerate(cases):
        a = case.arch
        key = (
            case.source,
            case.gpu,
            a.layers,
            a.hidden,
            a.ffn,
            case.sequence,
            case.fp8,
            case.ranks,
            case.global_batch,
        )
        groups[key].append(i)
    agree = pairs = 0
    for members in groups.values():
        for i, j in combinations(members, 2):
            true = np.log(cases[i].step_s / cases[j].step_s)
            said = np.log(predicted[i] / predicted[j])
            if abs(true) > REPEAT and abs(said) > 1e-6:
                pairs += 1
                agree += 1 if true * said > 0 else -1
    return (agree / pairs if pairs else None), pairs


def figures(cases: Sequence[Case], predicted: Array) -> dict[str, float | int | None]:
    """n, mape, bias (median log error), p90 in percent, and Kendall's tau with its pairs."""
    errors = ape(cases, predicted)
    bias = 100 * float(np.median(np.log(predicted / np.array([case.step_s for case in cases]))))
    tau, pairs = kendall(cases, predicted)
    return {
        "n": len(cases),
        "mape": float(errors.mean()),
        "bias": bias,
        "p90": float(np.quantile(errors, 0.9)),
        "kendall_tau": tau,
        "pairs": pairs,
    }


def grouped(cases: Sequence[Case]) -> Mapping[tuple[str, str], NDArray[np.intp]]:
    """The indices of each (source, GPU)."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, case in enumerate(cases):
        groups[case.source, case.gpu].append(i)
    return {key: np.array(index) for key, index in groups.items()}


def hardware_flops(case: Case) -> float:
    """FLOPs that the devices do: causal attention counted whole, recompute included."""
    a = case.arch
    forward = case.global_batch * case.sequence * a.layers
    attention = 4 * case.sequence * a.heads * a.head_dim
    again = {"none": 0.0, "full": 2.0 * a.block_products + attention, "selective": attention}[case.recompute]
    return model_flops(a, case.sequence, case.global_batch) + forward * again


def naive_6nd(case: Case) -> float:
    """6 FLOPs a parameter and token."""
    a = case.arch
    return 6.0 * case.global_batch * case.sequence * (a.layers * a.block_products + a.vocab * a.hidden)


def naive(cases: Sequence[Case], flops: Callable[[Case], float], by: Callable[[Case], object]) -> Predictor:
    """One utilisation (the median) per group `by`, all cases' where the group was not seen."""
    per_rank = np.array([flops(case) / case.ranks for case in cases])
    rates = per_rank / np.array([case.step_s for case in cases])

    def fit(known: list[int]) -> Callable[[list[int]], Array]:
        known = [i for i in known if cases[i].source not in COMPOSED] or known
        overall = float(np.median(rates[known]))
        groups: dict[object, list[float]] = defaultdict(list)
        for i in known:
            groups[by(cases[i])].append(rates[i])
        medians = {key: float(np.median(values)) for key, values in groups.items()}
        return lambda test: per_rank[test] / np.array([medians.get(by(cases[i]), overall) for i in test])

    return fit
