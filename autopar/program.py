"""A compiled program: its plan and predictions, its source, and the ways to run it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.capture.export import Exported
from autopar.capture.trees import check_like, rebuild
from autopar.cluster import ClusterSpec
from autopar.codegen import in_process as running
from autopar.codegen.directory import user_ops_source, write_directory
from autopar.codegen.pipeline import pipeline_module, pipeline_source
from autopar.codegen.stage import stage_source
from autopar.errors import InputError
from autopar.ir.lowered import LoweredProgram, LoweredStage
from autopar.ir.program import Program
from autopar.ir.setting import Setting
from autopar.options import Options
from autopar.passes.account.program import Account, account
from autopar.passes.check.lines import check_program
from autopar.passes.lower import lower
from autopar.passes.memory.peak import peak_kinds
from autopar.passes.price.pricer import Pricers
from autopar.passes.recompute.curve import as_data, curves
from autopar.passes.rules.book import RuleBook
from autopar.passes.shard.priced_plan import PricedPlan
from autopar.plan import Plan
from autopar.request import check_plan
from autopar.runtime.update_rule import OptimizerFactory, UpdateRule


@dataclass(frozen=True)
class Prediction:
    """What the cost model expects of a plan on one rank."""

    step_time_s: float
    peak_bytes: float
    comm_time_s: float


@dataclass(frozen=True)
class Alternative:
    """A baseline or runner-up."""

    name: str
    plan: Plan
    predicted: Prediction


@dataclass(frozen=True)
class RunResult:
    """Losses per step (training) or outputs per batch (inference), and the final full state."""

    losses: tuple[torch.Tensor, ...]
    outputs: tuple[Any, ...]
    state: dict[str, torch.Tensor] = field(repr=False, default_factory=dict)

    def _items(self) -> tuple[Any, ...]:
        return self.losses or self.outputs

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items())

    def __len__(self) -> int:
        return len(self._items())

    def __getitem__(self, index: Any) -> Any:
        return self._items()[index]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Full parameters and buffers after the run."""
        return self.state


