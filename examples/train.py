"""A training loop of one's own, with the one line that makes it parallel. Started as

    torchrun --nproc-per-node 4 examples/train.py plan.json [--steps 20]

where plan.json is a plan for `examples/gpt.py:build`:

    autopar profile cluster --nproc 4 -o cluster.json
    autopar profile model examples/gpt.py:build --nproc 4 --seq 128 -o model.json
    autopar search --model model.json --cluster cluster.json --global-batch 16 -o plan.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from gpt import build
from torch import Tensor

import autopar


def batches(samples: int, sequence: int, seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Endless global batches of bytes of Python's help topics, the same on every rank."""
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - sequence, (samples, 1), generator=generator)
        windows = text[starts + torch.arange(sequence + 1)]
        yield {"ids": windows[:, :-1], "targets": windows[:, 1:]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    plan = autopar.Plan.load(options.plan)

    torch.manual_seed(0)
    model = autopar.parallelize(build(), plan)  # the one line

    optimizer = torch.optim.AdamW(model.param_groups(), lr=3e-3)
    data = batches(plan.request.global_batch, plan.request.sequence)
    for step in range(options.steps):
        loss = model.train_step(model.shard_batch(next(data)))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
