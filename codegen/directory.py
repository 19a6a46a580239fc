"""The emitted directory: files out.

plan.json            the plan, replayable and hand-editable
pipeline.py          stages, what travels between them, and what every group of ranks does in a step
program.json         facts for `autopar-dump` (mesh, collectives, storage, predictions)
manifest.json        what run.py needs to know
stages/stage_0.py    the code; ranks that are alike share it
ranks/rank_0.py …    one short file per rank: its coordinates and its stages
user_factories.py    functions of the user's script that make the optimizer, where there are any
autopar_runtime/     of the small runtime, torch only, the modules that the program needs
run.py               torchrun entry; launch.sh, slurm.sh and kubernetes.yaml start it on machines
weights/             the model's weights (torch.distributed.checkpoint); where they are on meta, what no state dict holds
buckets/1/ …         plan.json, pipeline.py and stages for batches of other shapes, where there are any
entries/NAME/ …      the same for other steps over the parameters, with buckets of their own
candidates/1/ …      the program under other plans, each a directory like this one without weights, for autopar-tune
tuned.json           which of them it found to be the fastest; run.py runs that one
worlds/2/ …          the program for other numbers of ranks, likewise; run.py runs that of the number it finds
slower/1/ …          the program under plans for slower machines, likewise; a run goes on under one where machines are slow
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from autopar.capture.examples.trees import flatten
from autopar.codegen.factories import factories_source, named_rule
from autopar.codegen.owned_files import FACTS, WEIGHTS, digest, facts_text, settle, to_replace
from autopar.codegen.stage import render
from autopar.codegen.travelling import runtime_files
from autopar.codegen.user_ops import used_ops, user_ops_source
from autopar.errors import EmitError
from autopar.ir.lowered import LoweredProgram
from autopar.plan import Plan
from autopar.runtime.data.fields import from_data, to_data
from autopar.runtime.data.schema import SchemaError
from autopar.runtime.data.whole_files import begin, commit, give_up, partial
from autopar.runtime.errors import CheckpointError
from autopar.runtime.program.batches import BatchInput, Plain
from autopar.runtime.program.factories import USER_FACTORIES, factory_modules
from autopar.runtime.program.machines import Machines
from autopar.runtime.program.manifest import (
    SLOWER,
    TUNED,
    WORLDS,
    BucketFiles,
    EntryFiles,
    Manifest,
    slower_folder,
    world_folder,
)
from autopar.runtime.program.run_options import DEFAULTS, RunOptions
from autopar.runtime.update.averaging import Averaging
from autopar.runtime.update.update_rule import UpdateRule

MOST_RANK_FILES = 1024
CANDIDATES = "candidates"
LAUNCHERS = ("run.py", "launch.sh", "slurm.sh", "kubernetes.yaml")


@dataclass(frozen=True, eq=False)
class FormContents:
    """The part of a program's directory that serves another step, or batches of another shape."""

    plan: Plan
    lowered: LoweredProgram
    sources: tuple[str, ...]
    pipeline: str
    inputs: Any


@dataclass(frozen=True, eq=False)
class EntryContents:
    """The part that serves another step. buckets: batches of other shapes of it; has_loss: whether its outputs begin with one;
    update: of one that trains; averaging: of one that computes with averages; fixed: as of `Contents`."""

    form: FormContents
    buckets: tuple[FormContents, ...]
    pad_values: Mapping[str, float]
    has_loss: bool
    update: UpdateRule | None = None
    averaging: Averaging | None = None
    fixed: Mapping[str, Plain] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Contents:
    """A directory's contents. sources: of the stages; pipeline: text of pipeline.py. update: None for inference. weights: by
    table name, on the meta device where there are none; state_names: what the same are called in the model's own state
    dict. inputs: a global batch. ranks_per_node: of the cluster. facts: of program.json. buckets: batches of other shapes,
    and pad_values what inputs are padded with up to them. options: those that reach run time. idle: ranks that the plan leaves
    idle. entries: other steps. fixed: what a batch has beside tensors, and the defaults of what it leaves out, by name."""

    plan: Plan
    lowered: LoweredProgram
    sources: tuple[str, ...]
    pipeline: str
    update: UpdateRule | None
    seed: int
    weights: Mapping[str, torch.Tensor]
    state_names: Mapping[str, tuple[str, ...]]
    inputs: Any
    ranks_per_node: int
    facts: Mapping[str, Any]
    buckets: tuple[FormContents, ...] = ()
    pad_values: Mapping[str, float] = field(default_factory=dict)
    options: RunOptions = DEFAULTS
    idle: int = 0
    entries: Mapping[str, EntryContents] = field(default_factory=dict)
    fixed: Mapping[str, Plain] = field(default_factory=dict)

    @property
    def forms(self) -> dict[str, FormContents]:
        """Every other step and shape, by its folder."""
        forms = {bucket_folder(i): bucket for i, bucket in enumerate(self.buckets)}
        for name, entry in self.entries.items():
            folder = entry_folder(name)
            forms[folder] = entry.form
            forms |= {f"{folder}/{bucket_folder(i)}": bucket for i, bucket in enumerate(entry.buckets)}
        return forms

    @property
    def started(self) -> int:
        """How many ranks are started."""
        return self.plan.ranks + self.idle


