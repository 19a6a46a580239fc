"""Lines that repeat in an emitted function become loops that do the same, in the same order, with the same values alive."""

from __future__ import annotations

import ast
import random
from dataclasses import replace

import pytest

from autopar.codegen.body import Body
from autopar.codegen.marks import fill, local, number, quoted, shape
from autopar.codegen.repeats import Progression, Run, Variable, runs
from autopar.codegen.table import table_lines
from autopar.ir.lines import CallForward, Function, Line, Stored
from tests.codegen.trace import trace, unrolled


def call(template: str, n: int, outs: str, inputs: str = "", parameter: str = "", source: str = "") -> CallForward:
    params = (Stored(parameter),) if parameter else ()
    return CallForward(template, n, params, tuple(inputs.split()), outs=tuple(outs.split()), source=source)


def text_of(line: Line) -> str:
    assert isinstance(line, CallForward)
    arguments = [
        number(line.number),
        *(quoted(p.name) for p in line.params if isinstance(p, Stored)),
        *map(local, line.inputs),
    ]
    return f"{', '.join(map(local, line.outs))}, = {line.template}({', '.join(arguments)})"


def emitted(lines: list[Line], args: str, returns: str) -> str:
    """The body of a function over these lines; held to the lines one after another."""
    names, returned = args.split(), returns.split()
    function = Function("f", tuple(names), tuple(lines), tuple(returned))
    body = Body(function, text_of, set(returned), {"given", "zip", "range", "reversed", "dict"})
    text = [*body.beginning([("given", names, True)]), *body.statements(), f"return {body.listed(returned)}"]
    taken = [f"{', '.join(names)}, = given", "given.clear()"] if names else []
    plain = [*taken, *unrolled(function, text_of, set(returned)), f"return [{', '.join(returned)}]"]
    given = {"given": len(names)}
    assert trace(ast.parse("\n".join(text)).body, given) == trace(ast.parse("\n".join(plain)).body, given), "\n".join(
        text
    )
    return "\n".join(text)


def chain(count: int, first: str = "x") -> list[Line]:
    before = [first, *(f"y_{n}" for n in range(count))]
    return [call("f", n, f"y_{n}", before[n], f"layers.{n}.w", f"layers.{n}") for n in range(count)]


def test_calls_in_a_chain_are_one_loop_with_one_variable() -> None:
    assert emitted(chain(5), "x", "y_4").splitlines() == [
        "y, = given",
        "given.clear()",
        "for i in range(5):",
        "    # layers.0 … layers.4",
        "    y, = f(i, f'layers.{i}.w', y)",
        "return [y]",
    ]


def test_values_that_live_on_are_entries_of_a_dict_from_forward_to_backward() -> None:
    forward = [call("f", n, f"s_{n} m_{n}", "x") for n in range(4)]
    back = [call("b", n, "_", f"s_{n}") for n in reversed(range(4))]
    text = emitted([*forward, *back], "x", "")
    assert "s[i], m, = f(i, x)" in text
    assert "for i in reversed(range(4)):\n    _, = b(i, s[i])\n    del s[i]" in text


def test_entries_are_taken_and_returned_in_short() -> None:
    saved, later = ([f"{stem}_{n}" for n in range(6)] for stem in "st")
    lines = [call("b", n, later[n], saved[n]) for n in reversed(range(6))]
    text = emitted(lines, " ".join(saved), " ".join(later))
    assert text.startswith("t = {}\ns = dict(zip(range(6), given))")
    assert text.endswith("return [t[i] for i in range(6)]")


def test_what_all_rounds_read_goes_after_the_last() -> None:
    lines = [call("f", n, f"y_{n}", f"{f'y_{n - 1}' if n else 'x'} context") for n in range(3)]
    assert emitted(lines, "x context", "y_2").splitlines()[-2:] == ["del context", "return [y]"]


