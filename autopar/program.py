"""A compiled program: its source, and the ways to run it, write it, and put it under another plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from autopar.batches import Bucketed, bucketed, listed, shapes_of
from autopar.capture.examples.default_device import with_cpu_as_default
from autopar.capture.examples.trees import rebuild
from autopar.capture.export.saved_names import saved_names, saved_state
from autopar.capture.exported import Captured
from autopar.cluster import ClusterSpec
from autopar.cluster.arrangement import arranged
from autopar.codegen.directory import Contents, EntryContents, FormContents, write_directory
from autopar.codegen.in_process import InProcess, load
from autopar.compiled import Alternative, Compiled, emitted
from autopar.errors import AutoparError, EmitError, InfeasibleError, InputError
from autopar.exchange.exported import Exported, exchangeable, export_plan
from autopar.passes.batch.microbatches import Microbatches
from autopar.passes.order.ordered import in_order
from autopar.passes.search.idle import planned_ranks
from autopar.passes.search.task import Task
from autopar.passes.shard.evaluate import evaluate
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.plan import Plan, check_plan, checked_plan
from autopar.report import facts, report
from autopar.report.advice.advice import Advice
from autopar.report.advice.planned import advice_on
from autopar.report.answer import over_bytes
from autopar.report.candidates import ruled_out_stages, worth_measuring
from autopar.report.memory_snapshot import write_memory_snapshot
from autopar.report.other_machines import on_clusters, where_slower
from autopar.report.page import page_html, write_page
from autopar.report.predicted_vs_measured import Profile, predicted_vs_measured_text
from autopar.report.run_result import RunResult
from autopar.report.words import no_faster
from autopar.request import Request
from autopar.runtime.comm.recorder import Recorder, StepRecord
from autopar.runtime.data.fields import to_data
from autopar.runtime.data.schema import is_integer, shown
from autopar.runtime.program.rows import DataShard
from autopar.runtime.program.shapes import Shapes
from autopar.runtime.step.session import FIRST, Session
from autopar.runtime.update.averaging import Averaging
from autopar.what_if.answer import WhatIf, what_if

T = TypeVar("T")
Steps = tuple[StepRecord, ...]
MOST_CANDIDATES = 16


@dataclass(frozen=True, eq=False)
class ParallelProgram(Compiled):
    """The result of `autopar.compile`. compile_again: meets another request, as `autopar.compile` does."""

    compile_again: Callable[[Request], ParallelProgram] = field(repr=False)

    def source(self, rank: int = 0) -> str:
        """The code that a rank runs."""
        return "\n\n".join(self.sources[s] for s in self.lowered.graph.groups[self.group_of(rank)])

    def beside(self, profile: Profile) -> str:
        """The prediction beside what `run(…, profile=True)` recorded: per action, and per kind of message."""
        return predicted_vs_measured_text(facts(self), profile)

    def report(self) -> str:
        """The plan in words: mesh, predictions, collectives, storage, alternatives."""
        return report(self)

    @with_cpu_as_default
    def advice(
        self,
        profile: Profile | None = None,
        *,
        baseline: tuple[ParallelProgram, Profile] | None = None,
        seconds: float = 120.0,
    ) -> Advice:
        """The limits of a step, how well it scales, and the changes of the request that are planned to be better by over 2 %.

        profile: what `run(…, profile=True)` recorded; without it all is predicted. baseline: the same model for one node or
        one device, with its profile, beside which scaling is then measured. seconds: after which no further change is
        planned; `Advice.left_out` names those. Raises InputError where the profile is of another number of ranks."""
        return advice_on(self, self.compile_again, profile, baseline, seconds)

    def report_html(
        self,
        path: str | Path,
        *,
        profile: Profile | None = None,
        what_if: Sequence[Mapping[str, Any]] = (),
        advice: Mapping[str, Any] | None = None,
        refused: InfeasibleError | None = None,
    ) -> Path:
        """Write the plan as a page: one HTML file that needs nothing else.

        profile: what `run(…, profile=True)` recorded, to stand beside the prediction. what_if, advice: answers as plain data, by
        the fields that `autopar.report.page.answers` names. refused: why nothing fits, where this is the smallest plan. Raises
        EmitError where the file cannot be written, InputError for answers that lack a field.
        """
        page = page_html(facts(self), self.plan, profile, what_if=what_if, advice=advice, refused=refused)
        return write_page(page, path)

    def memory_snapshot(self, path: str | Path, *, rank: int = 0) -> Path:
        """Write the predicted life of a rank's tensors over a step in the form of `torch.cuda.memory._dump_snapshot`, which
        pytorch.org/memory_viz shows. Raises InputError for a rank that there is not, EmitError where it cannot be written."""
        return write_memory_snapshot(self, path, rank)

    @with_cpu_as_default
    def save(
        self,
        directory: str | Path,
        *,
        candidates: int = 0,
        also: Sequence[int | ClusterSpec | str | Path] = (),
        slower: Sequence[float] = (),
    ) -> Path:
        """Write the program: plan.json, stages, run.py, the small runtime, launch scripts, and the model's weights.

        The directory is a program: who runs it runs its code. What autopar wrote there before is replaced; where a file of
        anybody else is in the way nothing is touched. candidates: so many plans of other shapes that are predicted to come
        next are written beside it, for `autopar-tune` to measure; one with stages is among those to choose from. also: other
        numbers of ranks (of the same machines), or clusters, that the program is compiled for and written beside it: `run.py`
        takes the plan for the number of ranks that it finds itself with, and steps are the same under each. slower: factors;
        for each of them and each stage (each machine, where there is one stage alone) the program is compiled for the case that
        this one takes so many times as long, and a plan that is faster then is written beside it: a run goes on under it, from
        a save on, where it measures such speeds. Raises EmitError, InputError, and what `compile` raises where there is no plan
        for one of the others.
        """
        if not isinstance(directory, str | Path) or not str(directory) or "\0" in str(directory):
            raise EmitError(f"save takes the path of a directory, not {shown(directory)}")
        if not is_integer(candidates, 0, MOST_CANDIDATES):
            raise InputError(f"save: candidates is a whole number from 0 to {MOST_CANDIDATES}, not {shown(candidates)}")
        others = worth_measuring(
            self.plan, [*self.alternatives, *(self._in_two_stages() if candidates else ())], candidates
        )
        beside = [self.with_plan(other.plan).contents for other in others]
        worlds = on_clusters(self, also, self.compile_again)
        for text in no_faster({one.cluster.size: one.predicted.step_time_s for one in (self, *worlds)}):
            warnings.warn(f"save(also=…): {text}", stacklevel=3)
        slowed = [one.contents for one in where_slower(self, slower, self.compile_again, self.with_plan)]
        return write_directory(self.contents, Path(directory), beside, [world.contents for world in worlds], slowed)

    def _in_two_stages(self) -> Iterator[Alternative]:
        """The best plan in two stages, where a search ruled stages out."""
        plans = (self.plan, *(other.plan for other in self.alternatives))
        if self.request.plan is None and ruled_out_stages(self.options, self.cluster.size, plans):
            with suppress(AutoparError):  # there may be no place to cut, or no room
                other = self.compile_again(replace(self.request, options=replace(self.options, pp=2)))
                yield Alternative(f"{other.plan.origin} {other.plan.show_meshes()}", other.plan, other.predicted)

    @with_cpu_as_default
    def export(self, format: str, path: str | Path, *, price: bool = True) -> Exported:
        """Write the plan in a format that another system reads: a name of `autopar.exchange.formats.FORMATS`.

        path: a folder, or the file. The result says what was written, which decisions the format leaves out, and (price) what
        the exported layout costs beside the plan, in seconds and bytes. Raises InputError, EmitError.
        """
        again = self.compile_again if price else None
        return export_plan(self, format, Path(path), again, lambda exported: over_bytes(exported, self.options))

    @with_cpu_as_default
    def what_if(self, **changes: Any) -> WhatIf[ParallelProgram]:
        """The program solved again with something changed, from what is known of it, and the difference by cause.

        changes: fields of `Options` by name (strategy="fsdp", microbatches=8, …), sizes of axes (tp=4; the rest is solved), mesh
        (sizes of several, {"tp": 4, "pp": 2}), pin ({"layers.*.up.weight": "[@tp, .]"}), nodes, memory_gb or cluster: see
        `autopar.what_if.changes`. Where nothing fits the answer says by how much. Raises InputError, ClusterError,
        ConstraintError for pins that cannot be, and what else `compile` raises.
        """
        return what_if(self, changes, self.compile_again)

    @property
    def contents(self) -> Contents:
        """The contents of the program's directory."""
        weights = self.weights()
        return Contents(
            self.plan,
            self.lowered,
            self.sources,
            self.pipeline,
            self.request.update if self.training else None,
            self.options.seed,
            weights,
            saved_names(self.model, weights),
            self.request.inputs,
            self.cluster.levels[0].group_size if self.cluster.levels else self.plan.ranks,
            {**to_data(facts(self)), "exchange": to_data(exchangeable(self))},
            tuple(b._form for b in self.buckets),
            self.request.pad_values,
            self.options.at_run_time(),
            self.cluster.size - self.plan.ranks,
            {
                name: EntryContents(
                    e._form,
                    tuple(b._form for b in e.buckets),
                    e.request.pad_values,
                    e.has_loss,
                    e.request.update if e.training else None,
                    self._averaging(name),
                    e.request.fixed,
                )
                for name, e in self.entries.items()
            },
            self.request.fixed,
        )

    @property
    def _form(self) -> FormContents:
        """The files of this program alone, of one shape of one step."""
        return FormContents(self.plan, self.lowered, self.sources, self.pipeline, self.request.inputs)

    def _averaging(self, entry: str) -> Averaging | None:
        """How an entry averages parameters, if it does."""
        decay = self.entries[entry].request.ema
        return None if decay is None else Averaging(decay, self.request.averaged[entry])

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's parameters, buffers and captured constants by table name."""
        tensors = self.captured.exported.constants | self.request.tensors
        own = {name: tensors[name].detach() for name in (*self.ir.parameters, *self.ir.buffers)}
        for other in (*self.buckets, *self.entries.values()):
            own = other.weights() | own
        return own

    @property
    def has_loss(self) -> bool:
        """Whether an entry's result has a loss."""
        return self.request.gives != "step" and self.captured.exported.output_structure[0] is not None

    def entry(self, name: str) -> ParallelProgram:
        """The program of another step over the same parameters, by itself. Raises InputError where there is none so named."""
        if name not in self.entries:
            known = ", ".join(self.entries) or "none"
            raise InputError(
                f"this program has no entry {shown(name)}; it has {known}: name it in compile(…, entries=)"
            )
        return self.entries[name]

    def leaves(self, batch: Any) -> list[torch.Tensor]:
        """Tensor leaves of a batch built like the example inputs, of any bucket. Raises InputError when it is not."""
        return self._bucketed(batch).leaves

    def for_batch(self, batch: Any) -> tuple[ParallelProgram, list[torch.Tensor]]:
        """The program of the batch's bucket alone, and the batch's tensors padded as it takes them. Raises InputError."""
        given = self._bucketed(batch)
        if given.bucket or not (self.buckets or self.entries):
            return self.of_buckets[given.bucket], given.padded
        alone = replace(self.request, buckets=(), entries={})
        return replace(self, buckets=(), entries={}, request=alone), given.padded

    def _bucketed(self, batch: Any) -> Bucketed:
        return bucketed(batch, self.captured.exported.input_structure, self._shapes)

    @cached_property
    def _shapes(self) -> Shapes:
        """Which bucket a batch belongs to."""
        return shapes_of(self.of_buckets, self.request.pad_values)

    @cached_property
    def in_process(self) -> InProcess:
        """The emitted text as modules of this process."""
        return replace(
            load(self.lowered, self.sources, self.pipeline),
            buckets=tuple(bucket.in_process for bucket in self.buckets),
            entries={
                name: replace(entry.in_process, averaging=self._averaging(name)) for name, entry in self.entries.items()
            },
            pad_values=self.request.pad_values,
            options=self.options.at_run_time(),
            update=self.request.update if self.training else None,
        )

    def local_rows(self, rank: int) -> DataShard:
        """The rows of every global batch that a rank computes with, which are all that it need be given (`load(…,
        rows="local")`). Raises RuntimeProgramError where no input has rows, InputError for a rank that there is not."""
        shards = self.in_process.data_shards
        if not is_integer(rank, 0, len(shards) - 1):
            raise InputError(f"local_rows: the program has ranks 0 to {len(shards) - 1}, not {shown(rank)}")
        return shards[rank]

    @with_cpu_as_default
    def run(self, batches: Any, steps: int | None = None, *, profile: bool = False) -> RunResult:
        """Run every rank in this process from the model's weights.

        batches: an iterable of global batches (tuples or dicts like the example inputs). Training: `steps` optimizer
        steps (default: one per batch), batches taken again from the first when they run out; losses come back, and as outputs
        what loss_fn gives beside them.
        Inference: one output per batch. profile: record what every rank does when (`beside` shows it).
        """
        if steps is not None and not is_integer(steps, 0, 1 << 53):
            raise InputError(f"steps must be a whole number from 0 on, got {shown(steps)}")
        prepared = [self.leaves(b) for b in listed(batches)]
        if not prepared:
            raise InputError("run needs at least one batch")
        count = len(prepared) if steps is None or not self.training else steps
        return self._run([(FIRST, prepared[i % len(prepared)]) for i in range(count)], profile)

    @with_cpu_as_default
    def run_in_turn(self, turns: Iterable[tuple[str, Any]]) -> RunResult:
        """Run steps of several entries one after another on every rank in this process, from the model's weights.

        turns: (name of an entry, global batch), "" being the program's own step. The result has the losses of the steps that
        train, and the outputs of the others. Raises InputError.
        """
        prepared = [(name, (self.entry(name) if name else self).leaves(batch)) for name, batch in turns]
        if not prepared:
            raise InputError("run_in_turn needs at least one turn")
        return self._run(prepared)

    def _run(self, turns: Sequence[tuple[str, list[torch.Tensor]]], profile: bool = False) -> RunResult:
        """turns: entries with the tensors of a batch."""
        names = (*self.ir.parameters, *self.ir.buffers) if self.training else ()

        def body(session: Session) -> tuple[list[torch.Tensor], list[Any], dict[str, torch.Tensor], Steps]:
            session.recorder = Recorder(session.comm.device) if profile else None
            losses, outputs = list[torch.Tensor](), list[Any]()
            for name, leaves in turns:
                result = session.run_entry(name, list(leaves))
                if not isinstance(result, torch.Tensor):
                    outputs.append(rebuild(structures[name], result))
                    continue
                losses.append(result.clone())
                if session.extras is not None:
                    outputs.append(session.extras)
            done = tuple(session.recorder.steps) if session.recorder else ()
            return losses, outputs, {n: session.gather_full(n) for n in names}, done

        steps = {FIRST: self, **self.entries}
        structures = {name: one.captured.exported.output_structure for name, one in steps.items()}
        ranks = self.on_ranks(body)
        losses, outputs, state, _ = ranks[0]
        return RunResult(
            tuple(losses),
            tuple(outputs),
            state,
            Profile(tuple(done for *_, done in ranks)) if profile else None,
            saved_state(self.model, state) if self.training else {},
        )

    def on_ranks(self, body: Callable[[Session], T]) -> list[T]:
        """The results of `body` on every rank, each with a session that holds the model's weights."""
        return self.in_process.run(self.weights(), self.request.update, self.options.seed, body)

    @with_cpu_as_default
    def with_plan(self, plan: Plan) -> ParallelProgram:
        """The same program under another plan (no solving). Raises PlanError, InputError."""
        if not isinstance(plan, Plan):
            raise InputError(f"with_plan takes an autopar.Plan, such as Plan.load(…), not {type(plan).__name__}")
        plan = checked_plan(plan)
        request = replace(self.request, options=replace(self.options, microbatches=plan.microbatches))
        if (plan.microbatches, plan.order) != (self.plan.microbatches, self.plan.order) or len(self.forms) > 1:
            return self.compile_again(request.replaying(plan))
        return self._under(plan, request, self.captured)

    @with_cpu_as_default
    def on_batch(self, inputs: Any, **changed: Any) -> ParallelProgram:
        """The same model under the same plan, for example inputs of another batch size. changed: Options that are others.
        Raises PlanError where the plan does not fit it, CaptureError, InputError."""
        options = replace(self.options, microbatches=self.plan.microbatches, **changed)
        request = replace(self.request, inputs=inputs, options=options, buckets=(), entries={})
        batches = Microbatches(request.capture(), self.rules, request.capture_apart)
        captured = in_order(batches, self.plan.order).captured(self.plan.microbatches)
        return self._under(replace(self.plan, program=captured.program.fingerprint), request, captured)

    def _under(self, plan: Plan, request: Request, captured: Captured) -> ParallelProgram:
        """A captured program under a plan that is given."""
        check_plan(plan, captured.program)
        batches = Microbatches(captured, self.rules)
        cluster = planned_ranks(arranged(request.cluster, plan.placement), plan)
        task = Task(captured.program, cluster, self.rules, self.setting, request.options, batches, order=plan.order)
        candidate = PricedPlan(plan, evaluate(captured.program, plan, task.pricers, self.rules, self.setting))
        seconds = {"capture_s": self.timings["capture_s"], "plan_s": 0.0, "lower_s": 0.0}
        made = emitted(request, captured, task, [candidate], seconds)
        return ParallelProgram(request, captured, *made, self.compile_again)


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, shared ones under each of their names, and buffers."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
