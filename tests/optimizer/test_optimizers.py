"""Optimizers run on shards as on one device: every elementwise one of torch, and those of whole tensors where a rank
has them whole; with parameter groups, schedulers, clipping and loss scaling through `compile`."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.optimizer.examine import ELEMENTWISE, examine_on
from autopar.runtime.update.update_rule import REFUSED_OPTIMIZERS, WHOLE_TENSOR_OPTIMIZERS, UpdateRule

BATCH = (torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 8)
OPTIONS = {
    "zero3 on 2": (2, {"strategy": "zero3", "mesh": {"dp": 2}}),
    "zero3 on 4": (4, {"strategy": "zero3", "mesh": {"dp": 4}}),
    "zero1 on 4": (4, {"strategy": "zero1", "mesh": {"dp": 4}, "microbatches": 2}),
    "tensor parallel": (
        4,
        {"mesh": {"dp": 2, "tp": 2}, "constraints": {"layers.*.weight": "[@tp, .]", "layers.*.bias": "[@tp]"}},
    ),
    "pipeline": (4, {"strategy": "zero3", "pp": 2, "mesh": {"dp": 2}, "microbatches": 4}),
}
VARIANTS = {
    "ASGD": [{"lambd": 0.1, "t0": 2}],
    "Adadelta": [{"lr": 0.5, "weight_decay": 0.1}],
    "Adagrad": [{"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.1}, {"fused": True}],
    "Adam": [{"lr": 0.01, "amsgrad": True}, {"lr": 0.01, "fused": True}, {"maximize": True}, {"capturable": False}],
    "AdamW": [{"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.01, "amsgrad": True, "fused": True}],
    "Adamax": [{"lr": 0.01}],
    "NAdam": [{"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"lr": 0.01, "weight_decay": 0.1}],
    "RMSprop": [{"lr": 0.01, "centered": True, "momentum": 0.9}],
    "Rprop": [{"lr": 0.01}],
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "fused": True},
    ],
}


class Net(nn.Module):
    """Blocks alike, biases and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x * self.scale


SGD = functools.partial(torch.optim.SGD, lr=0.1)


def compiled(optimizer=SGD, where="zero3 on 4", **given):
    ranks, options = OPTIONS[where]
    return autopar.compile(
        Net(),
        autopar.ClusterSpec.local(ranks),
        BATCH,
        loss_fn=F.cross_entropy,
        optimizer=optimizer,
        options=autopar.Options(**options | given.pop("options", {})),
        **given,
    )


@pytest.fixture(scope="module", params=OPTIONS)
def program(request):
    return compiled(where=request.param)


def with_update(program, update):
    """The program with another rule for its optimizer's step."""
    return replace(program, request=replace(program.request, update=update))


def equal_to_eager(program, steps=4):
    result = autopar.verify(program, Net(), BATCH, steps=steps)
    assert result.max_error <= 1e-9, sorted(result.errors.items(), key=lambda row: -row[1])[:3]


def test_every_optimizer_of_torch_is_known():
    made = {n for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)}
    assert made - {"Optimizer"} == {*ELEMENTWISE, *WHOLE_TENSOR_OPTIMIZERS, *REFUSED_OPTIMIZERS}
    assert set(VARIANTS) == set(ELEMENTWISE)


@pytest.mark.few(3)
def test_these_plans_shard_what_the_optimizer_sees(program):
    assert any(not p.optimizer.is_replicated for s in program.plan.stages for p in s.parameters.values())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_run_on_shards_as_on_one_device(program, name):
    for kwargs in VARIANTS[name]:
        for foreach in ({}, {"foreach": True}, {"foreach": False}) if "fused" not in kwargs else ({},):
            factory = functools.partial(getattr(torch.optim, name), **kwargs, **foreach)
            equal_to_eager(with_update(program, UpdateRule(factory)))


def test_fused_optimizers_get_gradients_laid_out_as_parameters():
    """A convolution of images with channels last has a gradient with channels last, of which fused kernels take no notice."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 4)).double()
    images = torch.randn(4, 4, 6, 6, dtype=torch.float64).to(memory_format=torch.channels_last)
    labels = torch.randint(4, (4,))
    factory = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
    program = autopar.compile(
        net, autopar.ClusterSpec.local(1), (images, labels), loss_fn=F.cross_entropy, optimizer=factory
    )
    result = program.run([(images, labels)], steps=4)
    optimizer = factory(net.parameters())
    for loss in result.losses:
        optimizer.zero_grad()
        expected = F.cross_entropy(net(images), labels)
        expected.backward()
        optimizer.step()
        assert abs(loss.item() - expected.item()) <= 1e-9
    for name, value in net.state_dict().items():
        assert torch.allclose(result.state[name], value, rtol=0, atol=1e-9), name


# --- whole tensors --------------------------------------------------------------------------------------------------------


def muon_and_adam(named_parameters):
    return (
        torch.optim.Muon([p for _, p in named_parameters if p.ndim == 2], lr=0.02),
        torch.optim.AdamW([p for _, p in named_parameters if p.ndim != 2], lr=0.01),
    )


class Trust(torch.optim.Optimizer):
    """A user's optimizer: the step is as long as the parameter (as in LARS)."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad / (p.grad.norm() + 1e-3) * p.norm(), alpha=group["lr"])


