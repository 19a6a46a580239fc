"""Programs compiled by inductor compute what they compute as they are written; what cannot be compiled says so and runs."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.errors import InputError
from autopar.runtime import Session
from autopar.runtime.compiled import inductor
from autopar.runtime.kernels import ops
from autopar.runtime.kernels.convolutions import join_backward
from autopar.runtime.kernels.tiles import whole
from autopar.runtime.program.run_options import DEFAULTS, RunOptions
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo

needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
not_compiled = pytest.mark.filterwarnings("error::autopar.runtime.compiled.inductor.CompilerWarning")
LAYERS, STEPS = 3, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Small(nn.Module):
    """Equal layers. x: (batch, 16) float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(16, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, dtype=torch.float64, generator=make), torch.randint(4, (8,), generator=make)


@functools.cache
def small(mesh: tuple[tuple[str, int], ...], strategy: str, microbatches: int) -> autopar.ParallelProgram:
    ranks = 1
    for _, size in mesh:
        ranks *= size
    return autopar.compile(
        Small(),
        autopar.ClusterSpec.local(ranks),
        batch(),
        loss_fn=F.cross_entropy,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
        options=autopar.Options(
            mesh=dict(mesh), strategy=strategy, microbatches=microbatches, compiler="inductor", recompute="none"
        ),
    )


def trained(program: autopar.ParallelProgram, compiler: str, batches: list[Any]) -> dict[str, Tensor]:
    """Losses and the state after a step on each batch."""

    def body(session: Session) -> dict[str, Tensor]:
        losses = [session.train_step(program.leaves(one)).clone() for one in batches]
        state = {name: session.gather_full(name) for name in (*program.ir.parameters, *program.ir.buffers)}
        return {f"loss {i}": loss for i, loss in enumerate(losses)} | state

    modules = replace(program.in_process, options=RunOptions(compiler=compiler))
    return modules.run(program.weights(), program.request.update, program.options.seed, body)[0]


def met(where: str, function: Callable[..., Any], *tensors: Tensor) -> inductor.CompiledRegion:
    """A region that was called with tensors, and compiled then."""
    region = inductor.CompiledRegion(where, lambda rt, given: function(rt, *given), None)
    region(None, [*tensors])
    inductor.compile_met([region])
    return region


def assert_as_written(program: autopar.ParallelProgram, batches: list[Any], tolerance: float) -> None:
    written, own = (trained(program, compiler, batches) for compiler in ("none", "inductor"))
    for name, value in written.items():
        scale = max(1.0, float(value.abs().max()))
        assert float((own[name] - value).abs().max()) <= tolerance * scale, name