@dataclass(eq=False)
class ParallelProgram:
    """The result of `autopar.compile`. `timings`: seconds of capture, plan, lower, emit. `solver`: problem sizes, gap."""

    plan: Plan
    cluster: ClusterSpec
    predicted: Prediction
    alternatives: tuple[Alternative, ...]
    timings: dict[str, float]
    solver: dict[str, Any]
    ir: Program = field(repr=False)
    lowered: LoweredProgram = field(repr=False)
    sources: tuple[str, ...] = field(repr=False)
    pipeline: str = field(repr=False)
    options: Options = field(repr=False)
    update: UpdateRule = field(repr=False)
    model: nn.Module = field(repr=False)
    exported: Exported = field(repr=False)
    rules: RuleBook = field(repr=False)
    setting: Setting = field(repr=False)
    example_inputs: Any = field(repr=False)
    account: Account = field(repr=False)
    loss_fn: Any = field(repr=False, default=None)
    targets: int = field(repr=False, default=0)

    @property
    def optimizer(self) -> OptimizerFactory | None:
        """The optimizer factory."""
        return self.update.optimizer

    @property
    def training(self) -> bool:
        return self.ir.training

    @property
    def stages(self) -> tuple[LoweredStage, ...]:
        return self.lowered.stages

    @property
    def mesh(self) -> dict[str, int]:
        """Axes and sizes of the first stage's mesh."""
        return dict(self.plan.stages[0].mesh.axes)

    @property
    def pp(self) -> int:
        """Groups of ranks that follow each other in the pipeline."""
        return len(self.lowered.graph.groups)

    def group_of(self, rank: int) -> int:
        """Which row of the action table a rank runs. Raises InputError for ranks that do not exist."""
        if not 0 <= rank < self.plan.ranks:
            raise InputError(f"rank {rank} does not exist, the program has ranks 0 to {self.plan.ranks - 1}")
        for g, stages in enumerate(self.lowered.graph.groups):
            mesh = self.plan.stages[stages[0]].mesh
            if mesh.offset <= rank < mesh.offset + mesh.size:
                return g
        raise InputError(f"rank {rank} belongs to no stage")

    def stage_of(self, rank: int) -> int:
        """Which stage a rank runs (the first of several)."""
        return self.lowered.graph.groups[self.group_of(rank)][0]

    def source(self, rank: int = 0) -> str:
        """The code that a rank runs."""
        return "\n\n".join(self.sources[s] for s in self.lowered.graph.groups[self.group_of(rank)])

    def report(self) -> str:
        """The plan in words: mesh, predictions, collectives, storage, alternatives."""
        from autopar.report import report

        return report(self)

    @cached_property
    def peak_kinds(self) -> dict[str, float]:
        """What the predicted peak consists of, in bytes: parameters, gradients, optimizer, buffers, held for backward, for a
        moment."""
        return peak_kinds(self.lowered, [s.memory for s in self.account.stages])

    def recompute_curves(self) -> list[dict[str, Any]]:
        """Per stage what keeping less for backward would cost (`autopar.passes.recompute.curve`); nothing for inference."""
        if not self.training:
            return []
        return as_data(curves(self.ir, self.plan, Pricers(self.cluster), self.rules))

    def save(self, directory: str | Path) -> Path:
        """Write the program: plan.json, stages, run.py, the small runtime, launch scripts, and the model's weights."""
        return write_directory(self, Path(directory))

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's parameters, buffers and captured constants by table name."""
        found: dict[str, torch.Tensor] = {}
        named = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers())
        for name in (*self.ir.parameters, *self.ir.buffers):
            tensor = named.get(name)
            found[name] = (self.exported.constants[name] if tensor is None else tensor).detach()
        return found

    def leaves(self, batch: Any) -> list[torch.Tensor]:
        """Tensor leaves of a batch built like the example inputs. Raises InputError when it is not."""
        if isinstance(batch, torch.Tensor):
            batch = (batch,)
        if isinstance(batch, list):
            batch = tuple(batch)
        leaves = check_like(batch, self.exported.input_structure, "the batch")
        parts = self.plan.microbatches
        for leaf, (name, type_), dim in zip(leaves, self.ir.inputs, self.ir.batch_dims, strict=True):
            whole = tuple(n * parts if i == dim else n for i, n in enumerate(type_.shape))
            if tuple(leaf.shape) not in (type_.shape, whole):
                raise InputError(
                    f"the batch: input {name} has shape {tuple(leaf.shape)}, the program was compiled for {whole}; pass "
                    "batches of that shape, or compile again with an example of the new one"
                )
        return leaves

    @cached_property
    def _program(self) -> running.InProcess:
        return in_process(self, self.lowered, self.sources, self.pipeline)

    def run(self, batches: Any, steps: int | None = None) -> RunResult:
        """Run every rank in this process from the model's weights.

        batches: an iterable of global batches (tuples or dicts like the example inputs). Training: `steps` optimizer
        steps (default: one per batch), batches taken again from the first when they run out; losses come back.
        Inference: one output per batch.
        """
        prepared = [self.leaves(b) for b in _batches(batches)]
        if not prepared:
            raise InputError("run needs at least one batch")
        if self.training:
            count = len(prepared) if steps is None else steps

            def body(session: Any) -> Any:
                losses = running.train(session, prepared, count)
                return losses, {n: session.gather_full(n) for n in (*self.ir.parameters, *self.ir.buffers)}

            losses, state = self._ranks(body)[0]
            return RunResult(tuple(losses), (), state)
        outputs = self._ranks(lambda session: [session.forward(list(b)) for b in prepared])[0]
        return RunResult((), tuple(rebuild(self.exported.output_structure, o) for o in outputs))

    def _ranks(self, body: Callable[[Any], Any]) -> list[Any]:
        made = self._program
        return running.run_ranks(made.pipeline, made.modules, self.weights(), self.update, self.options.seed, body)

    def with_plan(self, plan: Plan) -> ParallelProgram:
        """The same program under another plan (no solving)."""
        from autopar.passes.shard.evaluate import evaluate

        if plan.microbatches != self.plan.microbatches:
            from autopar.api import compile

            free = replace(self.options, microbatches=plan.microbatches)
            return compile(
                self.model,
                self.cluster,
                self.example_inputs,
                loss_fn=self.loss_fn,
                optimizer=self.update,
                options=free,
                plan=plan,
            )
        check_plan(plan, self.ir)
        solution = evaluate(self.ir, plan, Pricers(self.cluster), self.rules, self.setting)
        made = emit_program(
            self.model,
            self.cluster,
            self.ir,
            self.exported,
            [PricedPlan(plan, solution)],
            self.rules,
            self.setting,
            replace(self.options, microbatches=plan.microbatches),
            self.update,
            self.example_inputs,
            self.loss_fn,
            self.targets,
        )
        made.timings.update(capture_s=self.timings.get("capture_s", 0.0), plan_s=0.0)
        return made


