"""`autopar verify`: a tiny replica under a plan, on real ranks, every gradient against one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.folding import fold_plan
from autopar.formats import from_plain
from autopar.plan import Plan
from autopar.runtime.batches import example_batch, labels_of
from autopar.runtime.gradients import whole, whole_parameter
from autopar.runtime.launch import Progress, inside_torchrun, launch
from autopar.runtime.losses import IGNORED_LABEL, loss_of
from autopar.runtime.models import build_model, import_model
from autopar.runtime.parallel import ParallelModel, parallelize
from autopar.runtime.recording import empty_weights
from autopar.runtime.rounding import rounding_of
from autopar.runtime.tiny import tiny_plan

LOSS_TOLERANCE, GRADIENT_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-4, 1e-4
STEPS = 3

# AdamW divides by the gradient's own size: with a tiny eps it turns rounding noise into whole steps.
_LEARNING_RATE, _EPS, _MAX_NORM = 1e-2, 1e-5, 0.5
# A gradient is compared with its own size, but at least with this part of the largest one, or with what rounding makes
# of it: that of a bias of keys is zero in exact arithmetic.
_FLOOR = 1e-8
_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Largest relative errors over the steps against one process, and where the gradient's is.

    loss, gradient (2-norm of the difference over that of the gradient), weight, norm (the clipped gradient norm);
    parameter, layer (`embed`, its number or `head`) and strategy: of the largest gradient error; parameters: how many
    were compared, copies on several ranks counted each; steps: how many optimizer steps.
    """

    loss: float
    gradient: float
    weight: float
    norm: float
    parameter: str
    layer: str
    strategy: str
    parameters: int
    steps: int

    @property
    def agrees(self) -> bool:
        """Whether all errors are within the tolerances."""
        return (
            max(self.loss, self.norm) <= LOSS_TOLERANCE
            and self.gradient <= GRADIENT_TOLERANCE
            and self.weight <= WEIGHT_TOLERANCE
        )


def verify_plan(plan: Plan, *, progress: Progress | None = None) -> Comparison:
    """How far the plan's gradients on real local ranks are from those of one process, on a tiny replica.

    Starts as many processes as the folded plan has ranks (see `fold_plan`; inside torchrun as many as the plan has),
    each of which also runs the whole replica by itself. Raises what `fold_plan` and `launch` do. Cost: start-up of the
    ranks and a few steps of the replica.
    """
    plan = plan if inside_torchrun() else fold_plan(plan)
    results = launch(
        "autopar.runtime.verify:verify_rank",
        {"plan": tiny_plan(plan).dumps()},
        nproc=plan.cluster.world_size,
        timeout_s=_TIMEOUT_S,
        progress=progress,
    )
    found = [from_plain(Comparison, result, "verify") for result in results]
    return worst_of(found)


def worst_of(found: Sequence[Comparison]) -> Comparison:
    """The largest errors over the ranks."""
    worst = max(found, key=lambda c: c.gradient if c.gradient == c.gradient else float("inf"))
    return Comparison(
        **{
            **asdict(worst),
            "loss": max(c.loss for c in found),
            "weight": max(c.weight for c in found),
            "norm": max(c.norm for c in found),
            "parameters": sum(c.parameters for c in found),
        }
    )


def verify_rank(payload: dict[str, Any], report: Progress) -> dict[str, Any]:
    """One rank's Comparison as plain data; the target of `launch`."""
    return asdict(compare(Plan.loads(payload["plan"]), progress=report))


def prepare(payload: dict[str, Any]) -> None:
    """Load, once for all ranks, what building the model imports; `launch` calls it."""
    import_model(Plan.loads(payload["plan"]).model.source)


