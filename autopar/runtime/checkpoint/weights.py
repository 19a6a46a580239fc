"""Weights in: from a checkpoint, or from a directory of safetensors as Hugging Face's libraries write them.

The directory holds what the model's own state dict names: a tied tensor under any of its names, no buffers that are not
persistent; those are as they were when the model was compiled. Every rank reads the bytes of its own shards.

A file's floats may have another width than the program's: they are rounded or widened as
`from_pretrained(…, dtype=…)` does with the program's dtype. Other dtypes must be the program's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..comm.text_exchange import one_line
from ..data.datafile import path_inside, read_json
from ..data.safetensors import StoredTensor, read_header, read_part
from ..data.schema import SchemaError, anything, paragraph, record, table, text
from ..data.whole_files import COMPLETE, current, problem_of, read_record, share_of
from ..errors import CheckpointError
from ..program.layout import TensorInfo
from ..program.manifest import Manifest
from ..step.session import Session
from .checkpoint import load, read_full
from .checkpoint_reader import METADATA
from .run_directory import newest_step_said

SUFFIX = ".safetensors"
INDEX = f"{SUFFIX}.index.json"
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INDEX = record({"weight_map": table(text(), path_inside)}, {"metadata": anything}, others=True)


def load_weights(directory: str | Path, session: Session, manifest: Manifest) -> None:
    """Fill parameters and buffers from a checkpoint or a directory of safetensors; every rank calls it. A checkpoint's step,
    optimizer and schedule stay out of it, which `checkpoint.load` takes too. Raises CheckpointError."""
    folder = current(Path(directory))
    if (folder / METADATA).exists():
        load(directory, session, weights_alone=True)
        return
    wanted = {
        name: info
        for form in session.forms
        for stage in form.pipeline.stages
        for tables in (form.pipeline.tables(stage),)
        for name, info in (tables.parameters | tables.buffers).items()
    }
    names = {name: manifest.state_names.get(name, (name,)) for name in wanted}
    sources, problem = dict[str, dict[str, StoredTensor]](), ""
    try:
        sources = matched(folder, stored_tensors(folder), wanted, names)
        problem = _damage(
            folder, {stored.path.name for rows in sources.values() for stored in rows.values()}, session.comm
        )
    except CheckpointError as error:
        problem = str(error)
    problem = next((said for said in session.comm.share(one_line(problem), paragraph()) if said), "")
    if problem:
        raise CheckpointError(problem)
    constants = _constants(folder, session, manifest, [name for name in wanted if not names[name]])

    def part(name: str, slices: tuple[slice, ...]) -> Tensor:
        if name in constants:
            return constants[name][slices]
        try:
            first, *others = [read_part(stored, slices) for stored in sources[name].values()]
        except (OSError, SchemaError) as error:
            raise CheckpointError(f"{folder}: {name} cannot be read: {error}") from error
        for also, other in zip(list(sources[name])[1:], others, strict=True):
            if not torch.equal(_bits(first), _bits(other)):
                raise CheckpointError(
                    f"{folder}: {next(iter(sources[name]))} and {also} are one tensor in this model, and differ in the "
                    "files; tie them there, or untie them in the model and compile it again"
                )
        return first

    session.load_weights(part)


def _damage(folder: Path, names: set[str], comm: Comm) -> str:
    """A text of what is wrong with the files that a record, as autopar-export writes it, says something of; this rank
    checks a part. Raises CheckpointError."""
    if not (folder / COMPLETE).exists():
        return ""
    try:
        files = read_record(folder)["files"]
    except (OSError, SchemaError) as error:
        raise CheckpointError(f"{folder / COMPLETE} is damaged: {error}; export again") from error
    known = {name: facts for name, facts in files.items() if name in names or name.endswith(INDEX)}
    problem = problem_of(folder, known, share_of(known, comm.rank, comm.world_size))
    return problem and (
        f"{folder} is damaged: {problem}; export again (or delete {COMPLETE}, if somebody changed the files since on purpose)"
    )


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors in the files of a directory, by name: those that its index names, else those of its only file. Raises
    CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no directory; give a checkpoint, or a directory of {SUFFIX} files")
    indices, singles = sorted(folder.glob(f"*{INDEX}")), sorted(folder.glob(f"*{SUFFIX}"))
    if not indices and not singles:
        if newest := newest_step_said(folder):
            raise CheckpointError(f"{folder} is no checkpoint directory{newest}")
        raise CheckpointError(
            f"{folder} is no checkpoint directory (it has no .metadata) and holds no {SUFFIX}; other files of weights, such "
            "as pytorch_model.bin, are pickles, which are programs: read them with what wrote them, and save safetensors"
        )
    if not indices:
        plain = folder / f"model{SUFFIX}"
        return _header_of(_only(folder, [plain] if plain in singles else singles))
    index = _only(folder, indices)
    try:
        files = _INDEX(read_json(index), "")["weight_map"]
    except (OSError, SchemaError) as error:
        raise CheckpointError(f"{folder}: the index of the files is not to be read: {error}") from error
    alone = index.with_name(index.name.removesuffix(INDEX) + SUFFIX)
    if alone in singles and alone.name not in files.values():
        _only(folder, [index, alone])
    tensors: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(files.values()):
        held = _header_of(folder / file)
        astray = [name for name in held if files.get(name) != file]
        astray += [name for name, said in files.items() if said == file and name not in held]
        if astray:
            raise CheckpointError(f"{folder}: the index and {file} do not agree on where {_some(astray)} lies")
        tensors |= held
    return tensors


def _only(folder: Path, paths: Sequence[Path]) -> Path:
    """The only one of some files. Raises CheckpointError where there are several."""
    if len(paths) > 1:
        raise CheckpointError(
            f"{folder} holds {_some([path.name for path in paths])}, and which of them are the model's weights is not "
            "clear; move the others away"
        )
    return paths[0]


def _header_of(path: Path) -> dict[str, StoredTensor]:
    try:
        return read_header(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except SchemaError as error:
        raise CheckpointError(f"{path} is damaged, or no file of safetensors: {error}") from error


def matched(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    wanted: Mapping[str, TensorInfo],
    names: Mapping[str, tuple[str, ...]],
) -> dict[str, dict[str, StoredTensor]]:
    """Where each tensor of the program lies, under which of its names. names: in the model's state dict; none for what is
    in no file. Raises CheckpointError where files and program differ in names, shapes or kinds of numbers."""
    sources = {name: {one: stored[one] for one in names[name] if one in stored} for name in wanted if names[name]}
    missing = [names[name][0] for name, found in sources.items() if not found]
    known = {one for every in names.values() for one in every}
    unexpected = [name for name in stored if name not in known]
    if missing or unexpected:
        said = [f"no {_some(missing)}"] if missing else []
        said += [f"{_some(unexpected)}, which the program does not have"] if unexpected else []
        raise CheckpointError(f"{folder} holds {'; and '.join(said)}; {_advice(missing, unexpected)}")
    for name, found in sources.items():
        for also, one in found.items():
            _check_kind(f"{folder}: {also}", one, wanted[name])
    return sources


def _check_kind(what: str, stored: StoredTensor, info: TensorInfo) -> None:
    if stored.shape != info.shape:
        raise CheckpointError(f"{what} has shape {stored.shape}, the program has {info.shape}")
    if stored.dtype != info.dtype and not {stored.dtype, info.dtype} <= FLOATS:
        raise CheckpointError(
            f"{what} has dtype {stored.dtype}, the program has {info.dtype}; only floats of 16, 32 and 64 bits are converted"
        )


def _advice(missing: list[str], unexpected: list[str]) -> str:
    """A text of what may be done about names that do not meet."""
    if any(".base_layer." in name or ".lora_" in name for name in missing):
        return (
            "the program's model has adapters (PEFT): give it the base weights before it is compiled, so that the program "
            "holds them with the adapters"
        )
    prefix = next((said for one in unexpected for said in _prefix(missing[:1], one)), "")
    return (
        f"the names must be those of the model's own state_dict(){prefix}; what transformers renames or joins while it "
        "loads, from_pretrained brings into the model before that is compiled"
    )


def _prefix(missing: list[str], unexpected: str) -> Iterator[str]:
    """A text of what one name has before the other, if that is all that is different."""
    for name in missing:
        if name.endswith(f".{unexpected}"):
            yield f", and these lack {name.removesuffix(unexpected)!r}"
        elif unexpected.endswith(f".{name}"):
            yield f", and these start with {unexpected.removesuffix(name)!r}"


def _constants(folder: Path, session: Session, manifest: Manifest, names: list[str]) -> dict[str, Tensor]:
    """The values that this rank stores and no file of weights has. names: of all ranks. Raises CheckpointError where
    the program came without them."""
    if not names:
        return {}
    if manifest.constants_folder is None:
        raise CheckpointError(
            f"{folder} has no {_some(names)}: no directory of safetensors holds buffers that are not persistent, and the "
            "program has no values of them either, since they were on the meta device when it was compiled; compile with "
            "the parameters alone on meta (as accelerate's init_empty_weights has them), or give a checkpoint of all"
        )
    own = {info.name for form in session.forms for stage in form.stages.values() for info, _ in stage.stored()}
    return read_full(manifest.constants_folder, [name for name in names if name in own], session.comm)


def _bits(part: Tensor) -> Tensor:
    return part.reshape(-1).view(torch.uint8)


def _some(names: list[str]) -> str:
    """Up to five names, and how many there are."""
    return ", ".join(names[:5]) + (f", … ({len(names)} in all)" if len(names) > 5 else "")
