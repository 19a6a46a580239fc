"""Lightning: a strategy whose training steps are autopar's.

    from autopar.integrations.lightning import AutoparStrategy                torchrun --nproc-per-node 4 script.py

    trainer = lightning.Trainer(strategy=AutoparStrategy(), devices=1, …)
    trainer.fit(module, loader)

Every rank runs Lightning's loop as its only process, with global batches that its loader gives. At the first batch the module's
`training_step` is captured with that batch as the example; a step of the loop is then one of the program, which computes the
loss, what the step logs and returns beside it, and updates the parameters. Validation, test and prediction run the module in
memory, which has the program's weights then, and whenever a hook of the script's may look at them.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from autopar.capture.examples.trees import check_like, flatten, rebuild
from autopar.errors import InputError
from autopar.integrations.picked import PickedInSums
from autopar.integrations.rehearsed import rehearse
from autopar.integrations.unseen import Unseen
from autopar.integrations.watched import Watched
from autopar.options import Options
from autopar.runtime.comm.backends import present_backend
from autopar.runtime.comm.environment import started
from autopar.runtime.data.datafile import parse_json
from autopar.runtime.errors import GuardError
from autopar.runtime.run.meeting import default_store
from autopar.runtime.update.update_rule import ClipNorm
from autopar.script.optimizers import factory_of, follow
from autopar.script.parallelize import parallelize

BATCHES = "accumulated_batches"
"""The input that says how many batches an update is of."""
_GRADIENT_HOOKS = (
    "backward",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
)
"""Hooks of a module that see, or do, what is inside a step of the program."""
_STEP_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_before_zero_grad",
)
"""Hooks between steps that may look at the weights."""
_WAY_OUT = "call trainer.strategy.update_program() on every rank after it, or leave it out"
_TOLD = itertools.count()
"""Broadcasts of this process, which every rank does in the same order."""
_PRECISIONS: Mapping[str, Any] = {"bf16-mixed": "bf16", "32-true": None, "64-true": None, "bf16-true": None}


class LoggingStep(nn.Module):
    """A module's training step: its loss, what it returns beside it, and what it logs.

    module: a LightningModule; structure: of its batches, as `flatten` gives it; context: of the precision's.
    """

    def __init__(self, module: Any, structure: Any, context: Callable[[], Any]) -> None:
        super().__init__()
        self.module = module
        self.structure, self._context = structure, context
        self.logged: list[tuple[str, Any, Mapping[str, Any]]] = []
        """Names, values where these are no tensors, and arguments of what the step logs."""

    def forward(self, **leaves: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """The loss by which gradients are, and {"loss": as the step gave it, "logged": in order, "returned": by name}."""
        batches = leaves.pop(BATCHES)
        batch = rebuild(self.structure, list(leaves.values()))
        module, told = self.module, list[tuple[str, Any, Mapping[str, Any]]]()
        beside: list[Tensor] = []

        def log(name: str, value: Any, *args: Any, **named: Any) -> None:
            if args:
                raise InputError(f"self.log({name!r}, …) has arguments without names; name them")
            if not isinstance(value, (Tensor, int, float)):
                raise InputError(
                    f"self.log({name!r}, …) has a {type(value).__name__}, which keeps a state on the host; log a tensor"
                )
            told.append((name, None if isinstance(value, Tensor) else value, named))
            if isinstance(value, Tensor):
                beside.append(value.detach())

        def log_dict(values: Mapping[str, Any], *args: Any, **named: Any) -> None:
            for name, value in values.items():
                log(name, value, *args, **named)

        vars(module).update(log=log, log_dict=log_dict)
        try:
            with self._context(), PickedInSums():
                result = module.training_step(*([batch, Unseen("batch_idx")][: _arguments(module)]))
        finally:
            del module.log, module.log_dict
        self.logged = told
        returned = dict(result) if isinstance(result, Mapping) else {"loss": result}
        loss = returned.pop("loss", None)
        if not isinstance(loss, Tensor):
            raise InputError("training_step gives no loss; it must return a tensor, or a dict with one under 'loss'")
        told_beside = {name: value.detach() for name, value in returned.items() if isinstance(value, Tensor)}
        if unlike := returned.keys() - told_beside.keys():
            raise InputError(
                f"training_step returns {', '.join(sorted(unlike))} beside the loss, no tensor; leave it out"
            )
        extras = {"loss": loss.detach()} | ({"logged": beside} if beside else {})
        return loss / batches, extras | ({"returned": told_beside} if told_beside else {})


def _arguments(module: Any) -> int:
    return (
        2
        if "batch_idx" in module.training_step.__code__.co_varnames[: module.training_step.__code__.co_argcount]
        else 1
    )


def loss_and_extras(outputs: Any) -> Any:
    """The loss_fn of a LoggingStep."""
    return outputs


class AutoparStrategy(SingleDeviceStrategy):
    """Trains a LightningModule with automatic optimization by a program for the ranks that torchrun started."""

    strategy_name = "autopar"
    optimizers: Any
    _weights: Watched

    def __init__(
        self,
        *,
        cluster: Any = "here",
        options: Options | None = None,
        plan: Any = None,
        buckets: Mapping[str, Mapping[int, Any]] | None = None,
        pad_values: Mapping[str, float] | None = None,
    ) -> None:
        """The arguments are those of `autopar.compile`; inputs are called as `program.inputs` would: by their keys in the batch,
        or by their places."""
        here, backend = started(), present_backend()
        super().__init__(device=backend.device(here.local_rank))
        self._asked = {"cluster": cluster, "plan": plan, "pad_values": pad_values}
        self._options, self._buckets = options or Options(), dict(buckets or {})
        self.global_rank, self.local_rank = here.rank, here.local_rank
        self._step: Any = None
        self._trained: LoggingStep | None = None
        self._updates = self._outdated = self._watched = False
        self._read_from: Path | None = None
        self._pending: Path | None = None

    # ---- the ranks

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def setup_environment(self) -> None:
        super().setup_environment()
        if started().ranks > 1 and not dist.is_initialized():
            dist.init_process_group(present_backend().transport.name)

    def barrier(self, *args: Any, **named: Any) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The value that rank src has, on every rank: strings, numbers, truth values, lists and dicts of them."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return obj
        store, key = default_store(), f"autopar/lightning/{next(_TOLD)}"
        if dist.get_rank() == src:
            store.set(key, json.dumps(str(obj) if isinstance(obj, Path) else obj))
        return parse_json(store.get(key).decode())

    # ---- a training

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        module = self.lightning_module
        if not module.automatic_optimization:
            raise InputError(
                "the module optimizes by hand (automatic_optimization=False), which a program's step cannot follow; use "
                "autopar.parallelize in a loop of your own"
            )
        if len(self.optimizers) != 1:
            raise InputError(f"configure_optimizers gives {len(self.optimizers)} optimizers; a program's step has one")
        of_callbacks = [(type(one), type(one).__name__) for one in trainer.callbacks]
        for kind, name in ((type(module), type(module).__name__), *of_callbacks):
            base = pl.LightningModule if issubclass(kind, pl.LightningModule) else pl.Callback
            if kind.__module__.startswith("lightning."):
                continue
            for hook in _GRADIENT_HOOKS:
                if getattr(kind, hook, None) is not getattr(base, hook, None):
                    raise InputError(
                        f"{name}.{hook} is about gradients, or the update, which are inside of a program's step; leave it out"
                    )
            self._watched |= any(getattr(kind, hook, None) is not getattr(base, hook, None) for hook in _STEP_HOOKS)
        if str(self.precision_plugin.precision) not in _PRECISIONS:
            raise InputError(
                f"precision={self.precision_plugin.precision!r} is none of {', '.join(_PRECISIONS)}: updates that loss scaling "
                "skips would go past the schedule; use 'bf16-mixed'"
            )
        self._step = self._trained = None

    def _make_step(self, batch: Any) -> None:
        """The program of the module's step, with a batch as the example."""
        module, trainer = self.lightning_module, self.lightning_module.trainer
        leaves, names, structure = flatten(batch)
        self._trained = LoggingStep(module, structure, self.precision_plugin.train_step_context)
        example = self._inputs(leaves, names)
        given, clip = self.optimizers[0], trainer.gradient_clip_val
        own = given._optimizer if isinstance(given, LightningOptimizer) else given
        by_value = str(trainer.gradient_clip_algorithm or "").endswith("value")
        narrow = _PRECISIONS[str(self.precision_plugin.precision)]
        options = replace(self._options, precision=narrow) if narrow and not self._options.precision else self._options
        buckets = self._with_odd_rows(example, trainer.train_dataloader)
        module.train()
        module._trainer = Unseen("self.trainer", {"training": True, "barebones": False})
        try:
            rehearse(self._trained, example)
            logged = self._trained.logged
            self._trained.logged = []
            self._step = parallelize(
                self._trained,
                example_inputs=example,
                loss_fn=loss_and_extras,
                optimizer=factory_of(own, self._trained),
                clip_grad_norm=ClipNorm(clip) if clip and not by_value else None,
                clip_grad_value=clip if clip and by_value else None,
                options=options,
                buckets=buckets or None,
                **self._asked,
            )
        finally:
            module._trainer = trainer
        self._trained.logged = logged
        self._weights = Watched(self._trained)
        if self._pending is not None:
            self._step.resume(self._pending)
            self._pending = None
        self.optimizers = [self._step.optimizer]
        for config in self.lr_scheduler_configs:
            follow(config.scheduler, own, self._step.optimizer)

    def _with_odd_rows(self, example: Mapping[str, Tensor], loader: Any) -> dict[str, dict[int, Any]]:
        """The buckets that were asked for, and that of the last batch of an epoch where it has fewer rows."""
        buckets = {name: dict(sizes) for name, sizes in self._buckets.items()}
        rows: Any = getattr(loader, "batch_size", None)
        dataset: Any = getattr(loader, "dataset", None)
        if rows is None or not hasattr(dataset, "__len__") or getattr(loader, "drop_last", False):
            return buckets
        odd = len(dataset) % rows
        for name, tensor in example.items() if odd and len(dataset) > rows else ():
            if tensor.dim() and tensor.shape[0] == rows:
                buckets.setdefault(name, {})[0] = (rows, odd)
        return buckets

    def _inputs(self, leaves: list[Tensor], names: list[str]) -> dict[str, Tensor]:
        batches = torch.tensor(self.lightning_module.trainer.accumulate_grad_batches)
        named = [name.replace(".", "_") or "batch" for name in names]
        return {**{f"_{n}" if n[0].isdigit() else n: t for n, t in zip(named, leaves, strict=True)}, BATCHES: batches}

    def training_step(self, batch: Any, *args: Any, **named: Any) -> Any:
        """The result of the module's training step for a global batch, after the program's step. Raises GuardError for shapes
        that have no bucket."""
        if self._step is None:
            self._make_step(batch)
        assert self._trained is not None
        self._weights.check_written(_WAY_OUT)
        self._weights.check_trained()
        check_like(batch, self._trained.structure, "the batch")
        leaves, names, _ = flatten(batch)
        try:
            with nullcontext() if self._updates else self._step.no_sync():
                _, extras = self._step(self._inputs(leaves, names))
        except GuardError as error:
            error.add_note(
                "Batches need shapes that are known before: pad them to one length, or name the lengths with buckets= and "
                "pad_values= of AutoparStrategy; drop_last=True of the loader leaves out an odd last batch"
            )
            raise
        self._outdated = True
        tensors = iter(extras.get("logged", ()))
        for name, value, arguments in self._trained.logged:
            self.lightning_module.log(name, next(tensors) if value is None else value, **arguments)
        if self._watched:
            self.update_module()
        return {"loss": extras["loss"], **extras.get("returned", {})}

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **named: Any) -> Tensor:
        """Nothing: the program's step has gone back already."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **named: Any) -> Any:
        """Run the step of the last batch of an update, which updates the parameters."""
        self._updates = True
        try:
            return closure()
        finally:
            self._updates = False

    # ---- the module in memory

    def update_module(self) -> None:
        """Give the module in memory the program's weights, where it does not have them. All ranks call it."""
        if self._step is not None and self._trained is not None and self._outdated:
            self._weights.check_written(_WAY_OUT)
            self._trained.load_state_dict(self._step.state_dict())
            self._weights.settle()
            self._outdated = False

    def update_program(self) -> None:
        """Give the program the weights that the module in memory has. All ranks call it."""
        if self._step is not None and self._trained is not None:
            self._step.load_state_dict(self._trained.state_dict())
            self._weights.settle()
            self._outdated = False

    def on_validation_start(self) -> None:
        self.update_module()

    def on_test_start(self) -> None:
        self.update_module()

    def on_predict_start(self) -> None:
        self.update_module()

    def on_train_end(self) -> None:
        self.update_module()

    # ---- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.update_module()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: the state lies in shards, in the program's folder beside the checkpoint's file."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._step is not None and "optimizer_states" in checkpoint:
            self._step.save(program_folder(filepath))
        self.barrier()

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(program_folder(filepath), ignore_errors=True)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._read_from = Path(os.fspath(checkpoint_path))
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take the program's state beside the checkpoint that was read, once there is a program. Raises InputError."""
        folder = program_folder(self._read_from) if self._read_from is not None else None
        if folder is None or not folder.is_dir():
            raise InputError(
                f"{self._read_from} has no folder {folder} beside it, which a run with AutoparStrategy writes; load its weights "
                "into the module (load_from_checkpoint) and fit without ckpt_path"
            )
        self._pending = folder


def program_folder(filepath: Any) -> Path:
    """The folder of the program's state beside the file of a checkpoint."""
    return Path(f"{os.fspath(filepath)}.autopar")