def compare(
    plan: Plan,
    *,
    steps: int = STEPS,
    tamper: Callable[[ParallelModel], None] | None = None,
    batch_of: Callable[[nn.Module, int], dict[str, Tensor]] | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """This rank's largest errors over `steps` AdamW steps with clipping; to be called on every rank.

    Every rank also runs the whole model by itself, as the reference. Weights are perturbed (zero biases and unit
    norms hide errors) and dropout is off. tamper: changes the wrapped model, to see the comparison fail; batch_of: the
    global batch of a step for this model, default random tokens with fewer labels on some ranks than on others, since
    a mean of means is right where they are even.
    """
    reference = _perturbed(build_model(plan.model.source, dtype=plan.request.dtype)).eval()
    with empty_weights():
        model = _perturbed(build_model(plan.model.source, dtype=plan.request.dtype)).eval()
    parallel = parallelize(model, plan)
    if tamper is not None:
        tamper(parallel)
    one = torch.optim.AdamW(reference.parameters(), lr=_LEARNING_RATE, eps=_EPS)
    many = torch.optim.AdamW(parallel.param_groups(), lr=_LEARNING_RATE, eps=_EPS)
    named = dict(reference.named_parameters(remove_duplicate=False))
    errors = {"loss": 0.0, "gradient": 0.0, "weight": 0.0, "norm": 0.0}
    place = (parallel.held[0].name, parallel.held[0].layer)
    for step in range(steps):
        if batch_of is None:
            samples, sequence = plan.request.global_batch, plan.request.sequence
            batch = uneven_batch(reference, samples=samples, sequence=sequence, seed=step)
        else:
            batch = batch_of(reference, step)
        expected = loss_of(reference(**batch))
        assert expected is not None
        trained = [p for p in reference.parameters() if p.requires_grad]
        rounding = dict(zip(trained, rounding_of(expected, torch.ones_like(expected), trained), strict=True))
        expected.backward()
        errors["loss"] = max(errors["loss"], _relative(parallel.train_step(parallel.shard_batch(batch)), expected))
        floor = _FLOOR * max(float(p.grad.norm()) for p in trained if p.grad is not None)
        for entry in parallel.held:
            if not entry.parameter.requires_grad:
                continue
            grad, actual = named[entry.name].grad, entry.stepped.grad
            assert grad is not None
            assert actual is not None
            scale = max(floor, float(grad.norm()), rounding[named[entry.name]] / GRADIENT_TOLERANCE)
            error = float((whole(entry, actual) - grad).norm()) / scale
            if not error <= errors["gradient"]:
                errors["gradient"], place = error, (entry.name, entry.layer)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), _MAX_NORM)
        errors["norm"] = max(errors["norm"], _relative(parallel.clip_grad_norm_(_MAX_NORM), norm))
        one.step()
        many.step()
        one.zero_grad()
        many.zero_grad()
        for entry in parallel.held:
            weight = named[entry.name].detach()
            error = float((whole_parameter(entry) - weight).norm() / weight.norm().clamp(min=1e-12))
            errors["weight"] = max(errors["weight"], error)
        if progress is not None:
            progress({"done": step + 1, "total": steps})
    name, layer = place
    return Comparison(
        **errors,
        parameter=name,
        layer=_layer_name(layer, plan),
        strategy=plan.strategies[layer].short,
        parameters=len(parallel.held),
        steps=steps,
    )


def uneven_batch(model: nn.Module, *, samples: int, sequence: int, seed: int) -> dict[str, Tensor]:
    """A random batch of which the first half has two labels a sample only, or every other sample has none."""
    batch = example_batch(model, samples=samples, sequence=sequence, seed=seed)
    labels = batch[labels_of(batch)]
    if labels.dim() > 1 and not labels.is_floating_point():
        labels[: samples // 2, 2:] = IGNORED_LABEL
    elif not labels.is_floating_point():
        labels[: samples // 2 : 2] = IGNORED_LABEL
    return batch


def _layer_name(layer: int, plan: Plan) -> str:
    last = len(plan.strategies) - 1
    return "embed" if layer == 0 else "head" if layer == last else str(layer - 1)


def _perturbed(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def _relative(actual: Tensor, expected: Tensor) -> float:
    return abs(float(actual) - float(expected)) / max(abs(float(expected)), 1e-12)
