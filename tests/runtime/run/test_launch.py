"""An emitted directory runs under torchrun with torch alone: run.py, manifest, checkpoints, and wrong use."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import torch

import autopar.runtime
from autopar.runtime import RuntimeProgramError
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.program import batches
from autopar.runtime.program.manifest import Manifest
from autopar.runtime.run.loaded import load_stage
from tests.runtime import pipelines, stages
from tests.warm import python, torchrun

RUN = """import pathlib, sys
here = pathlib.Path(__file__).parent
from autopar_runtime.run import launch
assert "autopar" not in sys.modules
if __name__ == "__main__":
    sys.exit(launch.main(here))
"""
STAGE = """import autopar_runtime.comm.comm
from programs import stages
from autopar_runtime import Rank
globals().update(vars(stages.mlp(2, 1, zero={zero}).stage))
"""
PIPELINE = """from programs import stages
globals().update(vars(stages.mlp(2, 1, zero={zero}).pipeline))
"""
DATA = """from programs import stages
def batches():
    return stages.batches(3)
def failing():
    import os
    yield from stages.batches(1)
    if os.environ["RANK"] == "1":
        raise ValueError("no more data")
    yield from stages.batches(2)
"""


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program as the emitter writes it, by hand: a ZeRO-3 MLP for two ranks."""
    out = tmp_path_factory.mktemp("emitted")
    shutil.copytree(Path(autopar.runtime.__file__).parent, out / "autopar_runtime")
    (out / "programs").mkdir()
    for name in ("__init__.py", "stages.py", "pipelines.py"):
        shutil.copy((Path(__file__).parents[1] / name), out / "programs" / name)
    (out / "stages").mkdir()
    (out / "stages" / "stage_0.py").write_text(STAGE.format(zero=3))
    (out / "pipeline.py").write_text(PIPELINE.format(zero=3))
    (out / "run.py").write_text(RUN)
    (out / "data.py").write_text(DATA)
    checkpoint.write_full(out / "weights", stages.weights())
    manifest = {
        "world_size": 2,
        "pipeline": "pipeline.py",
        "placement": [1, 0],
        "training": True,
        "update": {"optimizer": {"module": "torch.optim", "name": "AdamW", "kwargs": {"lr": 1e-2}}},
        "seed": 3,
        "weights": "weights",
        "inputs": [{"shape": [8, 8], "dtype": "float64"}, {"shape": [8, 8], "dtype": "float64"}],
    }
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


def losses(output: str) -> list[float]:
    return [float(line.split("loss ")[1].split()[0]) for line in output.splitlines() if line.startswith("step ")]


def test_run_trains_saves_and_resumes(emitted):
    want, data = stages.reference(5)["losses"], f"{emitted / 'data.py'}:batches"
    first = torchrun(2, emitted / "run.py", "--steps", 2, "--data", data, "--save", emitted / "saved")
    assert first.returncode == 0, first.stderr
    assert losses(first.stdout) == pytest.approx(want[:2], abs=1e-6)
    second = torchrun(2, emitted / "run.py", "--steps", 3, "--data", data, "--resume", emitted / "saved", "--check")
    assert second.returncode == 0, second.stderr
    assert losses(second.stdout) == pytest.approx(want[2:3], abs=1e-6)
    assert "steps 3 to 3" in second.stdout
    assert "Warning" not in second.stderr
    fewer = torchrun(2, emitted / "run.py", "--steps", 1, "--data", data, "--resume", emitted / "saved")
    assert fewer.returncode == 1
    assert "is of step 2, and --steps 1 are those of the whole run; give more than 2" in fewer.stderr


@pytest.mark.slow
def test_a_run_without_data_says_that_its_numbers_are_random(emitted, tmp_path):
    for own in ([], ["--run-dir", tmp_path / "run"]):
        done = torchrun(2, emitted / "run.py", "--steps", 1, *own)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("no --data: every batch is random numbers") == 1
    with_data = torchrun(2, emitted / "run.py", "--steps", 1, "--data", f"{emitted / 'data.py'}:batches")
    assert "random" not in with_data.stdout


def test_a_rank_that_fails_ends_the_run_with_its_error(emitted):
    done = torchrun(2, emitted / "run.py", "--steps", 3, "--data", f"{emitted / 'data.py'}:failing", "--timeout", 20)
    assert done.returncode == 1
    assert "error on rank 1 (rank 0 of the program): ValueError: no more data" in done.stderr


