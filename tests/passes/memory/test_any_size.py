"""An effect that is found at other sizes is the one that running the line at its own sizes has."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from autopar.counter import ByteCounter
from autopar.ir.lines import Compute, Ref
from autopar.ir.mesh import Mesh
from autopar.ops.registry import OPS, Offset
from autopar.passes.memory import probe as probes
from autopar.passes.memory.any_size import any_size, grown
from autopar.passes.memory.probe import Probe
from autopar.passes.played.tensors import Effect, Layout, watch

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64
TWO = Mesh.of(tp=2)
Case = tuple[str, dict[str, Any], list[Layout]]
V = tuple(map(Ref, "abc"))
"""Operands by place."""


def lying(*shape: int, dtype: torch.dtype = F32, how: str = "dense") -> Layout:
    """A layout: dense, turned (its last dims the other way round), or a part of longer rows."""
    if how == "turned" and len(shape) > 1:
        *first, a, b = shape
        return Layout.of(torch.empty(*first, b, a, dtype=dtype, device="meta").mT)
    *first, last = shape
    return Layout.of(torch.empty(*first, last * (3 if how == "part" else 1), dtype=dtype, device="meta")[..., :last])


def cases(draw: random.Random) -> list[Case]:
    """A call of every op whose memory grows with sizes, at sizes that are drawn."""
    n, b, c, d = (draw.choice((1, 2, 3, 4, 8, 30, 77, 128)) for _ in range(4))
    dtype, how = draw.choice((F32, BF16)), draw.choice(("dense", "turned", "part"))
    x, g, w = (lying(*shape, dtype=dtype, how=how) for shape in ((n, b, c), (n, b, d), (d, c)))
    m, rows = lying(n, c, dtype=dtype, how=how), lying(n, d, dtype=dtype, how=how)
    ids, places = lying(n, b, dtype=I64, how=how), lying(n, dtype=I64, how=how)
    start = {"offset": draw.choice((None, Offset(("tp",), d)))}
    summed = {"dim": [draw.choice((0, 1, -1))], "keepdim": draw.random() < 0.5, "dtype": draw.choice((None, F32))}
    gradient = {"rows": c, "padding": draw.choice((-1, 2))}
    return [
        ("aten.sum.dim_IntList", {"self": V[0], **summed}, [x]),
        ("aten.mm.default", {"self": V[0], "mat2": V[1]}, [m, lying(c, d, dtype=dtype, how=how)]),
        ("aten.bmm.default", {"self": V[0], "mat2": V[1]}, [x, lying(n, c, d, dtype=dtype, how=how)]),
        ("aten._to_copy.default", {"self": V[0], "dtype": draw.choice((F32, BF16))}, [x]),
        ("aten.clone.default", {"self": V[0]}, [x]),
        ("aten.t.default", {"self": V[0]}, [m]),
        ("aten.transpose.int", {"self": V[0], "dim0": 0, "dim1": 2}, [x]),
        ("aten.permute.default", {"self": V[0], "dims": [2, 0, 1]}, [x]),
        ("aten.select.int", {"self": V[0], "dim": 0, "index": draw.randrange(n)}, [x]),
        ("autopar.in_range", {"x": V[0], "low": 0, "high": draw.randrange(9)}, [ids]),
        ("autopar.linear", {"x": V[0], "w": V[1]}, [x, w]),
        ("autopar.linear", {"x": V[0], "w": V[1], "b": V[2]}, [m, w, lying(d, dtype=dtype)]),
        ("autopar.linear_dx", {"g": V[0], "w": V[1]}, [g, w]),
        ("autopar.linear_dw", {"g": V[0], "x": V[1]}, [g, x]),
        ("autopar.embedding", {"w": V[0], "index": V[1], **start}, [w, ids]),
        ("autopar.embedding_grad", {"g": V[0], "index": V[1], **gradient, **start}, [rows, places]),
        ("aten.relu.default", {"self": V[0]}, [x]),
        ("aten.gelu.default", {"self": V[0]}, [m]),
        ("aten.threshold_backward.default", {"grad_output": V[0], "self": V[1], "threshold": 0}, [x, x]),
        ("aten.add.Tensor", {"self": V[0], "other": V[1]}, [x, lying(1, c, dtype=dtype)]),
    ]


def effect_of(probe: Probe, case: Case) -> Effect:
    op, arguments, layouts = case
    return probe.effect(Compute(op, arguments, outs=("y",)), dict(zip("abc", layouts, strict=False)))[1]


def test_effects_at_any_sizes_are_those_at_these_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One probe learns from the first sizes, or kinds of layouts, and answers for all others."""
    learning = Probe(TWO)
    drawn = [case for seed in range(25) for case in cases(random.Random(seed))]
    found = [effect_of(learning, case) for case in drawn]
    monkeypatch.setattr(probes, "any_size", lambda *_: None)
    asking = Probe(TWO)
    for case, effect in zip(drawn, found, strict=True):
        assert effect == effect_of(asking, case), case


def test_every_op_whose_memory_grows_with_sizes_is_among_the_cases() -> None:
    tried = {op if op.startswith("autopar.") else op.rpartition(".")[0] for op, _, _ in cases(random.Random(0))}
    assert {name for name, definition in OPS.items() if definition.scales is not None} <= tried


def test_layers_of_other_sizes_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[int]()
    monkeypatch.setattr(probes, "watch", lambda *args, **kwargs: ran.append(1) or watch(*args, **kwargs))
    probe = Probe(TWO)
    for i in range(2, 9):
        x, w = lying(8, i * 16), lying(i * 48, i * 16)
        assert effect_of(probe, ("autopar.linear", {"x": V[0], "w": V[1]}, [x, w])).fresh == (8 * i * 48 * 4,)
    assert len(ran) == 2


def test_what_adds_sizes_up_grows_with_none() -> None:
    line = any_size(Compute("aten.relu.default", {"self": V[0]}, outs=("y",)), [lying(7)])
    assert line is not None

    def padded(_: Compute, layouts: tuple[Layout, ...], counter: ByteCounter) -> Effect:
        return watch(lambda tensors: tensors[0].new_empty(tensors[0].shape[0] + 1), layouts, counter=counter)

    assert grown(line, padded) is None
