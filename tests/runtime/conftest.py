"""A pool of real processes that tests reuse: each job runs on ranks 0..n-1 of a fresh gloo group."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

_PRELOAD = [
    "autopar.runtime.verify",
    "autopar.runtime.tensor_parallel",
    "torch.distributed.pipelining",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
]
_ROOT = str(Path(__file__).parents[2])


def _serve(connection: Any) -> None:
    import warnings

    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    sys.path.insert(0, _ROOT)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        name, payload, rank, size, store, timeout_s = job
        faulthandler.dump_traceback_later(0.6 * timeout_s, exit=False)
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
            )
            file, _, function = name.rpartition(":")
            jobs = importlib.import_module(f"tests.runtime.{file or 'rank_jobs'}")
            answer: Any = ("done", getattr(jobs, function)(**payload))
        except Exception:
            answer = ("failed", traceback.format_exc())
        finally:
            faulthandler.cancel_dump_traceback_later()
            if dist.is_initialized():
                dist.destroy_process_group()
        connection.send(answer)


class RankPool:
    def __init__(self) -> None:
        # One process imports torch and the models; the workers are forked from it, before any group exists.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._workers: list[tuple[Any, Any]] = []
        self.folder = tempfile.TemporaryDirectory()
        self._count = 0

    def _grow(self, size: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        while len(self._workers) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, name: str, size: int, timeout_s: float = 240, **payload: Any) -> list[Any]:
        """Results of `rank_jobs.<name>(**payload)` on each of `size` ranks; AssertionError with their tracebacks.

        name: a function of rank_jobs.py, or "file:function" for one of another file beside it.
        """
        # A new world in an old process meets what torch remembers of meshes with the same ranks: start afresh. Jobs of
        # one size share their processes, as long as no other size comes between.
        if len(self._workers) != size:
            self.close()
        self._grow(size)
        self._count += 1
        store = f"{self.folder.name}/{self._count}"
        results, failures = [], []
        try:
            for rank in range(size):
                self._workers[rank][1].send((name, payload, rank, size, store, timeout_s))
            for rank in range(size):
                state, value = self._answer(rank, timeout_s)
                results.append(value)
                if state == "failed":
                    failures.append(f"rank {rank}: {value}")
        except (EOFError, OSError) as error:
            self.close()  # answers that still come would be taken for those of the next job
            raise AssertionError(
                f"a rank of {name} is gone or silent ({error!r}); failed so far: {failures}"
            ) from None
        assert not failures, "\n".join(failures)
        return results

    def _answer(self, rank: int, timeout_s: float) -> Any:
        connection = self._workers[rank][1]
        if not connection.poll(timeout_s):
            raise TimeoutError(f"rank {rank} did not answer in {timeout_s} s")
        return connection.recv()

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """Run a function of rank_jobs.py on real ranks: ranks("name", 4, **payload) -> results by rank."""
    pool = RankPool()
    yield pool.run
    pool.close()
    pool.folder.cleanup()
