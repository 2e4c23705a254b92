"""What the link tests run on the ranks; given to `launch` by file name."""

from __future__ import annotations

import time
from typing import Any


def check_collectives(payload: dict[str, Any], report: Any) -> dict[str, Any]:
    """Every collective that would be timed, run once on rank numbers: the names of those that moved other data.

    Also the seconds that the clock gives a call that takes rank 1 20 ms and the others none.
    """
    import torch
    import torch.distributed as dist

    from autopar.profiler import links
    from autopar.profiler.cluster import tasks

    rank, cpu = dist.get_rank(), torch.device("cpu")
    todo = tasks(dist.get_world_size(), payload["ranks_per_node"])
    handles = links._process_groups(d.groups for _, d in todo if not d.p2p)
    wrong = []
    for collective, dimension in todo:
        size_bytes, run = links._run(collective, dimension, payload["size_bytes"], rank, cpu, handles)
        if not _moved_right(collective, dimension, run, rank, size_bytes):
            wrong.append(f"{collective} {dimension}")
    seconds = links._repeats(lambda: time.sleep(0.02 if rank == 1 else 0.0), 0.1, cpu)
    return {"wrong": wrong, "count": len(todo), "seconds": seconds}


def _moved_right(collective: str, dimension: Any, run: Any, rank: int, size_bytes: int) -> bool:
    import torch

    if collective == "p2p":
        for operation in run.args[0]:
            if operation.op.__name__ == "isend":
                operation.tensor.fill_(rank + 1)
        run()
        received = [o for o in run.args[0] if o.op.__name__ == "irecv"]
        senders = [a for a, b in dimension.groups if b == rank]
        return len(received) == len(senders) and all(
            o.tensor.nbytes == size_bytes and bool((o.tensor == a + 1).all())
            for o, a in zip(received, senders, strict=True)
        )
    (group,) = (g for g in dimension.groups if rank in g)
    members = torch.tensor([float(r + 1) for r in group])
    each = size_bytes // 4 // len(group)
    output, given = run.args[0], run.args[-1]
    given.fill_(rank + 1)
    run()
    expected = {
        "all_reduce": members.sum().expand(each * len(group)),
        "reduce_scatter": members.sum().expand(each),
        "all_gather": members.repeat_interleave(each),
        "all_to_all": members.repeat_interleave(each),
    }[collective]
    message = given if collective in ("all_reduce", "reduce_scatter", "all_to_all") else output
    return message.nbytes == size_bytes and torch.equal(output, expected)
