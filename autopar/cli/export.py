"""`autopar export OUT CHECKPOINT HF_DIR`: a checkpoint as safetensors, which `from_pretrained(HF_DIR)` loads; and
`autopar export OUT --plan FORMAT [PATH]`: the plan in the words of another system, as `program.export` writes it.

OUT is the emitted program that wrote CHECKPOINT with `run.py --save`; its manifest says what the model's own state dict
holds, and under which names. Of a tied tensor one name is written, as `save_pretrained` does. Tensors are read and
written one after another, so that memory holds one of them at a time. Files that were damaged since they were saved are named;
those that are written get their names when all are whole, with a record of their hashes beside them, complete.json.
Configuration and tokenizer are the user's: `--config` copies a config.json.

What an exported plan costs needs the model, which is not in OUT: `autopar price` says it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from autopar.cli.command import Commands, add, alone
from autopar.cli.saved import read_exchangeable
from autopar.cli.terminal import show
from autopar.errors import InputError
from autopar.exchange.exported import Exported, write_plan
from autopar.exchange.formats import FORMATS
from autopar.ir.text import size_text
from autopar.runtime.checkpoint.checkpoint import TensorSource
from autopar.runtime.checkpoint.weights import FLOATS, INDEX, SUFFIX
from autopar.runtime.data.safetensors import DTYPES, file_order, header, tensor_bytes
from autopar.runtime.data.schema import shown
from autopar.runtime.data.whole_files import begin, commit, file_facts, finish, give_up, write_record
from autopar.runtime.program.manifest import Manifest

Kind = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and the shape of a tensor."""
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FLOATS = {str(dtype).removeprefix("torch."): dtype for dtype in sorted(FLOATS, key=str)}
_SIZE = re.compile(r"([0-9]{1,12})\s*([KMGT]B)?", re.IGNORECASE)


