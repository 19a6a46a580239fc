"""Ops without a rule get one by experiment, or run whole with a warning that names them; a found rule is never wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.call import OpCall
from autopar.ir.mesh import Mesh
from autopar.ir.program import op_call
from autopar.ir.rule import Rule
from autopar.ops import discover as discovery
from autopar.ops.discover import discover
from autopar.passes.rules.book import RuleBook
from tests.ops.execution import MESHES, Case, as_node, check_strategy

_LIBRARY = torch.library.Library("strange", "DEF")
_CALLS = 0


def strange(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """An op that autopar has never heard of."""

    def add(f: Callable[..., Any]) -> Any:
        name = schema[: schema.index("(")]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, f, "CompositeExplicitAutograd")
        return getattr(torch.ops.strange, name).default

    return add


@strange("swish_pair(Tensor x, Tensor y) -> Tensor")
def swish_pair(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(x) * y


@strange("project(Tensor x, Tensor w) -> Tensor")
def project(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x) @ w.exp()


@strange("centre(Tensor x) -> Tensor")
def centre(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


@strange("statistics(Tensor x) -> (Tensor, Tensor)")
def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp().sum(0), x * 2


@strange("turn(Tensor x) -> Tensor")
def turn(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous() * 3


@strange("relu_of_sum(Tensor x) -> Tensor")
def relu_of_sum(x: Tensor) -> Tensor:
    return x.sum(0).relu()


@strange("reverse_windows(Tensor x) -> Tensor")
def reverse_windows(x: Tensor) -> Tensor:
    width = min(2, x.shape[0])
    return x.unflatten(0, (-1, width)).flip(1).flatten(0, 1)


@strange("neighbours(Tensor x) -> Tensor")
def neighbours(x: Tensor) -> Tensor:
    return x + torch.roll(x, 1, 0)


@strange("whole_mean(Tensor x) -> Tensor")
def whole_mean(x: Tensor) -> Tensor:
    return x - 1e-3 * x.mean()


@strange("always_one(Tensor x) -> Tensor")
def always_one(x: Tensor) -> Tensor:
    return torch.ones_like(x)


@strange("not_a_number(Tensor x) -> Tensor")
def not_a_number(x: Tensor) -> Tensor:
    return x * float("nan")


@strange("noise(Tensor x) -> Tensor")
def noise(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape, dtype=x.dtype)


@strange("stateful(Tensor x) -> Tensor")
def stateful(x: Tensor) -> Tensor:
    global _CALLS
    _CALLS += 1
    return x * _CALLS


@strange("rows(Tensor x, Tensor index, int n) -> Tensor")
def rows(x: Tensor, index: Tensor, n: int) -> Tensor:
    return x[index] / n


@strange("diagonal(Tensor x) -> Tensor")
def diagonal(x: Tensor) -> Tensor:
    return x.diagonal() * 2


@strange("one_hot_rows(Tensor x, int n) -> Tensor")
def one_hot_rows(x: Tensor, n: int) -> Tensor:
    return x[:, None] * torch.ones(n, dtype=x.dtype)


@strange("single_precision(Tensor x, Tensor y) -> Tensor")
def single_precision(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError("float32 only")
    return x * y.sum(-1, keepdim=True)


def f(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def rule_found(case: Case) -> Rule | None:
    node, _ = as_node(case, case.whole())
    return discover(op_call(node))


FINDS = [
    (swish_pair, (f(4, 6), f(4, 6)), "f0 f1, f0 f1 -> f0 f1"),
    (swish_pair, (f(4, 4), f(4, 4)), "f0 f1, f0 f1 -> f0 f1"),
    (project, (f(4, 6), f(6, 3)), "f1 f0, f0 f2 -> f1 f2"),
    (project, (f(4, 4), f(4, 4)), "f0 f1, f1 f2 -> f0 f2"),
    (centre, (f(4, 4),), "f0 . -> f0 ."),
    (turn, (f(4, 4),), "f0 f1 -> f1 f0"),
    (statistics, (f(4, 6),), "f0 f1 -> f1, f0 f1"),
    (diagonal, (f(6, 6),), ". . -> ."),
    (relu_of_sum, (f(4, 6),), ". f0 -> f0"),
    (reverse_windows, (f(8, 3),), ". f0 -> . f0"),
    (neighbours, (f(4, 6),), ". f0 -> . f0"),
    (whole_mean, (f(4, 6),), ". . -> . ."),
    (rows, (f(4, 6), torch.tensor([0, 3]), 2), ". f1, f0 -> f0 f1"),
    (single_precision, (f(4, 2).float(), f(4, 6).float()), "f0 f1, f0 f2 -> f0 f1"),
]


@pytest.mark.parametrize(("target", "args", "expected"), FINDS, ids=lambda v: getattr(v, "__name__", ""))
def test_experiment_finds_this_rule_and_it_holds_on_shards(target: Any, args: tuple[Any, ...], expected: str) -> None:
    case = Case(target, args, {})
    rule = rule_found(case)
    assert rule is not None
    names: dict[str, str] = {}
    got = " ".join(names.setdefault(t, f"f{len(names)}") if t[0] == "f" else t for t in tokens(str(rule)))
    names.clear()
    want = " ".join(names.setdefault(t, f"f{len(names)}") if t[0] == "f" else t for t in tokens(expected))
    assert got == want
    if args[0].dtype == torch.float64:
        check_everywhere(case, rule)


def tokens(text: str) -> list[str]:
    return text.replace(",", " ,").replace("!", "").split()


def check_everywhere(case: Case, rule: Rule) -> None:
    generator = torch.Generator().manual_seed(1)
    for mesh in MESHES:
        for strategy in rule.strategies(mesh):
            check_strategy(case, case.whole(), mesh, strategy, generator, rule)


@pytest.mark.parametrize("target", [always_one, not_a_number, noise, stateful])
def test_an_op_whose_results_say_nothing_gets_no_rule(target: Any) -> None:
    assert rule_found(Case(target, (f(4, 4),), {})) is None


ATEN = [
    (torch.ops.aten.cross.default, (f(4, 3), f(4, 3), 1)),
    (torch.ops.aten.trace.default, (f(4, 4),)),
    (torch.ops.aten.linalg_inv_ex.default, (f(4, 3, 3),)),
    (torch.ops.aten.linalg_det.default, (f(4, 3, 3),)),
    (torch.ops.aten.addmv.default, (f(4), f(4, 6), f(6))),
    (torch.ops.aten.addbmm.default, (f(3, 4), f(2, 3, 6), f(2, 6, 4))),
    (torch.ops.aten.linalg_qr.default, (f(4, 3, 3),)),
    (torch.ops.aten.matrix_exp.default, (f(4, 3, 3),)),
    (torch.ops.aten.channel_shuffle.default, (f(2, 4, 2, 2), 2)),
    (torch.ops.aten.diag_embed.default, (f(2, 4),)),
    (torch.ops.aten.ger.default, (f(4), f(4))),
    (torch.ops.aten.kron.default, (f(2, 2), f(2, 2))),
    (torch.ops.aten.rot90.default, (f(4, 4),)),
    (torch.ops.aten.logaddexp2.default, (f(4, 4), f(4, 4))),
    (torch.ops.aten.as_strided.default, (f(4, 4), [4, 2], [4, 1])),
    (torch.ops.aten.take.default, (f(4), torch.tensor([1, 0]))),
    (torch.ops.aten.isin.Tensor_Tensor, (torch.tensor([1, 2, 0, 1]), torch.tensor([1, 0]))),
]


@pytest.mark.parametrize(("target", "args"), ATEN, ids=lambda v: str(v) if isinstance(v, torch._ops.OpOverload) else "")
def test_what_experiment_finds_for_other_torch_ops_holds_on_shards(target: Any, args: tuple[Any, ...]) -> None:
    case = Case(target, args, {})
    rule = rule_found(case)
    if rule is not None:
        check_everywhere(case, rule)


def test_there_are_no_experiments_on_what_takes_long_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a table reads little and makes all of it, hundreds of times in experiments."""
    case = Case(one_hot_rows, (f(64), 4096), {})
    node, _ = as_node(case, case.whole())
    call = op_call(node)
    assert discover(call) is not None
    monkeypatch.setattr(discovery, "_MOST_ELEMENTS", 64 * 4096)
    monkeypatch.setattr(discovery, "run_call", lambda *_: pytest.fail("an experiment"))
    assert discover(call) is None


