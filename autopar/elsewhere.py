"""A traced model on a device that is not here: bytes as traced, seconds by the roofline of the shipped device.

Of one layer at `samples` local samples of T tokens, with the rates of autopar.roofline.Machine:

    products   2 T N K of each of its matrices (N/tp), with the edge terms of small tiles; scaled to the traced FLOPs
               where those are fewer (a table that is only looked up)
    experts    of parameters of three dimensions: the FLOPs that neither matrices nor heads explain, by so many rows
               of each as make them up
    attention  the FLOPs that no matrix explains; half of them, the causal ones, at the rate of fused attention
    streams    STREAMED times the saved set
    forward    the larger of their sum and the launches;  backward  2 x products, 2.5 x attention, 1.5 x streams

The head pays for its loss as in autopar.roofline.head, the embedding moves its output four times. Assumed, not
measured: for Llama-2 7B and GPT-2 XL it stays within 6 % of autopar.roofline at tp 1 and 2, within 35 % at tp 8, whose
small products it counts one by one (a test compares).
"""

from __future__ import annotations

from dataclasses import replace

from autopar import roofline
from autopar.counts import STREAMED
from autopar.derived import core_flops
from autopar.errors import InputError
from autopar.measured import LayerCost, ModelFile
from autopar.model import LayerKind
from autopar.shipped import Device, machine
from autopar.units import DTYPE_BYTES


def on_device(model: ModelFile, device: Device) -> ModelFile:
    """The model with the seconds of its layers on a shipped device.

    Raises InputError for a profile whose bytes are not those of 16-bit numbers: the device is rated in them.
    """
    check_dtype(model.layers.dtype, model.model.name, device)
    kinds = {kind.name: kind for kind in model.model.kinds}
    costs = []
    for cost in model.layers.costs:
        kind, sequence = kinds[cost.kind], kinds[cost.kind].tokens or model.layers.sequence
        times = [seconds(cost, kind, n, sequence, machine(device)) for n in cost.samples]
        forward_s, backward_s = zip(*times, strict=True)
        selective = cost.selective
        if selective is not None:
            # All of a forward runs again but the products with matrices.
            kept_s, _ = _matrices(cost, kind, cost.samples[-1], sequence, machine(device))
            selective = replace(selective, share=max(0.0, 1 - kept_s / forward_s[-1]))
        costs.append(replace(cost, forward_s=forward_s, backward_s=backward_s, selective=selective, origin="assumed"))
    layers = replace(model.layers, device=device.kind, device_name=device.name, processes=1, costs=tuple(costs))
    return replace(model, layers=layers)


def _matrices(
    cost: LayerCost, kind: LayerKind, samples: int, sequence: int, rates: roofline.Machine
) -> tuple[float, float]:
    """Seconds and FLOPs of the products with the layer's matrices, experts not among them."""
    tokens, products_s, products_flops = samples * sequence, 0.0, 0.0
    for parameter in kind.parameters:
        if len(parameter.shape) == 2:
            n, k = parameter.shape
            products_flops += 2 * tokens * n * k / cost.tp
            products_s += float(roofline.machine_product_s(rates, tokens, k, n / cost.tp))
    return products_s, products_flops


def check_dtype(dtype: str, name: str, device: Device) -> None:
    """Return for a dtype of 16 bits; InputError for another."""
    if DTYPE_BYTES[dtype] != 2:
        raise InputError(
            f"{name} in {dtype} has no seconds on {device.name}",
            why="shipped devices are priced in 16 bits",
            fix=f"autopar profile model MODEL --for {device.name}, in bf16",
        )


def seconds(
    cost: LayerCost, kind: LayerKind, samples: int, sequence: int, rates: roofline.Machine
) -> tuple[float, float]:
    """Seconds of forward and backward of a layer, by its traced bytes and FLOPs (the formulas of this module)."""
    tokens, flops = samples * sequence, cost.flops.at(samples)
    memory_bytes_per_s = rates.memory_bytes_per_s * rates.streamed_share
    if kind.role == "embed":
        moved_s = 4 * cost.output_bytes.at(samples) / memory_bytes_per_s
        return moved_s, moved_s
    products_s, products_flops = _matrices(cost, kind, samples, sequence, rates)
    experts = [parameter.shape for parameter in kind.parameters if len(parameter.shape) == 3]
    if experts and kind.attention is not None:
        core = core_flops(kind.attention, sequence) * samples / cost.tp
        expert_flops = max(0.0, flops - products_flops - core)
        rows = expert_flops / sum(2 * e * n * k / cost.tp for e, n, k in experts)
        products_flops += expert_flops
        products_s += sum(
            e * float(roofline.machine_product_s(rates, max(rows, 1.0), k, n / cost.tp)) for e, n, k in experts
        )
    if products_flops > flops:
        products_s, products_flops = products_s * flops / products_flops, flops
    rest_flops = flops - products_flops
    if kind.role == "head":
        logits = max((p.shape[0] for p in kind.parameters if len(p.shape) == 2), default=0)
        loss_s = rates.loss_passes * 8 * tokens * logits / cost.tp / rates.memory_bytes_per_s
        products_s += rest_flops / (rates.product_flops_per_s * rates.product_share)
        return products_s + loss_s, rates.backward_ratio * products_s + loss_s
    attention_s = 0.5 * rest_flops / (rates.attention_flops_per_s * rates.attention_share)
    streams_s = STREAMED * cost.saved_bytes.at(samples) / memory_bytes_per_s
    launch_s = rates.launch_s * (1.25 if cost.tp > 1 else 1.0)
    forward_s = roofline.smooth_max(products_s + attention_s + streams_s, launch_s)
    backward_s = rates.backward_ratio * products_s + 2.5 * attention_s + 1.5 * streams_s
    return float(forward_s), float(roofline.smooth_max(backward_s, 1.6 * launch_s))
