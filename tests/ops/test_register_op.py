"""`@autopar.register_op` end to end: compile, verify under any plan, emit, run without autopar."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import CoupledError, InputError, ShardingError


@autopar.register_op("b s d!, d! -> b s d!")
def soft_scale(x: torch.Tensor, scale: torch.Tensor, power: float, centred: bool = False) -> torch.Tensor:
    y = x - x.mean(-1, keepdim=True) if centred else x
    return torch.tanh(y) * scale**power


@autopar.register_op("b s i, i o -> b s o")
def exponential_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bsi,io->bso", torch.tanh(x), w.exp())


@autopar.register_op("b s h<max -> b s")
def strongest(x: torch.Tensor) -> torch.Tensor:
    return x.amax(-1)


@autopar.register_op("v h!, b s -> b s h!")
def whole_rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table[index] * 2.0


@autopar.register_op("v! h, b s -> b s h")
def doubled_rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table[index] * 2.0


@autopar.register_op("d, d -> d")
def gained_by_g(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return x * torch.exp(g)


@autopar.register_op("d, d -> d")
def gained_by_gain(x: torch.Tensor, gained_by_gain: torch.Tensor) -> torch.Tensor:
    return x * torch.exp(gained_by_gain)


@autopar.register_op("d, d -> d")
def gained_by_grad(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return x * torch.exp(grad)


class Gained(nn.Module):
    """A parameter, and an op of it and of a mean over the batch."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.op, self.inner, self.w = op, nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.w, self.inner(x).mean(0).detach()).sum()


