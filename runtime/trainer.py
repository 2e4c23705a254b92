"""Hugging Face's Trainer over a model under a plan without stages; import it where transformers is installed.

    model = autopar.parallelize(model, plan)
    Trainer(model=model, args=TrainingArguments(...), train_dataset=...).train()

Started by torchrun. Each rank's dataloader gives it its part of every global batch; losses are averaged over all
labels of a step, gradients clipped over the whole model. Checkpoints hold the model and the optimizer as `model.save`
writes them, and the weights as safetensors under the model's own names.
"""

from __future__ import annotations

import inspect
from math import lcm
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from autopar.errors import InputError
from autopar.runtime.hugging_face import trainer_class
from autopar.runtime.losses import IGNORED_LABEL
from autopar.runtime.parallel import ParallelModel
from autopar.runtime.side_inputs import MASK

_STATE, _SCHEDULER = "autopar", "scheduler.pt"


_Base: Any = trainer_class()


class Trainer(_Base):
    """transformers.Trainer for a ParallelModel: same arguments, same loop.

    Raises InputError for a pipelined model, arguments that the plan decides, and batch sizes other than the plan's.
    """

    optimizer: Any
    _signature_columns: Any

    def __init__(self, model: ParallelModel, args: Any, **others: Any) -> None:
        if not isinstance(model, ParallelModel):
            raise InputError(
                "this Trainer takes a model under a plan",
                why=f"it got a {type(model).__name__}",
                fix="give it autopar.parallelize(model, plan)",
            )
        _check(model, args)
        inner = model.model
        # What transformers looks for on its own models.
        for name in ("config", "loss_type", "main_input_name", "accepts_loss_kwargs"):
            if hasattr(inner, name):
                setattr(model, name, getattr(inner, name))
        if args.label_names is None:
            args.label_names = ["labels"]
        args.gradient_checkpointing = False
        super().__init__(model=model, args=args, **others)

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            names = list(inspect.signature(self.model.model.forward).parameters)
            self._signature_columns = [*names, "label", "label_ids", *self.label_names]

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Leave the parts where `parallelize` put them.

        On CPU ranks accelerate names the device cpu:0, to which torch copies what is on "cpu": all parameters would
        move away from what the optimizer steps.
        """

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch; where ranks share samples, padded to the longest one of theirs that the plan can cut."""
        inputs = super()._prepare_inputs(inputs)
        group = self.model.stage.body.side_inputs.group
        if group is None:
            return inputs
        padded = MASK in inputs and inputs[MASK].dim() == 2
        tokens = inputs[MASK].shape[1] if padded else 0
        longest = torch.tensor(tokens, device=self.model.device)  # also without a mask: other ranks may have one
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
        if not padded:
            return inputs
        pieces = lcm(*(strategy.sequence_pieces for strategy in self.model.plan.strategies))
        more = -(-int(longest) // pieces) * pieces - tokens
        fill = {"input_ids": getattr(self.model.config, "pad_token_id", None) or 0, "labels": IGNORED_LABEL}
        return {
            name: pad(x, (0, more), value=fill.get(name, 0)) if more and x.dim() == 2 and x.shape[1] == tokens else x
            for name, x in inputs.items()
        }

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which must not wrap the model: it sums its gradients itself."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, *others, **settings: model

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer that the arguments name, over this rank's part; weight decay as transformers deals it."""
        if self.optimizer is None:
            decayed = set(self.get_decay_parameter_names(self.model.model))
            groups: dict[bool, list[Tensor]] = {}
            seen: set[int] = set()
            for entry in self.model.held:
                if entry.parameter.requires_grad and id(entry.stepped) not in seen:
                    seen.add(id(entry.stepped))
                    groups.setdefault(entry.name in decayed, []).append(entry.stepped)
            kind, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            decay = self.args.weight_decay
            made = [{"params": some, "weight_decay": decay if decays else 0.0} for decays, some in groups.items()]
            self.optimizer = kind(made, **settings)
        return self.optimizer

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of this call over all ranks, as part of the mean over all labels of the step."""
        outputs = model(**inputs)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs.loss
        if num_items_in_batch is not None:
            _, count = model.stage.loss(outputs, inputs)
            labels = count.double()
            dist.all_reduce(labels)
            loss = loss * (labels / float(num_items_in_batch)).to(loss)
        return (loss, outputs) if return_outputs else loss

    def _clip_grad_norm(self, model: Any) -> Tensor:
        norm: Tensor = self.model.clip_grad_norm_(self.args.max_grad_norm)
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        return float(self.model.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights as safetensors, with the model's config; a collective."""
        folder = Path(output_dir or self.args.output_dir)
        self.model.export(folder)
        if self.args.should_save:
            self.model.config.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.model.save(Path(output_dir) / _STATE, _plain(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.model.load(Path(resume_from_checkpoint) / _STATE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        optimizer = _plain(self.optimizer)
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        self.model.load(Path(checkpoint) / _STATE, optimizer)
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))

    def _load_best_model(self) -> None:
        self.model.load(Path(self.state.best_model_checkpoint) / _STATE)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside accelerate's."""
    inside: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inside


def _check(model: ParallelModel, args: Any) -> None:
    plan = model.plan
    if plan.pp > 1:
        why = f"the plan has {plan.pp} stages, and the Trainer runs forward and backward of one batch at a time"
        raise InputError("the Trainer does not run pipelines", why=why, fix="search with --pp 1, or use train_step")
    dtypes = {"bf16": "search for bfloat16", "fp16": "use bfloat16"}
    asked = {
        **{name: f"the plan decides the precision ({plan.request.dtype}): {fix}" for name, fix in dtypes.items()},
        "fsdp": "the plan decides what is sharded",
        "deepspeed": "the plan decides what is sharded",
        "torch_compile": "the layers of a plan are not compiled",
        "gradient_checkpointing": "the plan decides what is recomputed (-r)",
        "auto_find_batch_size": "the plan is for one batch size",
        "save_only_model": "a checkpoint holds the model and its optimizer together",
    }
    for name, why in asked.items():
        if getattr(args, name, None):
            raise InputError(f"the argument {name} does not go with a plan", why=why, fix=f"leave out {name}")
    if args.label_smoothing_factor:
        why = "the loss would be computed from whole logits of other ranks"
        raise InputError("label smoothing does not go with a plan", why=why, fix="smooth in the model's own loss")
    samples = model.local_batch // plan.num_micro_batches
    given = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    if given != (samples, plan.num_micro_batches):
        raise InputError(
            f"batches of {given[0]} a rank, {given[1]} times, are not the plan's",
            why=f"it was made for {plan.request.global_batch} samples in {plan.num_micro_batches} micro-batches",
            fix=f"set per_device_train_batch_size={samples} and gradient_accumulation_steps={plan.num_micro_batches}",
        )
