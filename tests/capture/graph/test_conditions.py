"""A condition that is held element by element is broken by exactly the batches that break the condition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.capture.graph.conditions import of_each_element

Case = Callable[[Tensor], Tensor]
EACH: dict[str, Case] = {
    "all": lambda x: (x < 2).all().detach().reshape(()) != 0,
    "any": lambda x: (x > 1).any(),
    "not any": lambda x: torch.logical_not((x > 1).any()),
    "columns": lambda x: (x > 0).any(0).all(),
    "finite": lambda x: torch.isfinite(x).all(),
    "largest below": lambda x: x.max() < 2,
    "smallest above": lambda x: x.min().reshape(()) >= -2,
    "largest above": lambda x: x.max() > 1,
    "smallest below": lambda x: x.min() <= -1,
}
WHOLE: dict[str, Case] = {"sum": lambda x: x.sum() > 0, "largest at": lambda x: x.max() == 1}


class Step(nn.Module):
    def __init__(self, f: Case) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


def batches(dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randint(-3, 4, (2, 3), generator=draw).to(dtype) for _ in range(30)]
    drawn += [torch.zeros(2, 3, dtype=dtype), torch.full((2, 3), 5, dtype=dtype)]
    if dtype.is_floating_point:
        for value in (float("nan"), float("inf"), -float("inf")):
            drawn += [x.index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(value)) for x in drawn[:6]]
    return drawn


def held(case: Case, dtype: torch.dtype, value: bool) -> tuple[fx.GraphModule, bool] | None:
    """The graph that gives the truths of elements, and what they must be."""
    exported = torch.export.export(Step(case), (torch.zeros(2, 3, dtype=dtype),), strict=False)
    graph = exported.graph
    found = of_each_element(graph.output_node().args[0][0], value)  # type: ignore[index, arg-type]
    if found is None:
        return None
    graph.output_node().args = (found[0],)
    return fx.GraphModule(exported.graph_module, graph), found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("name", EACH)
def test_elements_are_as_they_must_be_exactly_where_the_condition_is(name: str, dtype: torch.dtype) -> None:
    ways = [(value, held(EACH[name], dtype, value)) for value in (True, False)]
    found = [(value, way) for value, way in ways if way is not None]
    assert len(found) == (0 if dtype.is_floating_point and name in ("largest above", "smallest below") else 1)
    for value, (graph, wanted) in found:
        answers = set()
        for x in batches(dtype):
            went = bool(EACH[name](x)) == value
            assert went == bool((graph(x) == wanted).all())
            answers.add(went)
        assert answers == {True, False} or (name == "finite" and not dtype.is_floating_point)


@pytest.mark.parametrize("name", WHOLE)
def test_conditions_of_all_elements_together_are_held_as_a_whole(name: str) -> None:
    assert held(WHOLE[name], torch.int64, True) is None
    assert held(WHOLE[name], torch.int64, False) is None
