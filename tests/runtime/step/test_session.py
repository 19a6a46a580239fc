"""A session trains, infers and keeps state like plain torch on one device, for every mesh and ZeRO level."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime import RuntimeProgramError, run_threads
from tests.runtime import stages
from tests.runtime.scenarios import session_of, train


def agree(got, want, rtol=1e-12):
    torch.testing.assert_close(got["losses"], want["losses"], rtol=rtol, atol=0)
    for part in ("grads", "weights"):
        assert got[part].keys() == want[part].keys()
        for name in want[part]:
            torch.testing.assert_close(got[part][name], want[part][name], rtol=rtol, atol=1e-12)


@pytest.mark.few(4)
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
def test_training_equals_one_device(dp, tp, zero):
    program, want = stages.mlp(dp, tp, zero), stages.reference(3)
    for got in run_threads(dp * tp, program.mesh, lambda comm: train(comm, program, 3), timeout_s=60):
        agree(got, want)


@pytest.mark.parametrize("zero", [0, 1])
def test_microbatches_give_the_mean_loss_and_its_gradient(zero):
    program, want = stages.mlp(2, 2, zero, microbatches=2), stages.reference(3)
    for got in run_threads(4, program.mesh, lambda comm: train(comm, program, 3), timeout_s=60):
        for result in (got, want):
            result["weights"].pop("seen", None)
        agree(got, want)


def test_without_optimizer_only_gradients_are_computed():
    program = stages.mlp(2, 2, zero=1)
    for got in run_threads(4, program.mesh, lambda comm: train(comm, program, 2, None), timeout_s=60):
        for name, value in stages.weights().items():
            if name != "seen":
                assert torch.equal(got["weights"][name], value)
        assert got["grads"]


def test_optimizer_shards_that_equal_storage_are_the_storage():
    program = stages.mlp(2, 2)

    def body(comm):
        session = session_of(program, comm)
        return all(session.opt_params[n].data_ptr() == session.rt.params[n].data_ptr() for n in session.opt_params)

    assert all(run_threads(4, program.mesh, body, timeout_s=30))


def test_frozen_parameters_and_those_without_gradient_stay_out_of_the_optimizer():
    program = stages.mlp(1, 1)
    program.stage.PARAMETERS["unused"] = {"shape": (4,), "dtype": "float64", "spec": ((),), "trainable": True}
    program.stage.GRADS["unused"] = {"contributions": 0, "steps": ()}
    seen = []

    def factory(params):
        seen.extend(tuple(p.shape) for p in params)
        return stages.adamw(params)

    def body(comm):
        session = session_of(program, comm, factory)
        session.load_weights(stages.weights() | {"unused": torch.ones(4, dtype=torch.float64)})
        session.train_step(stages.batches(1)[0])
        return session.gather_full("unused")

    assert torch.equal(run_threads(1, program.mesh, body)[0], torch.ones(4, dtype=torch.float64))
    assert seen == [(16, 8), (16,), (8, 16), (8,)]


def test_weights_are_read_as_slices_only():
    program, full, asked = stages.mlp(2, 2, zero=3), stages.weights(), []

    def body(comm):
        def reader(name, slices):
            asked.append((name, slices))
            return full[name][slices] if slices else full[name]

        session = session_of(program, comm, None)
        session.load_weights(reader)
        return session.gather_full("w1"), session.rt.params["w1"].untyped_storage().nbytes()

    for value, nbytes in run_threads(4, program.mesh, body, timeout_s=30):
        assert torch.equal(value, full["w1"])
        assert nbytes == full["w1"].untyped_storage().nbytes() // 4
    assert all(full[name][slices].numel() < full[name].numel() for name, slices in asked if name == "w1")


@pytest.mark.parametrize("microbatches", [1, 2])
def test_inference_outputs_are_full_or_local(microbatches):
    program = stages.inference(2, 2, microbatches)
    w, x = stages.weights()["w1"], stages.batches(1)[0][0]

    def body(comm):
        session = session_of(program, comm, None)
        session.load_weights({"w": w})
        return session.forward([x]), session.forward([x], local=True)[0]

    for rank, ((full, total), local) in enumerate(run_threads(4, program.mesh, body, timeout_s=30)):
        torch.testing.assert_close(full, x @ w.t(), rtol=1e-14, atol=1e-14)
        assert total.item() == pytest.approx(x.sum().item())
        rows = torch.cat([part.chunk(2, 0)[rank // 2] for part in full.chunk(microbatches)])
        assert torch.equal(local, rows.chunk(2, 1)[rank % 2])


def test_state_moves_between_meshes_with_the_optimizer():
    want = stages.reference(4)
    first, second = stages.mlp(2, 2, zero=1), stages.mlp(1, 2, zero=0)
    saved = run_threads(4, first.mesh, lambda comm: train(comm, first, 2)["session"].state_dict(), timeout_s=60)[0]
    assert {"w1", "seen", "step", "optim.w1.exp_avg", "optim.b2.step", "optim_groups"} <= saved.keys()

    def resume(comm):
        session = session_of(second, comm)
        session.load_state_dict(saved)
        assert session.rt.step == 2
        losses = [session.train_step(batch).item() for batch in stages.batches(4)[2:]]
        return losses, session.gather_full("w2")

    for losses, w2 in run_threads(2, second.mesh, resume, timeout_s=60):
        torch.testing.assert_close(losses, want["losses"][2:], rtol=1e-12, atol=0)
        torch.testing.assert_close(w2, want["weights"]["w2"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda s: s.train_step([torch.zeros(8, 8)]), "a batch of 1 tensors, the program takes 2: x, y"),
        (lambda s: s.train_step([torch.zeros(6, 8), torch.zeros(8, 8)]), r"input x: shape \(6, 8\).*\(8, 8\)"),
        (lambda s: s.train_step([torch.zeros(8, 8).long(), torch.zeros(8, 8)]), "input x: dtype torch.int64"),
        (lambda s: s.forward([]), "use train_step"),
        (lambda s: s.load_weights({}), "no tensor 'w1'"),
        (lambda s: s.load_weights(stages.weights() | {"w1": torch.zeros(3)}), r"w1.*\(16, 8\).*\(3,\)"),
        (lambda s: s.load_weights(lambda name, _: torch.zeros((), device="meta")), "w1: the weights hold no data"),
        (lambda s: s.gather_full("nope"), "no parameter or buffer 'nope'"),
    ],
)
def test_misuse_is_explained(misuse, words):
    with pytest.raises(RuntimeProgramError, match=words):
        run_threads(1, {"dp": 1, "tp": 1}, lambda comm: misuse(session_of(stages.mlp(1, 1), comm)))


def test_optimizers_that_need_whole_tensors_are_refused_on_shards():
    program = stages.mlp(2, 1, zero=1)
    with pytest.raises(RuntimeProgramError, match="Adafactor needs whole tensors"):
        run_threads(2, program.mesh, lambda comm: session_of(program, comm, torch.optim.Adafactor), timeout_s=30)


def test_a_program_for_another_mesh_is_refused():
    with pytest.raises(RuntimeProgramError, match=r"'dp': 2, 'tp': 1.*'dp': 1, 'tp': 2"):
        run_threads(2, {"dp": 1, "tp": 2}, lambda comm: session_of(stages.mlp(2, 1), comm), timeout_s=30)