class Sign(Trust):
    """A user's optimizer that is elementwise."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad.sign(), alpha=group["lr"])


class Together(Trust):
    """A user's optimizer whose step depends on all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in own]).norm()
        for p in own:
            p.sub_(p.grad / total, alpha=self.param_groups[0]["lr"])


@pytest.mark.slow
@pytest.mark.parametrize("factory", [torch.optim.Adafactor, muon_and_adam, Trust])
@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp": 2, "tp": 2}])
def test_optimizers_of_whole_tensors_get_them_whole(factory, mesh):
    program = autopar.compile(
        Net(),
        autopar.ClusterSpec.local(4),
        BATCH,
        loss_fn=F.cross_entropy,
        optimizer=factory,
        options=autopar.Options(mesh=mesh),
    )
    parameters = program.plan.stages[0].parameters.items()
    whole = {n for n, p in parameters if p.optimizer.is_replicated or p.optimizer.owner is not None}
    assert program.setting.optimizer.whole <= whole
    assert {n for n in program.ir.trained if n.endswith("weight")} <= program.setting.optimizer.whole
    equal_to_eager(program)
    for seed in range(3):
        equal_to_eager(program.with_plan(autopar.random_plan(program, seed)))


def test_only_the_parameters_of_such_an_optimizer_stay_whole():
    assert compiled(Sign).setting.optimizer.whole == frozenset()
    assert compiled(muon_and_adam, "zero3 on 4", options={"strategy": "auto"}).setting.optimizer.whole == {
        f"layers.{i}.weight" for i in range(4)
    }


def test_a_plan_that_shards_what_must_be_whole_is_refused():
    plan = compiled().plan
    with pytest.raises(autopar.PlanError, match=r"updates .* as a whole tensor, the plan shards it"):
        autopar.compile(
            Net(),
            autopar.ClusterSpec.local(4),
            BATCH,
            loss_fn=F.cross_entropy,
            optimizer=torch.optim.Adafactor,
            plan=plan,
        )


@pytest.mark.parametrize("where", ["zero3 on 2", "zero1 on 4"])
def test_a_constraint_that_forbids_whole_tensors_is_refused(where):
    options = {"strategy": "auto", "constraints": {"layers.0.weight": "[@dp, .]"}}
    with pytest.raises(autopar.ConstraintError, match="as a whole tensor"):
        compiled(torch.optim.Adafactor, where, options=options)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"optimizer": torch.optim.LBFGS},
            "LBFGS cannot train a compiled program: it evaluates the model several times",
        ),
        (
            {"optimizer": torch.optim.SparseAdam},
            "SparseAdam cannot train a compiled program: it takes sparse gradients",
        ),
        ({"optimizer": torch.optim.Muon}, "Muon.*2D.*a factory of `named_parameters` can give it some of them"),
        ({"optimizer": Together}, "Together lets the update of one parameter depend on others"),
        ({"optimizer": lambda params: None}, "must return a torch.optim.Optimizer"),
        ({"optimizer": 3}, "optimizer must be a factory params -> torch.optim.Optimizer, not int"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, r"the scheduler factory failed: TypeError.*step_size"),
        ({"scheduler": 3}, "scheduler must be a factory optimizer -> scheduler"),
        ({"scheduler": lambda optimizer: 3}, "must return a torch.optim.lr_scheduler, not int"),
        ({"optimizer": None, "scheduler": torch.optim.lr_scheduler.StepLR}, "a scheduler without an optimizer"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm must be a positive number"),
        ({"clip_grad_value": 0}, "clip_grad_value must be a positive number"),
        ({"clip_grad_norm": 1.0, "clip_grad_value": 1.0}, "choose one of clip_grad_norm and clip_grad_value"),
        ({"loss_scaling": 8.0}, "loss_scaling must be True or autopar.LossScaling"),
        ({"loss_scaling": autopar.LossScaling(backoff=2.0)}, "0 < backoff < 1"),
        ({"loss_scaling": autopar.LossScaling(initial=1e39)}, r"initial must be a float32 from 2\*\*-24 on"),
        ({"loss_scaling": autopar.LossScaling(initial=2.0**-25)}, r"initial must be a float32 from 2\*\*-24 on"),
    ],
)
def test_what_cannot_be_done_is_said_by_compile(given, words):
    with pytest.raises(autopar.InputError, match=words):
        compiled(**given)