def test_what_all_rounds_read_goes_in_the_last_round_where_the_round_goes_on() -> None:
    lines: list[Line] = []
    for n in range(3):
        lines += [call("f", n, f"y_{n}", f"{f'z_{n - 1}' if n else 'x'} context"), call("g", n, f"z_{n}", f"y_{n}")]
    assert "    if i == 2:\n        del context\n" in emitted(lines, "x context", "z_2")


def test_a_round_that_begins_otherwise_stands_before_the_loop() -> None:
    lines = [*chain(5), call("g", 5, "z", "x y_4")]
    text = emitted(lines, "x", "z")
    assert "y, = f(0, 'layers.0.w', x)\nfor i in range(1, 5):" in text


def test_the_period_that_leaves_out_most_wins() -> None:
    lines = [call("g" if n % 6 == 5 else "f", n, f"y_{n}", f"y_{n - 1}" if n else "x") for n in range(24)]
    text = emitted(lines, "x", "y_23")
    assert text.count("for i in") == 1
    assert text.count("f(") == 5


def test_numbers_that_grow_unevenly_end_the_loop() -> None:
    lines = [call("f", n, f"y_{n}", f"y_{n - 1}" if n else "x", f"layers.{n if n < 4 else n + 3}.w") for n in range(9)]
    assert emitted(lines, "x", "y_8").count("for i in range(") == 2


@pytest.mark.parametrize("name", ["a{b}.", "it's.", 'say "x".', "{i}.", "__import__('os')."])
def test_names_stay_strings_whatever_they_hold(name: str) -> None:
    lines = [call("f", n, f"y_{n}", f"y_{n - 1}" if n else "x", f"{name}{n}.w") for n in range(4)]
    tree = ast.parse(emitted(lines, "x", "y_3"))
    assert {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} <= {"y", "given", "f", "i", "range"}


def test_locals_give_way_to_names_of_the_file() -> None:
    lines = [call("f", n, f"y_{n}", f"{f'y_{n - 1}' if n else 'zip'} range i") for n in range(4)]
    text = emitted(lines, "zip range i", "y_3")
    assert "for j in range(4):\n    y, = f(j, y, range_, i)" in text


def test_keywords_are_no_names() -> None:
    lines = [call("f", n, f"is_{n}", f"is_{n - 1}" if n else "x") for n in range(4)]
    assert "is_, = f(i, is_)" in emitted(lines, "x", "is_3")


@pytest.mark.parametrize(
    ("values", "count", "text"),
    [
        ((0, 1), 4, "range(4)"),
        ((2, 1), 3, "range(2, 5)"),
        ((0, 2), 3, "range(0, 6, 2)"),
        ((7, -1), 8, "reversed(range(8))"),
        ((9, -3), 3, "range(9, 0, -3)"),
    ],
)
def test_ranges_hold_their_progression(values: tuple[int, int], count: int, text: str) -> None:
    first, step = values
    assert Progression(first, step).range(count) == text
    assert list(eval(text)) == [first + step * k for k in range(count)]


def test_numbers_are_expressions_of_the_variable() -> None:
    draw = random.Random(0)
    for _ in range(300):
        count = draw.randint(2, 5)
        numbers = [Progression(draw.randint(0, 40), draw.choice([-4, -2, -1, 0, 1, 2, 3, 6])) for _ in range(3)]
        variable = Variable.choose("i", count, numbers)
        for one in numbers:
            text = variable.expression(one) or str(one.first)
            made = [eval(text, {"i": i}) for i in eval(variable.values.range(count))]
            assert made == [one.first + one.step * k for k in range(count)]


def test_a_shape_is_what_is_left_without_names_and_numbers() -> None:
    one, two = (f"{local(f'x_{n}')} = f({number(n)}, {quoted(f'a.{n}.w07')}, 3)" for n in (4, 11))
    assert shape(one)[0] == shape(two)[0]
    assert (shape(one)[1], shape(two)[1]) == ((4, 4), (11, 11))
    assert fill(one, str.upper, ["i", None]) == ["X_4 = f(i, 'a.4.w07', 3)"]
    assert fill(one, str, ["i", "i + 1"]) == ["x_4 = f(i, f'a.{i + 1}.w07', 3)"]


