"""Predicted beside published step times, per source and GPU.

    python tests/bench/fidelity.py --data measured.jsonl [--fit other.jsonl] [--json] [--ablation] [--memory]

Each record becomes a model, a cluster and a plan, or is skipped with a reason. Coefficients are pooled per GPU class,
without a factor per source. The first columns come from fits that never saw the configuration: with --fit all
coefficients are fitted on that file and none on --data, otherwise by five folds over configurations. Then: before any
fit, fitted on the other sources, fitted on the others and a random half of this one; and the naive lines. Composed
sources are predicted but never fitted. --json prints one object {"sources": [...]}, its figures in percent.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autopar.formats import dumps
from autopar.shipped import Efficiencies, efficiencies
from tests.bench.fidelity_lib import judging
from tests.bench.fidelity_lib.cases import COMPOSED, Case
from tests.bench.fidelity_lib.fitting import fit
from tests.bench.fidelity_lib.records import load
from tests.bench.fidelity_lib.steps import COEFFICIENTS, Array, Batch, batch, predict, with_paths

EFFECTS = {
    "edges": "small sides of products",
    "tiles": "partial tiles",
    "launch": "host launches",
    "tp": "tp collectives",
    "fsdp": "FSDP gathers",
    "sync": "gradient sync",
    "hops": "latency of wide shard groups",
    "accumulation": "gradient accumulation",
    "optimizer": "optimizer",
    "head": "logits and loss",
    "bubble": "pipeline bubble and imbalance",
    "sends": "sends between stages",
    "fixed": "fixed step time",
    "jitter": "loss with scale",
}


class Class:
    """The runs of one GPU class as a batch, and fits over parts of them."""

    def __init__(
        self, cases: Sequence[Case], off: frozenset[str] = frozenset(), *, known: Sequence[Case] = ()
    ) -> None:
        """The cases to predict; `known` are further cases that only fits may use."""
        self.off = off
        self.count = len(cases)
        start = {name: c.start for name, c in COEFFICIENTS.items()}
        self.batch = with_paths(batch([*cases, *known]), start)
        self.cases = self.batch.cases
        fitted = self.fit([i for i, case in enumerate(self.cases) if i >= self.count or not known])
        self.batch = with_paths(self.batch, fitted)

    def fit(self, index: Sequence[int]) -> dict[str, float]:
        """The coefficients over these cases, composed ones left out; the priors when none are left."""
        usable = np.array([i for i in index if self.cases[i].source not in COMPOSED], dtype=int)
        if not usable.size:
            return {name: c.start for name, c in COEFFICIENTS.items()}
        return fit(self.batch.take(usable), off=self.off)

    def predict(self, index: Sequence[int], coefficients: dict[str, float]) -> Array:
        """Predicted seconds of these cases."""
        part: Batch = self.batch.take(np.array(index, dtype=int))
        return predict(part, coefficients, self.off)

    def predictor(self, index: list[int]) -> Callable[[list[int]], Array]:
        """For judging: the fit over `index` as a function."""
        coefficients = self.fit(index)
        return lambda test: self.predict(test, coefficients)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table or the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="records to predict, one JSON object a line")
    parser.add_argument("--fit", help="records to fit on; then none of --data is fitted")
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    parser.add_argument("--ablation", action="store_true", help="refit without each effect (minutes)")
    parser.add_argument("--coefficients", action="store_true", help="print the pooled coefficients of each GPU class")
    parser.add_argument("--memory", action="store_true", help="predicted beside stated memory")
    parser.add_argument("--worst", type=int, default=0, help="print the runs with the largest errors")
    parser.add_argument("--save", help="write the pooled coefficients as a profiles/efficiencies.json")
    options = parser.parse_args(arguments)
    cases, reasons = load(options.data)
    fit_cases = load(options.fit)[0] if options.fit else []
    predicted, classes = judged(cases, fit_cases)
    if options.json:
        print(json.dumps({"sources": rows(cases, reasons, predicted)}, indent=1))
        return
    print_table(cases, reasons, predicted, classes, bool(options.fit))
    if options.coefficients:
        print_coefficients(classes)
    if options.worst:
        print_worst(cases, predicted, options.worst)
    if options.save:
        Path(options.save).write_text(saved(classes), encoding="utf-8")
    if options.ablation:
        print_ablation(cases)
    if options.memory:
        from tests.bench.fidelity_lib.memory import print_memory

        print_memory(cases)


def judged(cases: Sequence[Case], fit_cases: Sequence[Case]) -> tuple[Array, dict[str, Class]]:
    """The predicted seconds of each case by fits that never saw its configuration, and the classes by GPU."""
    found = np.full(len(cases), np.nan)
    classes = {}
    for gpu in sorted({case.gpu for case in cases}):
        where = [i for i, case in enumerate(cases) if case.gpu == gpu]
        own = [cases[i] for i in where]
        known = [case for case in fit_cases if case.gpu == gpu]
        classes[gpu] = one = Class(own, known=known)
        if fit_cases:
            found[where] = one.predict(range(len(own)), one.fit(range(len(own), len(one.cases))))
        else:
            found[where] = judging.cross_validated(own, one.predictor)
    return found, classes


def rows(
    cases: Sequence[Case], reasons: dict[tuple[str, str], Counter[str]], predicted: Array
) -> list[dict[str, Any]]:
    """One entry a source and GPU, those with nothing mapped included."""
    groups = judging.grouped(cases)
    found = []
    for source, gpu in sorted({*groups, *reasons}):
        index = groups.get((source, gpu))
        figures: dict[str, Any] = dict.fromkeys(("mape", "bias", "p90", "kendall_tau"))
        if index is not None:
            figures = judging.figures([cases[i] for i in index], predicted[index])
            figures = {key: figures[key] for key in ("mape", "bias", "p90", "kendall_tau")}
        why = reasons.get((source, gpu), Counter())
        count = 0 if index is None else len(index)
        found.append(
            {"source": source, "gpu": gpu, "n": count, "skipped": why.total(), "reasons": dict(why), **figures}
        )
    return found


def print_table(
    cases: Sequence[Case],
    reasons: dict[tuple[str, str], Counter[str]],
    predicted: Array,
    classes: dict[str, Class],
    has_fit: bool,
) -> None:
    """The table: figures of `predicted`, the other ways to fit, and the naive lines, all in percent."""
    columns = {"fitted on --fit" if has_fit else "5 folds": predicted}
    for name in ("before", "others", "half", "6ND", "hardware", "class 6ND"):
        columns[name] = np.full(len(cases), np.nan)
    for gpu, one in classes.items():
        where = np.array([i for i, case in enumerate(cases) if case.gpu == gpu])
        own = list(one.cases[: one.count])
        everything = range(len(own))
        columns["before"][where] = one.predict(everything, {name: c.start for name, c in COEFFICIENTS.items()})
        for name, flops, by in (
            ("6ND", judging.naive_6nd, lambda case: (case.source, case.fp8)),
            ("hardware", judging.hardware_flops, lambda case: (case.source, case.fp8)),
            ("class 6ND", judging.naive_6nd, lambda case: case.fp8),
        ):
            columns[name][where] = judging.cross_validated(own, judging.naive(own, flops, by))
        columns["others"][where] = judging.left_out(own, one.predictor)
        for source in {case.source for case in own}:
            fit_index, test = judging.halves(own, source)
            if test and source not in COMPOSED:
                columns["half"][where[test]] = one.predictor(fit_index)(test)
    first = next(iter(columns))
    print(f"{'source':24s} {'gpu':5s} {'n':>4s} {'skip':>4s} | {first:>15s}: mape  bias   p90   tau (pairs) |", end="")
    print("  before  others (bias)   half |  6ND/source  hardware/source")
    for (source, gpu), index in sorted(judging.grouped(cases).items()):
        group = [cases[i] for i in index]
        f = judging.figures(group, predicted[index])
        tau = "     -" if f["kendall_tau"] is None else f"{f['kendall_tau']:6.2f}"
        other = judging.figures(group, columns["others"][index])
        half = columns["half"][index]
        tested = ~np.isnan(half)
        halves = judging.ape([c for c, t in zip(group, tested, strict=True) if t], half[tested])
        print(
            f"{source:24s} {gpu:5s} {len(index):4d} {reasons[source, gpu].total():4d} | {'':15s} {f['mape']:6.1f}"
            f" {f['bias']:+5.1f} {f['p90']:5.1f} {tau} ({f['pairs']:4d})"
            f" | {_mape(group, columns['before'][index])} {other['mape']:7.1f} ({other['bias']:+5.1f})"
            f" {halves.mean() if halves.size else float('nan'):6.1f}"
            f" | {_mape(group, columns['6ND'][index])}  {_mape(group, columns['hardware'][index])}"
            + (" (composed, never fitted)" if source in COMPOSED else "")
        )
    counted = np.array([case.source not in COMPOSED for case in cases])
    real = [case for case in cases if case.source not in COMPOSED]
    print(f"\n{len(real)} records of measured sources; pooled MAPE, median, macro over sources and GPUs:")
    for name, values in columns.items():
        some = counted & ~np.isnan(values)
        chosen = [case for case, s in zip(cases, some, strict=True) if s]
        if not chosen:
            continue
        errors = judging.ape(chosen, values[some])
        macro = np.mean([errors[index].mean() for index in judging.grouped(chosen).values()])
        print(f"  {name:16s} {errors.mean():6.2f} {np.median(errors):6.2f} {macro:6.2f}   ({len(chosen)} records)")
    print("\nskipped:")
    for (source, gpu), why in sorted(reasons.items()):
        if why:
            print(f"  {source:24s} {gpu:12s} " + "; ".join(f"{text} {count}" for text, count in why.most_common()))


def _mape(group: Sequence[Case], values: Array) -> str:
    errors = judging.ape(group, values)
    return f"{errors.mean():7.1f}" if not np.isnan(errors).all() else "      -"


def print_coefficients(classes: dict[str, Class]) -> None:
    """The coefficients fitted on all measured runs of each class, beside their priors."""
    fitted = {gpu: one.fit(range(one.count)) for gpu, one in classes.items()}
    print(f"\n{'coefficient':22s} {'prior':>9s} {'spread':>6s} " + " ".join(f"{gpu:>9s}" for gpu in fitted))
    for name, c in COEFFICIENTS.items():
        values = " ".join(f"{fitted[gpu][name]:9.4g}" for gpu in fitted)
        print(f"{name:22s} {c.start:9.4g} {c.spread:6.2f} {values}  {c.meaning}")


def print_worst(cases: Sequence[Case], predicted: Array, count: int) -> None:
    """The runs of measured sources whose prediction is furthest off, as predicted over measured."""
    ratio = predicted / np.array([case.step_s for case in cases])
    order = np.argsort(-np.abs(np.log(ratio)))
    real = [i for i in order if cases[i].source not in COMPOSED][:count]
    print("\nfurthest off: predicted / measured, source, GPUs, model, plan")
    for i in real:
        case, a = cases[i], cases[i].arch
        print(
            f"  {ratio[i]:5.2f} {case.source:22s} {case.ranks:5d} {case.gpu} {a.layers} x {a.hidden}, "
            f"{case.strategy} pp{case.pp}, {case.num_micro_batches} x {case.micro_batch:g} of {case.sequence}"
        )


def saved(classes: dict[str, Class]) -> str:
    """The text of profiles/efficiencies.json: the fit over all measured runs of each class; the others as they are."""
    found = [each for gpu, each in efficiencies().items() if gpu not in classes]
    for gpu, one in classes.items():
        index = [i for i in range(one.count) if one.cases[i].source not in COMPOSED]
        coefficients, own = one.fit(index), [one.cases[i] for i in index]
        found.append(
            Efficiencies(
                gpu=gpu,
                runs=len(index),
                sources=tuple(sorted({case.source for case in own})),
                median_error_percent=round(float(np.median(judging.ape(own, one.predict(index, coefficients)))), 2),
                command="tests/bench/fidelity.py --data measured.jsonl --save profiles/efficiencies.json",
                coefficients={name: float(f"{value:.4g}") for name, value in coefficients.items()},
            )
        )
    found.sort(key=lambda each: (each.runs == 0, each.gpu))
    return dumps("autopar.efficiencies", 1, {"efficiencies": tuple(found)})


def print_ablation(cases: Sequence[Case]) -> None:
    """Pooled and macro error in five folds, each effect left out and all else fitted again."""
    real = [case for case in cases if case.source not in COMPOSED]
    gpus = sorted({case.gpu for case in real})

    def errors(off: frozenset[str]) -> tuple[float, float]:
        ordered, found = [], []
        for gpu in gpus:
            own = [case for case in real if case.gpu == gpu]
            ordered += own
            found.append(judging.cross_validated(own, Class(own, off).predictor))
        every = judging.ape(ordered, np.concatenate(found))
        return float(every.mean()), float(np.mean([every[i].mean() for i in judging.grouped(ordered).values()]))

    pooled, macro = errors(frozenset())
    print(f"\nablation, five folds: all effects {pooled:.2f} pooled, {macro:.2f} macro")
    for name, words in EFFECTS.items():
        p, m = errors(frozenset({name}))
        print(f"  without {words:32s} {p - pooled:+6.2f} {m - macro:+6.2f}")


if __name__ == "__main__":
    main()