PIPED = """from programs import pipelines
program = pipelines.chain([(1, 1), (1, 1)], pipelines.one_f_one_b(2, 4), 4)
globals().update(vars({part}))
"""
PIPED_DATA = """from programs import pipelines
def batches():
    return pipelines.batches(3)
"""


@pytest.mark.slow
def test_run_trains_a_pipeline_and_resumes_it(emitted, tmp_path):
    shutil.copytree(emitted, tmp_path / "piped", ignore=shutil.ignore_patterns("weights", "saved", "__pycache__"))
    out, data = tmp_path / "piped", f"{tmp_path / 'piped' / 'data.py'}:batches"
    (out / "pipeline.py").write_text(PIPED.format(part="program.pipeline"))
    for stage in (0, 1):
        (out / "stages" / f"stage_{stage}.py").write_text(PIPED.format(part=f"program.modules[{stage}]"))
    (out / "data.py").write_text(PIPED_DATA)
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["inputs"] = [{"shape": [8, 8], "dtype": "float64"}] * 3 + [{"shape": [8], "dtype": "float64"}]
    (out / "manifest.json").write_text(json.dumps(manifest))
    checkpoint.write_full(out / "weights", pipelines.weights(2))
    want = pipelines.reference(3, 2)["losses"]
    first = torchrun(2, out / "run.py", "--steps", 2, "--data", data, "--save", out / "saved")
    assert first.returncode == 0, first.stderr
    assert losses(first.stdout) == pytest.approx(want[:2], abs=1e-6)
    assert "2 stages: dp=1 × tp=1 | dp=1 × tp=1, cpu, steps 1 to 2" in first.stdout
    second = torchrun(2, out / "run.py", "--steps", 3, "--data", data, "--resume", out / "saved")
    assert second.returncode == 0, second.stderr
    assert losses(second.stdout) == pytest.approx(want[2:], abs=1e-6)


