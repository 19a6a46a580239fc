"""Misconfigured machines, staged with real processes, networks and mounts: each is named, with what to set, in seconds."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.at_once import at_once
from tests.runtime.run.test_launch import emitted  # noqa: F401

from . import two_machines
from .two_machines import Ended, looking, on_two

pytestmark = pytest.mark.skipif(not two_machines.possible(), reason="needs namespaces of a user, with veth and tc")

SCENARIOS: dict[str, Callable[[Path, Path], None]] = {}
MOST_S = 20.0
"""The most seconds that any preflight says it took: 6 s to meet (or what --timeout says), 3 s to part, a busy machine."""
SAID = re.compile(r"^preflight: .* in ([\d.]+) s$", re.MULTILINE)


@pytest.fixture(scope="module")
def program(emitted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A program for two machines of one rank each, on 1 GbE."""
    out = tmp_path_factory.mktemp("preflight") / "out"
    shutil.copytree(emitted, out, ignore=shutil.ignore_patterns("saved", "__pycache__"))
    manifest = json.loads((out / "manifest.json").read_text())
    links = [("node", 1, 1e10, 1e-5), ("cluster", 2, 1.25e8, 5e-5)]
    named = [dict(zip(("name", "group_size", "bytes_per_s", "latency_s"), link, strict=True)) for link in links]
    machines = {"ranks_per_node": 1, "device": "cpu", "gpu": False, "links": named, "step_flops": 0, "peak_s": None}
    manifest |= {"placement": None, "machines": machines | {"state_bytes": 8 << 20}}
    (out / "manifest.json").write_text(json.dumps(manifest))
    texts = [path for path in out.rglob("*") if path.suffix in (".py", ".json")]
    files = {path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in texts}
    (out / "program.json").write_text(json.dumps({"files": files | {"program.json": "its own"}}))
    return out


def check(folder: Path, program: Path, *arguments: str, **staged: object) -> list[Ended]:
    """Look at two machines; the second rank says something only where the first cannot hear it."""
    commands = [looking(program, *arguments)] * 2
    ended, _ = on_two(folder, commands, **staged)  # type: ignore[arg-type]
    assert seconds_of(ended) < MOST_S, ended
    return ended


def seconds_of(ended: Sequence[Ended]) -> float:
    """The seconds that the slowest says it took; how long Python took to start before is the machine's affair."""
    return max(float(seconds) for one in ended for seconds in SAID.findall(one.out))


