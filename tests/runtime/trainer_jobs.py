"""Jobs on real ranks about Hugging Face's Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

from autopar.errors import AutoparError
from autopar.runtime.models import build_model
from autopar.runtime.parallel import parallelize
from tests.runtime.rank_jobs import make_plan


def losses_of_trainers(
    source: str, strategies: list[str], folder: str, optim: str = "adamw_torch", padded: bool = False, **shape: Any
) -> dict[str, Any]:
    """Losses and gradient norms of transformers' own Trainer in one process, of ours, and of ours after a resume.

    padded: samples of different lengths, padded to the longest of a batch, which differs from rank to rank.
    """
    from accelerate.state import AcceleratorState
    from transformers import Trainer as Plain

    from autopar.runtime.exporting import weight_files
    from autopar.runtime.trainer import Trainer

    world, data = dist.get_world_size(), _samples(64, padded)
    plan = make_plan(source, strategies, world=world, **shape)
    size, times = plan.request.global_batch // plan.num_micro_batches, plan.num_micro_batches

    def arguments(per_device: int, name: str) -> Any:
        return _arguments(Path(folder) / name, per_device, times, optim=optim)

    collate = {"data_collator": _collated} if padded else {}
    plain = Plain(build_model(source), arguments(size, f"plain{dist.get_rank()}"), train_dataset=data, **collate)
    plain.train()
    AcceleratorState._reset_state(True)
    with _as_torchrun():
        ours = Trainer(
            parallelize(build_model(source), plan), arguments(size // world, "ours"), train_dataset=data, **collate
        )
        ours.train()
        again = Trainer(
            parallelize(build_model(source, seed=3), plan),
            arguments(size // world, "again"),
            train_dataset=data,
            **collate,
        )
        again.train(resume_from_checkpoint=str(Path(folder) / "ours" / "checkpoint-3"))
        evaluated = again.evaluate(_samples(16, padded))["eval_loss"]
        AcceleratorState._reset_state(True)
    files = weight_files(Path(folder) / "ours" / "checkpoint-6")
    reread = type(plain.model).from_pretrained(Path(folder) / "ours" / "checkpoint-6")
    wrong = max(float((a - b).abs().max()) for a, b in zip(reread.parameters(), plain.model.parameters(), strict=True))
    return {
        "plain": _logged(plain),
        "ours": _logged(ours),
        "again": _logged(again),
        "moved": [e.name for e in ours.model.held if e.rows and e.parameter.device != torch.device("cpu")],
        "names": sorted(files) == sorted(name for name, _ in plain.model.named_parameters()),
        "weights": wrong,
        "evaluated": evaluated,
        "plainly evaluated": _evaluated(plain.model, _samples(16, padded)),
    }


def refused_by_the_trainer(source: str, folder: str) -> dict[str, str]:
    """The words with which the Trainer refuses what cannot work, by case."""
    from autopar.runtime.trainer import Trainer

    flat = make_plan(source, ["dp2"] * 4, world=2)
    model = parallelize(build_model(source), flat)
    stages = parallelize(
        build_model(source), make_plan(source, ["dp1"] * 4, world=2, pp=2, layers_per_stage=[2, 2], micro_batches=2)
    )
    said = {}
    with _as_torchrun():
        for case, given, settings in (
            ("stages", stages, {}),
            ("batch", model, {"per_device": 3}),
            ("bf16", model, {"bf16": True}),
            ("recompute", model, {"gradient_checkpointing": True}),
            ("plain model", nn.Linear(1, 1), {}),
        ):
            settings = {"per_device": 4, "times": 1, **settings}
            try:
                Trainer(given, _arguments(Path(folder), **settings), train_dataset=_samples(8))  # type: ignore[arg-type]
                said[case] = "not refused"
            except AutoparError as error:
                said[case] = str(error)
    return said


def _samples(count: int, padded: bool = False) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(64, (count, 8), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    for place in range(count):
        labels[place, 2 + place % 6 :] = -100
    samples = [{"input_ids": ids, "labels": own} for ids, own in zip(tokens, labels, strict=True)]
    lengths = [5 + place % 4 if padded else 8 for place in range(count)]
    return [{name: x[:n] for name, x in one.items()} for one, n in zip(samples, lengths, strict=True)]


def _collated(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch padded to its longest sample, with a mask where there is padding to tell from ids."""
    longest = max(len(one["labels"]) for one in samples)
    batch: dict[str, list[torch.Tensor]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for one in samples:
        more = (0, longest - len(one["labels"]))
        batch["input_ids"].append(pad(one["input_ids"], more))
        batch["labels"].append(pad(one["labels"], more, value=-100))
        batch["attention_mask"].append(pad(torch.ones_like(one["labels"]), more))
    return {name: torch.stack(rows) for name, rows in batch.items()}


def _arguments(folder: Path, per_device: int, times: int, **others: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=per_device,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=times,
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        adam_epsilon=1e-5,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **others,
    )


def _logged(trainer: Any) -> list[list[float]]:
    """[step, loss, gradient norm, learning rate] of each logged step."""
    rows = [row for row in trainer.state.log_history if "grad_norm" in row]
    return [[row["step"], row["loss"], row["grad_norm"], row["learning_rate"]] for row in rows]


def _evaluated(model: nn.Module, samples: list[dict[str, torch.Tensor]]) -> float:
    batch = _collated(samples)
    with torch.no_grad():
        return float(model.eval()(**batch).loss)


class _as_torchrun:
    """The environment that torchrun would have made."""

    def __enter__(self) -> None:
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        self._names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        self._names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
        os.environ.update(self._names)

    def __exit__(self, *error: Any) -> None:
        for name in self._names:
            del os.environ[name]
