"""A training step of a script: called with a global batch, it does what `loss.backward()` and `optimizer.step()` do together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.data.state_names import of_model
from autopar.runtime.errors import CheckpointError, RuntimeProgramError
from autopar.runtime.program.rows import DataShard
from autopar.runtime.run.loaded import LoadedEntry, LoadedProgram
from autopar.runtime.update.scheduler_steps import steps_taken

_SETTLED = (
    "which parameters a program trains is settled when it is made, so make another one: save() this step, make a new optimizer "
    "of the model as it is now, call parallelize again and resume() the new step"
)


class Step:
    """The step that `autopar.parallelize` returns. Every rank calls its methods, in the same order.

    directory: of the program that is run, to be read.
    """

    def __init__(self, program: LoadedProgram, model: nn.Module, directory: Path) -> None:
        self.directory = directory
        self._program = program
        self._session = program.session
        held = {saved for also in program.manifest.state_names.values() for saved in also}
        self._state = {name: None if name in held else value for name, value in model.state_dict().items()}
        """The names of the model's state dict in its order, with the values of what the program does not hold."""
        self._in_memory = dict(model.named_parameters())
        self._trains = self._requires_grad()
        self._members = self._grouped()
        self._adding = False
        self.training = True
        self._scheduled = self._epochs()

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """One optimizer step on a global batch, `step(x, y)`, `step((x, y))`, `step(input_ids=…)` or `step({…})`, the same on
        every rank; its loss, a scalar that is part of no graph, or (loss, extras) where loss_fn returns some. A program without
        loss gives its output instead.

        In eval mode it is `evaluate`. Raises GuardError for a batch of another shape, RankError where ranks do not do the same,
        RuntimeProgramError.
        """
        if not self.training:
            return self.evaluate(*batch, **named)
        return self._take(batch, named, self._program.own_rows)

    def local(self, *batch: Any, **named: Any) -> Any:
        """The same on a batch of which this rank has its own rows alone, those of `shard`."""
        return self._take(batch, named, True)

    @property
    def shard(self) -> DataShard:
        """The rows of every global batch that this rank computes with."""
        return self._program.shard

    def _take(self, batch: tuple[Any, ...], named: Mapping[str, Any], own_rows: bool) -> Any:
        if self._epochs() != self._scheduled:
            raise RuntimeProgramError(
                "the script stepped the scheduler that parallelize was given, which every update steps already; leave out "
                "scheduler.step(), or give no scheduler= and make your own of step.optimizer"
            )
        self._check_trained()
        given = self._program.take(batch, named, own_rows, not self._adding)
        self._session.updater.forget_gradients()  # so an optimizer.step() of the script finds none, and changes nothing
        self._scheduled = self._epochs()
        return given

    def _check_trained(self) -> None:
        """Raises RuntimeProgramError where the script would have other parameters trained than the program does."""
        if (now := self._requires_grad()) != self._trains:
            name = next(name for name in now if now[name] != self._trains[name])
            raise RuntimeProgramError(
                f"{name} was {'unfrozen' if now[name] else 'frozen'} after parallelize; {_SETTLED}"
            )
        if self._grouped() != self._members:
            raise RuntimeProgramError(
                f"an optimizer's groups have other parameters than after parallelize (add_param_group?); {_SETTLED}"
            )

    def _requires_grad(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._in_memory.items()}

    def _grouped(self) -> list[list[int]]:
        return [[*map(id, group["params"])] for one in self.optimizers for group in one.param_groups]

    def entry(self, name: str) -> LoadedEntry:
        """Another step over the same parameters, one of `entries=`, to be called with its batch. Raises RuntimeProgramError where
        there is none of that name."""
        return self._program.entry(name)

    def evaluate(self, *batch: Any, **named: Any) -> Any:
        """The entry "evaluate" on a batch: (loss, outputs) of the model in eval mode; nothing is trained. Raises
        RuntimeProgramError where parallelize was given no `entries={"evaluate": autopar.Entry()}`."""
        return self.entry("evaluate")(*batch, **named)

    def train(self, mode: bool = True) -> Step:
        """From now on a call is a training step (mode: False: an evaluation). Gives the step itself, as a module does."""
        self.training = mode
        return self

    def eval(self) -> Step:
        """From now on a call is an evaluation, until `train()`."""
        return self.train(False)

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """A context in which gradients of batches are added up, and nothing is updated; the next batch outside of it is updated
        with the sum, as in a loop that calls `backward` several times before `optimizer.step()`. enabled: False changes
        nothing."""
        before, self._adding = self._adding, self._adding or enabled
        try:
            yield
        finally:
            self._adding = before

    # ---- optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """This rank's optimizer, over its shards of the parameters. What is set in `param_groups` counts from the next step on,
        and is to be set alike on every rank; `step()` and `zero_grad()` find no gradients. Raises RuntimeProgramError where there
        is not one."""
        return self._only(self.optimizers, "optimizer")

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that the factory made."""
        return self._session.updater.optimizers

    @property
    def scheduler(self) -> Any:
        """The scheduler, which every update steps. Raises RuntimeProgramError where there is not one."""
        return self._only(tuple(self._session.updater.schedulers), "scheduler")

    @property
    def grad_norm(self) -> Tensor | None:
        """The global norm of the last update's gradients before they were clipped; None where nothing clips them by it."""
        return self._session.grad_norm

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters as this rank's optimizer has them, by the model's names: shards, flat ones where it has runs."""
        names = self._program.manifest.state_names
        for name, shard in self._session.opt_params.items():
            yield (*names.get(name, ()), name)[0], shard

    def _only(self, some: tuple[Any, ...], what: str) -> Any:
        if len(some) != 1:
            raise RuntimeProgramError(
                f"this step has {len(some)} {what}s; see {what}= of parallelize, and step.optimizers"
            )
        return some[0]

    def _epochs(self) -> list[Any]:
        return [steps_taken(one) for one in self._session.updater.schedulers]

    # ---- state

    @property
    def rank(self) -> int:
        """This process's place among the ranks; the first one, 0, is the one to write files."""
        return self._session.comm.rank

    @property
    def steps_done(self) -> int:
        """Batches that were taken so far, those before a checkpoint that was resumed included."""
        return self._program.step

    def state_dict(self, *, every_rank: bool = True) -> dict[str, Any]:
        """Full tensors on the CPU under the names of the model's own state dict, which loads them strictly. every_rank: False
        gives ranks other than 0 nothing, where host memory is short."""
        self._session.settle("reading the weights")
        gives = every_rank or self._session.comm.rank == 0
        names, held = self._program.manifest.state_names, dict[str, Tensor]()
        for name in (name for name, also in names.items() if also):
            full = self._session.gather_full(name)
            held |= {name: full.cpu()} if gives else {}
        now = of_model(held, names)
        return {name: now.get(name, value) for name, value in self._state.items()} if gives else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the weights of a state dict of the model, full and the same on every rank; the optimizer stays as it is. Raises
        CheckpointError where names or shapes are not the model's."""
        names = self._program.manifest.state_names
        missing = [also[0] for also in names.values() if also and not any(one in state for one in also)]
        surplus = [name for name in state if name not in self._state]
        if missing or surplus:
            said = [
                f"{what} {', '.join(some[:5])}"
                for what, some in (("lacks", missing), ("has the surplus", surplus))
                if some
            ]
            raise CheckpointError(f"the state dict {' and '.join(said)}; it must have the names of the model's own")
        full = {}
        for name, also in names.items():
            found = [state[one] for one in also if one in state]
            if any(not torch.equal(found[0], other) for other in found[1:]):
                raise CheckpointError(
                    f"{' and '.join(also)} are one tensor in this model, and differ in the state dict"
                )
            full[name] = found[0] if found else self._session.gather_full(name)
        try:
            self._session.load_weights(full)
        except RuntimeProgramError as error:
            raise CheckpointError(str(error)) from error
        self._state |= {name: state[name] for name, value in self._state.items() if value is not None and name in state}

    def save(self, directory: str | Path) -> None:
        """Write a checkpoint: weights, optimizer, scheduler and step, each rank its shards. It is whole or not there, and any
        number of ranks may go on from it."""
        self._program.save(directory)

    def resume(self, directory: str | Path) -> None:
        """Go on from a checkpoint of any plan. Raises CheckpointError where it does not fit, or is damaged."""
        self._program.resume(directory)
        self._scheduled = self._epochs()
