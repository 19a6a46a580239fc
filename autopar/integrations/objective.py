"""The scalar that a trainer calls backward on, as a module: its own training step, run once while a program is captured.

Trainers compute a loss from a model and a batch in methods that users override, divide it by the number of accumulated batches,
and give it to `accelerator.backward`. So the module runs the trainer's own `training_step`, and what reaches `backward` is the
loss of the program. What a trainer gathers over processes is for its logs; such values are stood in for by `Logged`, which
nothing can be computed of that a loss could depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from autopar.errors import InputError

STEPS = "accumulated_batches"
"""The input that says how many batches an update is of."""
ITEMS = "items_in_update"
"""The input that says how many items, such as tokens, the batches of an update have together."""


class Logged:
    """A number for logs while a step is captured: it takes part in arithmetic and comparisons, and has no value."""

    def _same(self, *others: Any, **named: Any) -> Logged:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __floordiv__ = __rfloordiv__ = __gt__ = __lt__ = __ge__ = __le__ = __neg__ = __getitem__ = _same
    sum = mean = item = float = detach = cpu = nanmean = min = max = _same

    def __bool__(self) -> bool:
        return True

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise InputError(
            f"the trainer's loss depends on a value that it gathers over processes ({getattr(function, '__name__', function)}), "
            "which a program for all ranks has no use for; compute the loss from the batch, which is the global one"
        )


class Objective(nn.Module):
    """The loss that a trainer's step calls backward on, for a global batch.

    trainer: of transformers, or of what subclasses it; training_step: its own (model, batch, items in the update).
    """

    def __init__(self, trainer: Any, training_step: Callable[..., Any]) -> None:
        super().__init__()
        self.model = trainer.model
        self.trainer, self.training_step = Hidden(trainer), Hidden(training_step)

    def forward(self, **batch: Tensor) -> Tensor:
        """The loss. batch: as the collator made it, with STEPS, and ITEMS where the trainer counts them."""
        trainer, losses = self.trainer.value, list[Tensor]()
        steps, items = batch.pop(STEPS), batch.pop(ITEMS, None)
        with captured_from(trainer, losses, steps):
            self.training_step.value(self.model, batch, items)
        if len(losses) != 1:
            raise InputError(
                f"{type(trainer).__name__}.training_step calls accelerator.backward {len(losses)} times for one batch; a program "
                "has one loss in a step"
            )
        return losses[0]


class Hidden:
    """A value that is part of no module's state, and whose own state nobody is to look at."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a trainer's state is not looked at")


@contextmanager
def captured_from(trainer: Any, losses: list[Tensor], steps: Tensor) -> Iterator[None]:
    """A context in which a trainer's step computes its loss and no more, and is as it was afterwards. losses: takes what would
    go to backward; steps: how many batches an update is of."""
    accelerator, logs = trainer.accelerator, vars(trainer).get("_metrics")
    replaced: list[tuple[Any, str, Any]] = [
        (accelerator, "backward", lambda loss, **_: losses.append(loss)),
        (accelerator, "gather", lambda value: Logged()),
        (accelerator, "gather_for_metrics", lambda value, **_: Logged()),
        (trainer, "_prepare_inputs", lambda inputs: inputs),
        (trainer, "optimizer", None),
        (trainer, "current_gradient_accumulation_steps", steps),
    ]
    if logs is not None:
        replaced += [
            (trainer, "_metrics", {mode: type(of_mode)(list) for mode, of_mode in logs.items()}),
            (trainer, "_total_train_tokens", vars(trainer).get("_total_train_tokens")),
        ]
    missing = object()
    before = [(owner, name, vars(owner).get(name, missing)) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
