"""The live-bytes tracker against hand counts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from autopar.runtime.tracker import LiveBytes, storage_bytes, tensors_of

SAMPLES, WIDTH, HIDDEN = 8, 16, 64
INPUT = SAMPLES * WIDTH * 4
ACTIVATION = SAMPLES * HIDDEN * 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


def test_linear_relu_forward_and_backward_by_hand() -> None:
    model, x = Mlp(), torch.randn(SAMPLES, WIDTH, requires_grad=True)
    weights = 2 * WIDTH * HIDDEN * 4
    with LiveBytes().adopt(model, x) as live:
        assert live.current_bytes == weights + INPUT
        y = model(x)
        # relu's result is what relu and the second linear save; its input dies at once.
        assert live.current_bytes == weights + INPUT + ACTIVATION + INPUT
        assert live.peak_bytes == weights + INPUT + 2 * ACTIVATION
        live.reset_peak()
        y.backward(torch.ones_like(y))
        # The incoming gradient is gone again; gradients of both weights and of x stay, as does y.
        assert live.current_bytes == 2 * weights + 3 * INPUT
        assert live.peak_bytes > live.current_bytes
        del y
        model.zero_grad()
        x.grad = None
        assert live.current_bytes == weights + INPUT
    del live


def test_views_count_once_and_frees_are_seen() -> None:
    with LiveBytes() as live:
        a = torch.zeros(100)
        b, c = a.view(10, 10), a[3:7]
        assert live.current_bytes == 400
        del a, b
        assert live.current_bytes == 400
        del c
        assert live.current_bytes == 0
        assert live.peak_bytes == 400


def test_in_place_lists_and_random_numbers() -> None:
    with LiveBytes() as live:
        parts = torch.zeros(8).split(2)
        assert live.current_bytes == 32
        torch._foreach_add_(list(parts), 1.0)
        assert live.current_bytes == 32
        more = torch._foreach_add(list(parts), 1.0)
        assert live.current_bytes == 64
        del more
        values, places = torch.rand(4).topk(2)
        assert live.current_bytes == 32 + values.nbytes + places.nbytes


def test_resize_of_a_storage_is_seen_and_the_patch_goes_away() -> None:
    before = torch.UntypedStorage.resize_
    a = torch.zeros(100)
    with LiveBytes().adopt(a) as outer, LiveBytes().adopt(a) as live:
        a.untyped_storage().resize_(0)
        assert live.current_bytes == outer.current_bytes == 0
        a.untyped_storage().resize_(400)
        assert live.current_bytes == outer.current_bytes == 400
    assert torch.UntypedStorage.resize_ is before


def test_a_storage_that_was_empty_before_the_tracker_counts_when_refilled() -> None:
    a = torch.zeros(100)
    a.untyped_storage().resize_(0)
    with LiveBytes() as live:
        a.untyped_storage().resize_(400)
        assert live.current_bytes == 400


def test_recompute_keeps_only_the_input() -> None:
    block = nn.Sequential(*[Mlp() for _ in range(3)])
    x = torch.randn(SAMPLES, WIDTH, requires_grad=True)

    def saved(recompute: bool) -> tuple[int, int]:
        with LiveBytes().adopt(block, x) as live:
            start = live.current_bytes
            y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            kept = live.current_bytes - start
            y.sum().backward()
            block.zero_grad()
            x.grad = None
            return kept, live.peak_bytes - start

    plain, plain_peak = saved(False)
    kept, kept_peak = saved(True)
    # Three hidden activations, the two inputs of later blocks, the output; with recompute the output alone.
    assert plain == 3 * ACTIVATION + 3 * INPUT
    assert kept == INPUT
    # In the backward the whole set lives again.
    assert kept_peak >= 3 * ACTIVATION + 2 * INPUT
    assert kept_peak <= plain_peak + INPUT


def test_optimizer_states_and_gradients_are_adopted() -> None:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(SAMPLES, WIDTH)).sum().backward()
    optimizer.step()
    weights = 2 * WIDTH * HIDDEN * 4
    steps = 2 * 4
    assert storage_bytes(model, optimizer) == 4 * weights + steps
    assert storage_bytes({"model": [model, optimizer]}, "text", 3) == 4 * weights + steps
    assert len(list(tensors_of(model))) == 4


def test_meta_tensors_weigh_nothing() -> None:
    with LiveBytes() as live:
        torch.empty(1000, device="meta").relu()
        assert live.peak_bytes == 0


def test_nothing_leaks_over_steps() -> None:
    model, optimizer_bytes = Mlp(), []
    optimizer = torch.optim.AdamW(model.parameters())
    with LiveBytes().adopt(model) as live:
        for _ in range(4):
            model(torch.randn(SAMPLES, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer_bytes.append(live.current_bytes)
    assert optimizer_bytes[1] == optimizer_bytes[3]


def sharded_steps(watch: Callable[..., None]) -> None:
    """Three AdamW steps of one rank of four under ZeRO-3; `watch(model, optimizer, x, step)` runs them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        model = nn.Sequential(*[Mlp() for _ in range(3)])
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        x = torch.randn(SAMPLES, WIDTH)
        watch(model, optimizer, x, step)
    finally:
        dist.destroy_process_group()


def test_sharded_training_agrees_with_torchs_own_tracker() -> None:
    ours: list[tuple[int, int]] = []
    theirs: list[tuple[int, int]] = []

    def watch(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, step: Callable[[], None]) -> None:
        with LiveBytes().adopt(model, optimizer, x) as live:
            for _ in range(3):
                live.reset_peak()
                step()
                ours.append((live.current_bytes, live.peak_bytes))

    def judge(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, step: Callable[[], None]) -> None:
        tracker = MemTracker()
        tracker.track_external(model, optimizer, x)
        with tracker:
            for _ in range(3):
                step()
                found = [tracker.get_tracker_snapshot(kind)[x.device]["Total"] for kind in ("current", "peak")]
                theirs.append((found[0], found[1]))
                tracker.reset_mod_stats()

    sharded_steps(watch)
    sharded_steps(judge)
    assert ours == theirs
    assert ours[1] == ours[2]
