"""Ops that ranks compute alike by kernels that add in an order of their own: they are named, and others are taken."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.codegen.computed_alike import computed_alike
from autopar.runtime.comm.backends import CUDA, OF_TYPE, Host
from autopar.runtime.kernels.attention import scores
from tests.zoo.models import BY_NAME
from tests.zoo.programs import compiled_zoo

RECOMMENDER = BY_NAME["recommender"]


def compiled(name: str, **options: Any) -> autopar.Program:
    cluster = autopar.ClusterSpec.homogeneous(devices=2, device="h100")
    return compiled_zoo(BY_NAME[name], cluster, options=autopar.Options(coupled="per-microbatch", **options))


def settings() -> tuple[bool, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


class Images(torch.nn.Module):
    """Images whose sizes two ranks cannot share."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.conv, self.scale = torch.nn.Conv2d(3, 3, 3, padding=1), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y if self.scale == 1 else torch.nn.functional.interpolate(y, scale_factor=self.scale, mode="bilinear")


def images(scale: int, **options: Any) -> tuple[autopar.Program, Any]:
    batch = torch.randn(3, 3, 7, 7), torch.randn(3, 3, 7 * scale, 7 * scale)
    program = autopar.compile(
        Images(scale), autopar.ClusterSpec.local(2), batch, loss_fn=torch.nn.functional.mse_loss,
        optimizer=torch.optim.SGD, options=autopar.Options(mesh={"tp": 2}, **options),
    )  # fmt: skip
    return program, batch


def test_a_convolution_that_ranks_do_alike_is_named_and_the_program_says_so(tmp_path: Path) -> None:
    program, _ = images(1)
    alike = computed_alike(program.lowered)
    assert {(one.axis, one.always) for one in alike} == {("tp", False)}
    assert {one.op for one in alike} >= {"autopar.conv", "autopar.conv_dw"}
    assert "autopar.conv_dw along tp: on GPUs by kernels in a fixed order" in program.report()
    program.save(tmp_path)
    assert "\nIN_ORDER = True\n" in (tmp_path / "pipeline.py").read_text()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("recommender", {"strategy": "dp"}),
        ("recommender", {"mesh": {"tp": 2}}),  # gradients of tables are added in a fixed order
        pytest.param("gpt2", {"strategy": "dp"}, marks=pytest.mark.slow),
        ("llama", {"strategy": "megatron"}),
    ],
)
def test_what_is_sharded_or_summed_over_ranks_is_not(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    program = compiled(name, **options)
    assert computed_alike(program.lowered) == []
    assert "compute alike" not in program.report()
    program.save(tmp_path)
    assert "IN_ORDER" not in (tmp_path / "pipeline.py").read_text()


def test_ops_that_have_no_kernel_in_a_fixed_order_are_named_apart() -> None:
    program, _ = images(3)
    said = {one.op for one in computed_alike(program.lowered) if one.always}
    assert said == {"aten.upsample_bilinear2d_backward.default"}
    assert all(f"{op.removesuffix('.default')} along tp: GPUs have no kernels" in program.report() for op in said)


@pytest.mark.parametrize("alike", [True, False])
def test_steps_of_such_a_program_ask_for_such_kernels(alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank does, and torch is to warn where there are none."""
    seen = list[bool]()

    class Row(Host):
        def repeatable(self, strict: bool = True) -> Any:
            seen.append(strict)
            return nullcontext()

    monkeypatch.setitem(OF_TYPE, "cpu", Row("cpu", OF_TYPE["cpu"].transport, preset="cpu"))
    program, batch = images(1) if alike else (compiled("recommender", strategy="dp"), RECOMMENDER.batch())
    program.run([batch], steps=1)
    assert seen == ([False, False] if alike else [])


def test_what_torch_was_set_to_is_so_again() -> None:
    before = settings()
    with CUDA.repeatable(strict=False):
        assert settings() == (True, True, False)
        with CUDA.repeatable():
            assert settings() == (True, False, False)
        assert settings() == (True, True, False)
    assert settings() == before


def test_backward_of_attention_adds_in_a_fixed_order_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch does so only where it is to raise for what cannot."""
    seen = list[tuple[bool, ...]]()

    class Kernel:
        def attend_grad(self, *_: Any) -> None:
            seen.append(settings()[:2])

    monkeypatch.setattr(scores, "kernel_for", lambda *_: Kernel())
    x = torch.ones(1)
    for strict in (None, False, True):
        if strict is None:
            scores.attend_grad(x, x, x, x, None, x, x, 0.0, False, 1.0)
            continue
        with CUDA.repeatable(strict):
            scores.attend_grad(x, x, x, x, None, x, x, 0.0, False, 1.0)
            assert settings()[:2] == (True, not strict)
    assert seen == [(False, False), (True, False), (True, False)]
    assert settings()[:2] == (False, False)
