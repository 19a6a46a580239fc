"""An optimizer that somebody made over a model's parameters, as a factory of the same one over a rank's shards of them.

    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    groups    = [(("embed.weight", …), {"lr": …, "weight_decay": 0.1}), (("norm.weight", …), {"lr": …, "weight_decay": 0.0})]
    factory   = functools.partial(regrouped, kind=torch.optim.AdamW, groups=groups)
    taking    = taking_over(optimizer, model)        the optimizer itself, which has the shards in its groups from then on

A rank has parameters of its own stages alone, so groups are known by the names of their members. What an optimizer's groups do
not say, and a new one of its class does not have by itself, cannot be carried over and is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.examples.held import Held
from autopar.errors import InputError
from autopar.optimizer.examine import check_kind
from autopar.runtime.data.origin import name_of

Groups = Sequence[tuple[tuple[str, ...], Mapping[str, Any]]]
"""Names of parameters, and what their group says."""
_OWN_STATE = frozenset({"state", "param_groups", "defaults"})


def factory_of(optimizer: torch.optim.Optimizer, model: nn.Module | Held) -> Callable[..., torch.optim.Optimizer]:
    """A factory, as `compile` takes it, of an optimizer that is over a model's parameters, or those of several modules, and has
    not stepped yet.

    Raises InputError where a parameter is none of the model's, where the optimizer has stepped, has hooks or is none that a
    program can have, or where a new one of its class would be another.
    """
    check_kind(optimizer)
    again = _again(optimizer, _members(optimizer, model))
    each = {id(tensor): (name, tensor) for name, tensor in _tensors(model).items()}
    anew = again(list(each.values()))
    if not _same(optimizer.state, anew.state):
        raise InputError(
            f"this {type(optimizer).__name__} has stepped already; make a new one, whose state the program makes on its ranks"
        )
    _check_alike(optimizer, anew)
    return again


def _again(
    optimizer: torch.optim.Optimizer, members: Sequence[tuple[str, ...]]
) -> Callable[[Sequence[tuple[str, Tensor]]], torch.optim.Optimizer]:
    """A factory of another optimizer like this one. members: names of the parameters of every group."""
    groups = [
        (names, {key: value for key, value in group.items() if key not in ("params", "param_names")})
        for names, group in zip(members, optimizer.param_groups, strict=True)
    ]
    kind = type(optimizer)
    arguments = inspect.signature(kind).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in arguments}
    return functools.partial(regrouped, kind=kind, groups=groups, defaults=defaults)


def taking_over(
    optimizer: torch.optim.Optimizer, model: nn.Module | Held
) -> Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer]:
    """A factory that gives an optimizer itself, with the parameters that it is called with in the place of the model's: what
    refers to it (a scheduler, a loop that sets learning rates) sets what is trained. Raises InputError as `factory_of`."""
    members = _members(optimizer, model)
    again = _again(optimizer, members)

    def taken(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        own = dict(named_parameters)
        first_state = again(named_parameters).state
        optimizer.state.clear()
        optimizer.state.update(first_state)
        for names, group in zip(members, optimizer.param_groups, strict=True):
            held = [name for name in names if name in own]
            group |= {"params": [own[name] for name in held]} | (
                {"param_names": held} if "param_names" in group else {}
            )
        return optimizer

    return taken


def _tensors(model: nn.Module | Held) -> dict[str, Tensor]:
    return (model if isinstance(model, Held) else Held(model)).tensors()


def _members(optimizer: torch.optim.Optimizer, model: nn.Module | Held) -> list[tuple[str, ...]]:
    """The program's names of the parameters of every group; of one that is shared all, as a program has it by one of them."""
    names: dict[int, list[str]] = {}
    for name, tensor in _tensors(model).items():
        names.setdefault(id(tensor), []).append(name)
    for index, group in enumerate(optimizer.param_groups):
        if foreign := [tuple(p.shape) for p in group["params"] if id(p) not in names]:
            raise InputError(
                f"group {index} of this {type(optimizer).__name__} has a parameter of shape {foreign[0]} that is none of the "
                "model's; make the optimizer of the parameters of the model that is trained, after it has its last form, and "
                "anew for every call of parallelize, which gives it a rank's shards"
            )
    return [tuple(name for p in group["params"] for name in names[id(p)]) for group in optimizer.param_groups]


def regrouped(
    named_parameters: Sequence[tuple[str, Tensor]],
    kind: Callable[..., torch.optim.Optimizer],
    groups: Groups,
    defaults: Mapping[str, Any],
) -> torch.optim.Optimizer:
    """The optimizer of a kind over those of these parameters that groups name. defaults: arguments beside these, which what it
    does at the start may follow from (Adagrad's sums do). Raises InputError where it cannot be made."""
    own = dict(named_parameters)
    members = [{**said, "params": [own[name] for name in names if name in own]} for names, said in groups]
    try:
        return kind(members, **defaults)
    except TypeError as error:
        raise InputError(
            f"{name_of(kind)} cannot be made of parameter groups alone ({error}); use an optimizer whose arguments are those of "
            "its groups, as torch.optim's are"
        ) from error


def _check_alike(given: torch.optim.Optimizer, again: torch.optim.Optimizer) -> None:
    """Raises InputError where two optimizers differ in something that their groups do not say."""
    kind = type(given).__name__
    for ours, theirs in zip(given.param_groups, again.param_groups, strict=True):
        told = {key for key in ours.keys() | theirs.keys() if key not in ("params", "param_names")}
        if unlike := [key for key in sorted(told) if not _same(ours.get(key), theirs.get(key))]:
            raise InputError(f"a {kind} made again of its groups has another {unlike[0]}; use one of torch.optim")
    ours, theirs = (
        {k: v for k, v in vars(one).items() if k not in _OWN_STATE and not k.startswith("_") and not callable(v)}
        for one in (given, again)
    )
    if unlike := [key for key in sorted(ours.keys() | theirs.keys()) if not _same(ours.get(key), theirs.get(key))]:
        raise InputError(
            f"this {kind} holds {unlike[0]!r} outside its parameter groups, so ranks cannot make it again of their shards; use "
            "an optimizer whose arguments are those of its groups, as torch.optim's are"
        )


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor) or isinstance(theirs, Tensor):
        return isinstance(ours, Tensor) and isinstance(theirs, Tensor) and torch.equal(ours, theirs)
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    return bool(ours == theirs)


def follow(scheduler: Any, given: torch.optim.Optimizer, own: torch.optim.Optimizer) -> None:
    """Have a scheduler that was made for an optimizer set the learning rates of another one of the same groups.

    given: the optimizer that it was made for; own: the one that it is to set.
    """
    if getattr(scheduler, "optimizer", None) is given:
        scheduler.optimizer = own
    for inner in (*getattr(scheduler, "_schedulers", ()), getattr(scheduler, "after_scheduler", None)):
        if inner is not None:
            follow(inner, given, own)
