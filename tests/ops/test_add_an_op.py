"""Adding an op takes one file: the worked example of the docs, compiled, emitted and verified.

Above the tests stands all that a new op needs. `taken_rows` looks up rows of a table. Its rule lets the table be sharded
by rows (`v`), which no op that torch knows allows: a rank then has zeros for the rows that it lacks, and the sum over
ranks, which the rule says is owed, is the result. For that it must be told which rows it has.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import InputError
from autopar.ir.call import OpCall
from autopar.ir.rule import Rule, parse_rule
from autopar.ops import registry
from autopar.ops.dialect import LIFT, lifts
from autopar.ops.registry import Block, find, precision_of, register

ONE_FILE = '''
import math

import torch
from torch import Tensor

import autopar


def work(call, rule):
    """(FLOPs, kind, factors of m, n, k): one multiplication and addition an element that is read or written."""
    return 2.0 * math.prod(call.type_of("g" if call.op.endswith("_grad") else "index").shape), "pointwise", ()


def rows_held(block):
    """On a rank: the first of its rows."""
    return {"first": block.offset("v")}


def all_rows(call):
    """The same on the whole table, for the checker."""
    return {"first": 0}


def taken_rows_grad(g: Tensor, table: Tensor, index: Tensor, first: int) -> list[Tensor]:
    place = index - first
    inside = (place >= 0) & (place < table.shape[0])
    place = place.where(inside, torch.zeros_like(place))
    kept = (g * inside.unsqueeze(-1)).reshape(-1, g.shape[-1])
    return [torch.zeros_like(table).index_add_(0, place.reshape(-1), kept), torch.zeros_like(index)]


@autopar.register_op(
    "v h, b s -> b s h",
    gradient=taken_rows_grad,
    work=work,
    localize=rows_held,
    globalize=all_rows,
    precision="keep",
    dear=False,
    fresh=True,
)
def taken_rows(table: Tensor, index: Tensor, first: int = 0) -> Tensor:
    place = index - first
    inside = (place >= 0) & (place < table.shape[0])
    return table[place.where(inside, torch.zeros_like(place))] * inside.unsqueeze(-1)
'''


@pytest.fixture(scope="module", autouse=True)
def family(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The file, imported as a user's module would be."""
    path = tmp_path_factory.mktemp("ops") / "taken.py"
    path.write_text(ONE_FILE)
    spec = importlib.util.spec_from_file_location("taken", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["taken"] = module
    spec.loader.exec_module(module)
    return module


class Model(nn.Module):
    """A look-up by the new op, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 8) * 0.3)
        self.head = nn.Linear(8, 4)

    def forward(self, index: Tensor) -> Tensor:
        """index: (batch, sequence)."""
        return self.head(torch.tanh(sys.modules["taken"].taken_rows(self.table, index)))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 16, (8, 4), generator=generator), torch.randn(8, 4, 4, generator=generator)


def compiled(model: nn.Module, plan: autopar.Plan | None = None, **options: object) -> autopar.ParallelProgram:
    return autopar.compile(
        model,
        autopar.ClusterSpec.local(4),
        batch(),
        loss_fn=F.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        plan=plan,
        options=autopar.Options(**options),
    )


def seeded() -> Model:
    torch.manual_seed(0)
    return Model()


def test_a_model_with_the_new_op_trains_on_four_ranks_as_on_one() -> None:
    model = seeded()
    assert autopar.verify(compiled(model), model, batch()).max_error <= 1e-9


def by_rows(plan: autopar.Plan) -> autopar.Plan:
    """The plan with the rows of the table over all ranks of its one mesh axis."""
    (stage,) = plan.stages
    templates = {
        name: replace(
            template,
            strategies={
                op: ("v",) if op.startswith("taken_rows") else strategy for op, strategy in template.strategies.items()
            },
        )
        for name, template in stage.templates.items()
    }
    return replace(plan, stages=(replace(stage, templates=templates),))


def test_sharded_by_rows_a_rank_is_told_where_its_rows_start(tmp_path: Path) -> None:
    model = seeded()
    options = {"mesh": {"tp": 4}, "pp": 1}
    program = compiled(model, by_rows(compiled(model, **options).plan), **options)
    assert autopar.verify(program, model, batch()).max_error <= 1e-9
    program.save(tmp_path)
    text = (tmp_path / "stages" / "stage_0.py").read_text()
    assert re.search(r"user_ops\.taken_rows\(\w+, \w+, rt\.comm\.axis_index\('tp'\) \* 4\)", text)
    assert re.search(r"user_ops\.taken_rows_grad\(\w+, \w+, \w+, rt\.comm\.axis_index\('tp'\) \* 4\)", text)
    functions = (tmp_path / "user_ops.py").read_text()
    assert "def taken_rows(" in functions
    assert "def taken_rows_grad(" in functions


def test_what_the_file_states_is_what_the_compiler_knows(family: ModuleType) -> None:
    forward, backward = find("autopar_ops.taken_rows.default"), find("autopar_ops.taken_rows_grad.default")
    assert forward is not None
    assert backward is not None
    assert forward.home == backward.home == "user_ops"
    assert forward.localize is family.rows_held
    assert forward.globalize is family.all_rows
    assert forward.work is family.work
    assert backward.fresh
    assert not forward.recompute_is_dear
    assert precision_of("autopar_ops.taken_rows.default") == "keep"


def test_an_op_kept_in_the_models_dtype_is_not_cast_under_mixed_precision() -> None:
    program = compiled(seeded(), precision="bf16")
    dtypes = {
        call.results[0].dtype
        for template in program.ir.templates.values()
        for call in template.op_calls.values()
        if call.op.startswith("autopar_ops.taken_rows.") and call.results[0] is not None
    }
    assert dtypes == {torch.float32}


def test_a_gradient_of_another_name_is_refused() -> None:
    def some_grad(g: Tensor, x: Tensor) -> list[Tensor]:
        return [g]

    with pytest.raises(InputError, match="the gradient of halved must be called halved_grad, not some_grad"):

        @autopar.register_op("n d -> n d", gradient=some_grad)
        def halved(x: torch.Tensor) -> torch.Tensor:
            return x / 2


def test_a_fact_that_no_op_has_is_refused() -> None:
    with pytest.raises(InputError, match="colour is nothing that can be stated of an op; possible: work, localize"):
        autopar.register_op("n d -> n d", colour="red")


# --- an op that torch has and the compiler does not know -----------------------------------------------------------------


@pytest.fixture
def table() -> Iterator[None]:
    """The table of ops, put back afterwards."""
    ops, lift = dict(registry.OPS), dict(LIFT)
    yield
    for own, before in ((registry.OPS, ops), (LIFT, lift)):
        own.clear()
        own.update(before)
    find.cache_clear()


class Crossed(nn.Module):
    """Torques: a cross product of two learned fields."""

    def __init__(self) -> None:
        super().__init__()
        self.arm = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, sequence, 6)."""
        return torch.linalg.cross(self.arm(x), x[..., :3])


def crossed() -> autopar.ParallelProgram:
    torch.manual_seed(0)
    x = torch.randn(8, 4, 6)
    return autopar.compile(
        Crossed(),
        autopar.ClusterSpec.local(4),
        (x, torch.randn(8, 4, 3)),
        loss_fn=F.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )


@pytest.mark.usefixtures("table")
def test_an_op_of_torch_gets_a_rule_and_facts() -> None:
    assert find("aten.linalg_cross.default").rule is None
    assert "aten.linalg_cross.default" in crossed().rules.discovered

    @register("aten.linalg_cross", precision="keep", dear=True)
    def cross(call: OpCall) -> Rule:
        """The three numbers of a vector stay together, every other dim passes."""
        return parse_rule("b s c!, b s c! -> b s c!", call.shapes, call.out_shapes)

    program = crossed()
    assert not program.rules.discovered
    assert find("aten.linalg_cross.default").recompute_is_dear
    torch.manual_seed(0)
    x = torch.randn(8, 4, 6)
    torch.manual_seed(0)
    assert autopar.verify(program, Crossed(), (x, torch.randn(8, 4, 3))).max_error <= 1e-9


@pytest.mark.usefixtures("table")
def test_an_op_of_torch_becomes_ops_that_are_known() -> None:
    @lifts(torch.ops.aten.linalg_cross.default)
    def cross(a: Tensor, b: Tensor, *, dim: int = -1) -> Tensor:
        """The difference of two products."""
        return a.roll(-1, dim) * b.roll(-2, dim) - a.roll(-2, dim) * b.roll(-1, dim)

    program = crossed()
    names = {call.op for template in program.ir.templates.values() for call in template.op_calls.values()}
    assert "aten.linalg_cross.default" not in names
    assert "aten.roll.default" in names


@pytest.mark.usefixtures("table")
def test_a_fact_is_stated_once() -> None:
    register("aten.linalg_cross", dear=True)(
        lambda call: parse_rule("b c!, b c! -> b c!", call.shapes, call.out_shapes)
    )
    registry.define("aten.linalg_cross", dear=True)
    with pytest.raises(ValueError, match=r"aten\.linalg_cross: dear is defined twice"):
        registry.define("aten.linalg_cross", dear=False)


def test_the_place_of_a_block_is_said_in_rows() -> None:
    """16 rows over two mesh axes of size 2: blocks of 4."""
    x, index, y = (
        autopar.ir.types.TensorType(shape, dtype)
        for shape, dtype in (((16, 8), torch.float32), ((8, 4), torch.int64), ((8, 4, 8), torch.float32))
    )
    call = OpCall("", {}, (x, index), (y,))
    rule = parse_rule("v h, b s -> b s h", call.shapes, call.out_shapes)
    block = Block(call, rule, ("v", "v"), autopar.ir.mesh.Mesh.of(a=2, b=2))
    assert block.offset("v") == registry.Offset(("a", "b"), 4)
    assert block.offset("h") == 0
    assert math.prod(block.result_shape()) == 8 * 4 * 8