def write_directory(
    contents: Contents,
    directory: Path,
    candidates: Sequence[Contents] = (),
    worlds: Sequence[Contents] = (),
    slower: Sequence[Contents] = (),
) -> Path:
    """Write everything; returns the directory. candidates: the program under other plans; worlds: for other numbers of ranks;
    slower: under plans for slower machines.

    Whatever ends this, the directory holds the program that was there before, or the new one
    (autopar/runtime/data/whole_files.py). Raises EmitError when a part cannot be written, and, before anything is touched,
    where a file is in the way that autopar did not write.
    """
    beside = {candidate_folder(n): one for n, one in enumerate(candidates)}
    beside |= {world_folder(one.started): one for one in worlds}
    beside |= {slower_folder(place): one for place, one in enumerate(slower, 1)}
    try:
        settle(directory, contents.plan)
        programs = {".": _program(contents, [one.started for one in worlds], len(slower))}
        programs |= {
            folder: _program(replace(one, weights={n: w.to("meta") for n, w in one.weights.items()}))
            for folder, one in beside.items()
        }
        travelling = runtime_files([program.files for program in programs.values()])  # run.py of one may run another
        programs = {folder: replace(one, files={**one.files, **travelling}) for folder, one in programs.items()}
        gone = list(_going(directory, programs, contents.plan))
        for folder, program in programs.items():
            _write(program, begin(directory) if folder == "." else partial(directory) / folder)
        last = [f"{folder}/{name}".removeprefix("./") for folder in programs for name in ("manifest.json", FACTS)]
        commit(directory, last, gone)
    except (OSError, SchemaError, CheckpointError) as error:
        with suppress(OSError):  # the error that is told says what the directory lacks
            give_up(directory)
        said = getattr(error, "strerror", None) or error
        raise EmitError(f"cannot write to {directory}: {said}; save to another directory") from error
    return directory


@dataclass(frozen=True, eq=False)
class _Program:
    """The files of one program. files: by name; weights: of the folder of weights, if there is one."""

    contents: Contents
    files: Mapping[str, bytes]
    weights: Mapping[str, torch.Tensor] | None


def _going(directory: Path, programs: Mapping[str, _Program], plan: Plan) -> Iterator[str]:
    """Files of earlier programs that are deleted before those of these are put in place: what none of these has, and what leads
    to the others, so that nobody finds a mixture. plan: of the program at home. Raises EmitError where a file is in the way."""
    old = {f"{kind}/{path.name}" for kind in (CANDIDATES, WORLDS, SLOWER) for path in (directory / kind).glob("*")}
    for folder, program in [*programs.items(), *((folder, None) for folder in sorted(old - programs.keys()))]:
        coming = [*program.files, FACTS] if program is not None else []
        present = to_replace(directory / folder, coming, program.contents.plan if program is not None else plan)
        if program is not None and program.weights is not None:
            coming += [name for name in present if name.startswith(f"{WEIGHTS}/")]
        for name in sorted(present, reverse=True):  # .metadata, by which weights are known, after them
            if name not in coming or name in ("manifest.json", "plan.json"):
                yield f"{folder}/{name}".removeprefix("./")
    if (directory / TUNED).exists():
        yield TUNED


def _program(contents: Contents, worlds: Sequence[int] = (), slower: int = 0) -> _Program:
    """One program's own files. worlds: other numbers of ranks that it is written for; slower: plans for slower machines."""
    constants = {name: w for name, w in contents.weights.items() if not contents.state_names[name]}
    complete, known = (not any(w.is_meta for w in some.values()) for some in (contents.weights, constants))
    written = contents.weights if complete else constants if known else {}
    manifest = Manifest(
        Path(),
        world_size=contents.plan.ranks,
        pipeline="pipeline.py",
        training=contents.update is not None,
        update=named_rule(contents.update),
        seed=contents.seed,
        weights=WEIGHTS if complete else None,
        state_names=contents.state_names,
        constants=WEIGHTS if constants and known else None,
        inputs=_inputs(contents.inputs),
        placement=contents.plan.placement or None,
        save_every=(contents.facts["long_run"] or {}).get("save_every"),
        options=contents.options,
        machines=from_data(Machines, contents.facts["machines"]),
        worlds=tuple(sorted(worlds)),
        slower=slower,
        idle=contents.idle,
        buckets=_buckets(contents.buckets),
        pad_values=contents.pad_values,
        fixed=contents.fixed,
        entries={
            name: EntryFiles(
                f"{entry_folder(name)}/pipeline.py",
                _inputs(entry.form.inputs),
                entry.has_loss,
                _buckets(entry.buckets, f"{entry_folder(name)}/"),
                entry.pad_values,
                entry.update is not None,
                named_rule(entry.update, name),
                entry.averaging,
                entry.fixed,
            )
            for name, entry in contents.entries.items()
        },
    )
    text = json.dumps(to_data(manifest), indent=1, allow_nan=False) + "\n"
    texts = {**_texts(contents, worlds), "manifest.json": text}
    files = {name: content.encode() for name, content in texts.items()}
    return _Program(contents, files, written if manifest.weights or manifest.constants else None)


