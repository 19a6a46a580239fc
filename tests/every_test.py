"""Fixtures and settings of every test: one thread per process, repeatable hypothesis, and markers that skip themselves."""

import gc
import os
import signal
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import autopar.request.request
from autopar.passes.memory.probe import Probe
from tests.sharing import SHARING, shared_effects
from tests.zoo.models import BY_NAME, ZooModel
from tests.zoo.shared import shared

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job, and so in all that tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which nothing has done yet
gc.set_threshold(
    1_000_000, 20, 100
)  # graphs are large and live long: looking for garbage in them is a fifth of the time

FEW_OBJECTS = 100_000

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=25,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=12)
settings.register_profile("explore", settings.get_profile("ci"), derandomize=False, max_examples=500)


def pytest_configure(config: pytest.Config) -> None:
    """Where slow tests are left out, a property that does not say how many examples it wants is looked at in fewer."""
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick" if without_slow(config) else "ci"))


def without_slow(config: pytest.Config) -> bool:
    return config.option.markexpr == "not slow"


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Where slow tests are left out, those that are slow whatever their parameters are not made at all."""
    if not (without_slow(collector.config) and isinstance(obj, types.FunctionType)):
        return None
    return [] if any(mark.name == "slow" for mark in getattr(obj, "pytestmark", ())) else None


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in _beyond_few(items):
        item.add_marker(pytest.mark.slow)
    items.sort(key=_model_of)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """A module of tests draws the same as it is imported, whichever modules are imported before."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


def pytest_collection_finish() -> None:
    gc.freeze()


def _beyond_few(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The parameter sets of tests marked `few(n)` beyond n, n being spread over them evenly."""
    sets: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            sets.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    for tests in sets.values():
        (n,) = tests[0].get_closest_marker("few").args
        kept = {i * len(tests) // n for i in range(n)} if n < len(tests) else range(len(tests))
        yield from (test for i, test in enumerate(tests) if i not in kept)


def _model_of(item: pytest.Item) -> str:
    """The zoo model that a test is about, by which tests lie side by side: they share captures and compiled programs."""
    parameters = getattr(item, "callspec", None)
    for value in parameters.params.values() if parameters is not None else ():
        if isinstance(value, ZooModel):
            return value.name
        if isinstance(value, str) and value in BY_NAME:
            return value
    return ""


@pytest.fixture(scope="session", autouse=True)
def shared_among_tests() -> Iterator[None]:
    """Equal models are captured, and equal lines played, once for all tests of a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autopar.request.request, "capture_program", shared(autopar.request.request.capture_program))
        patch.setattr(Probe, "_standing", shared_effects(Probe._standing))
        yield


@pytest.fixture(autouse=True)
def sharing(request: pytest.FixtureRequest) -> None:
    SHARING.begin(request)


@pytest.fixture(scope="module", autouse=True)
def old_is_not_collected() -> None:
    """Objects that are alive stay out of every later collection, of which a measurement of memory begins with a whole one; few
    may be in them."""
    if gc.get_count()[0] > FEW_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