def test_an_optimizer_for_cuda_graphs_is_planned_where_there_is_no_gpu():
    rule = UpdateRule(functools.partial(torch.optim.Adam, capturable=True))
    state = examine_on(rule, {"weight": (8, 8)}, 2)
    assert (state.elements, state.whole) == (2.0, frozenset())


# --- what surrounds the optimizer -----------------------------------------------------------------------------------------


def groups(named_parameters):
    decay = [p for n, p in named_parameters if n.endswith("weight")]
    rest = [p for n, p in named_parameters if not n.endswith("weight")]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}], lr=0.01
    )


@pytest.mark.few(1)
def test_groups_scheduler_clipping_and_scaling_together_equal_one_device(program):
    cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5)
    rule = UpdateRule(groups, cosine, autopar.ClipNorm(0.1), loss_scaling=autopar.LossScaling(), compensated=True)
    equal_to_eager(with_update(program, rule))
    for seed in range(3):
        other = program.with_plan(autopar.random_plan(program, seed))
        equal_to_eager(with_update(other, replace(rule, clip_norm=autopar.ClipNorm(0.1, float("inf")))))


def test_arguments_of_compile_make_the_rule():
    step = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    made = compiled(
        groups, scheduler=step, clip_grad_norm=1, loss_scaling=True, options={"compensated_sums": True}
    ).request.update
    assert made == UpdateRule(groups, step, autopar.ClipNorm(1), None, autopar.LossScaling(), True)
    assert compiled(optimizer=made).request.update == made


def test_an_overflow_is_recovered_from():
    """float32 gradients that overflow at first: the scale halves until they do not, and training begins."""
    program, batch = compiled(loss_scaling=autopar.LossScaling(2.0**120, interval=1000)), (BATCH[0] * 1e4, BATCH[1])

    def body(session):
        rows = []
        for _ in range(12):
            session.train_step(list(batch))
            rows.append((session.updater.skipped, session.updater.loss_scale))
        return rows, session.gather_full("layers.0.weight")

    results = program.on_ranks(body)
    rows, weight = results[0]
    assert rows[0][0]
    assert not rows[-1][0]
    assert all(other[0] == rows and torch.equal(other[1], weight) for other in results)
    skipped = sum(row[0] for row in rows)

    def plain(session):
        for _ in range(12 - skipped):
            session.train_step(list(batch))
        return session.gather_full("layers.0.weight")

    torch.testing.assert_close(weight, compiled().on_ranks(plain)[0], rtol=1e-4, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize(("strategy", "times"), [("dp", 1), ("zero1", 1), ("zero2", 8), ("zero3", 8)])
def test_a_step_of_eight_microbatches_reduces_gradients_as_often_as_the_strategy_says(strategy, times):
    def sent(parts):
        program = compiled(options={"strategy": strategy, "microbatches": parts})

        def body(session):
            session.train_step(list(BATCH))
            calls, comm = [], session.rt.comm
            start = comm._start
            comm._start = lambda call: calls.append((call.kind, call.site)) or start(call)
            session.train_step(list(BATCH))
            return [kind for kind, site in calls if site.startswith("gradients of")]

        return program.on_ranks(body)[0]

    one = sent(1)
    assert one
    assert sent(8).count("reduce_scatter") == times * one.count("reduce_scatter")
    assert times > 1 or sent(8) == one


class SkippingNet(nn.Module):
    """A parameter that is first in the model and last in its step: in a pipeline the last stage owns it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.bias = nn.Parameter(torch.zeros(8))
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.bias


def by_place(parameters):
    """Groups by the place of parameters in the model."""
    every = list(parameters)
    return torch.optim.SGD([{"params": every[:2], "lr": 0.5}, {"params": every[2:], "lr": 0.01}], lr=0.1)


@pytest.mark.parametrize(
    "options", [{}, {"pp": 2, "microbatches": 2}, {"pp": 2, "strategy": "zero3", "mesh": {"dp": 2}}]
)
def test_an_optimizer_is_given_parameters_in_the_models_order_by_every_plan(options: dict[str, object]) -> None:
    model, (x, y) = SkippingNet().double(), BATCH
    ranks = 2 * (2 if "mesh" in options else 1)
    program = autopar.compile(
        SkippingNet().double(),
        autopar.ClusterSpec.local(ranks),
        (x.double(), y),
        loss_fn=F.cross_entropy,
        optimizer=by_place,
        options=autopar.Options(**options),
    )
    held = program.run([(x.double(), y)] * 2).saved
    optimizer = by_place(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(held[name], parameter.detach(), rtol=1e-9, atol=1e-9)
