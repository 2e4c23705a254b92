"""Once, after the third step: is it as long and as large as the plan predicted, and if not, which part of it is off.

The second step is timed (on a GPU, where that costs little, the third too); in the third the live tensors are seen, on
a GPU by its allocator. What lies between our own calls, such as reading the next batch, does not count, except between
the forwards of a loop of the user's. Afterwards nothing is measured any more.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.plan import Plan, Prediction
from autopar.runtime.gradients import HeldParameter
from autopar.runtime.peak_parts import PartsAtPeak
from autopar.units import format_bytes, format_seconds

STEP_TOLERANCE, MEMORY_TOLERANCE = 0.25, 0.1
"""How far off, of the measured, a prediction may be: a step was by 0.23 at most, a peak by 0.04 (docs/fidelity.md)."""
TIMED, LAST = 2, 3
_STAGE = ("compute", "tp_communication", "zero_communication", "relayout")
_WAITING = ("p2p", "bubble")

log = logging.getLogger("autopar")


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """What this rank measured: seconds of the parts of a step (see `StepCheck`), bytes of its peak by category.

    peak_bytes: 0 where it was not seen; waiting_s: of the forward and backward, for other stages, None where unknown.
    """

    parts_s: dict[str, float]
    waiting_s: float | None
    peak_bytes: int
    parts_bytes: dict[str, int]

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(self.parts_s.values())


class StepCheck:
    """The measurements of one model's first steps.

    Parts of a step: `training` (forward, backward and what waits in them), `gradient_sync`, `clip`, `optimizer`.
    words: what came of it, once that is known; is_off: whether a prediction was further off than usual.
    """

    def __init__(self, plan: Plan, held: Sequence[HeldParameter], device: torch.device) -> None:
        self._plan, self._held, self._device = plan, held, device
        self._steps = 0
        self._kept: list[dict[str, float]] = []
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._waiting_s: float | None = None
        self._began: float | None = None
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._live: PartsAtPeak | None = None
        self._peak_bytes, self._peak_parts = 0, dict[str, int]()
        self.words, self.is_off = "", False
        self.is_over = plan.predicted is None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count what is inside to a part of the step, and not to one around it."""
        if self.is_over:
            yield
            return
        began, others_s = self._now(), sum(self._parts.values())
        yield
        self._parts[part] += self._now() - began - (sum(self._parts.values()) - others_s)

    @contextmanager
    def train_step(self, model: nn.Module, buffers: Iterable[Tensor], batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Around a whole forward and backward."""
        optimizer = self._optimizer() if self._optimizer else None
        looks = not self.is_over and self._steps == LAST - 1 and optimizer is not None
        if looks and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif looks:
            assert optimizer is not None
            self._live = PartsAtPeak(model, self._held, buffers, optimizer, batch)
        with self.timed("training"):
            if self._live is None:
                yield
            else:
                with self._live:
                    yield

    def waited(self, seconds: float) -> None:
        """So much of the forward and backward was for other stages."""
        if self._device.type == "cpu":  # elsewhere a stage returns before it has computed
            self._waiting_s = seconds

    def call_begins(self) -> None:
        """A forward of the user's own loop begins: the step is timed from its first one to its optimizer."""
        if self._began is None and not self.is_over:
            self._began = self._now()
            if self._steps == LAST - 1 and self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Around what an optimizer does to this rank's part."""
        self._optimizer = weakref.ref(optimizer)
        with self.timed("optimizer"):
            if self._live is None:
                yield
            else:
                with self._live:
                    yield

    def step_ended(self) -> None:
        """The parameters are what the optimizer made them."""
        if self.is_over:
            return
        self._steps += 1
        parts = dict(self._parts)
        if self._began is not None:
            # Gradients are summed in the backward, which is the user's call.
            inner_s = parts.pop("gradient_sync", 0.0) + parts.pop("training", 0.0)
            parts["training"] = inner_s + self._now() - self._began - sum(self._parts.values())
        if self._steps == TIMED or (self._steps == LAST and self._device.type == "cuda"):
            self._kept.append(parts)
        if self._steps == LAST:
            self._say()
        self._parts.clear()
        self._began = None

    def _say(self) -> None:
        if self._live is not None:
            self._peak_bytes, self._peak_parts = self._live.peak_bytes, self._live.parts_bytes
        elif self._device.type == "cuda":
            self._peak_bytes = torch.cuda.max_memory_allocated(self._device)
        self._live, self.is_over = None, True
        measured = MeasuredStep(
            parts_s={name: sum(one.get(name, 0.0) for one in self._kept) / len(self._kept) for name in self._kept[0]},
            waiting_s=self._waiting_s,
            peak_bytes=self._peak_bytes,
            parts_bytes=self._peak_parts,
        )
        rank, predicted = dist.get_rank(), self._plan.predicted
        assert predicted is not None
        findings = [step_words(predicted, measured)] if rank == 0 else []
        if rank in (0, predicted.worst_rank):
            findings += memory_words(predicted, measured, rank)
        self.is_off = any(off for off, _ in findings)
        self.words = "; ".join(words for off, words in findings if off or not self.is_off)
        if self.words and (rank == 0 or self.is_off):
            log.log(logging.WARNING if self.is_off else logging.INFO, "step %d: %s", LAST, self.words)


def step_words(predicted: Prediction, measured: MeasuredStep) -> tuple[bool, str]:
    """Whether a step takes something else than predicted, and the words for it with the part that is off."""
    parts = predicted.parts_s
    inner = {name: parts.get(name, 0.0) for name in (*_STAGE, *_WAITING)}
    own_s, sync_s = measured.parts_s.get("training", 0.0), measured.parts_s.get("gradient_sync", 0.0)
    rows = {
        "forward and backward": (own_s, inner),
        "gradient_sync": (sync_s, {"gradient_sync": parts.get("gradient_sync", 0.0)}),
        "clip": (measured.parts_s.get("clip", 0.0), {"clip": parts.get("clip", 0.0)}),
        "optimizer": (measured.parts_s.get("optimizer", 0.0), {"optimizer": parts.get("optimizer", 0.0)}),
    }
    if "gradient_sync" not in measured.parts_s:  # in the backward of a loop of the user's
        rows["forward and backward"] = own_s, {**inner, **rows.pop("gradient_sync")[1]}
    if measured.waiting_s is not None:
        rows["forward and backward"] = own_s - measured.waiting_s, {name: inner[name] for name in _STAGE}
        rows["waiting for other stages"] = measured.waiting_s, {name: inner[name] for name in _WAITING}
    low_s, high_s = predicted.step_s_interval or (predicted.step_s, predicted.step_s)
    most = STEP_TOLERANCE if predicted.step_s_interval is None else 0.0
    words = _both("a step takes", format_seconds(measured.step_s), format_seconds(predicted.step_s))
    if low_s - most * measured.step_s <= measured.step_s <= high_s + most * measured.step_s:
        return False, words
    sign = 1 if measured.step_s > predicted.step_s else -1
    name = max(rows, key=lambda one: sign * (rows[one][0] - sum(rows[one][1].values())))
    took_s, expected = rows[name]
    listed = ", ".join(f"{part} {format_seconds(value)}" for part, value in expected.items() if value)
    of = f" ({listed})" if len(expected) > 1 and listed else ""
    there, here = format_seconds(took_s), format_seconds(sum(expected.values()))
    return True, f"{words}; most of the difference is in {name}: {there}, predicted {here}{of}"


def memory_words(predicted: Prediction, measured: MeasuredStep, rank: int) -> list[tuple[bool, str]]:
    """Whether this rank's peak is another than predicted, and the words for it; nothing where it was not seen."""
    if not measured.peak_bytes:
        return []
    expected = predicted.memory[rank]
    here, there = format_bytes(expected.peak_bytes), format_bytes(measured.peak_bytes)
    words = _both(f"the peak of rank {rank} is", there, here)
    if abs(measured.peak_bytes - expected.peak_bytes) <= MEMORY_TOLERANCE * measured.peak_bytes:
        return [(False, words)]
    if not measured.parts_bytes:
        return [(True, words)]
    parts = {**expected.parts_bytes}
    # What is on its way counts as an activation.
    parts["activations"] = parts.get("activations", 0) + parts.pop("transient", 0)
    sign = 1 if measured.peak_bytes > expected.peak_bytes else -1
    name = max(measured.parts_bytes, key=lambda one: sign * (measured.parts_bytes[one] - parts.get(one, 0)))
    there, here = format_bytes(measured.parts_bytes[name]), format_bytes(parts.get(name, 0))
    return [(True, f"{words}; most of the difference is in {name}: {there}, predicted {here}")]


def _both(what: str, measured: str, predicted: str) -> str:
    return f"{what} {measured}, predicted {predicted}"
