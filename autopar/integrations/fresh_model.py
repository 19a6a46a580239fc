"""Callbacks of a script see the weights that the program has, and those that a trainer's package brings cost no gathering."""

from __future__ import annotations

from typing import Any

import transformers


class FreshModel(transformers.TrainerCallback):
    """Gives the model in memory the program's weights before a callback of the script's is called, which may look at them."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer


def _event(name: str) -> Any:
    def called(self: FreshModel, args: Any, state: Any, control: Any, **named: Any) -> None:
        asks = [one for one in self.trainer.callback_handler.callbacks if not is_of_trainer(one)]
        if any(getattr(type(one), name) is not getattr(transformers.TrainerCallback, name) for one in asks):
            self.trainer.update_model()

    return called


for _name in (name for name in vars(transformers.TrainerCallback) if name.startswith("on_")):
    setattr(FreshModel, _name, _event(_name))


def is_of_trainer(callback: Any) -> bool:
    """Whether a callback is one of those that the trainer's package brings, which do not look at weights."""
    return isinstance(callback, FreshModel) or type(callback).__module__.partition(".")[0] in ("transformers", "trl")
