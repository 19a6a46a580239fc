"""Global batches: their tensors in input order, random ones for a first try, and a user's own from a file or module."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import math
import re
import symtable
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from numbers import Number
from pathlib import Path
from types import ModuleType, NoneType
from typing import Annotated, Any

import torch
from torch import Tensor

from ..data.fields import Length, kept
from ..data.schema import MOST_SIZE, MOST_TEXT, choice, did_you_mean, integer, shown
from ..errors import GuardError, RuntimeProgramError
from .layout import dtype_of
from .rows import DataShard

SPARSE = kept(sparse=True)
DATA = "--data"
DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype))


Plain = bool | int | float | str | None
"""A value of a batch that is no tensor, and that a program is compiled for."""
_NUMBERS = (Number, str, NoneType)
"""Kinds of values that may be equal to a plain one; scalars of numpy are numbers."""
GIVEN = ("shard", "start", "epoch")
"""The arguments that a data function may have."""
_BINDS_UNSEEN = re.compile(r"import\s*\*|\b(globals|locals|vars|exec)\(|__getattr__|setattr|\bglobal\b")
"""Ways in which a module comes by names that are not written in it."""


def leaves(batch: Any, names: Sequence[str], fixed: Mapping[str, Plain]) -> list[Tensor]:
    """The tensors of a batch built like the example inputs. Mappings may have another order, and more entries.

    names: of the inputs, such as `0`, `input_ids` or `1.mask`; fixed: what the program was compiled for beside these, by name.
    Raises RuntimeProgramError when tensors are missing, GuardError where something fixed is another.
    """
    tensors = _tensors(batch)
    if all(name in tensors for name in names) and (isinstance(batch, Mapping) or len(tensors) == len(names)):
        _check_fixed(batch, fixed)
        return [tensors[name] for name in names]
    if len(tensors) != len(names) or isinstance(batch, Mapping):
        missing = [name for name in names if name not in tensors]
        raise RuntimeProgramError(
            f"a batch of {len(tensors)} tensors ({', '.join(tensors) or 'none'}), the program takes {len(names)}: "
            f"{', '.join(names)}" + (_instead(batch, missing) if isinstance(batch, Mapping) else "")
        )
    return list(tensors.values())


def own_leaves(batch: Any, names: Sequence[str], taken: Sequence[str], fixed: Mapping[str, Plain]) -> list[Tensor]:
    """The tensors of the inputs that a rank takes, of a batch of its rows alone: built like the example inputs, where what it
    does not take may be missing, None, or anything. names: of all inputs; fixed: as of `leaves`. Raises RuntimeProgramError when
    tensors are missing, GuardError."""
    tensors = _tensors(batch)
    if all(name in tensors for name in taken):
        _check_fixed(batch, fixed, or_none=True)
        return [tensors[name] for name in taken]
    if len(tensors) == len(names) and not isinstance(batch, Mapping):
        by_place = dict(zip(names, tensors.values(), strict=True))
        return [by_place[name] for name in taken]
    raise RuntimeProgramError(
        f"a batch of this rank's rows has {', '.join(tensors) or 'no tensors'}; it takes {', '.join(taken)}: missing "
        f"{', '.join(name for name in taken if name not in tensors)}"
    )


def fixed_values(batch: Any) -> dict[str, Plain]:
    """The plain values that example inputs have beside tensors, by name."""
    return {name: value for name, value in _named(batch, "") if is_plain(value)}


def is_plain(value: Any) -> bool:
    """Whether a value is one that a manifest can hold: a flag, a finite number, a short text or None."""
    if isinstance(value, float):
        return type(value) is float and math.isfinite(value)
    return type(value) in (bool, int, NoneType) or (type(value) is str and len(value) <= MOST_TEXT)


def _check_fixed(batch: Any, fixed: Mapping[str, Plain], *, or_none: bool = False) -> None:
    """Raises GuardError where a batch has another value, or a tensor, in the place of one that the program was compiled for.
    or_none: it may have None there."""
    for name, value in _named(batch, "") if fixed else ():
        parts = name.split(".")
        place = next((p for p in accumulate(parts, "{}.{}".format) if p in fixed), None)
        if place is None or (or_none and value is None) or (isinstance(value, _NUMBERS) and value == fixed[place]):
            continue
        given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
        raise GuardError(
            f"input {name} is {given}, and the program was compiled for {fixed[place]!r} there; compile again with an example "
            "like this batch, or make it a tensor of the example inputs where it is another one in every batch"
        )


def _instead(batch: Mapping[str, Any], missing: Sequence[str]) -> str:
    """The tensors that a batch lacks, in words, and what stands in their places."""
    others = dict(_named(batch, ""))
    said = [f"{name} is {shown(others[name])}" if name in others else f"missing {name}" for name in missing]
    return f"; {', '.join(said)}: every batch has the tensors that the example inputs had"


def _tensors(batch: Any) -> dict[str, Tensor]:
    return {name: value for name, value in _named(batch, "") if isinstance(value, Tensor)}


def _named(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All that stands in a batch and is no container, by name."""
    if isinstance(value, Tensor):
        yield name or "0", value
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items: Iterable[tuple[Any, Any]] = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        items = value._asdict().items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        yield name or "0", value
        return
    for key, entry in items:
        yield from _named(entry, f"{name}.{key}" if name else str(key))


