"""`autopar-export`: safetensors in, a program, a checkpoint and safetensors out are the same bytes."""

from __future__ import annotations

import functools
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cli import export
from autopar.counter import ByteCounter
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.checkpoint.weights import load_weights
from autopar.runtime.program.manifest import Manifest
from tests.runtime import safetensors_files as files
from tests.warm import torchrun

X = torch.randint(0, 32, (8, 4), generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A tied head, a frozen layer, one that is not used, and a buffer of either kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layer = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.register_buffer("kept", torch.arange(16.0))
        self.register_buffer("passing", torch.ones(16), persistent=False)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.frozen(self.layer(self.embed(ids)) + self.kept * self.passing))


def loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def compiled(model: nn.Module, ranks: int = 2, **options: Any) -> autopar.ParallelProgram:
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
    given = {"loss_fn": loss, "optimizer": adamw, "options": autopar.Options(**options)}
    return autopar.compile(model, autopar.ClusterSpec.local(ranks), (X, X), **given)


@pytest.fixture(scope="module")
def program() -> autopar.ParallelProgram:
    torch.manual_seed(1)
    return compiled(Model(), strategy="zero3")


@pytest.fixture(scope="module")
def out(program: autopar.ParallelProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program.save(tmp_path_factory.mktemp("export") / "out")


def others() -> dict[str, Tensor]:
    """The tensors of another model of the class, as `save_pretrained` would write them: the head is the embedding."""
    torch.manual_seed(2)
    state = {name: torch.randn_like(value) for name, value in Model().state_dict().items()}
    return {name: state[name] for name in sorted(state) if name != "head.weight"}


def trained(program: autopar.ParallelProgram, out: Path, source: Path, target: Path, steps: int = 0) -> Path:
    """A checkpoint after `steps` steps from a directory of safetensors."""

    def body(session: Any) -> None:
        load_weights(source, session, Manifest.read(out))
        for _ in range(steps):
            session.train_step([X, X])
        checkpoint.save(target, session)

    program.on_ranks(body)
    return target


def read(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, by the format's own words."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    rows = json.loads(content[8 : 8 + length])
    assert rows.pop("__metadata__") == {"format": "pt"}
    data = content[8 + length :]
    return {
        name: torch.frombuffer(bytearray(data[slice(*row["data_offsets"])]), dtype=torch.float32).reshape(row["shape"])
        for name, row in rows.items()
    }


def run(*arguments: Any) -> int:
    return export.main([str(one) for one in arguments])


def test_nothing_is_changed_on_the_way_through_a_program(
    program: autopar.ParallelProgram, out: Path, tmp_path: Path
) -> None:
    (tmp_path / "hf").mkdir()
    given = files.write(tmp_path / "hf" / "model.safetensors", others())
    saved = trained(program, out, tmp_path / "hf", tmp_path / "checkpoint")
    assert run(out, saved, tmp_path / "again") == 0
    (written,) = (tmp_path / "again").glob("*.safetensors")
    assert read(written).keys() == others().keys()
    for name, value in read(written).items():
        assert torch.equal(value, others()[name]), name
    size = sum(value.nbytes for value in others().values())
    assert written.read_bytes()[-size:] == given.read_bytes()[-size:]


def test_what_was_trained_is_written_and_loads_again(
    program: autopar.ParallelProgram, out: Path, tmp_path: Path
) -> None:
    (tmp_path / "hf").mkdir()
    files.write(tmp_path / "hf" / "model.safetensors", others())
    saved = trained(program, out, tmp_path / "hf", tmp_path / "checkpoint", steps=2)
    (tmp_path / "config.json").write_text('{"model_type": "ours"}')
    arguments = ["--max-shard-size", "2KB", "--config", tmp_path / "config.json"]
    assert run(out, saved, tmp_path / "again", *arguments) == 0
    names = sorted(path.name for path in (tmp_path / "again").iterdir())
    shards = [name for name in names if name.endswith(".safetensors")]
    assert names == ["complete.json", "config.json", *shards, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "again" / names[-1]).read_text())
    parts = {name: read(tmp_path / "again" / name) for name in shards}
    full = {name: value for part in parts.values() for name, value in part.items()}
    assert index["weight_map"] == {name: shard for shard, part in parts.items() for name in part}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in full.values())
    assert all(len(part) == 1 or sum(v.nbytes for v in part.values()) <= 2000 for part in parts.values())
    model = Model()
    model.load_state_dict(others() | {"head.weight": others()["embed.weight"]})
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        adamw.zero_grad()
        loss(model(X), X).backward()
        adamw.step()
    assert full.keys() == others().keys()
    for name, value in full.items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-6)
    again = trained(program, out, tmp_path / "again", tmp_path / "checkpoint 2")
    assert run(out, again, tmp_path / "third") == 0
    for name, value in read(tmp_path / "third" / "model.safetensors").items():
        assert torch.equal(value, full[name])


