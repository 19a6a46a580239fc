"""Adding a kind of resharding step is two rows: what a rank does (`runtime.comm.reshard`), and what the compiler knows of it
(`ir.steps`); one that sends has a third, its cost (`costmodel.collective`).

Here `pad`: a shard between zeros, so that the shards of all ranks are terms of a sum. [8@dp] -> ~sum(dp) [8] has to gather
without it. Nothing else of the library knows it, and it is found where it is cheapest, printed, typed, priced and run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autopar
from autopar.codegen.printer import Printer
from autopar.errors import CheckError
from autopar.ir.lines import Convert, Function, Line
from autopar.ir.spec import Spec
from autopar.ir.steps import STEP_KINDS, RuntimeStep, Step, StepKind, bytes_before_per_byte, rows
from autopar.passes.check.lines import check
from autopar.passes.lower.convert import Converter, path, runtime_steps
from autopar.passes.lower.names import Names
from autopar.passes.price.lines import conversion_copied_s, conversion_messages
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.lattice import steps_between
from autopar.runtime.comm.comm import Axes, Comm
from autopar.runtime.comm.reshard import TABLE_STEPS, TableStepKind, run_step
from autopar.runtime.comm.threads import run_threads
from tests.passes.price.stages import GATHER_DP, MEMORY, MESH, ON_DP, ROWS, WHOLE, pricer, stage
from tests.zoo.models import BY_NAME

# --- all that it takes


def padded(comm: Comm, x: Tensor, dim: int, axes: Axes) -> Tensor:
    """x where it is in the whole along dim, zeros elsewhere."""
    n, index, size = comm.axis_size(axes), comm.axis_index(axes), x.shape[dim]
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (index * size, (n - 1 - index) * size))


TABLE_ROW = TableStepKind(lambda comm, x, axes, dims, site: padded(comm, x, dims[0], axes), dims=(1,))
ROW = StepKind(
    TABLE_ROW, "padded", owes=1, sends=False, copied_s=lambda held, size, dims, copy_s: copy_s * held * (1 + size)
)

# --- and what it gives


@pytest.fixture
def pad(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Comm, "pad", padded, raising=False)
    monkeypatch.setitem(TABLE_STEPS, "pad", TABLE_ROW)
    monkeypatch.setitem(STEP_KINDS, "pad", ROW)
    steps_between.cache_clear()
    yield
    steps_between.cache_clear()


OWED = Spec(((), ()), (("dp", "sum"),))
PAD = Step("pad", "dp", 0)


def steps(before: Spec, after: Spec) -> list[Step]:
    return [step for step, _ in path(pricer(), ROWS, before, after)]


def lines(before: Spec, *specs: Spec) -> list[Line]:
    """The conversions of x from one spec to the next."""
    made: list[Line] = []
    converter, name = Converter(pricer(), Names(), made.append), "x"
    for after in specs:
        name, before = converter.convert(name, "x", ROWS, before, after, "F", "here"), after
    return made


def of_lines(*made: Line, before: Spec = ON_DP) -> Function:
    return Function("forward", ("x",), made, (made[-1].outs[0],), {"x": (ROWS, before)})


def test_without_its_rows_a_shard_is_gathered_to_be_a_term() -> None:
    assert [step.kind for step in steps(ON_DP, OWED)] == ["all_gather", "to_partial"]


@pytest.mark.usefixtures("pad")
def test_conversions_take_it_where_it_is_cheapest() -> None:
    assert steps(ON_DP, OWED) == [PAD]
    assert [step.kind for step in steps(WHOLE, OWED)] == ["to_partial"]
    assert [step.kind for step in steps(ON_DP, WHOLE)] == ["all_gather"]


@pytest.mark.usefixtures("pad")
def test_it_is_printed_and_typed_and_runs() -> None:
    made = lines(ON_DP, OWED, WHOLE)
    printed = [f"{line.outs[0]} = {Printer().expression(line)}" for line in made]  # type: ignore[arg-type]
    assert printed == ["x_padded = rt.comm.pad(x, 0, 'dp')", "x_reduced = rt.comm.all_reduce(x_padded, 'dp')"]
    check(replace(stage(), forward=of_lines(*made)), RuleBook())
    whole = torch.arange(4.0)

    def run(comm: Comm) -> list[float]:
        values = {"rt": type("Rank", (), {"comm": comm}), "x": whole[2 * comm.rank : 2 * comm.rank + 2]}
        exec("\n".join(printed), values)
        return list(values["x_reduced"].tolist())  # type: ignore[attr-defined]

    assert run_threads(2, {"dp": 2}, run) == 2 * [whole.tolist()]


@pytest.mark.usefixtures("pad")
@pytest.mark.parametrize(
    ("step", "before"), [(replace(PAD, axis="tp"), ON_DP), (replace(PAD, dim=1), ON_DP), (PAD, WHOLE)]
)
def test_the_checker_refuses_it_where_the_axis_does_not_shard_the_dim(step: Step, before: Spec) -> None:
    line = Convert("x", step, outs=("y",), types=(ROWS,), specs=(replace(OWED, partial=((step.axis, "sum"),)),))
    with pytest.raises(CheckError, match=f"pad over {step.axis} of x .*: the axis is not the minor-most of that dim"):
        check(replace(stage(), forward=of_lines(line, before=before)), RuleBook())


@pytest.mark.usefixtures("pad")
def test_it_sends_nothing_and_costs_what_it_writes() -> None:
    line = Convert("x", PAD, outs=("y",))
    assert list(conversion_messages(line, {"x": 100.0}, MESH)) == []
    assert conversion_copied_s(line, {"x": 100.0}, pricer()) == pytest.approx(300 / MEMORY)


@pytest.mark.usefixtures("pad")
def test_a_table_may_have_it() -> None:
    (step,) = runtime_steps(path(pricer(), ROWS, ON_DP, OWED), ROWS, pricer().mesh) or ()
    assert step == RuntimeStep("pad", ("dp",), (0,))
    assert bytes_before_per_byte((step, GATHER_DP), MESH) == 1 / 4

    def run(comm: Comm) -> list[float]:
        return list(run_step(comm, torch.ones(1), rows((step,))[0]).tolist())

    assert run_threads(2, {"dp": 2}, run) == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.usefixtures("pad")
def test_a_program_with_it_computes_the_same() -> None:
    zoo, options = BY_NAME["llama"], autopar.Options(mesh={"dp": 2, "tp": 2})
    given = {"loss_fn": zoo.loss_fn, "optimizer": zoo.optimizer, "options": options}
    program = autopar.compile(zoo.make(), autopar.ClusterSpec.local(4), zoo.batch(), **given)
    for seed in range(30):
        made = program.with_plan(autopar.random_plan(program, seed, pp=1))
        used = [
            line for t in made.stages[0].templates.values() for line in t.forward.lines if isinstance(line, Convert)
        ]
        if PAD.kind in [line.step.kind for line in used]:
            assert autopar.verify(made, zoo.make(), zoo.batch()).max_error < 1e-9
            return
    raise AssertionError("no random plan with the step")