@dataclass(frozen=True, kw_only=True)
class BatchInput:
    """An input of a global batch, in a manifest. high: of integers, what random ones are below."""

    name: str | None = field(default=None, metadata=SPARSE)
    shape: Annotated[tuple[Annotated[int, integer(0, MOST_SIZE)], ...], Length(most=64)]
    dtype: Annotated[str, choice(DTYPES)]
    high: Annotated[int, integer(1, (1 << 63) - 1)] | None = field(default=None, metadata=SPARSE)


def random_batches(inputs: Sequence[BatchInput], seed: int, first_step: int = 0) -> Iterator[list[Tensor]]:
    """Endless global batches that depend on (seed, step) alone: integers below `high`, else standard normal."""
    step = first_step
    while True:
        make = torch.Generator().manual_seed(seed * 1_000_003 + step)
        batch = []
        for row in inputs:
            dtype, shape = dtype_of(row.dtype), row.shape
            if dtype == torch.bool:
                batch.append(torch.ones(shape, dtype=dtype))
            elif dtype.is_floating_point:
                batch.append(torch.randn(shape, generator=make, dtype=torch.float32).to(dtype))
            else:
                batch.append(torch.randint(row.high or 2, shape, generator=make, dtype=dtype))
        yield batch
        step += 1


def check_source(source: str, argument: str = DATA) -> None:
    """See, without running anything of it, that `MODULE_OR_FILE:FUNCTION` is there. Raises RuntimeProgramError."""
    where, name = _parts(source, argument)
    top, _, inner = where.partition(".")
    try:
        if where.endswith(".py"):
            file: str | None = where
        else:
            spec = importlib.util.find_spec(top)
            if spec is None:
                raise RuntimeProgramError(
                    f"{argument} {source!r}: No module named {where!r}; is its folder on PYTHONPATH?"
                )
            file = None if inner else spec.origin
        if not file or not file.endswith(".py"):
            return
        with tokenize.open(file) as stream:
            text = stream.read()
        symbols = symtable.symtable(text, file, "exec").get_symbols()
    except OSError as error:
        raise RuntimeProgramError(f"{argument} {source!r}: {where}: {error.strerror}") from error
    except SyntaxError as error:
        raise RuntimeProgramError(f"{argument} {source!r}: {error}") from error
    except ValueError:  # a module that has no file
        return
    bound = [one.get_name() for one in symbols if one.is_assigned() or one.is_imported()]
    if name not in bound and not _BINDS_UNSEEN.search(text):
        raise RuntimeProgramError(f"{argument} {source!r}: {where} has no function {name!r}{did_you_mean(name, bound)}")


def _parts(source: str, argument: str) -> tuple[str, str]:
    """Module or file, and function. Raises RuntimeProgramError."""
    where, separator, name = source.rpartition(":")
    if not separator:
        raise RuntimeProgramError(f"{argument} {source!r}: write MODULE:FUNCTION or FILE.py:FUNCTION")
    return where, name


