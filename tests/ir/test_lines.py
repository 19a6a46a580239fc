"""Lines: what each reads, what it is called, and how many bytes steps leave."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from autopar.ir import lines as ir
from autopar.ir.lines import Line, Ref, Stored
from autopar.ir.mesh import Mesh
from autopar.ir.steps import RuntimeStep, Step, bytes_before_per_byte

SIZES = {"dp": 4, "tp": 2, "cp": 1}


def kinds(parent: type[Line] = Line) -> Iterator[type[Line]]:
    """The classes that lines are of: those that no other is derived from."""
    for kind in parent.__subclasses__():
        yield from kinds(kind) if kind.__subclasses__() else (kind,)


def test_lines_read_in_the_order_of_their_arguments() -> None:
    add = ir.Compute("aten.cat.default", {"tensors": [Ref("b"), Ref("a")], "dim": 0, "like": Ref("c")})
    assert list(add.reads()) == ["b", "a", "c"]
    forward = ir.CallForward("block", 3, (Stored("bias"), Ref("weight_3f")), ("x", "y"))
    assert list(forward.reads()) == ["weight_3f", "x", "y"]
    backward = ir.CallBackward("block", 3, "saved_3", (Ref("weight_3b"),), ("d_y",))
    assert list(backward.reads()) == ["saved_3", "weight_3b", "d_y"]
    assert list(ir.Convert("x", Step("all_reduce", "dp")).reads()) == ["x"]


def test_every_kind_of_line_has_a_name_of_its_own() -> None:
    plain = [kind for kind in kinds() if kind not in (ir.Compute, ir.Convert, ir.Start, ir.GoOn, ir.Wait)]
    names = [ir.label(object.__new__(kind)) for kind in plain]
    assert len(plain) == len(set(names)) == 16
    assert ir.label(ir.Compute("autopar.linear")) == "autopar.linear"
    assert ir.label(ir.Convert("x", Step("all_reduce", "dp"))) == "comm.all_reduce"
    sums, op = ir.Convert("x", Step("all_reduce", "dp")), ir.Compute("autopar.experts")
    assert [ir.label(ir.Start(sums)), ir.label(ir.Wait("h", sums))] == ["comm.start_all_reduce", "comm.wait"]
    of_op = [ir.label(line) for line in (ir.Start(op), ir.GoOn("h", op), ir.Wait("h", op))]
    assert of_op == ["start autopar.experts", "go on autopar.experts", "wait autopar.experts"]


def test_parameters_of_a_call_are_gathered_apart_for_forward_and_backward() -> None:
    assert ir.GatherKey(3) != ir.GatherKey(3, backward=True)
    assert [str(ir.GatherKey(3, late)) for late in (False, True)] == ["3f", "3b"]


def test_a_step_in_a_table_is_its_kind_its_axes_and_its_dims() -> None:
    assert RuntimeStep("all_reduce", ("dp", "tp")).row == ("all_reduce", ("dp", "tp"))
    assert RuntimeStep("all_to_all", ("tp",), (1, 0)).row == ("all_to_all", ("tp",), 1, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("all_gather", "shard", "all_to_all", "all_reduce", "reduce_scatter")),
            st.lists(st.sampled_from(tuple(SIZES)), unique=True, min_size=1).map(tuple),
        )
    )
)
def test_bytes_before_steps_become_the_bytes_after_them(table: list[tuple[str, tuple[str, ...]]]) -> None:
    steps = [RuntimeStep(kind, axes) for kind, axes in table]
    nbytes = 1024 * bytes_before_per_byte(steps, Mesh.from_dict(SIZES))
    for step in steps:
        for axis in step.axes:
            nbytes = step.facts.table.bytes_after(nbytes, SIZES[axis])
    assert math.isclose(nbytes, 1024)
