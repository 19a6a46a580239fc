"""Ranks that meet at an address of IPv6."""

from __future__ import annotations

import socket

import pytest

from autopar.runtime.checkpoint.run_directory import RunDirectory
from autopar.runtime.preflight.facts import interfaces
from autopar.runtime.preflight.links import listener
from tests.runtime.run.test_faults import RANKS, out  # noqa: F401
from tests.runtime.staged import run as run_ranks


def there() -> bool:
    """Whether this machine has a loopback of IPv6."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not there(), reason="this machine has no IPv6")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_meets_and_trains(out, tmp_path):  # noqa: F811
    own = ["--run-dir", tmp_path / "run", "--steps", 3, "--data", f"{out / 'data.py'}:nothing", "--timeout", 60]
    codes, said = run_ranks(out, own, RANKS, tmp_path / "log", master="::1")
    assert codes == [0] * RANKS, said
    assert RunDirectory(tmp_path / "run").steps() == [3]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_preflight_meets_and_finds_nothing_of_the_address(out, tmp_path):  # noqa: F811
    codes, said = run_ranks(out, ["--preflight", "--timeout", 30], RANKS, tmp_path / "log", master="::1")
    assert set(codes) <= {0, 1}, said
    assert "Traceback" not in said
    assert "MASTER_ADDR" not in said
    assert f"{RANKS} ranks" in said


@pytest.mark.parametrize("address", ["::1", "127.0.0.1"])
def test_others_connect_to_the_address_that_a_rank_listens_at(address):
    with listener(address) as one:
        socket.create_connection((address, one.getsockname()[1]), 5.0).close()


def test_an_interface_without_an_ipv4_address_has_its_ipv6_one(monkeypatch, tmp_path):
    import autopar.runtime.preflight.facts as facts

    table = tmp_path / "if_inet6"
    table.write_text(
        "fe80000000000000aaaabbbbccccdddd 01 40 20 80       lo\n20010db8000000000000000000000001 01 80 00 80       lo\n"
    )
    monkeypatch.setattr(facts, "IF_INET6", table)
    monkeypatch.setattr(facts, "_SIOCGIFADDR", 0)  # no address of IPv4
    assert [one.address for one in interfaces() if one.name == "lo"] == ["2001:db8::1"]
