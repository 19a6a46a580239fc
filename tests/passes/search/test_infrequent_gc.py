"""A search leaves the garbage collector as it was."""

import gc

from autopar.passes.search.infrequent_gc import infrequent_gc


def test_garbage_is_afterwards_looked_for_as_often_as_before() -> None:
    before = gc.get_threshold()
    with infrequent_gc():
        assert gc.get_threshold()[0] >= before[0]
    assert gc.get_threshold() == before