@needs_a_compiler
@not_compiled
@pytest.mark.parametrize(
    ("mesh", "strategy", "microbatches"),
    [
        ((("dp", 1),), "auto", 2),
        pytest.param((("tp", 2),), "megatron", 1, marks=pytest.mark.slow),
        pytest.param((("dp", 2), ("tp", 2)), "megatron-zero3", 2, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_step_is_that_of_the_text(
    mesh: tuple[tuple[str, int], ...], strategy: str, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    start = inductor.CompiledRegion.start

    def counted(self: inductor.CompiledRegion, form: inductor.Form) -> Callable[[], None]:
        compiled.append(f"rank {self.rt.comm.rank}, {self.where}")
        return start(self, form)

    monkeypatch.setattr(inductor.CompiledRegion, "start", counted)
    program = small(mesh, strategy, microbatches)
    assert_as_written(program, [batch(seed) for seed in range(STEPS)], 1e-9)
    assert any("layers_forward" in where for where in compiled)
    assert any("layers_backward" in where for where in compiled)
    assert len(compiled) == len(set(compiled)), "a region is compiled once, however many layers, microbatches and steps"


@needs_a_compiler
@not_compiled
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "resnet", "audio", "moe"])
def test_compiled_models_stay_within_the_rounding_of_float32(name: str) -> None:
    zoo = BY_NAME[name]
    program = compiled_zoo(zoo, 1, optimizer=functools.partial(torch.optim.SGD, lr=1e-2))
    assert_as_written(program, [zoo.batch(seed=seed) for seed in range(STEPS)], 1e-4)


@pytest.mark.slow
@needs_a_compiler
@not_compiled
def test_all_that_a_step_met_is_compiled_at_its_end() -> None:
    program = small((("dp", 1),), "auto", 2)
    called: list[str] = []

    def body(session: Session) -> None:
        regions = session.stages[0].regions
        for region in regions:
            written = region.function
            region.function = lambda *given, w=written, where=region.where: called.append(where) or w(*given)
        session.train_step(program.leaves(batch(0)))
        assert regions
        assert all(region.compiled and not region.met for region in regions)
        called.clear()
        session.train_step(program.leaves(batch(1)))
        assert not called

    program.in_process.run(program.weights(), program.request.update, program.options.seed, body)


@needs_a_compiler
def test_what_is_fresh_in_the_text_is_fresh_when_compiled() -> None:
    def results(rt: Any, x: Tensor) -> tuple[Tensor, ...]:
        doubled = x * 2
        return (x.sum(0), x.sum(0), x.clone(), x + 0, doubled, doubled.clone(), doubled.t(), x @ x.t(), x @ x.t())

    def storages(tensors: tuple[Tensor, ...]) -> list[int]:
        """Per tensor the place of the first one that shares its memory."""
        places = [t.untyped_storage().data_ptr() for t in tensors]
        return [places.index(place) for place in places]

    x = torch.randn(8, 8)
    region = met("results", results, x)
    own, written = region(None, [x]), results(None, x)
    assert not region.given_up
    assert storages((x, *own)) == storages((x, *written))
    assert [t.stride() for t in own] == [t.stride() for t in written]


@needs_a_compiler
def test_a_region_empties_the_list_that_it_is_given_and_frees_what_is_in_it() -> None:
    """The first product's operand is gone when the second product runs: nobody's list of arguments holds it."""
    seen: list[bool] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is torch.ops.aten.mm:
                seen.append(first() is not None)
            return func(*args, **(kwargs or {}))

    region = met("products", lambda rt, x, w: (torch.mm(torch.mm(x, w).sin(), w),), torch.ones(8, 8), torch.ones(8, 8))
    assert not region.given_up
    given = [torch.ones(8, 8), torch.ones(8, 8)]
    first = weakref.ref(given[0])
    with Watch(), torch.no_grad():
        region(None, given)
    assert given == []
    assert seen == [True, False]


def test_what_cannot_be_compiled_says_so_once_and_runs() -> None:
    def depends_on_the_data(rt: Any, x: Tensor) -> tuple[Tensor]:
        return (x[: int(x.sum())],)

    said = r"up_forward of stage 0 \(stage_0.py, line 7; up: x\) is not compiled, it runs as it is written: \w+: .+"
    with pytest.warns(inductor.CompilerWarning, match=said):
        region = met("up_forward of stage 0 (stage_0.py, line 7; up: x)", depends_on_the_data, torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (again,) = region(None, [torch.ones(3)])
        inductor.compile_met([region])
    assert again.shape == (3,)


def test_a_number_that_may_change_is_never_a_constant() -> None:
    region = inductor.CompiledRegion("scaled", lambda rt, given: (given[0] * given[1],), None)
    with pytest.warns(inductor.CompilerWarning, match="scaled is not compiled"):
        assert region(None, [torch.ones(2), 3])[0].tolist() == [3, 3]
    assert region(None, [torch.ones(2), 4])[0].tolist() == [4, 4]


def test_a_stage_without_a_compiler_is_its_module() -> None:
    program = small((("dp", 1),), "auto", 2)
    modules = replace(program.in_process, options=DEFAULTS)
    session = modules.run_bare(lambda comm: modules.session(comm, None, 0))[0]
    assert session.stages[0].module is modules.stages[0]


def test_the_option_is_checked() -> None:
    with pytest.raises(InputError, match=r"Options\.compiler must be one of auto, none, inductor, got 'gcc'"):
        autopar.Options(compiler="gcc")


def test_the_cache_lies_beside_the_program_unless_the_user_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.setattr(inductor, "CACHE_IS_CHOSEN", True)
    inductor.keep_beside(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    monkeypatch.setattr(inductor, "CACHE_IS_CHOSEN", False)
    inductor.keep_beside(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compile_cache")


def test_the_text_of_a_module_is_its_own_or_its_file(tmp_path: Path) -> None:
    (tmp_path / "stage.py").write_text("A = 1")
    assert inductor.source_of(types.SimpleNamespace(__file__=str(tmp_path / "stage.py"))) == "A = 1"
    assert inductor.source_of(types.SimpleNamespace(__source__="B = 2")) == "B = 2"


@needs_a_compiler
@pytest.mark.slow
def test_a_saved_program_runs_with_either_compiler(tmp_path: Path) -> None:
    out = small((("dp", 1),), "auto", 2).save(tmp_path / "out")
    assert json.loads((out / "manifest.json").read_text())["compiler"] == "inductor"

    def losses(*arguments: str) -> list[float]:
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR")}
        command = [
            sys.executable,
            "-W",
            "error::UserWarning:autopar_runtime",
            str(out / "run.py"),
            "--steps",
            "3",
            *arguments,
        ]
        ran = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=500, check=False)
        assert ran.returncode == 0, ran.stderr
        assert "is not compiled" not in ran.stderr
        return [float(line.split("loss ")[1].split()[0]) for line in ran.stdout.splitlines() if "loss" in line]

    written = losses("--compiler", "none")
    assert not (out / "compile_cache").exists()
    assert losses() == written
    assert (out / "compile_cache").is_dir()
    small((("dp", 1),), "auto", 2).save(out)
    assert losses() == written


REGION = """
import torch
from autopar.runtime.compiled.inductor import CompiledRegion, compile_met
region = CompiledRegion("doubled", lambda rt, given: ((given[0] * 2).sum(0) + 1, given[0].sin()), None)
region(None, [torch.ones(37, 16)])
compile_met([region])
assert region.compiled
print(region(None, [torch.ones(37, 16)])[0].sum().item(), region.given_up)
"""


@needs_a_compiler
@pytest.mark.slow
def test_a_file_of_the_cache_that_a_kill_left_half_written_is_made_anew(tmp_path: Path) -> None:
    def printed() -> str:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", REGION]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True).stdout

    assert printed() == "1200.0 False\n"
    (wrapper,) = tmp_path.rglob("*.py")
    wrapper.write_text(wrapper.read_text()[:100])
    assert printed() == "1200.0 False\n"


def test_both_gradients_of_a_convolution_are_one_call() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    window = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    x, w, g = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 5, 5), (4, 3, 3, 3), (2, 4, 5, 5)))

    def gradients(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        other = ops.conv_dw(g + 1, x, list(w.shape), *window)
        return ops.conv_dx(g, w, list(x.shape), *window), ops.conv_dw(g, x, list(w.shape), *window), other

    graph = make_fx(gradients, tracing_mode="fake")(g, x, w)
    join_backward(graph.graph)
    graph.graph.lint()
    graph.recompile()
    calls = [node for node in graph.graph.nodes if "convolution_backward" in str(node.target)]
    assert len(calls) == 2
    for own, written in zip(graph(g, x, w), gradients(g, x, w), strict=True):
        torch.testing.assert_close(own, written, rtol=0, atol=1e-12)


def test_gradients_of_a_convolution_stay_apart_where_one_is_needed_for_the_other() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    window = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    x, w = torch.randn(2, 4, 5, 5), torch.randn(4, 4, 3, 3)

    def gradients(g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        made = ops.conv_dx(g, w, list(g.shape), *window)
        return made, ops.conv_dw(g, made, list(w.shape), *window)

    graph = make_fx(gradients, tracing_mode="fake")(x, w)
    join_backward(graph.graph)
    assert sum("convolution_backward" in str(node.target) for node in graph.graph.nodes) == 2


def test_a_region_is_traced_in_one_tile():
    """The steps of a large softmax are traced once, not tile by tile."""
    x, m = torch.randn(4096, 512), torch.zeros(4096)

    def calls() -> int:
        graph = make_fx(lambda x, m: ops.sumexp(x, m, 1), tracing_mode="fake")(x, m).graph
        return sum(node.op == "call_function" for node in graph.nodes)

    with whole():
        in_one = calls()
    assert in_one < 20 < calls()


def test_gpus_compile_by_default_and_cpus_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_has_triton", lambda: True)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert inductor.compiler_on(cpu, DEFAULTS.compiler) == "none"
    assert inductor.compiler_on(gpu, DEFAULTS.compiler) == "inductor"
    assert inductor.compiler_on(gpu, DEFAULTS.compiler, captures=True) == "none"
    assert inductor.compiler_on(gpu, "none") == "none"


def test_a_gpu_without_triton_runs_what_is_written_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_has_triton", lambda: False)
    with pytest.warns(inductor.CompilerWarning, match="inductor finds no Triton that makes kernels for cuda"):
        assert inductor.compiler_on(torch.device("cuda", 0), "auto") == "none"