class DataFunction:
    """A data function, `MODULE_OR_FILE:FUNCTION`. takes: the arguments of `GIVEN` that it has.

    shard: a `DataShard`, and then its batches have the rows of that shard alone. start: global batches that were taken before,
    and then it begins there; a function without it is iterated past them. epoch: how often it was called before.
    """

    def __init__(self, source: str) -> None:
        """Imports its file. Raises RuntimeProgramError where it is not there, or takes other arguments."""
        function = _function(source, DATA)
        self.source, self._function = source, function
        self.takes = _arguments(source, DATA, function, GIVEN)

    def batches(self, first_step: int = 0, shard: DataShard | None = None) -> Iterator[Any]:
        """Its batches, called again when they run out, from first_step on. shard: of this rank, where it takes one; on a rank
        that takes no rows it is not called, and batches are None."""
        own = shard if "shard" in self.takes else None
        if own is not None and not own.rows:
            yield from repeat(None)
        step, epoch = first_step if "start" in self.takes else 0, 0
        while True:
            before, values = step, {"shard": own, "start": step, "epoch": epoch}
            for batch in _started(self.source, DATA, self._function(**{name: values[name] for name in self.takes})):
                if step >= first_step:
                    yield batch
                step += 1
            epoch += 1
            if step == before:
                ended = f"ended after {step} batches" if step else "gave no batch"
                raise RuntimeProgramError(
                    f"--data {self.source!r} {ended}: it is called again when its batches run out, so let it return a new list "
                    "or generator each time"
                )


def user_batches(source: str, first_step: int = 0) -> Iterator[Any]:
    """Global batches of a data function, from first_step on."""
    yield from DataFunction(source).batches(first_step)


def batches_once(source: str, argument: str) -> Iterator[Any]:
    """Global batches of `MODULE_OR_FILE:FUNCTION`, as it gives them when it is called once. argument: that names it."""
    given = 0
    function = _function(source, argument)
    _arguments(source, argument, function)
    for given, batch in enumerate(_started(source, argument, function()), 1):  # noqa: B007
        yield batch
    if not given:
        raise RuntimeProgramError(
            f"{argument} {source!r} gave no batch: let it return a new list or generator each time"
        )


def _function(source: str, argument: str) -> Callable[..., Iterable[Any]]:
    """The function that gives batches. Raises RuntimeProgramError where there is none."""
    where, name = _parts(source, argument)
    try:
        file = where.endswith(".py")
        module = module_of(Path(where), f"autopar_data_{Path(where).stem}") if file else importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise RuntimeProgramError(f"{argument} {source!r}: {error}; is its folder on PYTHONPATH?") from error
    function: Callable[..., Iterable[Any]] | None = getattr(module, name, None)
    if function is None:
        raise RuntimeProgramError(f"{argument} {source!r}: {where} has no function {name!r}")
    return function


def _arguments(source: str, argument: str, function: Any, known: Sequence[str] = ()) -> tuple[str, ...]:
    """The arguments of `known` that a function takes. Raises RuntimeProgramError for what cannot be called with these alone."""
    if not callable(function):
        raise RuntimeProgramError(
            f"{argument} {source!r} is {type(function).__name__}, no function; name one that returns batches"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:
        return ()  # a function without a signature
    named = {n for n, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes = tuple(name for name in known if name in named)
    try:
        signature.bind(**dict.fromkeys(takes))
    except TypeError as error:
        raise RuntimeProgramError(
            f"{argument} {source!r} is called without arguments: {error}"
            f"{'; it is given those of ' + ', '.join(known) + ' that it has' if known else ''}"
        ) from error
    if {"start", "epoch"} <= {*takes}:
        raise RuntimeProgramError(
            f"{argument} {source!r} takes start and epoch, but how many epochs there were before a batch the function alone "
            "knows; let it count them from start"
        )
    return takes


def _started(source: str, argument: str, batches: Any) -> Iterator[Any]:
    """An iterator over what a data function returned. Raises RuntimeProgramError for what has none."""
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise RuntimeProgramError(
            f"{argument} {source!r} returned {type(batches).__name__}; return an iterable of global batches, such as a list of "
            "tuples of tensors, or yield them"
        )
    return iter(batches)


def module_of(path: Path, name: str) -> ModuleType:
    """Import a file under a name of its own. Raises RuntimeProgramError when it is not there."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise RuntimeProgramError(f"{path} is missing: was the directory copied whole?")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
