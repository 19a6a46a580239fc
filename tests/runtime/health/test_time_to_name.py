"""How long it takes until the culprit of a fault is named, with the default `--hang` of 60 s. Each test says its seconds.

The faults, and what runs them, are those of test_faults.py; the ranks' data source notes when a fault is about to begin.
"""

from __future__ import annotations

import pytest

from autopar.cli.doctor import conclusion, read_flights
from tests.runtime.run.test_faults import DATA, RANKS, out  # noqa: F401
from tests.runtime.staged import run as run_ranks

LIMIT_S = 65.0
"""The limit of `--hang`, and 5 s in which whoever stalls is told apart from who stalled for less."""
TIMED = """
def timed(fault):
    def noted():
        for n, batch in enumerate(fault()):
            if (RANK, n) == (0, 6):
                open(os.path.join(os.path.dirname(__file__), "began"), "w").close()
            yield batch
    return noted

timed_stopped, timed_looping, timed_left_out, timed_other_later = map(timed, (stopped, looping, left_out, other_later))
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("fault", "culprits", "said", "limit_s"),
    [
        ("stopped", (2,), "rank 2 no longer runs (stopped", LIMIT_S),
        ("looping", (1,), "rank 1 is not waiting for anybody; it is at step 7", LIMIT_S),
        ("left_out", (3,), "rank 3 sent other messages than the rest", LIMIT_S),
        ("other_later", (2,), "rank 2 (", 20.0),
    ],
)
def test_a_fault_is_named_within_the_default_limit(out, tmp_path, fault, culprits, said, limit_s):  # noqa: F811
    (out / "data.py").write_text(DATA + TIMED)
    run, began = tmp_path / "run", out / "began"
    argv = ["--run-dir", run, "--steps", 90, "--timeout", 600, "--data", f"{out / 'data.py'}:timed_{fault}"]
    codes, text = run_ranks(out, argv, RANKS, tmp_path / "log")
    assert any(codes)
    assert said in text
    assert conclusion(read_flights(run)).culprits == culprits
    named_at = max(path.stat().st_mtime for path in (run / "flight").glob("rank_*.json"))
    took_s = named_at - began.stat().st_mtime
    print(f"{fault} was named {took_s:.1f} s after it began")
    assert took_s < limit_s
