"""Pipelines train and infer like plain torch on one device: any meshes, schedules, skips, tied weights."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime import RuntimeProgramError, run_threads
from autopar.runtime.comm.recorder import Recorder
from tests.runtime import pipelines
from tests.runtime.pipelines import chain, gpipe, one_f_one_b
from tests.runtime.scenarios import session_of, train

LOOP, VEE = ((0, 2), (1, 3)), ((0, 3), (1, 2))
ZB = [
    "F0.0 F1.0 B0.0 F2.0 W0.0 B1.0 F3.0 B2.0 W1.0 B3.0 W2.0 W3.0",
    "F0.1 B0.1 F1.1 B1.1 W0.1 F2.1 B2.1 F3.1 B3.1 W1.1 W2.1 W3.1",
]


def case(**options):
    return options


CASES = {
    "two stages": case(meshes=[(1, 1)] * 2, table=one_f_one_b(2, 4), microbatches=4),
    "one microbatch": case(meshes=[(1, 1)] * 3, table=one_f_one_b(3, 1), microbatches=1),
    "fewer microbatches than stages": case(meshes=[(1, 1)] * 4, table=one_f_one_b(4, 2), microbatches=2),
    "gpipe": case(meshes=[(2, 1)] * 2, table=gpipe([[0], [1]], 4), microbatches=4),
    "dp to tp": case(meshes=[(2, 1), (1, 2)], table=one_f_one_b(2, 4), microbatches=4),
    "tp to dp x tp, optimizer shards": case(
        meshes=[(1, 2), (2, 2), (4, 1)], table=one_f_one_b(3, 2), microbatches=2, zero=True
    ),
    "one rank to four": case(meshes=[(1, 1), (2, 2)], table=one_f_one_b(2, 2), microbatches=2),
    "skip": case(meshes=[(1, 1), (2, 1), (1, 2)], table=one_f_one_b(3, 4), microbatches=4, skip=True),
    "tied": case(meshes=[(1, 1)] * 3, table=one_f_one_b(3, 4), microbatches=4, tied=(0, 2)),
    "tied over unequal meshes": case(
        meshes=[(2, 2), (2, 1), (1, 4)], table=one_f_one_b(3, 2), microbatches=2, tied=(0, 2), zero=True
    ),
    "tied, a reader without gradient": case(
        meshes=[(1, 1)] * 3, table=one_f_one_b(3, 4), microbatches=4, tied=(0, 2), silent=(2,)
    ),
    "tied, an owner without gradient": case(
        meshes=[(2, 1), (1, 1), (1, 2)], table=one_f_one_b(3, 4), microbatches=4, tied=(0, 1, 2), silent=(0,), zero=True
    ),
    "owned by a later stage": case(meshes=[(1, 1)] * 3, table=one_f_one_b(3, 2), microbatches=2, tied=(2, 0, 1)),
    "interleaved": case(meshes=[(2, 1)] * 4, groups=LOOP, table=gpipe(LOOP, 2), microbatches=2, skip=True),
    "interleaved on unlike meshes": case(
        meshes=[(2, 1), (1, 1), (1, 2), (1, 1)], groups=LOOP, table=gpipe(LOOP, 4), microbatches=4, tied=(0, 2)
    ),
    "v": case(meshes=[(1, 2)] * 4, groups=VEE, table=gpipe(VEE, 2), microbatches=2, tied=(0, 3), zero=True),
    "stages of one group": case(meshes=[(2, 2)] * 3, groups=((0, 1, 2),), table=gpipe(((0, 1, 2),), 2), microbatches=2),
    "B and W apart": case(meshes=[(2, 1)] * 2, table=one_f_one_b(2, 4, True), microbatches=4, split=True),
    "zero bubble": case(meshes=[(1, 1), (1, 2)], table=ZB, microbatches=4, split=True, tied=(0, 1)),
    "weights last": case(meshes=[(1, 1)] * 2, table=gpipe([[0], [1]], 2, "FBW"), microbatches=2, split=True),
}


def made(case):
    options = CASES[case]
    known = {"stages": len(options["meshes"]), "skip": options.get("skip", False), "tied": options.get("tied", ())}
    known["silent"] = options.get("silent", ())
    return chain(**options), known


def agree(got, want):
    torch.testing.assert_close(got["losses"], want["losses"], rtol=1e-12, atol=0)
    for part in ("grads", "weights"):
        assert got[part].keys() == want[part].keys()
        for name in want[part]:
            torch.testing.assert_close(got[part][name], want[part][name], rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.few(7)
@pytest.mark.parametrize("in_order", [False, True], ids=["tags", "in order"])
@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_device(case, in_order):
    program, known = made(case)
    full, data = pipelines.weights(known["stages"], known["tied"]), pipelines.batches(3)

    def body(comm):
        comm.in_order = in_order
        return train(comm, program, 3, full=full, data=data)

    want = pipelines.reference(3, **known)
    for got in run_threads(program.ranks, program.mesh, body, timeout_s=60):
        agree(got, want)


@pytest.mark.parametrize(("meshes", "groups"), [([(2, 1), (1, 2)], None), ([(1, 2)] * 4, LOOP), ([(2, 1)] * 3, None)])
def test_inference_gives_outputs_of_any_stage_to_every_rank(meshes, groups):
    groups = groups or [[s] for s in range(len(meshes))]
    options = case(microbatches=2, groups=groups, skip=len(meshes) > 2, training=False)
    program = chain(meshes, gpipe(groups, 2, "F"), **options)
    full, batch = pipelines.weights(len(meshes)), pipelines.batches(1)[0]
    out, first = pipelines.layers(full, batch, len(meshes), options["skip"], ())
    rows, columns = meshes[-1]
    owner = next(g for g, stages in enumerate(groups) if len(meshes) - 1 in stages)

    def body(comm):
        session = session_of(program, comm, None)
        session.load_weights(full)
        return session.group, session.forward(batch), session.forward(batch, local=True)

    for group, outputs, local in run_threads(program.ranks, program.mesh, body, timeout_s=30):
        torch.testing.assert_close(outputs[0], out, rtol=1e-12, atol=1e-12)
        if len(outputs) > 1:
            torch.testing.assert_close(outputs[1], first.sum(1), rtol=1e-12, atol=1e-12)
        assert (local[0] is None) == (group != owner)
        if group == owner:
            assert local[0].shape == (8 // rows, 8 // columns)


def test_a_tied_weight_is_held_once_where_its_stages_share_ranks():
    program, known = made("v")
    full = pipelines.weights(4, known["tied"])

    def body(comm):
        session = session_of(program, comm)
        session.load_weights(full)
        holders = [rt.params["w.tied"].data_ptr() for rt in session.rts if "w.tied" in rt.params]
        return session.group, holders, [tuple(p.shape) for p in session.opt_params.values()]

    for group, holders, shapes in run_threads(4, program.mesh, body, timeout_s=30):
        assert len(holders) == (2 if group == 0 else 0)
        assert len(set(holders)) <= 1
        assert len(shapes) == (3 if group == 0 else 4)


@pytest.mark.parametrize("shrink", [True, False])
def test_only_shared_buffers_that_steps_write_are_sent(shrink):
    program = chain([(1, 1)] * 2, one_f_one_b(2, 1), 1, shrink=shrink)

    def body(comm):
        session = session_of(program, comm)
        session.load_weights(pipelines.weights(2))
        session.train_step(pipelines.batches(1)[0])
        return [route[0] for route in session.shared.written], session.rts[0].buffers["gain"].item()

    assert run_threads(2, program.mesh, body, timeout_s=30) == [(["gain"], 1.0) if shrink else ([], 2.0)] * 2


def test_a_recorded_step_shows_every_action_of_the_row_in_order():
    program, _ = made("B and W apart")

    def body(comm):
        session = session_of(program, comm)
        session.load_weights(pipelines.weights(2))
        session.train_step(pipelines.batches(1)[0])
        session.recorder = Recorder(comm.device)
        session.train_step(pipelines.batches(1)[0])
        (step,) = session.recorder.steps
        return session.group, step

    for group, step in run_threads(4, program.mesh, body, timeout_s=30):
        actions = [span for span in step.spans if "." in span.name]
        assert " ".join(span.name for span in actions) == program.pipeline.TABLE[group]
        times = [t for span in step.spans for t in (span.start_s, span.end_s)]
        assert times == sorted(times)
        assert times[-1] <= step.seconds
        assert all(0 <= m.start_s <= m.wait_s <= m.end_s <= step.seconds for m in step.messages)
        assert {m.kind for m in step.messages} >= {"send", "recv"}


def test_random_keys_depend_on_the_microbatch_and_not_on_the_schedule():
    seen = []
    for table in (one_f_one_b(2, 4), gpipe([[0], [1]], 4)):
        program = chain([(1, 1)] * 2, table, 4)
        keys = {}
        for stage in program.modules:
            stage.forward = _recorded(stage.forward, keys, stage.STAGE, "F")
            stage.backward = _recorded(stage.backward, keys, stage.STAGE, "B")

        def body(comm, program=program):
            session = session_of(program, comm)
            session.load_weights(pipelines.weights(2))
            for batch in pipelines.batches(2):
                session.train_step(batch)

        run_threads(2, program.mesh, body, timeout_s=30)
        seen.append(keys)
    assert seen[0] == seen[1]
    assert len(set(seen[0].values())) == 2 * 4
    assert len(seen[0]) == 2 * 4 * 2 * 2


def _recorded(function, keys, stage, kind):
    def call(rt, *arguments):
        keys[stage, kind, rt.step, rt.microbatch] = rt.key(3, 1)
        return function(rt, *arguments)

    return call


def test_nothing_of_a_step_outlives_it():
    program, known = made("zero bubble")

    def body(comm):
        session = session_of(program, comm)
        session.load_weights(pipelines.weights(2, known["tied"]))
        session.train_step(pipelines.batches(1)[0])
        run = session.executor
        return [len(held) for held in (run._arriving, run._kept, run._sending, run._states, run._outputs)]

    assert run_threads(3, program.mesh, body, timeout_s=30) == [[0] * 5] * 3


def test_an_error_names_action_group_and_rank():
    program, _ = made("two stages")

    def fail(rt, state, received):
        raise ValueError("bad gradient")

    program.modules[1].backward = fail
    with pytest.raises(ValueError, match="bad gradient") as caught:
        run_threads(
            2,
            program.mesh,
            lambda comm: train(comm, program, 1, full=pipelines.weights(2), data=pipelines.batches(1)),
            timeout_s=30,
        )
    assert "in action B0.1 of group 1, rank 1 of 2" in caught.value.__notes__[0]


def change(path, value):
    def apply(program):
        place, name = path
        setattr(program.pipeline if place == "pipeline" else program.modules[place], name, value)

    return apply


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (change(("pipeline", "TABLE"), ["F0.0 B0.0", "F0.1"]), "row of group 1 has no B0.1"),
        (change(("pipeline", "TABLE"), ["B0.0 F0.0", "F0.1 B0.1"]), "F0.0 B0.0 in another order"),
        (change(("pipeline", "TABLE"), ["F0.0 B0.0 B0.0", "F0.1 B0.1"]), "group 0: B0.0 is there twice"),
        (change(("pipeline", "TABLE"), ["F0.0 X0.0", "F0.1 B0.1"]), "'X0.0' is no action"),
        (change(("pipeline", "GROUPS"), [[0, 1], []]), "different ranks"),
        (change((1, "RECEIVES"), []), r"stage 1: its RECEIVES are \[\].*TRANSFERS say \['h01'\]"),
        (change((0, "MESH"), {"dp": 1, "tp": 2}), "stage 0 of the pipeline is for dp=1 × tp=1"),
        (change((0, "forward"), lambda rt, i, r, p: ([], [], [])), "F0.0 gave 0 values to send, the pipeline has 1"),
        (
            change((0, "forward"), lambda rt, i, r, p: ([], [torch.zeros(2)], [])),
            r"value h01 \(stage 0 to 1\): torch.float64\[8, 8\] is to be sent, the stage gave torch.float32\[2\]",
        ),
    ],
)
def test_programs_that_contradict_themselves_are_refused(misuse, words):
    program = chain([(1, 1)] * 2, ["F0.0 B0.0", "F0.1 B0.1"], 1)
    misuse(program)
    with pytest.raises(RuntimeProgramError, match=words):
        run_threads(
            2,
            {"rank": 2},
            lambda comm: train(comm, program, 1, full=pipelines.weights(2), data=pipelines.batches(1)),
            timeout_s=30,
        )


def test_a_table_that_waits_for_itself_is_refused():
    groups = ((0, 2), (1,))
    program = chain([(1, 1)] * 3, ["F0.2 F0.0 B0.2 B0.0", "F0.1 B0.1"], 1, groups=groups)
    with pytest.raises(
        RuntimeProgramError, match=r"waits for itself: group 0 cannot start F0\.2; group 1 cannot start F0\.1"
    ):
        run_threads(2, program.mesh, lambda comm: session_of(program, comm), timeout_s=30)
