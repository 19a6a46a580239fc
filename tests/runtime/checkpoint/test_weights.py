"""Weights from directories of safetensors: ranks read their own bytes, tied names meet, and what does not fit is named."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime import CheckpointError, run_threads
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.checkpoint.weights import load_weights
from autopar.runtime.data import safetensors
from autopar.runtime.program.manifest import Manifest
from tests.runtime import pipelines, stages
from tests.runtime import safetensors_files as files
from tests.runtime.scenarios import session_of
from tests.runtime.step.test_pipeline import CASES, made

PLAIN = Manifest(Path(), 1, "pipeline.py", True)


def loaded(folder: Path, program: Any, manifest: Manifest = PLAIN) -> list[dict[str, Tensor]]:
    """Every rank's full tensors after loading."""

    def body(comm: Any) -> dict[str, Tensor]:
        session = session_of(program, comm)
        load_weights(folder, session, manifest)
        assert session.rt.step == 0
        names = {name for stage in session.pipeline.stages for name in held(session.pipeline.tables(stage))}
        return {name: session.gather_full(name) for name in sorted(names)}

    return run_threads(program.ranks, program.mesh, body, timeout_s=60)


def held(tables: Any) -> dict[str, Any]:
    return tables.parameters | tables.buffers


def same(got: list[dict[str, Tensor]], want: dict[str, Tensor]) -> None:
    for state in got:
        assert state.keys() == want.keys()
        for name, value in want.items():
            assert torch.equal(state[name], value), name


@pytest.mark.parametrize(("dp", "tp", "zero"), [(1, 1, 0), (2, 2, 3), (4, 1, 1), (1, 4, 0)])
def test_one_file_fills_any_mesh(tmp_path: Path, dp: int, tp: int, zero: int) -> None:
    files.write(tmp_path / "model.safetensors", stages.weights())
    same(loaded(tmp_path, stages.mlp(dp, tp, zero)), stages.weights())


def test_shards_fill_the_stages_of_a_pipeline(tmp_path: Path) -> None:
    program, known = made("tied")
    full = pipelines.weights(known["stages"], known["tied"])
    names = list(full)
    files.write_shards(tmp_path, *({name: full[name] for name in names[i::3]} for i in range(3)))
    same(loaded(tmp_path, program), full)
    assert "tied" in CASES


def test_training_starts_from_the_files(tmp_path: Path) -> None:
    files.write(tmp_path / "model.safetensors", stages.weights())
    program = stages.mlp(2, 1, 3)

    def body(comm: Any) -> list[float]:
        session = session_of(program, comm)
        load_weights(tmp_path, session, PLAIN)
        return [session.train_step(batch).item() for batch in stages.batches(3)]

    for losses in run_threads(2, program.mesh, body, timeout_s=60):
        assert losses == pytest.approx(stages.reference(3)["losses"], rel=1e-12)


def test_a_directory_that_is_not_there_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"gone is no directory; give a checkpoint, or a directory of \.safetensors files"
    ):
        loaded(tmp_path / "gone", stages.mlp(1, 1, 0))


def test_the_weights_of_a_run_begin_another_one(tmp_path: Path) -> None:
    """Its step, its optimizer's state and learning rate are not those of the run that wrote the checkpoint."""
    program, data = stages.mlp(2, 1, 3), stages.batches(3)

    def body(comm: Any) -> tuple[list[float], list[float]]:
        first = session_of(program, comm, partial(torch.optim.Adam, lr=0.5))
        first.load_weights(stages.weights())
        for batch in data:
            first.train_step(batch)
        checkpoint.save(tmp_path, first)
        losses = []
        for other in (session_of(program, comm, partial(torch.optim.SGD, lr=0.01)) for _ in range(2)):
            if losses:
                other.load_weights({name: first.gather_full(name) for name in stages.weights()})
            else:
                load_weights(tmp_path, other, PLAIN)
            assert (other.rt.step, other.updater.optimizers[0].param_groups[0]["lr"]) == (0, 0.01)
            losses.append([other.train_step(batch).item() for batch in data])
        return losses[0], losses[1]

    for from_checkpoint, from_tensors in run_threads(2, program.mesh, body, timeout_s=60):
        assert from_checkpoint == from_tensors


