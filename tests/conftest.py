"""Fixtures and settings are those of `tests/every_test.py`, which a process that only hands tests to workers does not import.

Bytecode of tests and library is kept, whatever the environment says of other bytecode: else pytest rewrites all asserts anew,
which is half the time of collecting.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import warm


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker is told where workers share a warm Python."""
    node.workerinput["warm"] = str(warm.own_folder())


def pytest_configure(config: pytest.Config) -> None:
    if "warm" in getattr(config, "workerinput", {}):
        warm.GIVEN[:] = [Path(config.workerinput["warm"])]
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        with kept_bytecode():
            config.pluginmanager.register(importlib.import_module("tests.every_test"), "every_test")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with kept_bytecode():
        return (yield)


@contextmanager
def kept_bytecode() -> Iterator[None]:
    without, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        yield
    finally:
        sys.dont_write_bytecode = without
