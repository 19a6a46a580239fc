"""manifest.json of an emitted directory: what its run.py needs to know, read as data.

It names files of its own directory, and classes of torch.optim. Any other module that optimizers or schedulers come from
has to be imported by a file that the user runs: the directory's run.py (the compiler writes the import there), or the
script that calls `load`. So a manifest alone makes nobody import anything.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..compiled.inductor import COMPILERS
from ..data.datafile import path_inside, read_json, read_text
from ..data.schema import (
    MOST_NUMBER,
    MOST_RANKS,
    MOST_SIZE,
    MOST_TEXT,
    SchemaError,
    anything,
    choice,
    either,
    flag,
    identifier,
    integer,
    is_number,
    listed,
    optional,
    parsed,
    positive,
    record,
    table,
    text,
    where,
)
from ..data.whole_files import current
from ..errors import RuntimeProgramError
from ..update.update_rule import ClipNorm, LossScaling, UpdateRule
from .batches import module_of
from .machines import MACHINES, Machines
from .tables import show_meshes

MOST_BUCKETS = 256
MOST_WORLDS = 256
_DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype))
_SEED = integer(-(1 << 63), (1 << 63) - 1)
_NAME = where(lambda name: isinstance(name, str) and len(name) <= MOST_TEXT, f"text of at most {MOST_TEXT} characters")


def _module(name: str) -> str:
    if not all(part.isidentifier() for part in name.split(".")):
        raise SchemaError(f"{name!r} is no name of a module")
    return name


_FACTORY = record(
    {"module": parsed(_module), "name": identifier()}, {"kwargs": table(identifier(), anything, most=256)}
)
_UPDATE = record(
    {},
    {
        "optimizer": optional(_FACTORY),
        "scheduler": optional(_FACTORY),
        "clip_norm": optional(
            record(
                {"max_norm": positive()},
                {"norm_type": either((str, choice(("inf",))), (object, positive()), what="a number or inf")},
            )
        ),
        "clip_value": optional(positive()),
        "loss_scaling": optional(
            record(
                {},
                {
                    "initial": positive(3.4e38),
                    "growth": where(lambda x: is_number(x, 1, 1e30) and x > 1, "a number above 1"),
                    "backoff": where(lambda x: is_number(x, 0, 1) and 0 < x < 1, "a number between 0 and 1"),
                    "interval": integer(1, 1 << 53),
                },
            )
        ),
        "compensated": flag(),
    },
)
_INPUT = record(
    {"shape": listed(integer(0, MOST_SIZE), most=64), "dtype": choice(_DTYPES)},
    {"name": text(), "high": integer(1, (1 << 63) - 1)},
)
_MANIFEST = record(
    {"world_size": integer(1, MOST_RANKS), "pipeline": path_inside, "training": flag(), "inputs": listed(_INPUT)},
    {
        "update": optional(_UPDATE),
        "seed": _SEED,
        "weights": optional(path_inside),
        "buckets": listed(record({"pipeline": path_inside, "inputs": listed(_INPUT)}), most=MOST_BUCKETS),
        "pad_values": table(text(), where(lambda x: is_number(x, -MOST_NUMBER, MOST_NUMBER), "a number"), most=1024),
        "state_names": table(_NAME, listed(_NAME)),
        "constants": optional(path_inside),
        "compiler": choice(COMPILERS),
        "cuda_graphs": flag(),
        "placement": optional(listed(integer(0, MOST_RANKS))),
        "save_every": optional(integer(1, 1 << 53)),
        "worlds": listed(integer(1, MOST_RANKS), most=MOST_WORLDS),
        "machines": optional(MACHINES),
    },
)


TUNED = "tuned.json"
WORLDS = "worlds"
_TUNED = record({"folder": optional(path_inside)}, others=True)


@dataclass(frozen=True)
class Manifest:
    """manifest.json of an emitted directory. state_names: the names of every parameter and buffer in the model's own state
    dict, none for what is not in it; constants: the folder with the values of the latter; home: where folders of weights
    lie, which is not the directory where that is one of several candidates (`tuned`), or the program for another number of
    ranks; worlds: such numbers, beside that of the program at home."""

    directory: Path
    world_size: int
    pipeline: str
    training: bool
    inputs: tuple[dict[str, Any], ...]
    update: dict[str, Any] | None = None
    seed: int = 0
    weights: str | None = None
    placement: tuple[int, ...] = ()
    buckets: tuple[dict[str, Any], ...] = ()
    pad_values: Mapping[str, float] = field(default_factory=dict)
    state_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    constants: str | None = None
    home: Path | None = None
    save_every: int | None = None
    compiler: str = "none"
    cuda_graphs: bool = False
    worlds: tuple[int, ...] = ()
    machines: Machines | None = None

    @classmethod
    def read(cls, directory: str | Path) -> Manifest:
        """The manifest of the directory, or of the candidate that was found to be the fastest of its programs. Raises
        RuntimeProgramError where there is none, or something in it is not as it may be."""
        home = current(Path(directory))
        own, folder = cls._of(home), tuned(home)
        return own if folder is None else own._beside(folder)

    def for_ranks(self, ranks: int) -> Manifest:
        """The manifest of the program for so many ranks, one of `worlds`. Raises RuntimeProgramError."""
        other = self._beside((self.home or self.directory) / world_folder(ranks))
        if other.world_size != ranks:
            raise RuntimeProgramError(f"{other.directory} holds a program for {other.world_size} ranks; emit it again")
        return other

    def _beside(self, folder: Path) -> Manifest:
        """The manifest of a program that takes its weights from the same home."""
        home = self.home or self.directory
        return replace(self._of(folder), weights=self.weights, constants=self.constants, home=home, worlds=self.worlds)

    @property
    def weights_folder(self) -> Path | None:
        """Where the weights that were emitted with the program lie, if any were."""
        return None if self.weights is None else (self.home or self.directory) / self.weights

    @property
    def constants_folder(self) -> Path | None:
        """The folder of the tensors that no state dict holds."""
        return None if self.constants is None else (self.home or self.directory) / self.constants

    @property
    def plan_hash(self) -> str:
        """A hash of the pipeline, which tells plans apart. Raises RuntimeProgramError when it is not there."""
        try:
            return hashlib.sha256((self.directory / self.pipeline).read_bytes()).hexdigest()[:16]
        except OSError as error:
            raise RuntimeProgramError(f"{self.directory / self.pipeline} cannot be read: {error.strerror}") from error

    @classmethod
    def _of(cls, directory: Path) -> Manifest:
        path = directory / "manifest.json"
        try:
            raw = _MANIFEST(read_json(path), "")
            placement = tuple(raw.get("placement") or ())
            if placement and sorted(placement) != list(range(raw["world_size"])):
                raise SchemaError(f"the placement {list(placement)[:16]} does not name every rank once")
        except FileNotFoundError as error:
            raise RuntimeProgramError(f"{path} is missing: is {directory} a directory that autopar wrote?") from error
        except OSError as error:
            raise RuntimeProgramError(f"{path} cannot be read: {error.strerror}") from error
        except SchemaError as error:
            raise RuntimeProgramError(f"{path} is damaged: {error}; emit it again") from error
        return cls(
            directory=directory,
            world_size=raw["world_size"],
            pipeline=raw["pipeline"],
            training=raw["training"],
            inputs=tuple(raw["inputs"]),
            update=raw.get("update"),
            seed=raw.get("seed", 0),
            weights=raw.get("weights"),
            placement=placement,
            buckets=tuple(raw.get("buckets", ())),
            pad_values=raw.get("pad_values", {}),
            state_names={name: tuple(names) for name, names in raw.get("state_names", {}).items()},
            constants=raw.get("constants"),
            save_every=raw.get("save_every"),
            compiler=raw.get("compiler", "none"),
            cuda_graphs=raw.get("cuda_graphs", False),
            worlds=tuple(raw.get("worlds", ())),
            machines=Machines.of(raw["machines"]) if raw.get("machines") else None,
        )

    def load_pipeline(self) -> ModuleType:
        """The module of pipeline.py. Raises RuntimeProgramError when it is not there."""
        return module_of(self.directory / self.pipeline, "autopar_pipeline")

    def load_buckets(self) -> Iterator[tuple[Path, ModuleType]]:
        """The folder and the module of pipeline.py for every other shape of batch. Raises RuntimeProgramError."""
        for i, bucket in enumerate(self.buckets):
            path = self.directory / bucket["pipeline"]
            yield path.parent, module_of(path, f"autopar_pipeline_of_bucket_{i + 1}")

    def show(self) -> str:
        """`dp=2 × tp=2`, or `2 stages: dp=2 | dp=2`."""
        return show_meshes([stage["mesh"] for stage in self.load_pipeline().STAGES])

    def update_rule(self) -> UpdateRule:
        """How parameters follow from gradients; nothing without `update`. Raises RuntimeProgramError."""
        row = self.update if self.training else None
        if row is None:
            return UpdateRule()
        clip = dict(row.get("clip_norm") or {})
        if "norm_type" in clip:
            clip["norm_type"] = math.inf if clip["norm_type"] == "inf" else clip["norm_type"]
        optimizer, scheduler = self._factory(row.get("optimizer")), self._factory(row.get("scheduler"))
        _try(optimizer, scheduler)
        return UpdateRule(
            optimizer=optimizer,
            scheduler=scheduler,
            clip_norm=ClipNorm(**clip) if clip else None,
            clip_value=row.get("clip_value"),
            loss_scaling=LossScaling(**row["loss_scaling"]) if row.get("loss_scaling") else None,
            compensated=row.get("compensated", False),
        )

    def _factory(self, row: Mapping[str, Any] | None) -> functools.partial[Any] | None:
        """A class or function by module and name, with its keyword arguments."""
        if row is None:
            return None
        module, name = row["module"], row["name"]
        by_torch = _is_of(module, "torch.optim")
        if not by_torch and not any(_is_of(module, known) for known in self._imported()):
            raise RuntimeProgramError(
                f"{self.directory / 'manifest.json'} names {name} of module {module} to train with, which is neither of "
                f"torch.optim nor of a module that the file that is run imports; write `import {module}` into that file (or "
                f"into {self.directory / 'run.py'}) if it is yours"
            )
        try:
            kind = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise RuntimeProgramError(
                f"{name} of module {module}, which this program trains with, cannot be imported here ({error}); "
                "install it, or put it on PYTHONPATH"
            ) from error
        if not (callable(kind) and (not by_torch or _is_torch_class(kind))):
            raise RuntimeProgramError(
                f"{name} of module {module} makes no optimizer and no scheduler; emit the program again"
            )
        return functools.partial(kind, **row.get("kwargs", {}))

    def _imported(self) -> Iterator[str]:
        """Names of the modules that run.py and the running script import. Those of Python make no optimizers, and of torch
        only torch.optim does."""
        others = sys.stdlib_module_names | {"torch", "__main__"}
        for name in (*_imports_of(self.directory / "run.py"), *_imports_of_main()):
            if name.partition(".")[0] not in others:
                yield name


def tuned(directory: Path) -> Path | None:
    """The candidate whose program is to run instead of the directory's own: the one that `autopar-tune` measured to be the
    fastest. Raises RuntimeProgramError where that file is damaged."""
    path = directory / TUNED
    try:
        folder = _TUNED(read_json(path), "")["folder"]
    except FileNotFoundError:
        return None
    except (OSError, SchemaError) as error:
        raise RuntimeProgramError(f"{path} is damaged ({error}); delete it, or run autopar-tune again") from error
    return None if folder is None else directory / folder


def world_folder(ranks: int) -> str:
    """The folder of the program for another number of ranks."""
    return f"{WORLDS}/{ranks}"


def factory_modules(rule: UpdateRule) -> list[str]:
    """The modules that a program has to import for its update rule."""
    modules = []
    for factory in (rule.optimizer, rule.scheduler):
        while isinstance(factory, functools.partial):
            factory = factory.func
        module = getattr(factory, "__module__", None)
        if factory is not None and isinstance(module, str) and not _is_of(module, "torch.optim"):
            modules.append(module)
    return sorted(set(modules))


def _is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _is_torch_class(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler)


def _imports_of(path: Path) -> Iterator[str]:
    """Modules that a source file imports, read and not run."""
    try:
        tree = ast.parse(read_text(path, 1 << 20))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _imports_of_main() -> Iterator[str]:
    """Modules that the running script has imported, or has something of."""
    for value in list(vars(sys.modules["__main__"]).values()):
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str):
            yield name


def _try(optimizer: functools.partial[Any] | None, scheduler: functools.partial[Any] | None) -> None:
    """Make those of torch once, for a parameter of nobody. Raises RuntimeProgramError where their arguments are wrong."""
    if optimizer is None or not _is_torch_class(optimizer.func):
        return
    try:
        one = optimizer([torch.nn.Parameter(torch.zeros(2, 2))])
        if scheduler is not None and _is_torch_class(scheduler.func):
            scheduler(one)
    except Exception as error:
        raise RuntimeProgramError(
            f"the manifest's optimizer {optimizer.func.__name__} with {json.dumps(optimizer.keywords)[:200]} and its "
            f"scheduler cannot be made: {error}"
        ) from error