def in_process(
    program: ParallelProgram, lowered: LoweredProgram, sources: Sequence[str], pipeline: str
) -> running.InProcess:
    """Emitted text as modules of this process."""
    extra = user_ops_source(program, lowered)
    shared = {"user_ops": extra[1]} if extra else None
    modules = tuple(running.stage_module(source, f"autopar_stage_{i}", shared) for i, source in enumerate(sources))
    return running.InProcess(pipeline_module(pipeline), modules)


def _batches(batches: Any) -> Iterable[Any]:
    if isinstance(batches, (torch.Tensor, dict)):
        return [batches]
    if isinstance(batches, tuple) and batches and isinstance(batches[0], torch.Tensor):
        return [batches]
    if not isinstance(batches, Iterable):
        raise InputError(f"run needs batches built like the example inputs, not {type(batches).__name__}")
    return list(batches)


def emit_program(
    model: nn.Module,
    cluster: ClusterSpec,
    program: Program,
    exported: Exported,
    candidates: list[PricedPlan],
    rules: RuleBook,
    setting: Setting,
    options: Options,
    update: UpdateRule,
    inputs: Any,
    loss_fn: Any,
    targets: int,
) -> ParallelProgram:
    """Lower, check and emit the first candidate; the others become alternatives."""
    best, pricers = candidates[0], Pricers(cluster)
    started = time.perf_counter()
    lowered = best.lowered or lower(program, best.plan, pricers, rules)
    check_program(lowered, rules)
    counted = best.account or account(lowered, best.plan.stages, program.templates, pricers, setting, rules)
    done = time.perf_counter()
    name = type(model).__name__
    sources = tuple(stage_source(s, f"Stage {s.index} of {name} on {s.mesh}.") for s in lowered.stages)
    pipeline = pipeline_source(lowered, program, f"The pipeline of {name} on {best.plan.ranks} ranks.")
    emitted = time.perf_counter()
    step_s = replace(best, account=counted).step_s if len(lowered.stages) == 1 else counted.step_time_s
    prediction = Prediction(step_s, counted.peak_bytes, counted.comm_time_s)
    plan = replace(
        best.plan,
        predicted={
            "step_time_s": prediction.step_time_s,
            "peak_bytes": prediction.peak_bytes,
            "comm_time_s": prediction.comm_time_s,
        },
        precision=options.precision or "",
    )
    others = tuple(
        Alternative(
            f"{c.plan.origin} {c.plan.show_meshes()}",
            replace(c.plan, precision=plan.precision),
            Prediction(c.step_s, c.solution.memory, 0.0),
        )
        for c in candidates[1:]
    )
    solution = best.solution
    solver = {
        "method": solution.method,
        "gap": solution.gap,
        "nodes_before": solution.before.get("nodes", 0),
        "nodes_after": solution.after.get("nodes", 0),
        "variables_before": solution.before.get("variables", 0),
        "variables_after": solution.after.get("variables", 0),
        "unknown_ops": list(rules.unknown),
        "discovered_rules": dict(rules.discovered),
    }
    timings = {"capture_s": 0.0, "plan_s": 0.0, "lower_s": done - started, "emit_s": emitted - done}
    return ParallelProgram(
        plan,
        cluster,
        prediction,
        others,
        timings,
        solver,
        program,
        lowered,
        sources,
        pipeline,
        options,
        update,
        model,
        exported,
        rules,
        setting,
        inputs,
        counted,
        loss_fn,
        targets,
    )
