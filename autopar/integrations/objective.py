"""The scalar that a trainer calls backward on, as a module: its own training step, run once while a program is captured.

Trainers compute a loss from a model and a batch in methods that users override, divide it by the number of accumulated batches,
and give it to `accelerator.backward`. So the module runs the trainer's own `training_step`, and what reaches `backward` is the
loss of the program. What a trainer gathers over processes is for its logs (logged.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.examples.trees import flatten, rebuild
from autopar.errors import InputError
from autopar.integrations.logged import Logged, StepLogs
from autopar.integrations.picked import PickedInSums
from autopar.integrations.plain_heads import plain_log_probs
from autopar.integrations.unseen import Unseen

STEPS = "accumulated_batches"
"""The input that says how many batches an update is of."""
ITEMS = "items_in_update"
"""The input that says how many items, such as tokens, the batches of an update have together."""


class Objective(nn.Module):
    """The loss that a trainer's step calls backward on, for a global batch.

    trainer: of transformers, or of what subclasses it; training_step: its own (model, batch, items in the update).
    """

    def __init__(
        self, trainer: Any, training_step: Callable[..., Any], prediction_step: Callable[..., Any], loss_only: bool
    ) -> None:
        super().__init__()
        self.model = trainer.model
        held = {name: value for name, value in vars(trainer).items() if isinstance(value, nn.Module)}
        self.beside = nn.ModuleDict({name: one for name, one in held.items() if not name.startswith("model")})
        self.trainer, self.training_step, self._logs = Hidden(trainer), Hidden(training_step), Hidden(None)
        self.prediction_step, self.loss_only, self._prediction = Hidden(prediction_step), loss_only, Hidden(None)

    @property
    def logs(self) -> StepLogs | None:
        """The logs of a step, once one is captured; None where it keeps no such logs."""
        return self._logs.value

    @property
    def prediction(self) -> Prediction:
        """The way from outputs in eval mode to what the trainer's prediction step gives, once one is captured."""
        return self._prediction.value

    def forward(self, **batch: Tensor) -> Any:
        """The loss, and what the trainer gathers for its logs. batch: as the collator made it, with STEPS, and ITEMS where the
        trainer counts them. In eval mode: the tensors of the trainer's prediction step, and what it gathers."""
        if not self.training:
            return self._predicted(batch)
        trainer, losses = self.trainer.value, list[Tensor]()
        steps, items = batch.pop(STEPS), batch.pop(ITEMS, None)
        logs = StepLogs(lambda: trainer._total_train_tokens) if "_metrics" in vars(trainer) else None
        with PickedInSums(), plain_log_probs(), captured_from(trainer, losses, steps, logs):
            self.training_step.value(self.model, batch, items)
        if len(losses) != 1:
            raise InputError(
                f"{type(trainer).__name__}.training_step calls accelerator.backward {len(losses)} times for one batch; a program "
                "has one loss in a step"
            )
        self._logs.value = logs
        return losses[0], logs.extras if logs is not None else []

    def _predicted(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        trainer = self.trainer.value
        logs = StepLogs(lambda: trainer._total_train_tokens) if "_metrics" in vars(trainer) else None
        with PickedInSums(), plain_log_probs(), captured_from(trainer, [], None, logs):
            result = self.prediction_step.value(self.model, batch, self.loss_only)
        leaves, _, structure = flatten(result)
        self._prediction.value = Prediction(structure, len(leaves), logs)
        return *leaves, *(logs.extras if logs is not None else ())


@dataclass(frozen=True)
class Prediction:
    """How the outputs of a program in eval mode are what a trainer's prediction step gives: (loss, logits, labels).

    structure: as `flatten` gives it, of so many tensors (count); logs: what the step logs, of the outputs beyond these.
    """

    structure: Any
    count: int
    logs: StepLogs | None

    def of(self, trainer: Any, outputs: Any) -> Any:
        """The result of a step of the program, whose logs go to the trainer's."""
        tensors = list(outputs) if isinstance(outputs, tuple) else [outputs]
        if self.logs is not None:
            self.logs.put(trainer, tensors[self.count :])
        return rebuild(self.structure, tensors[: self.count])


def loss_and_extras(outputs: tuple[Tensor, list[Tensor]]) -> Any:
    """The loss_fn of an Objective."""
    return outputs if outputs[1] else outputs[0]


class Hidden:
    """A value that is part of no module's state, and whose own state nobody is to look at."""

    value: Any

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a trainer's state is not looked at")


@contextmanager
def captured_from(trainer: Any, losses: list[Tensor], steps: Tensor | None, logs: StepLogs | None) -> Iterator[None]:
    """A context in which a trainer's step computes its loss and no more, and is as it was afterwards. losses: takes what would
    go to backward; steps: how many batches an update is of (None: there is none); logs: take what the trainer logs."""
    accelerator, counted = trainer.accelerator, trainer._get_num_items_in_batch
    gathered = (lambda value, *_, **__: Logged(lambda extras: value)) if logs is None else logs.gathered
    replaced: list[tuple[Any, str, Any]] = [
        (accelerator, "backward", lambda loss, **_: losses.append(loss)),
        (accelerator, "gather", gathered),
        (accelerator, "gather_for_metrics", gathered),
        (trainer, "_prepare_inputs", lambda inputs: inputs),
        (trainer, "optimizer", None),
        (trainer, "state", Unseen("self.state")),
        (trainer, "_get_num_items_in_batch", lambda samples, device: counted(samples, torch.device("cpu"))),
    ]
    if steps is not None:
        replaced.append((trainer, "current_gradient_accumulation_steps", steps))
    if logs is not None:
        replaced += [(trainer, "_metrics", logs.metrics), (trainer, "_total_train_tokens", logs.total)]
    missing = object()
    before = [(owner, name, vars(owner).get(name, missing)) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
        if logs is not None:
            logs.total = trainer._total_train_tokens
    finally:
        for owner, name, value in before:
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
