"""A link that is dropped in the middle of a run: both ends name what they wait for, when `--hang` says, long before `--timeout`.

Two machines made of namespaces (preflight/two_machines.py), one rank each. The first has the job's store. Both ranks have
computed 20 steps when the link is dropped, and neither has begun the next.
"""

from __future__ import annotations

import shutil

import pytest

from tests.runtime.preflight import two_machines
from tests.runtime.run.test_launch import emitted  # noqa: F401
from tests.warm import python

pytestmark = pytest.mark.skipif(not two_machines.possible(), reason="needs namespaces of a user, with veth and tc")

DATA = """import os, pathlib, time
from programs import stages

HERE = pathlib.Path(__file__).parents[1]

def batches():
    for step, batch in enumerate(stages.batches(4000), 1):
        if step == 21:
            (HERE / f"ready{os.environ['RANK']}").touch()
            while not (HERE / "dropped").exists():
                time.sleep(0.02)
        yield batch
"""
DROP = """(
  until test -e "$DIR/ready0" -a -e "$DIR/ready1"; do sleep 0.02; done
  ip link set cable down
  touch "$DIR/dropped"
) &"""


@pytest.mark.parametrize("hang_s", [4, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.timeout(200)
def test_a_dropped_link_is_named_on_both_its_ends_at_the_limit(emitted, tmp_path, hang_s):  # noqa: F811
    out = tmp_path / "out"
    shutil.copytree(emitted, out, ignore=shutil.ignore_patterns("saved", "__pycache__"))
    (out / "data.py").write_text(DATA)
    own = ["--run-dir", tmp_path / "run", "--steps", 4000, "--data", f"{out / 'data.py'}:batches", "--timeout", 600]
    hang = [] if hang_s == 60 else ["--hang", hang_s]  # 60 is the default
    command = [python(), *map(str, [out / "run.py", *own, *hang])]
    ends, _ = two_machines.on_two(tmp_path, [command, command], setup=DROP)
    dropped_at = (tmp_path / "dropped").stat().st_mtime
    for machine, said in (
        (0, "no longer runs (stopped, swapped out, or its machine or the link to it"),
        (1, "the job's store"),
    ):
        end = ends[machine]
        assert end.status == 1
        assert end.has("this run hangs", said, "all_gather", "step 21, action F0.0", "stages.py:"), end
        took_s = (tmp_path / f"out{machine}").stat().st_mtime - dropped_at
        print(f"machine {machine} said so {took_s:.1f} s after the link was dropped")
        assert hang_s < took_s, end
