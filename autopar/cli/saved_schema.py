"""The schema of program.json, as far as `autopar-dump` shows it; keys beside these are left alone."""

from __future__ import annotations

import math
from typing import Any

from autopar.ir.actions import parse_row
from autopar.runtime.data.schema import (
    MOST_RANKS,
    Schema,
    SchemaError,
    flag,
    identifier,
    integer,
    listed,
    must_be,
    number,
    optional,
    paragraph,
    parsed,
    record,
    row,
    table,
    text,
)

VERSION = 2

_BYTES, _SECONDS, _STAGE = number(0, 1e21), number(0, 1e9), integer(0, 1 << 16)
_NAMES = listed(text())
_TYPES = table(text(), text())
_EDGE = row(_STAGE, _STAGE)
_PLACE = row(_BYTES, _SECONDS)
_FUNCTION = record(
    {
        "arguments": _TYPES,
        "lines": listed(
            record(
                {
                    "out": _NAMES,
                    "op": text(),
                    "reads": _NAMES,
                    "specs": _NAMES,
                    "source": paragraph(),
                    "axis": optional(text()),
                    "sent": listed(
                        record(
                            {"kind": text(), "axis": text(), "nbytes": _BYTES, "times": _STAGE, "behind": number(0, 1)},
                            others=True,
                        )
                    ),
                },
                others=True,
            )
        ),
        "results": _NAMES,
    },
    others=True,
)
_FUNCTIONS = table(text(), _FUNCTION)
_COLLECTIVE = record(
    {
        "kind": text(),
        "axis": text(),
        "what": paragraph(),
        "nbytes": _BYTES,
        "times": integer(0, 1 << 40),
        "time_s": _SECONDS,
    },
    others=True,
)
_PARAMETER = record(
    {"stored": text(), "gradient_and_optimizer": text(), "trained": flag(), "local_bytes": _BYTES}, others=True
)
_STAGE_FACTS = record(
    {
        "mesh": table(identifier(), integer(1, MOST_RANKS), most=16),
        "first_rank": integer(0, MOST_RANKS),
        "resting": table(text(), _BYTES),
        "held_bytes": _BYTES,
        "inputs": _TYPES,
        "outputs": _TYPES,
        "templates": table(text(), record({"functions": _FUNCTIONS}, others=True)),
        "functions": _FUNCTIONS,
        "collectives": listed(_COLLECTIVE),
        "parameters": table(text(), _PARAMETER),
    },
    others=True,
)
_SCHEDULE = record(
    {
        "name": text(),
        "peaks": listed(_BYTES),
        "groups": listed(listed(_STAGE, least=1), least=1),
        "edges": listed(_EDGE),
        "gradients": optional(listed(_EDGE)),
        "table": listed(parsed(parse_row, text(1 << 24))),
        "seconds": listed(row(_STAGE, text(), _SECONDS)),
        "hand_over": listed(row(_STAGE, _STAGE, _SECONDS)),
        "hidden": listed(row(_STAGE, text(), _SECONDS)),
        "exposed": listed(_SECONDS),
    },
    others=True,
)
_TRANSFER = record(
    {"name": text(), "kind": text(), "source": _STAGE, "target": _STAGE, "bytes": _BYTES, "from": text(), "to": text()},
    others=True,
)
_BY_NODE = record(
    {
        "stage": _STAGE,
        "axis": text(),
        "nodes": integer(1, MOST_RANKS),
        "places": integer(1, MOST_RANKS),
        "least": table(text(), integer(0)),
    }
)
_CURVE = record({"corners": listed(_PLACE, least=1), "policies": table(text(), _PLACE), "chosen": _PLACE}, others=True)
_COSTS: dict[str, Schema[Any]] = {"step_time_s": _SECONDS, "peak_bytes": _BYTES}
_PROGRAM = record(
    {
        "autopar_program": integer(VERSION, VERSION),
        "torch": text(),
        "training": flag(),
        "ranks": integer(1, MOST_RANKS),
        "origin": text(),
        "solver": record({"method": text(), "gap": optional(number())}, others=True),
        "predicted": record({**_COSTS, "comm_time_s": _SECONDS}, others=True),
        "timings": table(text(), number()),
        "memory": table(text(), _BYTES),
        "peak_bytes": _BYTES,
        "alternatives": listed(record({"name": text(), **_COSTS}, others=True)),
        "microbatches": integer(1),
        "model": text(),
        "cluster": text(),
        "calls": listed(record({"template": text(), "path": text()}, others=True)),
        "schedule": _SCHEDULE,
        "transfers": listed(_TRANSFER),
        "shared": table(text(), listed(_STAGE, least=1)),
        "stages": listed(_STAGE_FACTS, least=1, most=1 << 16),
    },
    {"recompute": listed(optional(_CURVE)), "by_node": listed(_BY_NODE)},
    others=True,
)


def check_facts(data: object) -> None:
    """Raises SchemaError where program.json holds something that cannot be, or parts that do not go together."""
    facts = _PROGRAM(data, "")
    schedule, stages = facts["schedule"], len(facts["stages"])
    groups = schedule["groups"]
    if sorted(stage for group in groups for stage in group) != list(range(stages)):
        raise must_be("schedule.groups", f"groups that hold each of the {stages} stages once", groups)
    for key in ("table", "peaks", "exposed"):
        if len(schedule[key]) != len(groups):
            raise must_be(f"schedule.{key}", f"a list with an entry per group, {len(groups)}", schedule[key])
    for stage, mesh in enumerate(one["mesh"] for one in facts["stages"]):
        if math.prod(mesh.values()) > MOST_RANKS:
            raise must_be(f"stages[{stage}].mesh", f"of at most {MOST_RANKS} ranks", mesh)
    for g, (group, actions) in enumerate(zip(groups, schedule["table"], strict=True)):
        if any(action.stage not in group for action in actions):
            raise SchemaError(f"schedule.table[{g}]: has an action of a stage that is not of its group")
    known = set(range(stages))
    named = [s for edge in (*schedule["edges"], *(schedule["gradients"] or ())) for s in edge]
    named += [s for shared in facts["shared"].values() for s in shared]
    named += [t[end] for t in facts["transfers"] for end in ("source", "target")]
    if not known.issuperset(named):
        raise SchemaError(f"a stage {min(set(named) - known)} is named, but there are {stages}")
    if any(u >= v for u, v in (*schedule["edges"], *(schedule["gradients"] or ()))):
        raise must_be("schedule.edges", "edges from earlier to later stages", schedule["edges"])
    if len(facts.get("recompute", ())) not in (0, stages):
        raise must_be("recompute", f"a list with an entry per stage, {stages}", facts["recompute"])
