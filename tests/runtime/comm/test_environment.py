"""A launch that cannot work ends with one line that says what is wrong and what to do, with and without torchrun."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from autopar.runtime.comm.environment import LaunchError, Started, check_name, started
from tests.at_once import at_once
from tests.runtime.run.test_launch import emitted  # noqa: F401
from tests.warm import python

TORCHRUNS = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29501"}


def test_what_torchrun_says_is_taken_and_who_was_not_started_by_it_is_alone():
    assert started({**TORCHRUNS, "MASTER_ADDR": "node0"}) == Started(3, 4, 1, 2, "node0", 29501)
    assert started({}) == Started(0, 1, 0, 1, "127.0.0.1", 0)
    assert started({"RANK": "1", "WORLD_SIZE": "2"}) == Started(1, 2, 0, 2, "127.0.0.1", 29500)


@pytest.mark.parametrize("name", TORCHRUNS)
@pytest.mark.parametrize("words", ["", "x", "-1", "1.0", "1e3", "٣", "9" * 30, "0x1", "\n"])
def test_a_variable_that_is_no_number_is_named(name, words):
    with pytest.raises(
        LaunchError, match=f"^{name} is .* in the environment, and must be a whole number from [01] to "
    ):
        started({**TORCHRUNS, name: words})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE 4: ranks are counted from 0"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0' in the environment"),
        ({"WORLD_SIZE": None}, "RANK is 3 and WORLD_SIZE 1: .* which is not set"),
        ({"RANK": None}, "WORLD_SIZE is 4, but RANK is not set"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE 2"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is '65536'"),
    ],
)
def test_numbers_that_do_not_go_together_are_named(changed, said):
    environment = {name: value for name, value in {**TORCHRUNS, **changed}.items() if value is not None}
    with pytest.raises(LaunchError, match=said):
        started(environment)


@pytest.mark.parametrize("name", ["no.such.host.invalid", "a b", "x" * 300, "\0"])
def test_a_master_that_has_no_address_is_named(name):
    with pytest.raises(LaunchError, match="is no name that this machine knows; set MASTER_ADDR"):
        check_name(name)


def run(out, *arguments, timeout=60, **environment):
    """run.py of one process that nobody started with others."""
    kept = {name: value for name, value in os.environ.items() if name not in (*TORCHRUNS, "MASTER_ADDR")}
    return subprocess.run(
        [python(), str(out / "run.py"), "--steps", "1", "--timeout", "2", *arguments],
        env=kept | {"PYTHONPATH": str(out), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return str(one.getsockname()[1])


ALONE, SECOND = {"WORLD_SIZE": "2", "RANK": "0"}, {"WORLD_SIZE": "2", "RANK": "1"}


CANNOT: dict[str, dict[str, str]] = {
    "error: WORLD_SIZE is 'two' in the environment": {"WORLD_SIZE": "two", "RANK": "0"},
    "error: RANK is 2 and WORLD_SIZE 2": {"WORLD_SIZE": "2", "RANK": "2"},
    "error: this program was compiled for 2 ranks": {"WORLD_SIZE": "3", "RANK": "0"},
    "MASTER_ADDR 'no.such.invalid' is no name": {**ALONE, "MASTER_ADDR": "no.such.invalid"},
    "refuses: the machine is there, but nobody listens": {**SECOND, "MASTER_PORT": "free"},
    "rank 0: not all of 2 ranks came to 127.0.0.1:": {**ALONE, "MASTER_PORT": "free"},
    "is taken on this machine; set MASTER_PORT": {**ALONE, "MASTER_PORT": "taken"},
    "though somebody listens there": {**SECOND, "MASTER_PORT": "taken"},
}
"""By what the line says: the environment of a launch, with a port that is free and one at which somebody else listens."""


@pytest.mark.timeout(120)
def test_a_launch_that_cannot_work_ends_with_one_line(emitted):  # noqa: F811
    def look(said: str, environment: dict[str, str], ports: dict[str, str]) -> None:
        done = run(emitted, **{**environment, "MASTER_PORT": ports[environment.get("MASTER_PORT", "free")]})
        assert done.returncode != 0
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        assert len(lines) == 1, done.stderr
        assert said in lines[0]
        assert "Traceback" not in done.stderr

    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        ports = [{"free": free_port(), "taken": str(taken.getsockname()[1])} for _ in CANNOT]
        at_once(
            {said: functools.partial(look, said, CANNOT[said], own) for said, own in zip(CANNOT, ports, strict=True)}
        )


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_meet_over_ipv6(emitted):  # noqa: F811
    port = free_port()
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": port}
    with ThreadPoolExecutor(2) as both:
        done = list(both.map(lambda rank: run(emitted, "--timeout", "60", **environment, RANK=rank), ("0", "1")))
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    assert "step 1  loss" in done[1].stdout  # the program's rank 0
