"""A compilation leaves nothing behind in the process: caches of modules have what follows from ops and meshes, which the next
compilation shares, and all that is known of a program goes with it."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autopar

OPTIONS: dict[str, dict[str, Any]] = {
    "searched": {},
    "pipelined": {"pp": 2, "microbatches": 4},
    "recomputed": {"mesh": {"dp": 2, "tp": 2}, "recompute": "full"},
}


def compiled(width: int, **options: Any) -> autopar.ParallelProgram:
    """A small program; programs of other widths have the same ops on the same meshes."""
    layers = [nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.LayerNorm(width)] * 2
    batch = torch.randn(8, width), torch.randn(8, width)
    return autopar.compile(
        nn.Sequential(*layers),
        autopar.ClusterSpec.local(4),
        batch,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.Adam,
        options=autopar.Options(**options),
    )


def held(value: Any) -> Iterator[tuple[str, int]]:
    """Entries of a cache or a collection that a name of a module stands for, or that its function keeps. A cache that forgets
    may have entries by size of a dim."""
    if isinstance(value, functools._lru_cache_wrapper):
        if value.cache_info().maxsize is None:
            yield "", value.cache_info().currsize
    elif isinstance(value, (dict, list, set, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        yield "", len(value)
    elif callable(value) and hasattr(value, "__wrapped__"):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield from ((f" {name}", count) for _, count in held(cell.cell_contents))


def entries() -> dict[str, int]:
    """Entries by name of all that modules of the library hold."""
    return {
        f"{module}.{name}{inner}": count
        for module, loaded in list(sys.modules.items())
        if module.startswith("autopar.")
        for name, value in list(vars(loaded).items())
        if not name.startswith("__")
        for inner, count in held(value)
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_another_program_of_the_same_ops_adds_no_entry_to_any_cache_of_a_module(options: dict[str, Any]) -> None:
    compiled(32, **options)
    gc.collect()
    before = entries()
    assert len([name for name in before if name.endswith(" known")]) >= 10, "facts of programs are looked at"
    compiled(48, **options)
    gc.collect()
    assert {name: (before.get(name), count) for name, count in entries().items() if before.get(name) != count} == {}


@pytest.mark.few(1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_program_goes_when_nobody_holds_it(options: dict[str, Any]) -> None:
    program = compiled(32, **options)
    parts = [weakref.ref(part) for part in (program, program.ir, program.lowered, *program.stages)]
    parts += [weakref.ref(template) for stage in program.stages for template in stage.templates.values()]
    del program
    gc.collect()
    assert [part() for part in parts if part() is not None] == []
