"""transformers.Trainer, and every trainer that subclasses it, with steps of autopar.

    from autopar.integrations.transformers import Trainer, parallel          torchrun --nproc-per-node 4 script.py

    trainer = Trainer(model, args, train_dataset=…)                          or parallel(SFTTrainer)(model, args, …)
    trainer.train()

The trainer's own loop runs on every rank as if that was the only process (one_process.py): data, logs, evaluation, callbacks,
schedules and checkpoints are its own. Its batches are global ones, of `per_device_train_batch_size` rows for every rank and the
same on all of them. The loss is that of the trainer's own step, captured once (objective.py); a step of the loop is one of the
program. The model in memory holds the weights again whenever somebody may look: before evaluation, a save, a callback of the
script's, and when training ends.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers.trainer import SCHEDULER_NAME

from autopar.errors import InputError
from autopar.integrations.fresh_model import FreshModel, is_of_trainer
from autopar.integrations.objective import ITEMS, STEPS, Objective, loss_and_extras
from autopar.integrations.one_process import as_first_rank, as_one_process
from autopar.integrations.rehearsed import rehearse
from autopar.integrations.training_arguments import check_arguments
from autopar.integrations.watched import Watched
from autopar.options import Entry, Options
from autopar.runtime.errors import GuardError
from autopar.runtime.update.update_rule import ClipNorm
from autopar.script.optimizers import factory_of, follow
from autopar.script.parallelize import parallelize

CHECKPOINT = "autopar"
"""The folder in a trainer's checkpoint where the program's is."""
_NO_CLIPPING = 1e30
_WAY_OUT = "call trainer.update_program() on every rank after it, or leave it out"
TrainerT = TypeVar("TrainerT", bound=type)


@functools.cache
def parallel(trainer: TrainerT) -> TrainerT:
    """The class of a trainer whose steps are autopar's. trainer: transformers.Trainer or a subclass, such as trl's SFTTrainer."""
    if not issubclass(trainer, transformers.Trainer):
        raise InputError(
            f"{trainer.__name__} is no subclass of transformers.Trainer; see autopar.parallelize for other loops"
        )
    return type(f"Parallel{trainer.__name__}", (ParallelTrainer, trainer), {"__doc__": trainer.__doc__})  # type: ignore[return-value]


_Base: Any = object
"""The trainer that a class of `parallel` has behind this one."""


class ParallelTrainer(_Base):
    """The part of a trainer's class that `parallel` puts in front of it.

    Beside the trainer's own arguments it takes those of `autopar.compile`: cluster, options, plan, buckets, pad_values.
    """

    optimizer: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool
    _step: Any
    _objective: Any
    _watched: Watched

    def __init__(
        self,
        *args: Any,
        cluster: Any = "here",
        options: Options | None = None,
        plan: Any = None,
        buckets: Mapping[str, Mapping[int, Any]] | None = None,
        pad_values: Mapping[str, float] | None = None,
        evaluate_by: str = "program",
        **named: Any,
    ) -> None:
        """evaluate_by: "program", or "model" where the trainer's prediction step has no fixed computation, as one that
        generates."""
        bound = inspect.signature(super().__init__).bind(*args, **named)
        given = bound.arguments.get("args")
        if given is None:
            raise InputError(f"{type(self).__name__} needs args=, such as a transformers.TrainingArguments")
        check_arguments(given)
        _ = given.device  # sets accelerate up
        ranks = as_one_process()
        own = bound.arguments["args"] = copy.copy(given)
        own.gradient_checkpointing = own.activation_checkpointing = False
        own.torch_empty_cache_steps = None
        own.accelerator_config = copy.copy(given.accelerator_config)
        own.accelerator_config.dispatch_batches = own.accelerator_config.split_batches = False
        super().__init__(*bound.args, **bound.kwargs)
        self._ranks = ranks
        self.args.per_device_train_batch_size *= ranks.count
        self.args.per_device_eval_batch_size *= ranks.count
        self._train_batch_size = self.args.train_batch_size
        self._asked = {"cluster": cluster, "plan": plan, "pad_values": pad_values}
        self._options, self._buckets = options or Options(), dict(buckets or {})
        self._step = None
        self._objective = None
        self._outdated, self._evaluated = False, set[Any]()
        if evaluate_by not in ("program", "model"):
            raise InputError(f"evaluate_by is {evaluate_by!r}; it is 'program' or 'model'")
        self._evaluates = evaluate_by == "program"
        if self.accelerator.gradient_accumulation_steps != 1:
            raise InputError(
                "accelerator_config accumulates gradients in accelerate; use gradient_accumulation_steps of the arguments"
            )

    # ---- doors of the trainer

    def train(self, *args: Any, **named: Any) -> Any:
        as_one_process()
        return super().train(*args, **named)

    def get_train_dataloader(self) -> Any:
        as_one_process()
        with as_first_rank():
            return super().get_train_dataloader()

    def get_eval_dataloader(self, *args: Any, **named: Any) -> Any:
        as_one_process()
        with as_first_rank():
            return super().get_eval_dataloader(*args, **named)

    def get_test_dataloader(self, *args: Any, **named: Any) -> Any:
        as_one_process()
        with as_first_rank():
            return super().get_test_dataloader(*args, **named)

    def hyperparameter_search(self, *args: Any, **named: Any) -> Any:
        raise InputError(
            "hyperparameter_search starts several trainings in one process; start a script for each instead"
        )

    # ---- one training

    def _init_training_state(self, *args: Any, **named: Any) -> Any:
        batch_size = self._train_batch_size
        result = super()._init_training_state(*args, **named)
        if self.state.train_batch_size not in (None, batch_size):
            raise InputError(
                f"the checkpoint was made with global batches of {self.state.train_batch_size} rows, and this run has "
                f"{batch_size} ({self._ranks.count} ranks): the place in the data would be another. Set "
                "per_device_train_batch_size so that times the ranks it is the same"
            )
        return result

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """The model, which the loop only passes on, and the data. Makes the program, unless an earlier training has."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._check_callbacks()
        if self._step is None or self._objective is None or self._objective.model is not self.model:
            self.create_optimizer()
            given = self.optimizer
            self._make_step(train_dataloader)
            self.optimizer = self._step.optimizer
            if self.lr_scheduler is not None:
                follow(self.lr_scheduler, given, self.optimizer)
        else:
            self.update_program()
        self.create_scheduler(num_training_steps=max_steps)
        self.model_wrapped = self.model
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _make_step(self, train_dataloader: Any) -> None:
        """Capture the trainer's step, and its prediction step where there are data for it, and have them planned and loaded."""
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)  # autocast, where it was evaluated before
        loss_only = self.compute_metrics is None or self.args.prediction_loss_only
        self._objective = Objective(self, super().training_step, super().prediction_step, loss_only)
        example, buckets = self._example(train_dataloader, self._train_batch_size)
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        example = self._global_batch(example, self._get_num_items_in_batch([example], torch.device("cpu")))
        self._objective.train()
        rehearse(self._objective, example)
        entries = {}
        if self._evaluates and self.eval_dataset is not None:
            held_out, of_held_out = self._example(self._any_eval_dataloader(), self.args.eval_batch_size)
            self._objective.eval()
            rehearse(self._objective, held_out)
            entries["evaluate"] = Entry(
                held_out, loss_fn=None, buckets=of_held_out or None, pad_values=self._asked["pad_values"]
            )
            self._evaluated = set(_shapes_with(held_out, of_held_out))
            self._objective.train()
        options = self._options
        if self.args.bf16 and options.precision is None:
            options = dataclasses.replace(options, precision="bf16")
        self._step = parallelize(
            self._objective,
            example_inputs=example,
            loss_fn=loss_and_extras,
            optimizer=factory_of(self.optimizer, self._objective),
            clip_grad_norm=ClipNorm(self.args.max_grad_norm or _NO_CLIPPING),
            options=options,
            buckets=buckets or None,
            entries=entries or None,
            **self._asked,
        )
        self._watched = Watched(self._objective)

    def _any_eval_dataloader(self) -> Any:
        """The loader of the data that the loop evaluates, the first of several."""
        several = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
        return self.get_eval_dataloader(next(iter(several), None))

    def _example(self, loader: Any, rows: int) -> tuple[dict[str, Tensor], dict[str, dict[int, Any]]]:
        """A batch as the loop will have them, of the first rows of the data, and the other sizes there will be; random numbers
        are left as they were."""
        dataset = loader.dataset
        with same_random_numbers():
            if isinstance(dataset, torch.utils.data.IterableDataset):
                samples = list(itertools.islice(iter(dataset), rows))
            else:
                samples = [dataset[i] for i in range(min(rows, len(dataset)))]
            batch = dict(loader.collate_fn(samples))
        buckets = {name: dict(sizes) for name, sizes in self._buckets.items() if name in batch}
        sized = not (self.args.dataloader_drop_last or isinstance(dataset, torch.utils.data.IterableDataset))
        odd = len(dataset) % rows if sized and len(dataset) > rows else 0
        for name, value in batch.items() if odd else ():
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows:
                buckets.setdefault(name, {})[0] = (rows, odd)
        return batch, buckets

    def _global_batch(self, inputs: Mapping[str, Any], items: Any) -> dict[str, Tensor]:
        """The inputs of the program. Raises InputError where one is no tensor."""
        for name, value in inputs.items():
            if not isinstance(value, Tensor):
                raise InputError(
                    f"the collator gives {name}, which is no tensor but a {type(value).__name__}; programs take tensors, so "
                    "leave it out, or make it one"
                )
        steps = torch.tensor(self.current_gradient_accumulation_steps)
        batch = {**inputs, STEPS: steps}
        if items is not None:
            batch[ITEMS] = torch.as_tensor(items)
        return batch

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """The loss of a global batch, after whose gradients, and those of the batches accumulated before it, the program has
        updated the parameters if it is the last one of an update."""
        assert self._step is not None
        self._watched.check_written(_WAY_OUT)
        self._watched.check_trained()
        model.train()
        updates = self.accelerator.gradient_state.sync_gradients
        try:
            with nullcontext() if updates else self._step.no_sync():
                result = self._step(self._global_batch(inputs, num_items_in_batch))
        except GuardError as error:
            error.add_note(
                "A trainer's batches need shapes that are known before: pad them to one length (padding='max_length', "
                "max_length=…, or pad_to_multiple_of), or name the lengths with buckets= and pad_values=; "
                "dataloader_drop_last=True leaves out an odd last batch of data without length"
            )
            raise
        self._outdated = True
        loss, extras = result if isinstance(result, tuple) else (result, [])
        if self._objective.logs is not None:
            self._objective.logs.put(self, extras)
        return loss.detach().to(self.args.device)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """(loss, logits, labels) of a global batch: by the program where it has a step for its shapes and what is asked, else by
        the model in memory, whole on each rank."""
        lacks = self._objective is None or (self._objective.loss_only and not prediction_loss_only)
        if lacks or ignore_keys is not None or _shapes(inputs) not in self._evaluated:
            self.update_model()
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        self._watched.check_written(_WAY_OUT)
        _, outputs = self._step.evaluate(dict(inputs))
        loss, logits, labels = self._objective.prediction.of(self, outputs)
        return (loss, None, None) if prediction_loss_only else (loss, logits, labels)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self._step.grad_norm if self._step is not None else None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    def _finalize_training(self, *args: Any, **named: Any) -> Any:
        self.update_model()
        return super()._finalize_training(*args, **named)

    # ---- the model in memory and the program

    def update_model(self) -> None:
        """Give the model in memory the program's weights, where it does not have them. All ranks call it."""
        if self._step is not None and self._objective is not None and self._outdated:
            self._watched.check_written(_WAY_OUT)
            self._objective.load_state_dict(self._step.state_dict())
            self._watched.settle()
            self._outdated = False

    def update_program(self) -> None:
        """Give the program the weights that the model in memory has. All ranks call it."""
        if self._step is not None and self._objective is not None:
            self._step.load_state_dict(self._objective.state_dict())
            self._watched.settle()
            self._outdated = False

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.update_program()

    def _check_callbacks(self) -> None:
        """Raises InputError where a callback of the script's wants to see gradients. Others find the model up to date."""
        own = [one for one in self.callback_handler.callbacks if not is_of_trainer(one)]
        for one in own:
            if type(one).on_pre_optimizer_step is not transformers.TrainerCallback.on_pre_optimizer_step:
                raise InputError(
                    f"{type(one).__name__}.on_pre_optimizer_step is for gradients before the update; in a program the update is "
                    "part of the step: use on_optimizer_step or on_step_end"
                )
        others = [one for one in self.callback_handler.callbacks if not isinstance(one, FreshModel)]
        self.callback_handler.callbacks[:] = [FreshModel(self), *others] if own else others

    # ---- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.update_model()
        super().save_model(output_dir, _internal_call=_internal_call)
        if _internal_call:
            self._meet()

    def _save_checkpoint(self, *args: Any, **named: Any) -> None:
        super()._save_checkpoint(*args, **named)
        self._meet()

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self._step is not None
        self._step.save(Path(output_dir) / CHECKPOINT)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._step is None:
            return
        own = Path(checkpoint) / CHECKPOINT
        if not own.is_dir():
            raise InputError(
                f"{checkpoint} has no folder {CHECKPOINT!r} with the program's state: a trainer without autopar wrote it, or "
                "save_only_model=True. Load its weights into the model and start without resume_from_checkpoint"
            )
        self._step.resume(own)
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))
        self._outdated = True

    def _meet(self) -> None:
        """Wait until the first rank has written what the others will look for."""
        if self._ranks.count > 1:
            dist.barrier()


def _shapes(inputs: Mapping[str, Any]) -> Any:
    """The shapes of a batch by name, to be looked up."""
    return tuple((name, tuple(v.shape)) for name, v in sorted(inputs.items()) if isinstance(v, Tensor))


def _shapes_with(example: Mapping[str, Tensor], buckets: Mapping[str, Mapping[int, Any]]) -> Iterator[Any]:
    """The shapes of a batch, and those with the odd rows of its buckets."""
    yield _shapes(example)
    for rows in {sizes[0][-1] for sizes in buckets.values() if 0 in sizes}:
        yield _shapes({name: v[:rows] if 0 in buckets.get(name, {}) else v for name, v in example.items()})


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """A context after which the random numbers of torch, numpy and Python go on as if nothing had drawn any."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


Trainer = parallel(transformers.Trainer)
"""transformers.Trainer with steps of autopar."""
__all__ = ["ParallelTrainer", "Trainer", "parallel"]
