"""A stage program with its state: weights in, training steps, forwards, full tensors and checkpoints out.

One optimizer step: slice the batch, run `stage.step` per microbatch (it adds gradients to rt.grads and returns the
loss, or a Handle of it), finish the gradients, run the optimizer on this rank's optimizer shards, gather the new shards
back into storage. Storage and optimizer shard are one memory wherever the shard is a contiguous part of the storage
(always, when the two specs are equal), so the gather writes only what other ranks own.

The optimizer sees shards: elementwise optimizers (SGD, Adam, …) compute exactly what they would on full tensors.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .comm import Comm, Handle
from .errors import CheckpointError, RuntimeProgramError
from .gather import Gather, start_gathers
from .grads import MIB, GradEntry, GradStore
from .layout import StateEntry, TensorInfo, gather_full, local_shape, local_slices, local_view, refinement
from .rank import Rank

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SliceReader = Callable[[str, tuple[slice, ...]], Tensor]
WHOLE_TENSOR_OPTIMIZERS = ("LBFGS", "Adafactor", "Muon", "SparseAdam")


class Session:
    """A running stage program on one rank. Every method is called by all ranks together."""

    def __init__(
        self,
        stage: Any,
        comm: Comm,
        optimizer_factory: OptimizerFactory | None = None,
        seed: int = 0,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 25 * MIB,
    ) -> None:
        """stage: the module (tables and `step`); dtype: hold every floating tensor in it instead of the table's."""
        if list(stage.MESH.items()) != list(comm.mesh.items()):
            raise RuntimeProgramError(f"the program is for the mesh {dict(stage.MESH)}, the ranks form {comm.mesh}")
        self.stage = stage
        self.comm = comm
        self.training = bool(getattr(stage, "TRAINING", False))
        self.microbatches = int(getattr(stage, "MICROBATCHES", 1))
        self.param_info = {name: TensorInfo(name, row, dtype) for name, row in stage.PARAMETERS.items()}
        self.buffer_info = {name: TensorInfo(name, row, dtype) for name, row in stage.BUFFERS.items()}
        self.inputs = [TensorInfo(row["name"], row, dtype) for row in stage.INPUTS]
        self.outputs = [TensorInfo(row["name"], row, dtype) for row in stage.OUTPUTS]
        table = {
            name: GradEntry(int(row["contributions"]), tuple(tuple(step) for step in row["steps"]))
            for name, row in getattr(stage, "GRADS", {}).items()
            if row["contributions"] > 0
        }
        self.mean_loss = getattr(stage, "MICROBATCH_LOSS", "mean") == "mean"
        scale = 1.0 / self.microbatches if self.mean_loss else 1.0
        self.rt = Rank(
            comm,
            {name: self._empty(info) for name, info in self.param_info.items()},
            {name: self._empty(info) for name, info in self.buffer_info.items()},
            GradStore(comm, table, self.microbatches, bucket_bytes, scale=scale),
            use_steps={name: info.use_steps for name, info in self.param_info.items()},
            seed=seed,
        )
        self.grads: dict[str, Tensor] = {}
        self.opt_params: dict[str, nn.Parameter] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        if self.training:
            trained = [name for name, info in self.param_info.items() if info.trainable and name in table]
            self.opt_params = {name: self._optimizer_shard(self.param_info[name]) for name in trained}
            if optimizer_factory is not None and self.opt_params:
                self.optimizer = optimizer_factory(list(self.opt_params.values()))
                self._check_optimizer(self.optimizer)

    # ---- weights

    @torch.no_grad()
    def load_weights(self, full: Mapping[str, Tensor] | SliceReader) -> None:
        """Fill parameters and buffers: from full tensors by name, or from `reader(name, slices) -> Tensor`.

        Only this rank's slice of each tensor is read and kept. Tied parameters appear once, under their table name.
        """
        for info, target in self._stored():
            slices = local_slices(info.shape, info.spec, self.comm, info.name)
            if isinstance(full, Mapping):
                if info.name not in full:
                    raise RuntimeProgramError(f"the weights have no tensor {info.name!r}")
                source = full[info.name]
                if tuple(source.shape) != info.shape:
                    raise RuntimeProgramError(
                        f"{info.name}: the program expects shape {info.shape}, the weights have {tuple(source.shape)}"
                    )
                source = source[slices] if info.shape else source
            else:
                source = full(info.name, slices)
            if source.is_meta or hasattr(source, "fake_mode"):
                raise RuntimeProgramError(
                    f"{info.name}: the weights hold no data (meta or fake tensor); load a checkpoint"
                )
            target.copy_(source)
        self._refresh_optimizer_shards()

    # ---- steps

    def train_step(self, batch: Sequence[Tensor]) -> Tensor:
        """One optimizer step on a global batch (its leaves in input order); the loss, over all microbatches.

        `self.grads` holds the reduced local gradients until the next step. Without an optimizer nothing is updated.
        """
        if not self.training:
            raise RuntimeProgramError("this program was compiled for inference; use forward()")
        losses: list[Any] = [outputs[0] for outputs in self._run(batch)]
        self.grads = self.rt.grads.finish()
        if self.optimizer is not None:
            self._optimize(self.optimizer)
        self.rt.step += 1
        losses = [loss.wait() if isinstance(loss, Handle) else loss for loss in losses]
        if len(losses) == 1:
            return losses[0]
        total = torch.stack(losses).sum()
        return total / len(losses) if self.mean_loss else total

    def forward(self, batch: Sequence[Tensor], *, local: bool = False) -> list[Tensor]:
        """The outputs for a global batch: full tensors on every rank, or this rank's shards."""
        if self.training:
            raise RuntimeProgramError("this program was compiled for training; use train_step()")
        runs = self._run(batch)
        outputs = []
        for info, values in zip(self.outputs, zip(*runs, strict=True), strict=True):
            if not local:
                values = tuple(gather_full(value, info.spec, self.comm, f"output {info.name}") for value in values)
            outputs.append(values[0] if len(values) == 1 else _join_microbatches(list(values)))
        return outputs

    @torch.no_grad()
    def _run(self, batch: Sequence[Tensor]) -> list[list[Tensor]]:
        results = []
        for index, leaves in enumerate(self.local_inputs(batch)):
            self.rt.microbatch = index
            results.append(list(self.stage.step(self.rt, leaves)))
        self.rt.end_step()
        return results

    def local_inputs(self, batch: Sequence[Tensor]) -> list[list[Tensor]]:
        """Per microbatch this rank's slices of the batch. A leaf as large as one microbatch's input goes to each."""
        if len(batch) != len(self.inputs):
            names = ", ".join(info.name for info in self.inputs)
            raise RuntimeProgramError(f"a batch of {len(batch)} tensors, the program takes {len(self.inputs)}: {names}")
        columns = [self._microbatches_of(leaf, info) for leaf, info in zip(batch, self.inputs, strict=True)]
        return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in range(self.microbatches)]

    def _microbatches_of(self, leaf: Tensor, info: TensorInfo) -> list[Tensor]:
        count, shape = self.microbatches, tuple(leaf.shape)
        if shape == info.shape:
            parts = [leaf] * count
        elif shape and shape == (count * info.shape[0], *info.shape[1:]):
            parts = list(leaf.chunk(count))
        else:
            expected = (count * info.shape[0], *info.shape[1:]) if info.shape else ()
            raise RuntimeProgramError(
                f"input {info.name}: shape {shape}, the program was compiled for the global shape {expected}"
            )
        if leaf.dtype != info.dtype and not (leaf.is_floating_point() and info.dtype.is_floating_point):
            raise RuntimeProgramError(f"input {info.name}: dtype {leaf.dtype}, the program takes {info.dtype}")
        views = [local_view(part, info.spec, self.comm, f"input {info.name}") for part in parts]
        return [view.to(device=self.comm.device, dtype=info.dtype) for view in views]

    @torch.no_grad()
    def _optimize(self, optimizer: torch.optim.Optimizer) -> None:
        for name, parameter in self.opt_params.items():
            parameter.grad = self.grads[name]
        optimizer.step()
        gathers: list[Gather] = []
        for name, parameter in self.opt_params.items():
            info = self.param_info[name]
            if info.gather:
                gathers.append((parameter.data, info.gather, self.rt.params[name]))
        if gathers:
            start_gathers(self.comm, gathers, site="updated parameters").wait()

    # ---- state

    def gather_full(self, name: str) -> Tensor:
        """A parameter or buffer, full, on every rank."""
        for info, value in self._stored():
            if info.name == name:
                return gather_full(value, info.spec, self.comm, f"full {name}").clone()
        raise RuntimeProgramError(f"the program has no parameter or buffer {name!r}")

    def full_grads(self) -> dict[str, Tensor]:
        """The gradients of the last train_step, full, on every rank."""
        return {
            name: gather_full(grad, self.param_info[name].opt_spec, self.comm, f"full gradient of {name}").clone()
            for name, grad in self.grads.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Parameters, buffers, optimizer state and step by name; DTensors over processes, else full tensors."""
        from . import checkpoint

        return {name: checkpoint.pack(entry, self.comm) for name, entry in self.state_entries().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of state_dict, for any mesh: full tensors and DTensors of any layout are taken."""
        from . import checkpoint

        self.prepare_optimizer_state({name: _signature(value) for name, value in state.items()})
        entries = self.state_entries()
        missing = [name for name in entries if name not in state]
        if missing:
            raise CheckpointError(f"the state has no {', '.join(missing[:5])} ({len(missing)} missing)")
        self.accept({name: checkpoint.unpack(state[name], entry, self.comm) for name, entry in entries.items()})

    def state_entries(self) -> dict[str, StateEntry]:
        """Everything a checkpoint holds: local values with their global shape and spec. Tensors are not copied."""
        entries = {info.name: StateEntry(value, info.shape, info.spec) for info, value in self._stored()}
        extra: dict[str, StateEntry] = {"step": StateEntry(torch.tensor(self.rt.step), (), ())}
        if self.optimizer is not None:
            for name, parameter in self.opt_params.items():
                info = self.param_info[name]
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    sharded = isinstance(value, Tensor) and value.shape == parameter.shape
                    shape = info.shape if sharded else tuple(getattr(value, "shape", ()))
                    spec = info.opt_spec if sharded else ((),) * len(shape)
                    extra[f"optim.{name}.{key}"] = StateEntry(value, shape, spec)
            extra["optim_groups"] = StateEntry(_dump_groups(self.optimizer), (), ())
        clash = entries.keys() & extra.keys()
        if clash:
            raise CheckpointError(f"parameter names {sorted(clash)} are reserved in checkpoints; rename them")
        return entries | extra

    def prepare_optimizer_state(self, available: Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]) -> None:
        """Allocate the optimizer state that a checkpoint has (name -> shape and dtype; None: no tensor)."""
        if self.optimizer is None:
            return
        for full_name, signature in available.items():
            name, _, key = full_name.removeprefix("optim.").rpartition(".")
            parameter = self.opt_params.get(name) if full_name.startswith("optim.") else None
            if parameter is None or key in self.optimizer.state[parameter]:
                continue
            if signature is None:
                self.optimizer.state[parameter][key] = None
                continue
            shape, dtype = signature
            local = parameter.shape if shape == self.param_info[name].shape else shape
            device = parameter.device if local else torch.device("cpu")
            self.optimizer.state[parameter][key] = torch.zeros(local, dtype=dtype, device=device)

    @torch.no_grad()
    def accept(self, local: Mapping[str, Any]) -> None:
        """Take local values for the names of state_entries (those in the entry's own memory stay put)."""
        for info, target in self._stored():
            value = local[info.name]
            if value.data_ptr() != target.data_ptr():
                target.copy_(value)
        self.rt.step = int(local["step"])
        if self.optimizer is not None:
            for name, parameter in self.opt_params.items():
                state = self.optimizer.state.get(parameter, {})
                for key in state:
                    value = local[f"optim.{name}.{key}"]
                    if not isinstance(state[key], Tensor):
                        state[key] = value
                    elif value.data_ptr() != state[key].data_ptr():
                        state[key].copy_(value)
            _restore_groups(self.optimizer, local["optim_groups"])
        self._refresh_optimizer_shards()

    # ---- small print

    def _stored(self) -> list[tuple[TensorInfo, Tensor]]:
        params = [(info, self.rt.params[name]) for name, info in self.param_info.items()]
        return params + [(info, self.rt.buffers[name]) for name, info in self.buffer_info.items()]

    def _empty(self, info: TensorInfo) -> Tensor:
        shape = local_shape(info.shape, info.spec, self.comm, info.name)
        return torch.empty(shape, dtype=info.dtype, device=self.comm.device)

    def _shard_view(self, info: TensorInfo) -> Tensor:
        value = self.rt.params[info.name]
        for dim, axes in refinement(info.spec, info.opt_spec, info.name).items():
            size = value.shape[dim] // self.comm.axis_size(axes)
            if value.shape[dim] % self.comm.axis_size(axes):
                raise RuntimeProgramError(f"{info.name}: dim {dim} cannot be split further over {axes}")
            value = value.narrow(dim, self.comm.axis_index(axes) * size, size)
        return value

    def _optimizer_shard(self, info: TensorInfo) -> nn.Parameter:
        if info.opt_spec != info.spec and not info.gather:
            raise RuntimeProgramError(f"{info.name}: optimizer spec {info.opt_spec} without the steps back to storage")
        shard = self._shard_view(info)
        return nn.Parameter(shard if shard.is_contiguous() else shard.contiguous())

    @torch.no_grad()
    def _refresh_optimizer_shards(self) -> None:
        for name, parameter in self.opt_params.items():
            shard = self._shard_view(self.param_info[name])
            if shard.data_ptr() != parameter.data_ptr():
                parameter.copy_(shard)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer).__name__
        whole = {name: info for name, info in self.param_info.items() if name in self.opt_params}
        cut = [name for name, info in whole.items() if local_shape(info.shape, info.opt_spec, self.comm) != info.shape]
        if cut and kind in WHOLE_TENSOR_OPTIMIZERS:
            raise RuntimeProgramError(
                f"{kind} needs whole tensors, but the plan shards {len(cut)} of them ({cut[0]}, …); use an elementwise "
                "optimizer such as AdamW, or a plan with replicated parameters"
            )
        if cut and type(optimizer).__module__.split(".")[0] != "torch":
            warnings.warn(f"{kind} runs on shards of parameters: correct only if it is elementwise", stacklevel=4)


def _signature(value: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


def _join_microbatches(values: list[Tensor]) -> Tensor:
    return torch.cat(values) if values[0].dim() else torch.stack(values).mean()


def _dump_groups(optimizer: torch.optim.Optimizer) -> str:
    """Learning rates and the like as JSON (a nested value would be taken apart by the checkpoint writer)."""
    plain = (int, float, bool, str, tuple, list, type(None))
    groups = []
    for group in optimizer.param_groups:
        values = {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
        groups.append({key: value for key, value in values.items() if key != "params" and isinstance(value, plain)})
    return json.dumps({"optimizer": type(optimizer).__name__, "groups": groups})


def _restore_groups(optimizer: torch.optim.Optimizer, dumped: str) -> None:
    state, kind = json.loads(dumped), type(optimizer).__name__
    if state["optimizer"] != kind:
        raise CheckpointError(f"the checkpoint was written with {state['optimizer']}, this program trains with {kind}")
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=False):
        for key, value in saved.items():
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
