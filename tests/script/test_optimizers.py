"""An optimizer over a model's parameters is made again, group by group, over the shards that a rank has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.examples.held import Held
from autopar.errors import InputError
from autopar.script.optimizers import factory_of, follow, taking_over


def test_groups_and_what_they_say_are_the_same_for_the_parameters_a_rank_has() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    groups = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[1].parameters(), "lr": 0.5}]
    given = torch.optim.AdamW(groups, lr=0.25, betas=(0.8, 0.9))
    shards = [("0.weight", nn.Parameter(torch.zeros(2, 4))), ("1.bias", nn.Parameter(torch.zeros(4)))]
    own = factory_of(given, model)(shards)
    assert type(own) is torch.optim.AdamW
    assert [[p.shape for p in group["params"]] for group in own.param_groups] == [[(2, 4)], [(4,)]]
    said = [(group["lr"], group["weight_decay"], group["betas"]) for group in own.param_groups]
    assert said == [(0.25, 0.1, (0.8, 0.9)), (0.5, 0.01, (0.8, 0.9))]


class Drifting(torch.optim.SGD):
    """An optimizer that keeps a number outside its groups."""

    def __init__(self, params: object, drift: float = 0.0) -> None:
        super().__init__(params, lr=0.1)  # type: ignore[arg-type]
        self.drift = drift


def test_an_optimizer_that_cannot_be_made_again_is_refused_by_name() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(InputError, match="'drift'"):
        factory_of(Drifting(model.parameters(), drift=0.5), model)
    with pytest.raises(InputError, match="none of the model's"):
        factory_of(torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1), model)
    hooked = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked.register_step_pre_hook(lambda *given: None)
    with pytest.raises(InputError, match="SGD has a step hook"):
        factory_of(hooked, model)
    stepped = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    stepped.step()
    with pytest.raises(InputError, match="has stepped"):
        factory_of(stepped, model)


def test_what_an_optimizer_holds_before_its_first_step_is_held_of_the_shards() -> None:
    model, shard = nn.Linear(4, 4, bias=False), nn.Parameter(torch.zeros(2, 4))
    given = torch.optim.Adagrad(model.parameters(), lr=0.5, initial_accumulator_value=0.25)
    for one in (factory_of(given, model), taking_over(given, model)):
        own = one([("weight", shard)])
        assert [*own.state] == [shard]
        torch.testing.assert_close(own.state[shard]["sum"], torch.full((2, 4), 0.25))


class Rated(torch.optim.SGD):
    """An optimizer that cannot be made without a learning rate."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, lr=lr)  # type: ignore[arg-type]


def test_an_optimizer_that_wants_arguments_beside_its_groups_is_given_its_defaults() -> None:
    model = nn.Linear(4, 4)
    own = factory_of(Rated(model.parameters(), 0.5), model)([("weight", nn.Parameter(torch.zeros(2, 4)))])
    assert (type(own), own.param_groups[0]["lr"]) == (Rated, 0.5)


def test_a_scheduler_sets_the_learning_rates_of_the_optimizer_that_took_the_others_place() -> None:
    model = nn.Linear(4, 4)
    given = torch.optim.SGD(model.parameters(), lr=1.0)
    parts = [torch.optim.lr_scheduler.ConstantLR(given, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(given, 0.5)]
    scheduler = torch.optim.lr_scheduler.SequentialLR(given, parts, [2])
    own = factory_of(given, model)([("weight", nn.Parameter(torch.zeros(2, 4)))])
    follow(scheduler, given, own)
    rates = []
    for _ in range(4):
        own.step()
        scheduler.step()
        rates.append(own.param_groups[0]["lr"])
    assert rates == [0.5, 1.0, 0.5, 0.25]
    assert given.param_groups[0]["lr"] == 0.5, "the first one's rate stays what it was"


def test_an_optimizer_that_is_taken_over_steps_shards_and_what_refers_to_it_sets_their_rates() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.25}]
    given = torch.optim.SGD(groups, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(given, 0.5)
    shards = {"0.weight": nn.Parameter(torch.zeros(2, 4)), "1.bias": nn.Parameter(torch.zeros(4))}
    assert taking_over(given, model)(list(shards.items())) is given
    assert [group["params"] for group in given.param_groups] == [[shards["0.weight"]], [shards["1.bias"]]]
    for _ in range(2):
        for shard in shards.values():
            shard.grad = torch.ones_like(shard)
        given.step()
        scheduler.step()
    assert shards["0.weight"].eq(-1.5).all()
    assert shards["1.bias"].eq(-0.375).all()
    with pytest.raises(InputError, match="none of the model's"):
        taking_over(torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1), model)
    with pytest.raises(InputError, match="anew for every call of parallelize"):
        factory_of(given, model)


def test_names_of_parameters_that_an_optimizer_knows_follow_its_shards() -> None:
    model = nn.Linear(4, 4)
    given = torch.optim.SGD(model.named_parameters(), lr=1.0)
    taking_over(given, model)([("bias", nn.Parameter(torch.zeros(4)))])
    assert given.param_groups[0]["param_names"] == ["bias"]


def test_a_tensor_of_several_modules_has_the_name_of_the_first_one() -> None:
    own, other = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
    other.append(own)
    given = torch.optim.SGD(other.parameters(), lr=1.0)
    made = factory_of(given, Held(own, {"both": other}))
    shards = {name: nn.Parameter(torch.zeros(4)) for name in ("weight", "bias", "both.0.weight")}
    assert {id(p) for p in made(list(shards.items())).param_groups[0]["params"]} == {*map(id, shards.values())}


def test_a_shared_parameter_is_found_by_whichever_of_its_names_a_program_has() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    for name in ("0.weight", "1.weight"):
        given, shard = torch.optim.SGD(model.parameters(), lr=1.0), nn.Parameter(torch.zeros(4))
        for one in (factory_of(given, model), taking_over(given, model)):
            assert one([(name, shard)]).param_groups[0]["params"] == [shard]