def test_a_rule_by_experiment_is_kept_and_named_and_an_op_without_one_warns_once() -> None:
    book = RuleBook()
    known, _ = as_node(Case(swish_pair, (f(4, 6), f(4, 6)), {}), [f(4, 6)])
    odd, _ = as_node(Case(noise, (f(4, 6),), {}), [f(4, 6)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert book.rule(op_call(known)).shardable
    with pytest.warns(UserWarning, match=r"strange\.noise.*runs whole"):
        assert not book.rule(op_call(odd)).shardable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        book.rule(op_call(odd))
    assert list(book.discovered) == ["strange.swish_pair.default"]
    assert book.unknown == ["strange.noise.default"]


@strange("trusting(Tensor x, Tensor y) -> Tensor")
def trusting(x: Tensor, y: Tensor) -> Tensor:
    """x * y, where y is taken to be as large as x, as kernels do that check nothing."""
    assert y.untyped_storage().nbytes() >= x.numel() * y.element_size(), "would read memory of others"
    return x * torch.as_strided(y, x.shape, x.stride())


@pytest.mark.parametrize("of", [f, lambda *shape: torch.ones(shape, dtype=torch.int64)], ids=["floats", "integers"])
def test_a_kernel_that_reads_past_a_part_meets_what_gives_it_away(
    of: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every hypothesis runs without an error, those too that cut one operand alone."""
    failed: list[Exception] = []
    run_call = discovery.run_call

    def watched(call: OpCall, tensors: list[Tensor]) -> list[Tensor | None]:
        try:
            return run_call(call, tensors)
        except Exception as error:
            failed.append(error)
            raise

    monkeypatch.setattr(discovery, "run_call", watched)
    assert str(rule_found(Case(trusting, (of(4, 4), of(4, 4)), {}))) == "f0 f1, f0 f1 -> f0 f1"
    assert failed == []


class Strange(nn.Module):
    """One op that experiment understands, one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return neighbours(swish_pair(y, y)) + whole_mean(y)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_with_unknown_ops_computes_what_one_device_does(ranks: int) -> None:
    torch.manual_seed(3)
    model, batch = Strange().eval(), (torch.randn(8, 8),)
    cluster = autopar.ClusterSpec.local(ranks)
    with pytest.warns(UserWarning, match=r"strange\.whole_mean"):
        program = autopar.compile(model, cluster, batch)
    assert autopar.verify(program, model, batch).ok
    for seed in range(3):
        plan = autopar.random_plan(program, seed)
        with pytest.warns(UserWarning, match=r"strange\.whole_mean"):
            replayed = autopar.compile(model, cluster, batch, plan=plan)
        assert autopar.verify(replayed, model, batch).ok


def test_meshes_cover_one_and_two_axes() -> None:
    assert {len(m.axes) for m in MESHES} == {1, 2}
    assert Mesh.of(a=2) in MESHES
