"""Template functions are cut into regions between what they send, draw and look at; the statements stay those of the file."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule

import autopar
from autopar.runtime.compiled import inductor
from autopar.runtime.compiled.regions import cut
from autopar.runtime.program.run_options import RunOptions
from tests.zoo.models import BY_NAME, MODELS, ZooModel
from tests.zoo.programs import compiled_zoo

HEAD = "def block_forward(rt, call, w, v, x):\n"
ONE = """
    # layers.0.up · model.py:8: self.up(x)
    h = ops.linear(x, w)
    del w
    a = aten.gelu(h)
    y = ops.linear(a, v)
    del v, a
"""
MESSAGE = """
    y_reduced = rt.comm.all_reduce(y, 'tp')
    del y
"""


def shown(body: str) -> list[str]:
    """The functions that a function with this body becomes, as text."""
    return [ast.unparse(function) for function in cut(HEAD + body).tree.body]


def text(lines: str) -> str:
    return textwrap.dedent(lines).strip()


def test_a_function_is_cut_at_its_messages() -> None:
    region, function = shown(ONE + MESSAGE + "    return y_reduced, [x, h]")
    assert region == text("""
        def block_forward_1(rt, _given):
            x, w, v = _given
            _given.clear()
            h = ops.linear(x, w)
            del w
            a = aten.gelu(h)
            y = ops.linear(a, v)
            del v, a
            return (h, y)
    """)
    assert function == text("""
        def block_forward(rt, call, w, v, x):
            _given = [x, w, v]
            del w, v
            h, y = block_forward_1(rt, _given)
            y_reduced = rt.comm.all_reduce(y, 'tp')
            del y
            return (y_reduced, [x, h])
    """)


def test_a_region_says_where_it_comes_from() -> None:
    (region,) = cut(HEAD + ONE + "    return y, [x, h]").regions
    assert (region.function, region.line) == ("block_forward", 4)
    assert region.source == "layers.0.up · model.py:8: self.up(x)"


@pytest.mark.parametrize(
    "line",
    [
        "y = rt.comm.all_gather(h, 0, 'tp')",
        "work = rt.comm.start_all_gather(h, 0, 'tp')",
        "y = work.wait()",
        "y = ops.dropout(h, 0.1, rt.key(call, 0))",
        "y = rt.guards.in_range(h, 0, 8)",
        "y = attention.attention(h, h, h, along=rt.along('cp'))",
        "y = experts.experts(h)",
        "y = user_ops.mine(h)",
        "y = ops.linear(rt.params['w'], h)",
        "y = open(h)",
        "y = h.item()",
        "y = h[0]",
        "y = [h, h]",
        "y = h",
        "saved.clear()",
        "y: int = ops.linear(h, h)",
    ],
)
def test_what_is_not_known_to_compute_stays_where_it_is(line: str) -> None:
    before, after = "    h = aten.gelu(x)\n    h = aten.relu(h)\n", "    z = aten.gelu(v)\n    z = aten.relu(z)\n"
    *_, function = shown(before + f"    {line}\n" + after + "    return z")
    assert function.split("\n    ")[1:] == [
        "_given = [x]",
        "h, = block_forward_1(rt, _given)",
        line,
        "_given = [v]",
        "z, = block_forward_2(rt, _given)",
        "return z",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "y = rt.comm.shard(h, 0, 'tp')",
        "y = ops.pick(h, h, 1, offset=rt.comm.axis_index('tp') * 32 + 1)",
        "y = aten.full([8], float('-inf'), dtype=torch.float32, device=rt.device)",
        "y = -h.permute(1, 0).sum([0], keepdim=True)",
        "y, _ = aten.split.Tensor(aten.cat([h, h], 0), 8)",
    ],
)
def test_what_a_rank_is_told_once_belongs_to_a_region(line: str) -> None:
    body = f"    h = aten.gelu(x)\n    {line}\n    z = aten.gelu(y)\n    return z"
    region, function = shown(body)
    assert line.split(" = ")[1].split("(")[0] in region
    assert [part for part in function.split("\n    ") if " = " in part] == function.split("\n    ")[1:3]


def test_what_has_nothing_to_be_fused_with_is_no_region() -> None:
    body = "    y = ops.linear(x, w)\n    y = y.reshape(4)\n    return y"
    assert shown(body) == [ast.unparse(ast.parse(HEAD + body))]


def test_other_functions_are_left_alone() -> None:
    source = "def forward(rt, inputs, received, prepared):\n    a = aten.gelu(x)\n    b = aten.gelu(a)\n    return [b]"
    assert ast.unparse(cut(source).tree) == source
    assert not cut(source).regions


def as_traced(graph: GraphModule, tensors: Sequence[torch.Tensor]) -> Callable[[], inductor.Compiled]:
    """A stand-in for inductor: the graph of a region as it is, op by op."""
    return lambda: lambda given: graph(*given)


def trained(program: autopar.ParallelProgram, compiler: str, zoo: ZooModel) -> tuple[list[torch.Tensor], dict]:
    """Losses of two steps on every form of program, and the parameters after them."""
    modules = replace(program.in_process, options=RunOptions(compiler=compiler))
    batches = [program.leaves(zoo.batch(seed=seed)) for seed in (1, 2)]

    def body(session: autopar.runtime.Session) -> tuple[list[torch.Tensor], dict]:
        losses = [session.train_step(list(batch)).clone() for batch in batches]
        return losses, {name: session.gather_full(name) for name in (*program.ir.parameters, *program.ir.buffers)}

    return modules.run(program.weights(), program.request.update, 0, body)[0]


def assert_the_same_bits(zoo: ZooModel, program: autopar.ParallelProgram) -> None:
    losses, state = trained(program, "none", zoo)
    own_losses, own_state = trained(program, "inductor", zoo)
    assert all(map(torch.equal, losses, own_losses))
    for name, value in state.items():
        assert torch.equal(value, own_state[name]), name


def compiled(zoo: ZooModel, ranks: int) -> autopar.ParallelProgram:
    return compiled_zoo(zoo, ranks)


@pytest.mark.few(1)
@pytest.mark.filterwarnings("error::autopar.runtime.compiled.inductor.CompilerWarning")
@pytest.mark.parametrize(
    ("name", "ranks", "seed"), [("gpt2", 1, None), ("llama", 4, 1), ("moe", 4, 3), ("resnet", 2, 0)]
)
def test_regions_are_traced_and_compute_the_same_bits(
    name: str, ranks: int, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "lowered", as_traced)
    program = compiled(BY_NAME[name], ranks)
    program = program if seed is None else program.with_plan(autopar.random_plan(program, seed))
    assert any(cut(source).regions for source in program.sources)
    assert_the_same_bits(BY_NAME[name], program)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::autopar.runtime.compiled.inductor.CompilerWarning")
@pytest.mark.parametrize("zoo", MODELS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_regions_of_every_model_are_traced(zoo: ZooModel, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "lowered", as_traced)
    program = compiled(zoo, ranks)
    for seed in range(3):
        assert_the_same_bits(zoo, program.with_plan(autopar.random_plan(program, seed)) if seed else program)
