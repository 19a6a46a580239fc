"""manifest.json of an emitted directory: what its run.py needs to know, read as data.

It names files of its own directory, and what makes optimizers and schedulers (factories.py). The compiler writes it from the
same fields (`autopar.codegen.directory`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from ..comm.mesh import sizes_of
from ..data.datafile import path_inside, read_json
from ..data.fields import Length, from_data, kept
from ..data.schema import MOST_RANKS, MOST_TEXT, SchemaError, integer, is_identifier, optional, record, where
from ..data.whole_files import current
from ..errors import RuntimeProgramError
from ..update.averaging import Averaging
from ..update.update_rule import UpdateRule
from .batches import BatchInput, is_plain, module_of
from .factories import NamedFactory, NamedRule
from .machines import Machines
from .run_options import DEFAULTS, RunOptions, Seed
from .tables import show_meshes

MOST_BUCKETS = 256
MOST_ENTRIES = 16
MOST_WORLDS = 256
MOST_SLOWER = 256
TUNED = "tuned.json"
WORLDS = "worlds"
SLOWER = "slower"
_TUNED = record({"folder": optional(path_inside)}, others=True)
_NAME = where(lambda name: isinstance(name, str) and len(name) <= MOST_TEXT, f"text of at most {MOST_TEXT} characters")
Name = Annotated[str, _NAME]
EntryName = Annotated[str, where(is_identifier, "a name that could be a variable's")]
Fixed = Annotated[Mapping[Name, Annotated[Any, where(is_plain, "a flag, a number, a text or null")]], Length(most=1024)]
PathInside = Annotated[str, path_inside]
Ranks = Annotated[int, integer(1, MOST_RANKS)]
SPARSE = kept(sparse=True)


@dataclass(frozen=True)
class BucketFiles:
    """Where the program lies for batches of another shape."""

    pipeline: PathInside
    inputs: tuple[BatchInput, ...]


@dataclass(frozen=True)
class EntryFiles:
    """Where the program lies for another step over the parameters. has_loss: its outputs begin with its loss; fixed: as of the
    manifest."""

    pipeline: PathInside
    inputs: tuple[BatchInput, ...]
    has_loss: bool
    buckets: Annotated[tuple[BucketFiles, ...], Length(most=MOST_BUCKETS)] = field(default=(), metadata=SPARSE)
    pad_values: Annotated[Mapping[str, float], Length(most=1024)] = field(
        default_factory=dict, metadata=kept(beside="buckets")
    )
    training: bool = field(default=False, metadata=SPARSE)
    update: NamedRule | None = field(default=None, metadata=SPARSE)
    averaging: Averaging | None = field(default=None, metadata=SPARSE)
    fixed: Fixed = field(default_factory=dict, metadata=SPARSE)


@dataclass(frozen=True)
class Manifest:
    """manifest.json of an emitted directory. state_names: the names of every parameter and buffer in the model's own state
    dict, none for what is not in it; constants: the folder with the values of the latter; home: where folders of weights
    lie, which is not the directory where that is one of several candidates (`tuned`), or the program for another number of
    ranks, or under a plan for slower machines; worlds: such numbers, beside that of the program at home; slower: how many such
    plans there are. idle: ranks that are started beside those of the plan, which is faster without them; entries: other steps
    over the same parameters, by name; fixed: what a batch has beside tensors, and the defaults of what it leaves out, by name."""

    directory: Path = field(metadata=kept(absent=True))
    world_size: Ranks
    pipeline: PathInside
    training: bool
    update: NamedRule | None = None
    seed: Seed = 0
    weights: PathInside | None = None
    state_names: Mapping[Name, tuple[Name, ...]] = field(default_factory=dict)
    constants: PathInside | None = None
    inputs: tuple[BatchInput, ...] = field(default=(), metadata=kept(required=True))
    placement: tuple[Annotated[int, integer(0, MOST_RANKS)], ...] | None = None
    save_every: Annotated[int, integer(1, 1 << 53)] | None = None
    options: RunOptions = field(default=DEFAULTS, metadata=kept(inline=True))
    machines: Machines | None = None
    worlds: Annotated[tuple[Ranks, ...], Length(most=MOST_WORLDS)] = field(default=(), metadata=SPARSE)
    slower: Annotated[int, integer(0, MOST_SLOWER)] = field(default=0, metadata=SPARSE)
    idle: Annotated[int, integer(0, MOST_RANKS)] = field(default=0, metadata=SPARSE)
    buckets: Annotated[tuple[BucketFiles, ...], Length(most=MOST_BUCKETS)] = field(default=(), metadata=SPARSE)
    pad_values: Annotated[Mapping[str, float], Length(most=1024)] = field(
        default_factory=dict, metadata=kept(beside="buckets")
    )
    entries: Annotated[Mapping[EntryName, EntryFiles], Length(most=MOST_ENTRIES)] = field(
        default_factory=dict, metadata=SPARSE
    )
    fixed: Fixed = field(default_factory=dict, metadata=SPARSE)
    home: Path | None = field(default=None, metadata=kept(absent=True))

    def as_read(self, path: str) -> Manifest:
        """The manifest as a file has it. Raises SchemaError where its placement does not name every rank once."""
        if self.placement and sorted(self.placement) != list(range(self.world_size)):
            raise SchemaError(f"the placement {list(self.placement)[:16]} does not name every rank once")
        return self

    @classmethod
    def read(cls, directory: str | Path) -> Manifest:
        """The manifest of the directory, or of the candidate that was found to be the fastest of its programs. Raises
        RuntimeProgramError where there is none, or something in it is not as it may be."""
        home = current(Path(directory))
        own, folder = cls._of(home), tuned(home)
        return own if folder is None else replace(own._beside(folder), slower=own.slower)

    def for_ranks(self, ranks: int) -> Manifest:
        """The manifest of the program for so many ranks, one of `worlds`. Raises RuntimeProgramError."""
        other = self._beside((self.home or self.directory) / world_folder(ranks))
        if other.started != ranks:
            raise RuntimeProgramError(f"{other.directory} holds a program for {other.started} ranks; emit it again")
        return other

    def under(self, place: int) -> Manifest:
        """The manifest of the plan for slower machines that was written in this place, counted from 1. Raises
        RuntimeProgramError."""
        return replace(self._beside((self.home or self.directory) / slower_folder(place)), slower=self.slower)

    def _beside(self, folder: Path) -> Manifest:
        """The manifest of a program that takes its weights from the same home."""
        home = self.home or self.directory
        return replace(self._of(folder), weights=self.weights, constants=self.constants, home=home, worlds=self.worlds)

    @property
    def started(self) -> int:
        """How many ranks are started: those of the plan, and those that it leaves idle."""
        return self.world_size + self.idle

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
            return from_data(cls, read_json(path), directory=directory)
        except FileNotFoundError as error:
            raise RuntimeProgramError(f"{path} is missing: is {directory} a directory that autopar wrote?") from error
        except OSError as error:
            raise RuntimeProgramError(f"{path} cannot be read: {error.strerror}") from error
        except SchemaError as error:
            raise RuntimeProgramError(f"{path} is damaged: {error}; emit it again") from error

    def load_pipeline(self) -> ModuleType:
        """The module of pipeline.py. Raises RuntimeProgramError when it is not there."""
        return module_of(self.directory / self.pipeline, "autopar_pipeline")

    def load_forms(self, entry: str = "") -> Iterator[tuple[Path, ModuleType]]:
        """The folder and the module of pipeline.py for every shape of batch of an entry, of the program's own step but the first.
        Raises RuntimeProgramError."""
        files = self.entries[entry] if entry else self
        named = "".join(f"_of_{part}" for part in (entry, "bucket") if part)
        for i, form in enumerate(files.buckets if not entry else (files, *files.buckets)):
            path = self.directory / form.pipeline
            yield path.parent, module_of(path, f"autopar_pipeline{named}_{i + 1}")

    def show(self) -> str:
        """`dp=2 × tp=2`, or `2 stages: dp=2 | dp=2`."""
        return show_meshes([sizes_of(stage["mesh"]) for stage in self.load_pipeline().STAGES])

    def update_rule(self, entry: str = "") -> UpdateRule:
        """How parameters follow from gradients in an entry; nothing without `update`. Raises RuntimeProgramError."""
        of = self.entries[entry] if entry else self
        return of.update.imported(self.directory) if of.training and of.update is not None else UpdateRule()

    @property
    def factories(self) -> tuple[NamedFactory, ...]:
        """All that makes optimizers and schedulers."""
        rules = (self.update, *(entry.update for entry in self.entries.values()))
        return tuple(factory for rule in rules if rule is not None for factory in rule.factories)


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


def slower_folder(place: int) -> str:
    """The folder of a plan for slower machines, counted from 1."""
    return f"{SLOWER}/{place}"


def world_folder(ranks: int) -> str:
    """The folder of the program for another number of ranks."""
    return f"{WORLDS}/{ranks}"
