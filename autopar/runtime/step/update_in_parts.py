"""The optimizer's step of a session, divided into parts where its state rests in memory tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ..memory.tiers import Tiers
from ..update.optimizer_parts import Parts
from .entries import EntryForms


def update_in_parts(entry: EntryForms, tiers: Tiers, gradient: Callable[[str], Tensor | None]) -> Parts | None:
    """The parts of an entry's update, which its updater then goes by; None where nothing rests in a tier. gradient: of the last
    step, by name."""
    stages, updater = entry.stages.values(), entry.updater
    where = [{name: stage.tables.parameters[name].optimizer_tier for name in stage.opt_params} for stage in stages]
    values = {n: p for stage in stages for n, p in stage.opt_params.items() if n in stage.rt.in_tier}
    if not updater.optimizers or not (values or any(tier for stage in where for tier in stage.values())):
        return None

    def store(updated: Mapping[str, Tensor]) -> None:
        for stage in stages:
            stage.store_updated({n: value for n, value in updated.items() if n in stage.opt_params})

    sizes = {name: p.numel() * p.element_size() for name, p in entry.opt_params.items()}
    parts = Parts(tiers, where, sizes, updater.state_of, values, gradient, store)
    updater.parts, updater.bring, updater.away = parts.parts, parts.bring, parts.values.keys()
    updater.settle = tiers.settle
    return parts