def start(emitted: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [python(), str(emitted / "run.py"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | environment, check=False
    )


ALONE = """import sys, torch
sys.path.insert(0, sys.argv[2])
from programs import stages
from autopar.runtime.program import worlds
from autopar.runtime.run import launch
weights = sys.argv[2] + "/weights"
program = launch.load(sys.argv[1], weights=weights)
batches = stages.batches(3)
first = [program(*batch).item() for batch in batches[:2]]
state = {name: value.clone() if hasattr(value, "clone") else value for name, value in program.state_dict().items()}
third = program(*batches[2]).item()
again = launch.load(sys.argv[1], weights=weights)
again.load_state_dict(state)
assert abs(again(*batches[2]).item() - third) < 1e-12
assert again.session.comm.world_size == 1
try:
    launch.load(sys.argv[2])
except worlds.WrongWorldSize as error:
    assert "compiled for 2 ranks" in str(error) and "process group has 1" in str(error)
else:
    raise AssertionError
torch.distributed.destroy_process_group()
print(*first, third)
"""


def test_a_loaded_program_is_called_with_a_batch_and_gives_the_loss(emitted, tmp_path):
    manifest = json.loads((emitted / "manifest.json").read_text())
    manifest |= {"world_size": 1, "weights": None, "placement": None}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "stages").mkdir()
    for name, text in (("stages/stage_0.py", STAGE), ("pipeline.py", PIPELINE)):
        (tmp_path / name).write_text(text.format(zero=0).replace("mlp(2, 1", "mlp(1, 1"))
    command = [python(), "-c", ALONE, str(tmp_path), str(emitted)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    want = stages.reference(3)["losses"]
    assert [float(word) for word in done.stdout.split()] == pytest.approx(want, rel=1e-12)


def test_a_wrong_world_size_ends_every_rank_with_the_same_message_before_they_meet(emitted):
    ranks = [start(emitted, RANK=str(rank), WORLD_SIZE="4") for rank in (0, 3)]
    assert [done.returncode for done in ranks] == [2, 2]
    assert ranks[0].stderr == ranks[1].stderr
    assert "compiled for 2 ranks (dp=2 × tp=1), but WORLD_SIZE is 4" in ranks[0].stderr
    assert "torchrun --nproc-per-node 2" in ranks[0].stderr


def test_a_damaged_directory_is_named(emitted, tmp_path):
    with pytest.raises(RuntimeProgramError, match=r"manifest.json is missing"):
        Manifest.read(tmp_path)
    (tmp_path / "manifest.json").write_text('{"world_size": 2')
    with pytest.raises(RuntimeProgramError, match="is damaged"):
        Manifest.read(tmp_path)
    with pytest.raises(RuntimeProgramError, match="was the directory copied whole"):
        load_stage(tmp_path / "stage_0.py", tmp_path)


def test_random_batches_depend_on_seed_and_step_alone():
    rows = [batches.BatchInput(shape=(4,), dtype="int64", high=9), batches.BatchInput(shape=(2, 3), dtype="float32")]
    stream = batches.random_batches(rows, seed=1)
    first, second = next(stream), next(stream)
    assert first[0].max() < 9
    assert first[1].dtype == torch.float32
    again = next(batches.random_batches(rows, seed=1, first_step=1))
    assert all(torch.equal(x, y) for x, y in zip(second, again, strict=True))
    assert not torch.equal(first[1], second[1])
    assert not torch.equal(first[1], next(batches.random_batches(rows, seed=2))[1])


def test_data_sources_start_over_and_skip_to_the_step(tmp_path):
    file = tmp_path / "numbers.py"
    file.write_text("import torch\ndef three(): return [(torch.tensor(i),) for i in range(3)]\ndef none(): return []\n")
    stream = batches.user_batches(f"{file}:three", first_step=2)
    assert [next(stream)[0].item() for _ in range(4)] == [2, 0, 1, 2]
    with pytest.raises(RuntimeProgramError, match="gave no batch"):
        next(batches.user_batches(f"{file}:none"))
    with pytest.raises(RuntimeProgramError, match="has no function 'four'"):
        next(batches.user_batches(f"{file}:four"))
    with pytest.raises(RuntimeProgramError, match="MODULE:FUNCTION"):
        next(batches.user_batches("numbers"))
    with pytest.raises(RuntimeProgramError, match="No module named 'no_such_data'"):
        next(batches.user_batches("no_such_data:three"))


def test_data_that_are_not_there_are_named_without_running_anything(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    texts = {
        "plain": "raise OSError\ndef three(): pass\nthrees = 3\n",
        "torn": "def three(:\n",
        "any": "from os import *\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    here = [
        f"{tmp_path}/plain.py:three",
        "plain:three",
        f"{tmp_path}/any.py:getcwd",
        "os.path:join",
        "sys:path",
        "random:random",
    ]
    for source in here:
        batches.check_source(source)
    wrong = {
        "plain:thre": "plain has no function 'thre'; did you mean 'three'?",
        f"{tmp_path}/plain.py:four": "has no function 'four'",
        f"{tmp_path}/torn.py:three": "invalid syntax",
        f"{tmp_path}/gone.py:three": "gone.py: No such file or directory",
        f"{tmp_path}:three": "No module named",
        "no_such_data.of:three": "No module named 'no_such_data.of'; is its folder on PYTHONPATH?",
        "numbers": "MODULE:FUNCTION",
    }
    for source, said in wrong.items():
        with pytest.raises(RuntimeProgramError) as caught:
            batches.check_source(source)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "gone.py:batches"], "--data 'gone.py:batches': gone.py: No such file or directory"),
        (["--save", "{file}"], "--save {file}: File exists; give a directory that every rank can write to"),
        (["--save", "{file}/in"], "--save {file}/in: Not a directory; give a directory that every rank can write to"),
        (
            ["--spike", "5"],
            "--spike does nothing in a run without a directory; give --run-dir DIR too, or leave it out",
        ),
        (["--profile", "{file}"], "--profile {file}: File exists; give a directory that every rank can write to"),
    ],
)
def test_what_cannot_be_done_ends_every_rank_before_they_meet(emitted, tmp_path, arguments, said):
    file = tmp_path / "file"
    file.touch()
    environment = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }  # where nobody listens
    done = start(emitted, *(one.format(file=file) for one in arguments), **environment)
    assert done.returncode == 2
    assert done.stderr == f"error: {said.format(file=file)}\n"


def test_ctrl_c_says_one_line(emitted):
    command = [python(), emitted / "run.py", "--steps", "100000"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    started = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | started | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for line in ranks[1].stdout or ():
        if line.startswith("step 2 "):
            break
    for process in ranks:
        process.send_signal(signal.SIGINT)
    said = [process.communicate(timeout=60)[1] for process in ranks]
    assert said == ["interrupted: the run ends here, and nothing more is saved (with --run-dir it saves first)\n", ""]
    assert ranks[0].returncode == 130
