"""Learning rates and parameter groups are those of one device on every rank, and travel in checkpoints."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.optim import lr_scheduler as lr

from autopar.runtime import CheckpointError, RuntimeProgramError, run_threads
from autopar.runtime.checkpoint import checkpoint
from autopar.runtime.update.update_rule import ClipNorm, LossScaling, UpdateRule
from tests.runtime import pipelines, stages
from tests.runtime.scenarios import session_of
from tests.runtime.step.test_pipeline import CASES, made
from tests.runtime.updates import agree, chain_reference, mlp_reference


def warm_cosine(optimizer):
    parts = [lr.LinearLR(optimizer, 0.1, total_iters=2), lr.CosineAnnealingLR(optimizer, T_max=5)]
    return lr.SequentialLR(optimizer, parts, milestones=[2])


def halving(step):
    return 0.5**step


class OnLoss(lr.LRScheduler):
    """The rate goes with the loss of the step."""

    def __init__(self, optimizer, factors):
        self.factors, self.low = factors, False
        super().__init__(optimizer)

    def get_lr(self):
        return [group["lr"] * self.factors[self.low] for group in self.optimizer.param_groups]

    def step(self, epoch=None, loss=None):
        self.low = loss is not None and loss < 1.5
        super().step()


SCHEDULERS = {
    "lambda": functools.partial(lr.LambdaLR, lr_lambda=halving),
    "multiplicative": functools.partial(lr.MultiplicativeLR, lr_lambda=lambda step: 0.9),
    "step": functools.partial(lr.StepLR, step_size=2),
    "multi-step": functools.partial(lr.MultiStepLR, milestones=[1, 3], gamma=0.3),
    "constant": functools.partial(lr.ConstantLR, factor=0.25, total_iters=2),
    "linear": functools.partial(lr.LinearLR, total_iters=3),
    "exponential": functools.partial(lr.ExponentialLR, gamma=0.7),
    "polynomial": functools.partial(lr.PolynomialLR, total_iters=4),
    "cosine": functools.partial(lr.CosineAnnealingLR, T_max=4),
    "restarts": functools.partial(lr.CosineAnnealingWarmRestarts, T_0=2),
    "one cycle": functools.partial(lr.OneCycleLR, max_lr=0.1, total_steps=10),
    "cyclic": functools.partial(lr.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2, cycle_momentum=False),
    "sequential": warm_cosine,
    "plateau": functools.partial(lr.ReduceLROnPlateau, factor=0.5, patience=0, threshold=0.2),
    "own plateau": lambda o: OnLoss(o, (0.5, 0.9)),
    "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.5, 2), lr.ExponentialLR(o, 0.9)]),
}


def groups(named_parameters):
    """Matrices decay, biases do not and learn faster."""
    matrices = [(name, p) for name, p in named_parameters if p.ndim > 1]
    biases = [(name, p) for name, p in named_parameters if name.startswith("b")]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}], lr=0.01
    )


def two(named_parameters):
    """One optimizer for matrices, another for biases."""
    matrices = [p for _, p in named_parameters if p.ndim > 1]
    return torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.Adam(
        [p for _, p in named_parameters if p.ndim == 1], lr=0.01
    )


def only_the_last_bias(named):
    return torch.optim.SGD([p for name, p in named if name == "b.1"], lr=0.1)


def trained(comm, program, rule, full, data):
    session = session_of(program, comm, rule)
    session.load_weights(full)
    losses = [session.train_step(batch).item() for batch in data]
    names = dict.fromkeys(name for module in program.modules for name in module.PARAMETERS)
    weights = {name: session.gather_full(name) for name in names}
    rates = [group["lr"] for group in session.optimizer.param_groups]
    return {"losses": losses, "grads": session.full_grads(), "weights": weights, "rates": rates}


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_scheduler_gives_the_rates_of_one_device(kind):
    rule = UpdateRule(groups, SCHEDULERS[kind])
    program, want = stages.mlp(2, 2, 1), mlp_reference(5, rule)
    want["weights"].pop("seen")
    run = lambda comm: trained(comm, program, rule, stages.weights(), stages.batches(5))  # noqa: E731
    for got in run_threads(4, program.mesh, run, timeout_s=60):
        agree(got, want)
        assert got["rates"][0] == pytest.approx(want["log"]["lr"][-1], rel=1e-15)


@pytest.mark.few(4)
@pytest.mark.parametrize("factory", [groups, two, only_the_last_bias])
@pytest.mark.parametrize("case", CASES)
def test_groups_and_several_optimizers_on_stages_that_own_few_or_none_of_them(case, factory):
    rule = UpdateRule(factory, SCHEDULERS["cosine"])
    program, known = made(case)
    full, data, want = (
        pipelines.weights(known["stages"], known["tied"]),
        pipelines.batches(3),
        chain_reference(3, rule, **known),
    )
    want["weights"].pop("gain")
    for got in run_threads(
        program.ranks, program.mesh, lambda comm: trained(comm, program, rule, full, data), timeout_s=60
    ):
        agree(got, want)
        assert got["rates"][0] == pytest.approx(want["log"]["lr"][-1], rel=1e-15)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("factory", [groups, two])
def test_training_goes_on_from_a_checkpoint_under_another_pipeline(tmp_path, factory, kind):
    rule = UpdateRule(factory, SCHEDULERS[kind], ClipNorm(0.5), loss_scaling=LossScaling(64.0, interval=3))
    first, known = made("tied over unequal meshes")
    second = pipelines.chain([(1, 1)] * 3, pipelines.one_f_one_b(3, 2), 2, tied=known["tied"])
    if kind in ("multiplicative", "cyclic"):
        rule = UpdateRule(groups, SCHEDULERS[kind])
    names = list(pipelines.weights(3, known["tied"]))
    full, data = pipelines.weights(3, known["tied"]), pipelines.batches(5)

    def whole(comm):
        session = session_of(first, comm, rule)
        session.load_weights(full)
        for step, batch in enumerate(data):
            if step == 3:
                checkpoint.save(tmp_path, session)
            session.train_step(batch)
        return {name: session.gather_full(name) for name in names}, session.updater.dump()

    def again(comm):
        session = session_of(second, comm, rule)
        checkpoint.load(tmp_path, session)
        for batch in data[3:]:
            session.train_step(batch)
        return {name: session.gather_full(name) for name in names}, session.updater.dump()

    want, state = run_threads(first.ranks, first.mesh, whole, timeout_s=60)[0]
    for got, after in run_threads(second.ranks, second.mesh, again, timeout_s=60):
        for name in names:
            torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-12)
        assert after == state


def test_a_checkpoint_of_other_groups_is_refused(tmp_path):
    program = stages.mlp(1, 1)

    def save(comm):
        checkpoint.save(tmp_path, session_of(program, comm, groups))

    run_threads(1, program.mesh, save)
    with pytest.raises(CheckpointError, match="AdamW has 2 parameter groups, this program's 1"):
        run_threads(1, program.mesh, lambda comm: checkpoint.load(tmp_path, session_of(program, comm)))
    with pytest.raises(CheckpointError, match="written with AdamW, this program trains with SGD and Adam"):
        run_threads(1, program.mesh, lambda comm: checkpoint.load(tmp_path, session_of(program, comm, two)))


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda params: None, "must return a torch.optim.Optimizer or several, not NoneType"),
        (lambda params: [], "not an empty list"),
        (lambda params: (stages.adamw(params), stages.adamw(params[:1])), "w1 is in two optimizers"),
        (lambda params: stages.adamw([torch.nn.Parameter(torch.ones(3))]), r"shape \(3,\) that it did not get"),
    ],
)
def test_factories_that_make_no_optimizer_of_the_given_parameters_are_explained(factory, words):
    with pytest.raises(RuntimeProgramError, match=words):
        run_threads(1, {"dp": 1, "tp": 1}, lambda comm: session_of(stages.mlp(1, 1), comm, factory))