def export(
    program: Path,
    checkpoint: Path,
    directory: Path,
    shard_bytes: int,
    dtype: torch.dtype | None = None,
    config: Path | None = None,
) -> list[Path]:
    """Write the files, all of them or none; their paths. dtype: that floating tensors are converted to; config: a config.json
    that is to lie beside them. Raises InputError, CheckpointError, OSError."""
    names = Manifest.read(program).state_names
    if not names:
        raise InputError(f"{program} was written by another version of autopar; save the program again")
    source = TensorSource(checkpoint)
    kinds = {saved: _converted(kind, dtype) for saved, kind in exported(source, names).items()}
    held = {also[0]: name for name, also in names.items() if also}
    shards = list(sharded(kinds, shard_bytes))
    files = file_names(len(shards))
    _make_room(directory)
    written = begin(directory)
    try:
        for name, shard in zip(files, shards, strict=True):
            with (written / name).open("wb") as file:
                rows = {one: kinds[one] for one in shard}
                order = file_order(rows)
                file.write(header((one, *rows[one]) for one in order))
                for one in order:
                    tensor = source.read(held[one]).to(kinds[one][0]).contiguous()
                    tensor.reshape(-1).view(torch.uint8).numpy().tofile(file)
        if len(files) > 1:
            places = {one: name for name, shard in zip(files, shards, strict=True) for one in shard}
            total = sum(tensor_bytes(*kind) for kind in kinds.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            files = [*files, f"model{INDEX}"]
            (written / files[-1]).write_text(json.dumps(index, indent=2) + "\n")
        write_record(written, {"files": {name: file_facts(written / name) for name in files}})
        if config is not None:
            shutil.copyfile(config, written / "config.json")
        commit(directory, last=files[-1:])
    finally:
        give_up(directory)
    return [directory / name for name in files]


def exported_plan(program: Path, name: str, path: str = ".") -> Exported:
    """The outcome of writing a saved program's plan in a format. path: a folder, or the file. Raises InputError, EmitError."""
    return write_plan(
        read_exchangeable(program), name, Path(path), "the model is not in the directory (see autopar price)"
    )


def exported(source: TensorSource, names: Mapping[str, Sequence[str]]) -> dict[str, Kind]:
    """The tensors that are written, by their names in the model's state dict. Raises InputError where the checkpoint is
    of another program."""
    kinds: dict[str, Kind] = {}
    for name, also in names.items():
        signature = source.signatures.get(name)
        if signature is None:
            raise InputError(f"{source.directory} has no tensor {name!r}: it is a checkpoint of another program")
        shape, dtype = signature
        if dtype not in DTYPES.values():
            raise InputError(f"{name} has dtype {dtype}, which safetensors do not know")
        if also:
            kinds[also[0]] = dtype, shape
    others = [n for n in source.signatures if n not in names and n != "step" and not n.startswith("optim")]
    if others:
        raise InputError(
            f"{source.directory} has {', '.join(others[:5])}, which this program does not: it is a checkpoint of another"
        )
    return kinds


def _converted(kind: Kind, dtype: torch.dtype | None) -> Kind:
    return (dtype, kind[1]) if dtype is not None and kind[0] in FLOATS else kind


def sharded(kinds: Mapping[str, Kind], shard_bytes: int) -> list[list[str]]:
    """Names in runs of at most `shard_bytes` each; a tensor that is larger stands alone."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, kind in kinds.items():
        size = tensor_bytes(*kind)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def file_names(count: int) -> list[str]:
    """File names numbered as Hugging Face's libraries number them."""
    if count == 1:
        return [f"model{SUFFIX}"]
    return [f"model-{number + 1:05d}-of-{count:05d}{SUFFIX}" for number in range(count)]


def _make_room(directory: Path) -> None:
    """Raises InputError where files of weights are there, which would be read beside the new ones."""
    finish(directory)
    present = sorted(path.name for path in directory.glob(f"*{SUFFIX}*"))
    if present:
        raise InputError(f"{directory} holds {', '.join(present[:5])}; remove them, or export to another directory")


def size(words: str) -> int:
    """A type of arguments: bytes, such as 5GB."""
    read = _SIZE.fullmatch(words.strip())
    if read is None or not int(read[1]):
        raise argparse.ArgumentTypeError(f"{shown(words)} is no size; give one such as 5GB or 500MB")
    return int(read[1]) * UNITS[(read[2] or "").upper()]


EXAMPLE = "autopar export out/mlp out/mlp/weights hf"


def add_parser(commands: Commands) -> None:
    """The command among those of `autopar`."""
    parser = add(commands, "export", run, __doc__, EXAMPLE)
    parser.add_argument("program", metavar="OUT", type=Path, help="what program.save(…) wrote")
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, nargs="?", help="what run.py --save wrote, or OUT/weights"
    )
    parser.add_argument("directory", metavar="HF_DIR", type=Path, nargs="?", help="where the files go")
    parser.add_argument(
        "--plan",
        nargs="+",
        metavar=("FORMAT", "PATH"),
        help=f"write the plan in a format of {', '.join(FORMATS)}, to a folder or file (default: here)",
    )
    parser.add_argument("--max-shard-size", type=size, default=size("5GB"), help="of a file (default: 5GB)")
    parser.add_argument("--dtype", choices=tuple(_FLOATS), help="convert floats to it (default: as they are)")
    parser.add_argument("--config", type=Path, help="a config.json to copy into HF_DIR")
    parser.add_argument("--json", action="store_true", help="the files and their bytes, as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the files, and say which; 0. Raises InputError, CheckpointError, OSError."""
    if args.plan is not None and (args.checkpoint is not None or len(args.plan) > 2):
        args.own_parser.error("--plan takes a FORMAT and a PATH, and stands without CHECKPOINT and HF_DIR")
    if args.plan is None and args.directory is None:
        args.own_parser.error("give CHECKPOINT and HF_DIR, or --plan FORMAT")
    if args.plan is not None:
        if args.json:
            args.own_parser.error("--json is of a checkpoint's files; --plan prints what is not carried")
        show(str(exported_plan(args.program, *args.plan)))
        return 0
    if args.config is not None and not args.config.is_file():
        raise InputError(f"--config {args.config}: there is no such file")
    dtype = _FLOATS.get(args.dtype)
    written = export(args.program, args.checkpoint, args.directory, args.max_shard_size, dtype, args.config)
    nbytes = {str(path): path.stat().st_size for path in written}
    if args.json:
        print(json.dumps({"files_bytes": nbytes}, indent=1))
        return 0
    names = ", ".join(path.name for path in written[:4]) + (", …" if len(written) > 4 else "")
    show(f"wrote {names}: {size_text(sum(nbytes.values()))}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """`autopar-export`, the command as a program of its own."""
    return alone("export", add_parser, argv)


if __name__ == "__main__":
    sys.exit(main())