def test_runs_do_not_overlap_and_hold_what_they_say() -> None:
    draw = random.Random(1)
    for _ in range(200):
        texts = [f"{draw.choice('ab')}({number(draw.randint(0, 2))})" for _ in range(draw.randint(0, 30))]
        shapes = [shape(text) for text in texts]
        end = 0
        for run in runs(shapes, lambda run: True):
            assert run.start >= end
            end = run.end
            assert end <= len(texts)
            for place in range(run.period):
                rounds = [shapes[i] for i in run.rounds(place)]
                assert len({text for text, _ in rounds}) == 1
                assert Progression.of([numbers[0] for _, numbers in rounds]) is not None
        assert Run(0, 1, 2).rounds(0) == range(2)


@pytest.mark.few(80)
@pytest.mark.parametrize("seed", range(200))
def test_random_functions_do_the_same_in_loops(seed: int) -> None:
    """Rounds over carried, constant, skipped and stacked values, with lines left out, swapped and read from elsewhere."""
    draw = random.Random(seed)
    lines: list[Line] = []
    made, args = ["a_0", "a_1", "c"], "a_0 a_1 c"
    counter = 0
    for _ in range(draw.randint(1, 3)):
        period, reads = draw.randint(1, 4), [[draw.randint(1, 7) for _ in range(draw.randint(0, 2))] for _ in range(4)]
        constant, direction = draw.choice(made), draw.choice([1, -1])
        for n in range(draw.randint(1, 6)):
            for place in range(period):
                if draw.random() < 0.04:
                    continue
                inputs = [made[-back] for back in reads[place] if back <= len(made)]
                inputs += [constant] if place == 0 else [draw.choice(made)] if draw.random() < 0.03 else []
                outs = [f"{stem}_{counter}" for stem in "uv"[: 1 + place % 2]]
                parameter = f"m.{10 + direction * n}.p{place}" if place else ""
                lines.append(call(f"f{place}", counter, " ".join(outs), " ".join(inputs), parameter))
                made += outs
                counter += 1
    returns = [name for name in made if draw.random() < 0.1] or [made[-1]]
    if draw.random() < 0.5:  # what was made is read again, the last first
        stack = [name for name in made if name.startswith("u")]
        lines += [call("g", k, "_", name) for k, name in enumerate(reversed(stack))]
    emitted([replace(line, source="") for line in lines], args, " ".join(returns))


def test_tables_hold_their_rows_in_order_however_they_are_written() -> None:
    draw = random.Random(2)
    for _ in range(100):
        rows = {f"first{draw.randint(0, 9)}": 0}
        for stem in "ab"[: draw.randint(1, 2)]:
            fields = [(f"{k}{{x}}'", draw.randint(0, 2)) for k in range(draw.randint(1, 4))]
            skipped = draw.randint(0, 40)
            rows |= {f"{stem}.{n}.{k}": v for n in range(draw.randint(1, 12)) for k, v in fields if n != skipped}
        named = "\n".join(table_lines([f"{quoted(k)}: {v}" for k, v in rows.items()], named=True))
        assert list(eval(f"{{{named}}}").items()) == list(rows.items())
        listed = "\n".join(table_lines([f"({quoted(k)}, {v})" for k, v in rows.items()]))
        assert eval(f"[{listed}]") == list(rows.items())


def test_rows_that_repeat_are_written_once() -> None:
    rows = [f"dict(file={quoted(f'stages/stage_{n}.py')}, first_rank={number(8 * n)})" for n in range(64)]
    lines = table_lines(rows)
    assert len(lines) == 3
    assert eval(f"[{' '.join(lines)}]") == [{"file": f"stages/stage_{n}.py", "first_rank": 8 * n} for n in range(64)]