def scenario(body: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    """One that waits for a limit: all of them do so side by side, each in a folder of its own."""
    SCENARIOS[body.__name__] = body
    return body


@pytest.mark.timeout(200)
def test_what_is_wrong_with_a_meeting_is_named(program, tmp_path):
    for name in SCENARIOS:
        (tmp_path / name).mkdir()
    at_once({name: functools.partial(body, program, tmp_path / name) for name, body in SCENARIOS.items()})


@scenario
def two_machines_with_the_same_number(program, tmp_path):
    """Both come before the limit that the wait for rank 1 ends with, so that is a long one. Whichever comes first speaks."""
    environments = ({}, {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    ended = check(tmp_path, program, "--timeout", "12", environments=environments)
    assert [one.status for one in ended] == [1, 1]
    (speaker,) = (one for one in ended if "preflight:" in one.out)
    assert speaker.has("error: the same rank twice: rank 0: came from", "alpha", "beta", "NODE_RANK of its own")
    assert speaker.has("error: absent ranks: rank 1")


@scenario
def nothing_is_found_where_nothing_is_wrong(program, tmp_path):
    run_directory = tmp_path / "run"
    first, second = check(
        tmp_path, program, "--run-dir", str(run_directory), "--data", f"{program / 'data.py'}:batches"
    )
    assert (first.status, second.status) == (0, 0), first.out + second.out
    assert first.has("2 came, from 2 machines: ranks 0 (alpha), 1 (beta)")
    assert first.has("cluster: 1 pairs", "(described: 0.125 GB/s)")
    assert first.has("preflight: nothing found")
    assert not second.has("preflight:")
    assert not list(run_directory.glob(".preflight*"))


@pytest.mark.slow
def test_an_interface_that_is_not_there(program, tmp_path):
    environments = ({}, {"GLOO_SOCKET_IFNAME": "eth9"})
    first, second = check(tmp_path, program, environments=environments)
    assert (first.status, second.status) == (1, 1)
    assert first.has("error: network interface: rank 1 (beta): GLOO_SOCKET_IFNAME=eth9", "there are lo, cable")


@pytest.mark.slow
def test_an_interface_that_is_down(program, tmp_path):
    environments = ({"GLOO_SOCKET_IFNAME": "spare"}, {})
    first, _ = check(tmp_path, program, setup="ip link add spare type veth", environments=environments)
    assert first.status == 1
    assert first.has("error: network interface: rank 0 (alpha)", "spare is down", "set GLOO_SOCKET_IFNAME")


def test_an_interface_that_joins_nobody(program, tmp_path):
    environments = ({"GLOO_SOCKET_IFNAME": "lo"}, {"GLOO_SOCKET_IFNAME": "lo"})
    first, _ = check(tmp_path, program, environments=environments)
    assert first.status == 1
    assert first.has("error: network interface: ranks 0 (alpha), 1 (beta)", "127.0.0.1, which only its own machine")


@scenario
def nobody_listens_where_all_meet(program, tmp_path):
    (_, second), _ = on_two(tmp_path, [[], looking(program)])
    assert second.status == 1
    assert seconds_of([second]) < MOST_S
    assert second.has("error: closed port: rank 1 (beta): 10.9.0.1:29511 refuses", "start the first machine too")


RULES = "ip rule add pref 10 lookup local; ip rule del pref 0; ip rule add pref 2 iif cable ipproto tcp "


@scenario
def a_firewall_that_drops_the_port_where_all_meet(program, tmp_path):
    first, second = check(tmp_path, program, setup=RULES + "dport 29511 blackhole")
    assert (first.status, second.status) == (1, 1)
    assert second.has("error: closed port: rank 1 (beta): 10.9.0.1:29511 did not answer", "firewall")
    assert first.has("error: absent ranks: rank 1: did not come in 6 s; rank 0 (alpha) did", "MASTER_PORT")


@scenario
def a_firewall_that_passes_that_port_alone(program, tmp_path):
    passed = "; ip rule add pref 1 iif cable ipproto tcp dport 29511 lookup local"
    first, _ = check(tmp_path, program, setup=RULES + "blackhole" + passed)
    assert first.status == 1
    assert first.has("error: closed port: rank", "cannot connect to rank", "at 10.9.0.", "all TCP ports")


@pytest.mark.slow
def test_a_host_that_takes_itself_for_loopback(program, tmp_path):
    """A host takes itself for loopback as some installations enter its name in /etc/hosts."""
    setup = "sed 's/10.9.0.2 beta/127.0.1.1 beta/' $DIR/hosts > $DIR/own; on_b \"mount --bind $DIR/own /etc/hosts\""
    first, _ = check(tmp_path, program, setup=setup)
    assert first.status == 1
    assert first.has("error: network interface: rank 1 (beta)", "127.0.1.1, which only its own", "/etc/hosts")


@scenario
def a_master_that_nobody_knows(program, tmp_path):
    first, second = check(tmp_path, program, master="nowhere.invalid")
    assert (first.status, second.status) == (1, 1)
    assert second.has("error: closed port: rank 1 (beta): nowhere.invalid:29511 is no name", "set MASTER_ADDR")


def test_a_port_that_somebody_has(program, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        own = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            looking(program), env=environment | own, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert "error: port in use: rank 0" in done.stderr
    assert "set MASTER_PORT to a free one" in done.stderr


def test_another_program_on_one_machine(program, tmp_path):
    """The other program's runtime is of another version."""
    shutil.copytree(program, tmp_path / "old")
    with (tmp_path / "old" / "autopar_runtime" / "kernels" / "gates.py").open("a") as file:
        file.write("\n# another\n")
    ended, _ = on_two(tmp_path, [looking(program), looking(tmp_path / "old")])
    assert [one.status for one in ended] == [1, 1]
    assert ended[0].has("error: another program: rank 1 (beta)", "gates.py changed since", "copy the same directory")


@pytest.mark.slow
def test_another_torch_on_one_machine(program, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.__version__ = '2.9.1'\n")
    patient = ("--timeout", "120")  # the second imports torch first, which a busy machine takes long for
    commands = [looking(program, *patient), looking(program, *patient, executable=sys.executable)]
    (first, _), _ = on_two(tmp_path, commands, environments=({}, {"PYTHONPATH": str(tmp_path)}))
    assert first.status == 1
    assert first.has("error: another version: rank 1 (beta): torch 2.9.1, the others have 2.", "same image")


def test_a_file_that_is_missing_on_one_machine(program, tmp_path):
    shutil.copytree(program, tmp_path / "part")
    (tmp_path / "part" / "stages" / "stage_0.py").unlink()
    ended, _ = on_two(tmp_path, [looking(program), looking(tmp_path / "part")])
    assert [one.status for one in ended] == [1, 1]
    assert ended[0].has("error: missing file: rank 1 (beta)", "stages/stage_0.py", "copy the whole directory")


@pytest.mark.slow
def test_data_that_one_machine_does_not_have(program, tmp_path):
    (tmp_path / "data.py").write_text("")
    hidden = f"on_b 'mount -t tmpfs none {tmp_path / 'own'}'"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "data.py").write_text("")
    first, _ = check(tmp_path, program, "--data", f"{tmp_path}/own/data.py:batches", setup=hidden)
    assert first.status == 1
    assert first.has("error: missing file: rank 1 (beta)", "own/data.py", "a path that every machine has")


@pytest.mark.slow
def test_small_shared_memory(program, tmp_path):
    several = {"LOCAL_WORLD_SIZE": "8"}
    staged = "on_b 'mount -t tmpfs -o size=16m none /dev/shm'"
    first, _ = check(tmp_path, program, setup=staged, environments=(several, several))
    assert first.has("shared memory: beta: /dev/shm has 16 MiB", "8 ranks want 1,024 MiB", "--shm-size")
    assert not first.has("shared memory: alpha")


@pytest.mark.slow
def test_a_slow_link(program, tmp_path):
    staged = "tc qdisc add dev cable root tbf rate 80mbit burst 64kbit latency 50ms"
    first, second = check(tmp_path, program, setup=staged)
    assert (first.status, second.status) == (0, 0)
    assert first.has("slow: slow link: ranks 0 (alpha), 1 (beta)", "MB/s over cluster", "GLOO_SOCKET_IFNAME")


@scenario
def a_full_disk(program, tmp_path):
    (run_directory := tmp_path / "run").mkdir()
    staged = f"mount -t tmpfs -o size=10m none {run_directory}; on_b 'mount -t tmpfs -o size=10m none {run_directory}'"
    first, _ = check(tmp_path, program, "--run-dir", str(run_directory), setup=staged)
    assert first.status == 1
    assert first.has(
        "error: room for checkpoints: ranks 0 (alpha), 1 (beta)", "10 MiB free, two checkpoints take 16 MiB"
    )


@scenario
def a_run_directory_that_is_not_shared(program, tmp_path):
    (run_directory := tmp_path / "run").mkdir()
    staged = f"on_b 'mount -t tmpfs -o size=100m none {run_directory}'"
    first, _ = check(tmp_path, program, "--run-dir", str(run_directory), setup=staged)
    assert first.status == 1
    assert first.has(
        "error: run directory: rank 1 (beta)", "is not the directory that rank 0 has", "all machines share"
    )


def test_a_run_directory_that_cannot_be_written(program, tmp_path):
    (run_directory := tmp_path / "run").mkdir()
    staged = f"on_b 'mount -t tmpfs -o ro none {run_directory}'"
    first, _ = check(tmp_path, program, "--run-dir", str(run_directory), setup=staged)
    assert first.status == 1
    assert first.has("error: run directory: rank 1 (beta)", "Read-only file system", "every rank can write")


def test_swapped_ranks(program, tmp_path):
    """The plan has both ranks on one machine."""
    shutil.copytree(program, tmp_path / "pair")
    manifest = json.loads((tmp_path / "pair" / "manifest.json").read_text())
    manifest["machines"]["ranks_per_node"] = 2
    (tmp_path / "pair" / "manifest.json").write_text(json.dumps(manifest))
    ended, _ = on_two(tmp_path, [looking(tmp_path / "pair")] * 2)
    assert ended[0].status == 1
    assert ended[0].has(
        "error: swapped ranks: rank 1 (beta)", "has 2 ranks that follow each other", "NODE_RANK of its own"
    )


@scenario
def another_number_of_ranks(program, tmp_path):
    environments = ({"WORLD_SIZE": "3"}, {"WORLD_SIZE": "3"})
    first, _ = check(tmp_path, program, environments=environments)
    assert first.status == 1
    assert first.has("error: number of ranks", "torchrun started 3, the program is for 2", "--nproc-per-node")


def test_machines_meet_without_torchrun(program, tmp_path):
    unset = ["env", "-u", "RANK", "-u", "WORLD_SIZE", "-u", "LOCAL_WORLD_SIZE"]
    commands = [[*unset, f"NODE_RANK={n}", *looking(program)] for n in (0, 1)]
    ended, _ = on_two(tmp_path, commands, environments=({}, {"NCCL_SOCKET_IFNAME": "=eno1"}))
    assert ended[0].status == 1
    assert ended[0].has("error: network interface: rank 1 (beta): NCCL_SOCKET_IFNAME==eno1", "no interface eno1")