def test_a_rank_reads_its_shards_and_no_byte_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write(tmp_path / "model.safetensors", stages.weights())
    program, read = stages.mlp(2, 2, 3), []
    fill = safetensors._fill
    monkeypatch.setattr(safetensors, "_fill", lambda file, room: (read.append(len(room)), fill(file, room))[1])

    def body(comm: Any) -> int:
        session = session_of(program, comm)
        load_weights(tmp_path, session, PLAIN)
        return sum(value.nbytes for _, value in session.stages[0].stored())

    kept = run_threads(4, program.mesh, body, timeout_s=60)
    assert sum(read) == sum(kept)
    whole = sum(value.nbytes for value in stages.weights().values())
    assert max(kept) < whole / 2


# --- names -------------------------------------------------------------------------------------------------------------


def named(**names: tuple[str, ...]) -> Manifest:
    return dataclasses.replace(PLAIN, state_names={name: (name,) for name in stages.weights()} | names)


@pytest.mark.parametrize("kept", [("w1",), ("head",), ("w1", "head")])
def test_a_tied_tensor_is_found_under_any_of_its_names(tmp_path: Path, kept: tuple[str, ...]) -> None:
    full = stages.weights()
    stored = {name: value for name, value in full.items() if name != "w1"} | dict.fromkeys(kept, full["w1"])
    files.write(tmp_path / "model.safetensors", stored)
    same(loaded(tmp_path, stages.mlp(2, 1), named(w1=("w1", "head"))), full)


def test_tied_names_with_different_values_are_refused(tmp_path: Path) -> None:
    full = stages.weights()
    files.write(tmp_path / "model.safetensors", full | {"head": full["w1"] + 1})
    with pytest.raises(CheckpointError, match="w1 and head are one tensor in this model, and differ"):
        loaded(tmp_path, stages.mlp(1, 1), named(w1=("w1", "head")))


def test_what_no_state_dict_holds_comes_with_the_program(tmp_path: Path) -> None:
    full = stages.weights()
    manifest = dataclasses.replace(named(seen=()), directory=tmp_path, constants="own")
    checkpoint.write_full(tmp_path / "own", {"seen": full["seen"], "w1": torch.zeros(16, 8)})
    (tmp_path / "hf").mkdir()
    files.write(tmp_path / "hf" / "model.safetensors", {name: full[name] for name in full if name != "seen"})
    same(loaded(tmp_path / "hf", stages.mlp(2, 1), manifest), full)
    with pytest.raises(
        CheckpointError, match="has no seen: no directory of safetensors holds buffers that are not pers"
    ):
        loaded(tmp_path / "hf", stages.mlp(1, 1), named(seen=()))
    files.write(tmp_path / "hf" / "model.safetensors", full)
    with pytest.raises(CheckpointError, match="holds seen, which the program does not have"):
        loaded(tmp_path / "hf", stages.mlp(1, 1), manifest)


def without(*names: str) -> dict[str, Tensor]:
    return {name: value for name, value in stages.weights().items() if name not in names}


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        (without("w2", "b2"), "holds no w2, b2; the names must be those of the model's own state_dict"),
        (without() | {"w3": torch.ones(1)}, "holds w3, which the program does not have"),
        (without("w2") | {"model.w2": stages.weights()["w2"]}, r"no w2; and model.w2, .* these start with 'model.'"),
        (without("w2") | {"w2": torch.ones(3, dtype=torch.float64)}, r"w2 has shape \(3,\), the program has \(8, 16\)"),
        (
            without("b1") | {"b1": torch.ones(16, dtype=torch.int64)},
            "b1 has dtype torch.int64, the program has torch.float64",
        ),
    ],
)
def test_files_of_other_models_are_refused_by_every_rank(tmp_path: Path, stored: dict[str, Tensor], says: str) -> None:
    files.write(tmp_path / "model.safetensors", stored)
    with pytest.raises(CheckpointError, match=says):
        loaded(tmp_path, stages.mlp(2, 1))


