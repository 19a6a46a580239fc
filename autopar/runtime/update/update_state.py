"""The state of optimizers, schedulers and loss scaling in a checkpoint, beside the state of parameters: text, by entry name.

What comes back is data that somebody else may have written: it takes the place of values of the same kind, and of those
alone, before anything of the session is changed.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.datafile import parse_json
from ..data.schema import (
    MOST_COUNT,
    SchemaError,
    anything,
    either,
    integer,
    listed,
    number,
    positive,
    record,
    shown,
    table,
    text,
)
from ..data.tensor_files import read_value
from ..errors import CheckpointError
from .optimizer_forms import FORM_KEYS

_PLAIN = (int, float, bool, str, tuple, list, type(None))
_LEAF = either((bool, anything), ((int, float), number()), (str, text()), (type(None), anything), what="plain data")
_VALUE = either(((list, tuple), listed(_LEAF, most=64)), (object, _LEAF), what="plain data")
_GROUPS = record({"optimizer": text(), "groups": listed(table(text(), _VALUE))})
_SCALING = record({"scale": positive(3.5e38), "growth_tracker": integer()})


def groups_text(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Learning rates and the like (a nested value would be taken apart by the checkpoint writer)."""
    return json.dumps([_groups(one) for one in optimizers])


def _groups(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = []
    for group in optimizer.param_groups:
        values = {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
        own = {k: v for k, v in values.items() if k not in ("params", "param_names") and isinstance(v, _PLAIN)}
        groups.append(own)
    return {"optimizer": type(optimizer).__name__, "groups": groups}


def read_groups(saved: object, optimizers: Sequence[torch.optim.Optimizer]) -> list[list[dict[str, Any]]]:
    """The parameter groups of every optimizer. Raises CheckpointError where they are not those of these optimizers."""
    try:
        data = parse_json(_line(saved))
        rows = listed(_GROUPS)([data] if isinstance(data, dict) else data, "optim_groups")
    except SchemaError as error:
        raise CheckpointError(f"the checkpoint's parameter groups are damaged: {error}; take another one") from error
    kinds = [type(one).__name__ for one in optimizers]
    if [one["optimizer"] for one in rows] != kinds:
        raise CheckpointError(
            f"the checkpoint was written with {' and '.join(one['optimizer'] for one in rows)}, this program "
            f"trains with {' and '.join(kinds)}"
        )
    for optimizer, row in zip(optimizers, rows, strict=True):
        _check_groups(optimizer, row["groups"])
    return [row["groups"] for row in rows]


def _check_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    name = type(optimizer).__name__
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's {name} has {len(groups)} parameter groups, this program's "
            f"{len(optimizer.param_groups)}; make the optimizer with the same groups"
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            current = group[key].item() if isinstance(group.get(key), Tensor) else group.get(key)
            if key in ("params", "param_names") or not _alike(current, value):
                raise CheckpointError(
                    f"the checkpoint's {name} has {key} {shown(value)} where this program has {shown(current)}; take another one"
                )


def restore_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give an optimizer the values that `read_groups` gave for it, but for the form of its step, which follows the device."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if key in FORM_KEYS:
                continue
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def plain_text(value: Any) -> str:
    """Plain Python data as text; JSON would lose tuples, counters and keys that are numbers."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def read_schedulers(saved: object, schedulers: Sequence[Any]) -> list[dict[str, Any]]:
    """A state dict per scheduler. Raises CheckpointError where it is not like the one that the scheduler has."""
    try:
        states = read_value(bytearray(base64.b64decode(_line(saved), validate=True)), crc=True)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint's schedulers are damaged ({error}); take another one") from error
    if not isinstance(states, list) or len(states) != len(schedulers):
        raise CheckpointError(f"the checkpoint has not the state of {len(schedulers)} schedulers, but {shown(states)}")
    for scheduler, state in zip(schedulers, states, strict=True):
        own = scheduler.state_dict()
        if not isinstance(state, dict) or not all(key in own and _alike(own[key], state[key]) for key in state):
            raise CheckpointError(
                f"the checkpoint's {type(scheduler).__name__} has the state {shown(state)}, this program's {shown(own)}; make "
                "the scheduler alike, or take another checkpoint"
            )
    return states


def read_scaling(saved: object) -> tuple[float, int]:
    """Scale and growth tracker. Raises CheckpointError."""
    try:
        state = _SCALING(parse_json(_line(saved)), "optim_scaling")
    except SchemaError as error:
        raise CheckpointError(f"the checkpoint's loss scaling is damaged: {error}; take another one") from error
    return float(state["scale"]), state["growth_tracker"]


def step_number(value: Any) -> int:
    """The step of a checkpoint. Raises CheckpointError for one that no training reaches."""
    step = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= 1 << 53:
        raise CheckpointError(f"the checkpoint is of step {shown(step)}; steps are counted from 0")
    return step


def check_plain(name: str, value: Any) -> None:
    """Raises CheckpointError for a value of an optimizer's state that is neither a tensor nor a number, text or nothing."""
    if not isinstance(value, (Tensor, int, float, str, type(None))):
        raise CheckpointError(f"the checkpoint's {name} is {shown(value)}; optimizer state is tensors and numbers")


def _line(saved: object) -> str:
    if not isinstance(saved, str):
        raise SchemaError(f"text was expected, got {shown(saved)}")
    return saved


def _alike(current: Any, value: Any, depth: int = 0) -> bool:
    """Whether a saved value may take the place of the current one: a finite number that of a number, a list that of one, and
    so on; nothing (None), a truth value or plain data that of nothing."""
    if depth > 4:
        return False
    if current is None or isinstance(current, bool):
        return value is None or isinstance(value, (bool, int, float, str))
    if isinstance(current, (int, float)):
        return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    if isinstance(current, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) > MOST_COUNT:
            return False
        return (
            all(_alike(current[min(i, len(current) - 1)], v, depth + 1) for i, v in enumerate(value))
            if current
            else True
        )
    if isinstance(current, dict):
        return isinstance(value, dict) and all(_alike(current.get(k), v, depth + 1) for k, v in value.items())
    return type(value) is type(current)
