"""A saved program as its directory says it: plan.json and program.json, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopar.costmodel.simulate import Timeline
from autopar.errors import InputError, PlanError
from autopar.exchange.exported import Exchangeable
from autopar.plan import Plan
from autopar.report.program_facts import VERSION, ProgramFacts, StageFacts
from autopar.runtime.data.datafile import read_json, read_text
from autopar.runtime.data.fields import from_data
from autopar.runtime.data.schema import SchemaError
from autopar.runtime.data.whole_files import current


@dataclass(frozen=True)
class Saved:
    """program: the content of program.json; plan: that of plan.json."""

    directory: Path
    program: ProgramFacts
    plan: Plan

    @property
    def stages(self) -> tuple[StageFacts, ...]:
        """Per stage what is lowered of it."""
        return self.program.stages

    def timeline(self) -> Timeline:
        """The predicted timeline, simulated again."""
        return self.program.schedule.timeline()

    def rank_code(self, rank: int) -> str:
        """The code that rank `rank` runs. Raises InputError when there is no such rank."""
        if not 0 <= rank < self.program.ranks:
            raise InputError(f"--rank {rank}: the program has ranks 0 to {self.program.ranks - 1}")
        own = self.directory / "ranks" / f"rank_{rank}.py"
        files = [own] if own.exists() else []
        files += [
            self.directory / "stages" / f"stage_{i}.py"
            for i, stage in enumerate(self.stages)
            if stage.mesh.offset <= rank < stage.mesh.offset + stage.mesh.size
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
        saved = Saved(directory, from_data(ProgramFacts, program, others=True), Plan.from_dict(plan))
    except (SchemaError, PlanError) as error:
        name = "plan.json" if isinstance(error, PlanError) else "program.json"
        raise InputError(f"{directory / name} is damaged: {error}; save the program again") from None
    if len(saved.plan.stages) != len(saved.stages):
        raise InputError(f"plan.json and program.json in {directory} are of different programs; save the program again")
    return saved


def read_exchangeable(directory: Path) -> Exchangeable:
    """The plan of a directory as formats of other systems take it. Raises InputError."""
    if directory.is_file():
        raise InputError(
            f"{directory} is a file, and a plan alone does not say which model it is of; give the directory that program.save(…) "
            "wrote, or export where the plan is made (autopar plan MODEL … --export FORMAT PATH)"
        )
    own = current(read(directory).directory)
    data = _contents(own, "program.json")
    if not isinstance(data, dict) or "exchange" not in data:
        raise InputError(f"{directory} was written by another version of autopar; save the program again")
    try:
        return from_data(Exchangeable, data["exchange"], "exchange")
    except (SchemaError, InputError) as error:
        raise InputError(f"{own / 'program.json'} is damaged: {error}; save the program again") from None


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