def test_names_without_the_prefix_of_a_base_model_are_explained(tmp_path: Path) -> None:
    files.write(tmp_path / "model.safetensors", without())
    manifest = dataclasses.replace(PLAIN, state_names={name: (f"transformer.{name}",) for name in stages.weights()})
    with pytest.raises(CheckpointError, match=r"and these lack 'transformer.'"):
        loaded(tmp_path, stages.mlp(1, 1), manifest)


def test_names_of_a_base_checkpoint_do_not_fill_adapters(tmp_path: Path) -> None:
    files.write(tmp_path / "model.safetensors", without())
    manifest = dataclasses.replace(PLAIN, state_names={n: (f"base_model.{n}.base_layer.weight",) for n in without()})
    with pytest.raises(CheckpointError, match="has adapters"):
        loaded(tmp_path, stages.mlp(1, 1), manifest)


def test_floats_are_converted_as_torch_converts_them(tmp_path: Path) -> None:
    full = stages.weights()
    stored = {name: value.to(torch.float16) for name, value in full.items()}
    files.write(tmp_path / "model.safetensors", stored)
    same(loaded(tmp_path, stages.mlp(2, 2, 3)), {name: value.double() for name, value in stored.items()})


# --- directories ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_still_taken(tmp_path: Path) -> None:
    checkpoint.write_full(tmp_path, stages.weights())
    same(loaded(tmp_path, stages.mlp(2, 1)), stages.weights())


def break_index(text: str) -> Any:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


def swap_shards(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (break_index("{"), "the index of the files is not to be read: no JSON"),
        (break_index("{}"), "'weight_map' is missing"),
        (break_index('{"weight_map": {"w1": "../../etc/passwd"}}'), "a relative path inside the directory"),
        (break_index('{"weight_map": {"w1": "/etc/passwd"}}'), "a relative path inside the directory"),
        (break_index('{"weight_map": {"w1": "a", "w1": "b"}}'), "the key 'w1' is given twice"),
        (break_index('{"weight_map": {"w1": "none.safetensors"}}'), "none.safetensors cannot be read: No such file"),
        (swap_shards, "do not agree on where .* lies"),
        (
            lambda folder: (folder / "model-00001-of-00002.safetensors").write_bytes(b"x"),
            "damaged, or no file of safet",
        ),
        (
            lambda folder: (folder / "other.safetensors.index.json").write_text("{}"),
            "is not clear; move the others away",
        ),
    ],
)
def test_directories_that_are_not_whole_are_refused(tmp_path: Path, change: Any, says: str) -> None:
    full = stages.weights()
    files.write_shards(
        tmp_path, {n: full[n] for n in ("w1", "b1")}, {n: full[n] for n in full if n not in ("w1", "b1")}
    )
    change(tmp_path)
    with pytest.raises(CheckpointError, match=says):
        loaded(tmp_path, stages.mlp(1, 1))


def test_an_index_and_a_single_file_beside_it_are_not_chosen_between(tmp_path: Path) -> None:
    full = stages.weights()
    files.write_shards(tmp_path, {"w1": full.pop("w1")}, full)
    files.write(tmp_path / "consolidated.safetensors", {"of": torch.ones(1)})
    same(loaded(tmp_path, stages.mlp(1, 1)), stages.weights())
    files.write(tmp_path / "model.safetensors", stages.weights())
    with pytest.raises(CheckpointError, match=r"holds model.safetensors.index.json, model.safetensors, and which"):
        loaded(tmp_path, stages.mlp(1, 1))


def test_pickled_weights_are_no_weights(tmp_path: Path) -> None:
    torch.save(stages.weights(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="are pickles, which are programs"):
        loaded(tmp_path, stages.mlp(1, 1))


def test_of_several_files_without_an_index_none_is_chosen(tmp_path: Path) -> None:
    files.write(tmp_path / "one.safetensors", stages.weights())
    files.write(tmp_path / "two.safetensors", stages.weights())
    with pytest.raises(CheckpointError, match=r"one.safetensors, two.safetensors, and which"):
        loaded(tmp_path, stages.mlp(1, 1))
    (tmp_path / "one.safetensors").rename(tmp_path / "model.safetensors")
    same(loaded(tmp_path, stages.mlp(1, 1)), stages.weights())
