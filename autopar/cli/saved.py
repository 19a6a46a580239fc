"""A saved program as its directory says it: plan.json and program.json, and what follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.cli.saved_schema import VERSION, check_facts
from autopar.costmodel.simulate import Timeline, simulate
from autopar.errors import InputError, PlanError
from autopar.ir.actions import StageGraph, parse_row
from autopar.plan import Plan
from autopar.runtime.data.datafile import read_json, read_text
from autopar.runtime.data.schema import SchemaError
from autopar.runtime.data.whole_files import current

Facts = dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """program, plan: the contents of program.json and plan.json."""

    directory: Path
    program: Facts
    plan: Facts

    @property
    def stages(self) -> list[Facts]:
        """Per stage what is lowered of it."""
        return self.program["stages"]

    def timeline(self) -> Timeline:
        """The predicted timeline, simulated again."""
        schedule = self.program["schedule"]
        gradients = schedule["gradients"]
        graph = StageGraph(
            tuple(map(tuple, schedule["groups"])),
            tuple(map(tuple, schedule["edges"])),
            None if gradients is None else tuple(map(tuple, gradients)),
        )
        seconds = {(stage, kind): s for stage, kind, s in schedule["seconds"]}
        between = {(u, v): s for u, v, s in schedule["hand_over"]}
        hidden = {(stage, kind): s for stage, kind, s in schedule["hidden"]}
        return simulate(tuple(map(parse_row, schedule["table"])), graph, seconds, between).with_messages(hidden)

    def rank_code(self, rank: int) -> str:
        """The code that rank `rank` runs. Raises InputError when there is no such rank."""
        if not 0 <= rank < self.program["ranks"]:
            raise InputError(f"--rank {rank}: the program has ranks 0 to {self.program['ranks'] - 1}")
        own = self.directory / "ranks" / f"rank_{rank}.py"
        files = [own] if own.exists() else []
        files += [
            self.directory / "stages" / f"stage_{i}.py"
            for i, stage in enumerate(self.stages)
            if stage["first_rank"] <= rank < stage["first_rank"] + math.prod(stage["mesh"].values())
        ]
        try:
            return "\n".join(f"# --- {f.relative_to(self.directory)}\n{read_text(f)}" for f in files)
        except (OSError, SchemaError) as error:
            raise InputError(f"the code of rank {rank} is damaged ({error}); save the program again") from None


def read(directory: Path) -> Saved:
    """Raises InputError when the directory is none that this version of autopar wrote."""
    if not directory.is_dir():
        raise InputError(f"{directory} is no directory; give one that program.save(…) wrote")
    directory = current(directory)
    program, plan = (_contents(directory, name) for name in ("program.json", "plan.json"))
    if not isinstance(program, dict) or program.get("autopar_program") != VERSION or not isinstance(plan, dict):
        raise InputError(f"{directory} was written by another version of autopar; save the program again")
    try:
        check_facts(program)
        stages = Plan.from_dict(plan).stages
    except (SchemaError, PlanError) as error:
        name = "plan.json" if isinstance(error, PlanError) else "program.json"
        raise InputError(f"{directory / name} is damaged: {error}; save the program again") from None
    if len(stages) != len(program["stages"]):
        raise InputError(f"plan.json and program.json in {directory} are of different programs; save the program again")
    return Saved(directory, program, plan)


def _contents(directory: Path, name: str) -> object:
    try:
        return read_json(directory / name)
    except FileNotFoundError:
        raise InputError(
            f"{directory} is not an autopar directory: it has no {name}; write one with program.save({str(directory)!r})"
        ) from None
    except OSError as error:
        raise InputError(f"{directory / name} cannot be read ({error.strerror})") from None
    except SchemaError as error:
        raise InputError(f"{directory / name} is damaged ({error}); save the program again") from None