def test_the_weights_that_a_program_came_with_are_exported_too(out: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    assert run(out, out / "weights", tmp_path / "hf") == 0
    want = Model().state_dict()
    got = read(tmp_path / "hf" / "model.safetensors")
    assert got.keys() == want.keys() - {"head.weight"}
    assert all(torch.equal(value, want[name]) for name, value in got.items())


def test_floats_are_written_in_the_dtype_that_is_asked_for(out: Path, tmp_path: Path) -> None:
    assert run(out, out / "weights", tmp_path / "hf", "--dtype", "bfloat16") == 0
    half = (tmp_path / "hf" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", half[:8])
    assert {row["dtype"] for name, row in json.loads(half[8 : 8 + length]).items() if name[0] != "_"} == {"BF16"}


def test_a_model_on_meta_gets_its_weights_from_safetensors(tmp_path: Path) -> None:
    """The model's parameters have no values; a buffer that no file holds was made on the CPU and travels with the program."""
    torch.manual_seed(1)
    model = Model()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.to("meta"), parameter.requires_grad))
    model.head.weight = model.embed.weight
    program = compiled(model, 2, mesh={"dp": 2})
    out = program.save(tmp_path / "out")
    assert Manifest.read(out).weights is None
    (tmp_path / "hf").mkdir()
    files.write(tmp_path / "hf" / "model.safetensors", others())
    lost = torchrun(2, out / "run.py", "--steps", 0)
    assert lost.returncode == 1
    assert "give --weights DIRECTORY" in lost.stderr
    done = torchrun(2, out / "run.py", "--weights", tmp_path / "hf", "--steps", 0, "--save", tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    assert run(out, tmp_path / "saved", tmp_path / "again") == 0
    for name, value in read(tmp_path / "again" / "model.safetensors").items():
        assert torch.equal(value, others()[name]), name
    signatures = checkpoint.read_signatures(tmp_path / "saved")
    assert {"passing", "step"} < set(signatures)
    assert torch.equal(checkpoint.read_full(tmp_path / "saved", ["passing"])["passing"], torch.ones(16))


def test_memory_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(24)))
    x = torch.randn(4, 64)
    out = autopar.compile(model, autopar.ClusterSpec.local(1), (x,)).save(tmp_path / "out")
    with ByteCounter() as counter:
        assert run(out, out / "weights", tmp_path / "hf") == 0
    one = 64 * 64 * 4
    assert one <= counter.peak <= 3 * one
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > 24 * one


def test_what_cannot_be_exported_is_said_in_a_line(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(says: str, *arguments: Any) -> None:
        assert run(*arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("autopar-export: ")
        assert says in said
        assert "Traceback" not in said

    full = checkpoint.read_full(out / "weights", ["embed.weight"])
    checkpoint.write_full(tmp_path / "part", full)
    refused("has no tensor", out, tmp_path / "part", tmp_path / "hf")
    every = checkpoint.read_full(out / "weights", list(checkpoint.read_signatures(out / "weights")))
    checkpoint.write_full(tmp_path / "more", every | {"another.weight": torch.ones(1)})
    refused("has another.weight, which this program does not", out, tmp_path / "more", tmp_path / "hf")
    refused("no checkpoint directory", out, tmp_path / "none", tmp_path / "hf")
    refused("manifest.json is missing", tmp_path, out / "weights", tmp_path / "hf")
    refused("there is no such file", out, out / "weights", tmp_path / "hf", "--config", tmp_path / "none")
    assert not (tmp_path / "hf").exists()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model-00001-of-00002.safetensors").write_text("")
    refused("holds model-00001-of-00002.safetensors; remove", out, out / "weights", tmp_path / "hf")
    (tmp_path / "file").write_text("")
    refused("file", out, out / "weights", tmp_path / "file")


@pytest.mark.parametrize(("words", "count"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("1024", 1024)])
def test_sizes_are_read(words: str, count: int) -> None:
    assert export.size(words) == count


@pytest.mark.parametrize("words", ["", "GB", "0", "-1GB", "1PB", "1e3"])
def test_what_is_no_size_is_refused(words: str, out: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run(out, out / "weights", tmp_path / "hf", f"--max-shard-size={words}")
    assert ended.value.code == 2
