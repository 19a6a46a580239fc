"""A saved program as its directory says it: plan.json and program.json, and what follows from them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.costmodel.simulate import Timeline, simulate
from autopar.errors import InputError
from autopar.ir.actions import StageGraph, parse_row

Facts = dict[str, Any]
VERSION = 2


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
        return simulate(tuple(map(parse_row, schedule["table"])), graph, seconds, between)

    def rank_code(self, rank: int) -> str:
        """What rank `rank` runs. Raises InputError when there is no such rank."""
        if not 0 <= rank < self.program["ranks"]:
            raise InputError(f"--rank {rank}: the program has ranks 0 to {self.program['ranks'] - 1}")
        own = self.directory / "ranks" / f"rank_{rank}.py"
        files = [own] if own.exists() else []
        files += [
            self.directory / "stages" / f"stage_{i}.py"
            for i, stage in enumerate(self.stages)
            if stage["first_rank"] <= rank < stage["first_rank"] + math.prod(stage["mesh"].values())
        ]
        return "\n".join(f"# --- {f.relative_to(self.directory)}\n{f.read_text()}" for f in files)


def read(directory: Path) -> Saved:
    """Raises InputError when the directory is none that this version of autopar wrote."""
    if not directory.is_dir():
        raise InputError(f"{directory} is no directory; give one that program.save(…) wrote")
    contents = []
    for name in ("program.json", "plan.json"):
        try:
            contents.append(json.loads((directory / name).read_text()))
        except FileNotFoundError:
            raise InputError(
                f"{directory} is not an autopar directory: it has no {name}; write one with program.save({str(directory)!r})"
            ) from None
        except ValueError as error:
            raise InputError(f"{directory / name} is damaged ({error}); save the program again") from None
    program, plan = contents
    if not isinstance(program, dict) or program.get("autopar_program") != VERSION or "stages" not in plan:
        raise InputError(f"{directory} was written by another version of autopar; save the program again")
    return Saved(directory, program, plan)