def _write(program: _Program, folder: Path) -> None:
    """Write a program's files. Raises OSError, CheckpointError."""
    for name, content in program.files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content)
    (folder / "launch.sh").chmod(0o755)
    hashes = {name: digest(content) for name, content in program.files.items()}
    if program.weights is not None:
        hashes |= _write_weights(program.weights, folder)
    (folder / FACTS).write_text(facts_text(program.contents.facts, hashes))


def _texts(contents: Contents, worlds: Sequence[int]) -> dict[str, str]:
    """The files that are generated, by name. worlds: other numbers of ranks."""
    lowered, ranks = contents.lowered, contents.started
    texts = {"plan.json": contents.plan.to_json(), "pipeline.py": contents.pipeline}
    texts |= {f"stages/stage_{i}.py": source for i, source in enumerate(contents.sources)}
    for folder, form in contents.forms.items():
        texts |= {f"{folder}/plan.json": form.plan.to_json(), f"{folder}/pipeline.py": form.pipeline}
        texts |= {f"{folder}/stages/stage_{k}.py": source for k, source in enumerate(form.sources)}
    for rank, place in _places(lowered):
        if rank < MOST_RANK_FILES:
            texts[f"ranks/rank_{rank}.py"] = render("rank.py.j2", rank=rank, **place)
    names = sorted(
        {name for one in (lowered, *(form.lowered for form in contents.forms.values())) for name in used_ops(one)}
    )
    if names:
        texts["user_ops.py"] = user_ops_source(names)
    per_node, gpus = min(contents.ranks_per_node, ranks), contents.facts["machines"]["gpu"]
    own_rules = {"": contents.update, **{name: entry.update for name, entry in contents.entries.items()}}
    if factories := factories_source(own_rules):
        texts[f"{USER_FACTORIES}.py"] = factories
    rules = [rule for rule in own_rules.values() if rule is not None]
    modules = sorted({module for rule in rules for module in factory_modules(rule)})
    sizes = (ranks, *worlds)
    least, nodes, most = (max(size // per_node, 1) for size in (min(sizes), ranks, max(sizes)))
    values = {"ranks": ranks, "nodes": nodes, "per_node": per_node, "gpus": gpus, "modules": modules}
    texts |= {name: render(f"{name}.j2", **values, least=least, most=most) for name in LAUNCHERS}
    return texts


def candidate_folder(place: int) -> str:
    """The folder of the program under another plan."""
    return f"{CANDIDATES}/{place + 1}"


def bucket_folder(place: int) -> str:
    """The folder of the files of a bucket."""
    return f"buckets/{place + 1}"


def entry_folder(name: str) -> str:
    """The folder of the files of another step."""
    return f"entries/{name}"


def _buckets(buckets: Sequence[FormContents], folder: str = "") -> tuple[BucketFiles, ...]:
    """The rows of a manifest for other shapes. folder: of the step whose they are."""
    return tuple(
        BucketFiles(f"{folder}{bucket_folder(i)}/pipeline.py", _inputs(one.inputs)) for i, one in enumerate(buckets)
    )


def _places(lowered: LoweredProgram) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every rank with its group, stages and mesh coordinates (per stage where there are several)."""
    for group, stages in enumerate(lowered.graph.groups):
        meshes = [lowered.stages[s].mesh for s in stages]
        for rank in range(meshes[0].offset, meshes[0].offset + meshes[0].size):
            coordinates = [{axis: mesh.coordinate(rank)[axis] for axis in mesh.names} for mesh in meshes]
            yield (
                rank,
                {
                    "group": group,
                    "stages": list(stages),
                    "coordinates": coordinates[0] if len(coordinates) == 1 else coordinates,
                },
            )


def _write_weights(weights: Mapping[str, torch.Tensor], directory: Path) -> dict[str, str]:
    """Write the folder of the weights; its files for the manifest's list."""
    from autopar.runtime.checkpoint.checkpoint import write_full  # takes as long to import as all of autopar

    folder = directory / WEIGHTS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_full(folder, {name: w.detach().cpu() for name, w in weights.items()})
    return {f"{WEIGHTS}/{p.name}": digest(p.read_bytes()) if p.name == ".metadata" else "" for p in folder.iterdir()}


def _inputs(batch: Any) -> tuple[BatchInput, ...]:
    """Global-batch shape of every input, and for integers the largest safe random value."""
    leaves, names, _ = flatten(batch)
    rows = []
    for leaf, name in zip(leaves, names, strict=True):
        high = None
        if not leaf.dtype.is_floating_point:
            has_values = leaf.device.type != "meta" and type(leaf) is torch.Tensor and leaf.numel()
            high = max(int(leaf.max()) + 1, 1) if has_values else 2
        dtype = str(leaf.dtype).removeprefix("torch.")
        rows.append(BatchInput(name=name, shape=tuple(leaf.shape), dtype=dtype, high=high))
    return tuple(rows)
