"""Scenarios that mostly wait, run side by side: processes that meet, part, hang or are slow leave a core idle."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from tests.warm import python


def at_once(jobs: Mapping[str, Callable[[], object]], most: int = 8) -> None:
    """Run jobs in threads, at most so many at a time; an AssertionError tells what every job that failed raised, by its name."""
    python()  # one for all, before they ask for it side by side
    with ThreadPoolExecutor(most) as pool:
        running = {name: pool.submit(job) for name, job in jobs.items()}
    errors = {name: error for name, job in running.items() if (error := job.exception()) is not None}
    told = (f"{name}:\n{''.join(traceback.format_exception(error))}" for name, error in errors.items())
    assert not errors, "\n".join(told)
