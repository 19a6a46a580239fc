"""Branches on data go the way of the example, and a batch that goes another way stops the program at the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.capture.equal import SGD, Net, square

Case = Callable[[Net, Tensor], Tensor]


def _if(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    if x.sum() > 0:  # here
        return net.last(h)
    return h


def _assert(net: Net, x: Tensor) -> Tensor:
    assert (x > -50).all()  # here
    assert not torch.isnan(x).any()
    return net.first(x)


def _item(net: Net, x: Tensor) -> Tensor:
    largest = x.max().item()
    return net.first(x) if (largest + 1) / 2 > x.min().item() + 20 else net.last(x)  # here


def _float_equality(net: Net, x: Tensor) -> Tensor:
    """Python compares in float64, where 0.1 is not float32's 0.1."""
    first = x.flatten()[0].item()
    return net.last(x) if first == 0.1 or first * 0 + 1 == first else net.first(x)  # here


def _exact(net: Net, x: Tensor) -> Tensor:
    """Python's numbers are float64 where torch would take float32."""
    count = (x > -50).sum().item() + 2**24
    exact = (count + 1) / 1 > count and count * 1.0 + 1.0 > count
    return net.first(x) if exact and count == 2**24 + 32 else net.last(x)  # here


def _flag(net: Net, x: Tensor) -> Tensor:
    return net.first(x) if (x > 50).any().item() is False else net.last(x)  # here


def _count(net: Net, x: Tensor) -> Tensor:
    return net.first(x)[:, : int((x > 0).sum())]  # here


def _factor(net: Net, x: Tensor) -> Tensor:
    return net.first(x) * float(x.amax())  # here


def _same(net: Net, x: Tensor) -> Tensor:
    return net.first(x) if torch.equal(x, x.flip(0)) else net.last(x)  # here


def _close(net: Net, x: Tensor) -> Tensor:
    return net.first(x) if torch.allclose(x, x.flip(0), atol=1e-3) else net.last(x)  # here


def _loop(net: Net, x: Tensor) -> Tensor:
    while x.abs().max() > 2:  # here
        x = x / 2
    return net.first(x)


def _no_grad(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        large = x.abs().max() > 50
    return net.first(x) if large else net.last(x)  # here


CASES: dict[Case, tuple[float, float]] = {
    _if: (2.0, -1.0),
    _assert: (2.0, -100.0),
    _item: (2.0, 100.0),
    _float_equality: (2.0, 0.0),
    _exact: (2.0, -100.0),
    _flag: (2.0, 100.0),
    _count: (1.0, -1.0),
    _factor: (1.0, 0.5),
    _same: (0.5, 0.0),
    _close: (0.5, 0.0),
    _loop: (0.9, 10.0),
    _no_grad: (2.0, 100.0),
}
"""Case: a factor of the example batch that leaves its branches as they are, and one that does not."""


def example() -> Tensor:
    x = torch.linspace(-1, 4, 32).reshape(4, 8)
    x[0, 0] = 1.25
    return x


def other(case: Case) -> Tensor:
    """A batch that goes another way."""
    x = example() * CASES[case][1]
    if case is _float_equality:
        x[0, 0] = 1.0
    return x


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.__name__)
def compiled(request: pytest.FixtureRequest) -> tuple[Case, Net, autopar.Program]:
    torch.manual_seed(0)
    net = Net(request.param)
    return request.param, net, autopar.compile(net, autopar.ClusterSpec.local(2), (example(),))


def test_a_batch_that_goes_the_way_of_the_example_gives_what_eager_gives(compiled: tuple[Case, Net, Any]) -> None:
    case, net, program = compiled
    for factor in (1.0, CASES[case][0]):
        assert autopar.verify(program, net, (example() * factor,)).ok


def test_a_batch_that_goes_another_way_stops_at_the_line_that_asks(compiled: tuple[Case, Net, Any]) -> None:
    case, _, program = compiled
    numbers = r" and was 26 .* it is 6\." if case is _count else ""
    with pytest.raises(autopar.GuardError, match=rf"# here.*this depends on the data{numbers}"):
        program.run([(other(case),)])


@pytest.mark.parametrize("asked", [{"branches": "refuse"}, {"guards": False}])
def test_a_branch_that_nothing_would_check_is_refused_and_says_how_to_take_it(asked: dict[str, Any]) -> None:
    with pytest.raises(autopar.CaptureError, match=r'# here.*branches="guard"') as raised:
        autopar.compile(Net(_if), autopar.ClusterSpec.local(2), (example(),), options=autopar.Options(**asked))
    assert ("guards=False" in str(raised.value)) == ("guards" in asked)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if not torch.isfinite(h).all():  # finite
            raise ValueError("not finite")
        return torch.relu(h)


def test_blocks_that_decide_alike_are_one_template_and_train_like_eager_on_any_plan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)))
    program = autopar.compile(model, autopar.ClusterSpec.local(2), (example(),), loss_fn=square, optimizer=SGD)
    # the first has no gradient to give back
    assert sum(program.ir.multiplicity[name] == 3 for name in program.ir.templates) == 1
    bad = example()
    bad[3, 7] = float("inf")
    for plan in (program.plan, autopar.random_plan(program, 0, pp=2)):
        one = program.with_plan(plan)
        assert autopar.verify(one, model, (example(),)).ok
        with pytest.raises(autopar.GuardError, match="# finite"):
            one.run([(bad,)])


def _formatted(net: Net, x: Tensor) -> Tensor:
    return net.first(x) if f"{x.max().item():.1f}" == "4.0" else net.last(x)


def _shown(net: Net, x: Tensor) -> Tensor:
    return net.first(x) if f"{x.max().item()}" == "4.0" else net.last(x)


def _times_tensor(net: Net, x: Tensor) -> Tensor:
    return net.first(x) * x.max().item()


def _listed(net: Net, x: Tensor) -> Tensor:
    return net.first(x) * x[0].tolist()[1]


def _nan(net: Net, x: Tensor) -> Tensor:
    return net.first(x) * float((x - x).sum() / 0.0)


def _fails(net: Net, x: Tensor) -> Tensor:
    assert x.max() < 1  # here
    return net.first(x)


@pytest.mark.parametrize("case", [_formatted, _shown, _nan, _fails], ids=lambda case: case.__name__)
def test_what_cannot_be_held_to_the_example_is_refused(case: Case) -> None:
    with pytest.raises(autopar.CaptureError, match=case.__name__):
        autopar.compile(Net(case), autopar.ClusterSpec.local(2), (example(),))


def test_a_model_without_values_cannot_show_the_way() -> None:
    with pytest.raises(autopar.InputError, match="holds no values"):
        autopar.compile(Net(_if).to("meta"), autopar.ClusterSpec.local(2), (example(),))


def test_taking_the_way_of_the_example_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    autopar.compile(model, autopar.ClusterSpec.local(1), (example(),))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