class Model(nn.Module):
    """Every kind of registered op: composite arguments, a contraction, a maximum, an integer operand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 8) * 0.3)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.up = nn.Parameter(torch.randn(8, 16) * 0.3)
        self.down = nn.Linear(16, 4)

    def forward(self, index: Tensor) -> Tensor:
        x = doubled_rows(self.table, index)
        x = soft_scale(x, self.scale, 1.5, centred=True)
        h = exponential_product(x, self.up)
        return self.down(h) + strongest(h).unsqueeze(-1)


def loss_fn(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, target)


OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-2)


@functools.cache
def model() -> Model:
    torch.manual_seed(5)
    return Model()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 12, (8, 4), generator=generator), torch.randn(8, 4, 4, generator=generator)


def compiled(ranks: int, plan: autopar.Plan | None = None) -> autopar.Program:
    cluster = autopar.ClusterSpec.local(ranks)
    return autopar.compile(model(), cluster, batch(), loss_fn=loss_fn, optimizer=OPTIMIZER, plan=plan)


@pytest.mark.few(2)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_model_with_registered_ops_trains_as_on_one_device(ranks: int) -> None:
    assert autopar.verify(compiled(ranks), model(), batch()).max_error <= 1e-9


def check_plan(ranks: int, seed: int) -> None:
    plan = autopar.random_plan(compiled(ranks), seed)
    result = autopar.verify(compiled(ranks, plan), model(), batch())
    assert result.max_error <= 1e-9, result.errors


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_registered_ops_compute_the_same_under_random_plans(ranks: int, seed: int) -> None:
    check_plan(ranks, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 44))
def test_registered_ops_compute_the_same_under_many_random_plans(seed: int) -> None:
    check_plan((2, 4)[seed % 2], seed)


@pytest.mark.parametrize("op", [gained_by_g, gained_by_grad, gained_by_gain])
def test_an_argument_that_is_called_like_a_gradient_or_the_op_is_neither(
    op: Callable[[Tensor, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    gained, x = Gained(op), torch.randn(8, 6)
    compiled = functools.partial(autopar.compile, gained, autopar.ClusterSpec.local(2), (x,), optimizer=OPTIMIZER)
    result = autopar.verify(compiled(options=autopar.Options(mesh={"dp": 2})), gained, (x,), steps=2)
    assert result.max_error <= 1e-9, result.errors
    with pytest.raises(CoupledError, match="gained_by_g"):
        compiled(options=autopar.Options(microbatches=2))


def test_gradients_of_an_op_that_owes_a_maximum_keep_that_factor_whole() -> None:
    from autopar.ir.call import OpCall, Operand
    from autopar.ir.types import TensorType
    from autopar.ops.registry import OPS

    x, y = TensorType((4, 4, 8), torch.float64), TensorType((4, 4), torch.float64)
    forward = OPS["autopar_ops.strongest"].rule(OpCall("", {"x": Operand(0)}, (x,), (y,)))
    backward = OPS["autopar_ops.strongest_grad"].rule(OpCall("", {}, (y, x), (x,)))
    assert forward.shardable == ("b", "s", "h")
    assert backward.shardable == ("b", "s")


_PROBE = """
import importlib.util, os, sys
assert importlib.util.find_spec("autopar") is None, "autopar is importable here"
os.chdir(os.path.dirname(sys.argv[1]))
import runpy
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv = [sys.argv[1], *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_emitted_directory_carries_the_ops_and_runs_without_autopar(tmp_path: Path) -> None:
    program = compiled(1)
    out = tmp_path / "out"
    program.save(out)
    source = (out / "user_ops.py").read_text()
    assert "def exponential_product(" in source
    assert "def exponential_product_grad(" in source
    assert "whole_rows" not in source
    assert "autopar." not in source.replace("autopar_ops", "")
    probe = tmp_path / "probe.py"
    probe.write_text(_PROBE)
    # -S and an explicit path leave out the editable install of autopar.
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not entry.name.startswith(("autopar", "__editable__", "_virtualenv")) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    environment = {**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", str(probe), str(out / "run.py"), "--steps", "2"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "loss" in done.stdout


# --- errors that teach ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["b s d", "b -> b, b", "b ->", ""])
def test_a_line_that_is_no_rule_is_refused_with_an_example(rule: str) -> None:
    with pytest.raises(InputError, match=r"write for example 'n d, d -> n d'"):
        autopar.register_op(rule)


def test_a_rule_for_another_number_of_tensors_is_refused() -> None:
    with pytest.raises(InputError, match=r"names 2 operands, lonely takes 1 tensors \(x\)"):

        @autopar.register_op("b d, d -> b d")
        def lonely(x: torch.Tensor) -> torch.Tensor:
            return x


def test_tensors_come_first_and_are_annotated() -> None:
    with pytest.raises(InputError, match=r"late must take its tensors first, each annotated torch\.Tensor"):

        @autopar.register_op("b -> b")
        def late(n: int, x: torch.Tensor) -> torch.Tensor:
            return x * n

    with pytest.raises(InputError, match="bare must take its tensors first"):

        @autopar.register_op("b -> b")
        def bare(x):  # type: ignore[no-untyped-def]
            return x


def test_an_optional_tensor_is_refused() -> None:
    with pytest.raises(InputError, match="argument bias must be annotated int, float, bool or str"):

        @autopar.register_op("b -> b")
        def perhaps(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return x if bias is None else x + bias


def test_a_result_without_annotation_is_refused() -> None:
    with pytest.raises(InputError, match="annotate arguments and the result"):

        @autopar.register_op("b -> b")
        def silent(x: torch.Tensor):  # type: ignore[no-untyped-def]
            return x


def test_a_name_that_is_taken_is_refused() -> None:
    def soft_scale(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(InputError, match="there is an op soft_scale already"):
        autopar.register_op("b -> b")(soft_scale)


def test_a_rule_that_does_not_fit_the_shapes_is_named_when_the_model_is_compiled() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return strongest(x)

    with pytest.raises(ShardingError, match=r"'b s h<max' has 3 dims, the tensor has shape \(4, 8\)"):
        autopar.compile(Flat(), autopar.ClusterSpec.local(2), (torch.randn(4, 8),))
