"""The sharding problem of a whole program on one mesh, as one factor graph over templates.

Variables: a strategy per op of each template; a spec per placeholder and hub (`autopar.passes.rules.hubs`); a (storage,
optimizer) pair of specs per group of parameters that share a template slot or are tied. Every call of a template shares
its variables, so an edge counts as often as calls use it, and depth costs nothing. Every edge is priced, also those
between calls, gradients going back between calls, batch slicing, parameter gathers, gradient reductions and the gather
after the optimizer step. What the plan recomputes is priced twice, and only what it keeps counts as memory: what a call keeps
is at least what kept values fill of the storages that `passes.memory.walk` finds held; the batch, and what several calls
keep, count too, and the rest of a storage of which a kept value shows a part does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

import numpy as np

from autopar.errors import InfeasibleError, PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, Template, resolve
from autopar.ir.rule import Strategy
from autopar.ir.setting import Setting
from autopar.ir.types import TensorType
from autopar.ops.registry import find
from autopar.passes.price.op_choices import OpChoices
from autopar.passes.price.pricer import Pricer
from autopar.passes.rules.alphabet import BIT, distinct
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.recomputation import Recomputation, held_values, recomputation
from autopar.passes.rules.strategy_table import StrategyTable
from autopar.passes.rules.structure import Group, call_edges, parameter_groups, view_of
from autopar.passes.shard.allowed import Allowed
from autopar.passes.shard.factors.conversions import conversions_s, ends_s, numbers_of
from autopar.passes.shard.factors.graph import FactorGraph, Key
from autopar.passes.shard.factors.launching import host_is_slower, launched_s
from autopar.passes.shard.factors.overlap import overlap_shares
from autopar.passes.shard.factors.parameters import ParameterCosts
from autopar.passes.shard.factors.stored import Resting, possible_states
from autopar.passes.shard.factors.template_facts import Operation, Place, TemplateFacts, template_facts
from autopar.plan import ParameterPlan


def _without_choice(key: Key, mesh: Mesh) -> InfeasibleError:
    return InfeasibleError(f"no choice is left for {' '.join(key)} on mesh {mesh}")


_Part = tuple[str, str | int] | None
"""A template and an op, a conversion or the slot of a parameter of it."""


class Problem:
    """Builds the factor graph; `allowed(key, state)` filters states (constraints, baselines), `given` fixes them.

    rests: how parameters rest that another program's plan stores. recompute: per template the values that backward makes again
    (`autopar.passes.recompute`). Specs are compared by their numbers (`autopar.passes.rules.alphabet`).
    """

    def __init__(
        self,
        program: Program,
        pricer: Pricer,
        rules: RuleBook,
        setting: Setting,
        allowed: Allowed | None = None,
        given: Callable[[Key], Any] | None = None,
        recompute: Mapping[str, tuple[str, ...]] | None = None,
        rests: Mapping[str, ParameterPlan] = MappingProxyType({}),
        room_bytes: float = math.inf,
    ) -> None:
        self.program, self.pricer, self.mesh, self.rules = program, pricer, pricer.mesh, rules
        self.setting, self._is_restricted = setting, False
        away = pricer.device.some_tiers()[0] if setting.offload and program.training else None
        self._move_s = 1 / away.bandwidth_Bps if away else 0.0  # seconds per byte to a memory tier or back
        self.given, self.rests, self.room_bytes = given, rests, room_bytes
        self.allowed = allowed
        shares = overlap_shares(program, pricer, rules, setting)
        self._parameter_costs = ParameterCosts(pricer, setting, shares, self._move_s)
        self.graph = FactorGraph()
        self.facts: dict[str, TemplateFacts] = {name: template_facts(t) for name, t in program.templates.items()}
        self._recompute(recompute or {})
        self.groups = parameter_groups(program)
        self._at: dict[tuple[str, str], tuple[int, np.ndarray]] = {}  # (variable, spec per state) of a value or hub
        self._ops: dict[tuple[str, str], tuple[int, OpChoices]] = {}  # the variable of an op, and what its states are
        self._ends: dict[int, list[np.ndarray]] = {}  # costs of a variable beside its own
        self._edges: list[tuple[int, int, np.ndarray, _Part]] = []  # what pairs of variables cost, and whose cost it is
        self._wanted: dict[tuple[str, str], list[np.ndarray]] = {}  # specs that ops want a value in
        self._made: dict[tuple[str, str], np.ndarray] = {}  # those that an op may leave it in
        for template in program.templates.values():
            self._add_ops(template)
        for template in program.templates.values():
            self._add_places(template)
            self._connect_inside(template)
        self._connect_calls()
        self._add_parameters()
        self._weigh(program.templates.values())

    def recomputing(self, recompute: Mapping[str, tuple[str, ...]]) -> Problem:
        """The same problem where backward makes these values again, as if it had been built so: what runs again is paid twice,
        and other values are held."""
        assert not self._is_restricted, "edges are those of all states"
        other, before, graph = copy(self), self.recomputations, self.graph
        other._recompute(recompute)
        other.graph = FactorGraph(graph.keys, graph.states, [*graph.cost], [*graph.memory], {}, graph.index)
        changed = (t for t in self.program.templates.values() if before[t.name] != other.recomputations[t.name])
        other._weigh(changed)
        return other

    def _recompute(self, recompute: Mapping[str, tuple[str, ...]]) -> None:
        self.recompute, templates = dict(recompute), self.program.templates
        self.recomputations: dict[str, Recomputation] = {
            name: recomputation(t, self.facts[name].flow, self.recompute.get(name, ())) for name, t in templates.items()
        }
        self.held = {name: held_values(t, self.recomputations[name]) for name, t in templates.items()}

    def restricted(self, allowed: Allowed) -> Problem:
        """The same problem with the states that a filter leaves, as if it had been built with these alone: places have no specs
        that no op wants any more. Raises InfeasibleError where a variable has none."""
        fewer = copy(self)
        fewer._is_restricted = True
        fewer._wanted, fewer._made, fewer._ops, fewer._at = {}, {}, {}, {}
        states = self.graph.states
        kept = [np.zeros(0, int)] * len(states)

        def keep(key: Key, v: int, places: Iterable[int]) -> None:
            kept[v] = np.array([i for i in places if allowed(key, states[v][i])], int)
            if not len(kept[v]):
                raise _without_choice(key, self.mesh)

        for (template, name), (v, choices) in self._ops.items():
            keep(("op", template, name), v, range(len(states[v])))
            fewer._ops[template, name] = v, choices.only(kept[v].tolist())
            fewer._note(template, self.facts[template].operations[name], choices.table.only(kept[v]))
        for template, facts in self.facts.items():
            for place in facts.places:
                v, numbers = self._at[template, place.name]
                where = {number: i for i, number in enumerate(numbers.tolist())}
                possible = fewer._possible(template, place).tolist()
                keep(("at", template, place.name), v, (where[number] for number in possible if number in where))
                fewer._at[template, place.name] = v, numbers[kept[v]]
        for name in self.groups:
            v = self.graph.index["param", name]
            keep(("param", name), v, range(len(states[v])))
        fewer.graph = self.graph.only(kept)
        return fewer

    # --- variables ------------------------------------------------------------------------------------------------------

    def _kept(self, key: Key, states: Iterable[Any]) -> tuple[Any, ...]:
        """The states of a variable: those of a plan that is given, or what is allowed of these."""
        if self.given is not None:
            return (self.given(key),)
        return tuple(states) if self.allowed is None else tuple(s for s in states if self.allowed(key, s))

    def _add(self, key: Key, states: tuple[Any, ...], cost: np.ndarray, memory: np.ndarray) -> int:
        if not states:
            raise _without_choice(key, self.mesh)
        return self.graph.add(key, states, cost, memory)

    def _add_ops(self, template: Template) -> None:
        for op in self.facts[template.name].operations.values():
            key = ("op", template.name, op.name)
            choices = self._choices(key, op)
            v = self._add(key, choices.strategies, *np.zeros((2, len(choices.strategies))))
            self._ops[template.name, op.name] = v, choices
            self._at.update(
                ((template.name, value), (v, numbers))
                for i, value in op.results.items()
                if (numbers := choices.table.results[i]) is not None
            )
            self._note(template.name, op, choices.table)

    def _weigh(self, templates: Iterable[Template]) -> None:
        """Set what the ops and places of these templates cost and hold, and what all pairs of variables cost."""
        for template in templates:
            facts, launching = self.facts[template.name], host_is_slower(template, self.pricer, self.rules)
            forms, calls = self.held[template.name], self.program.multiplicity[template.name]
            for op in facts.operations.values():
                v, choices = self._ops[template.name, op.name]
                held = [choices.result_bytes[i] for i, value in op.results.items() if forms.get(value) == value]
                seconds = launched_s(op.call, choices.seconds, self.pricer) if launching else choices.seconds
                times = calls * self.setting.microbatches * (2 if self._runs_again(template.name, op.name) else 1)
                self._hold(v, times * seconds, calls * sum(held, np.zeros(len(choices.strategies))))
            for place in facts.places:
                v, numbers = self._at[template.name, place.name]
                counted, shards = forms.get(place.value) == place.name, self.pricer.shards(place.type)
                nbytes = calls * shards.of_bytes(place.type, numbers) if counted else np.zeros(len(numbers))
                self._hold(v, np.zeros(len(numbers)), nbytes)
        twice = {part: part is not None and self._runs_again(*part) for part in {part for *_, part in self._edges}}
        for u, v, cost, part in self._edges:
            self.graph.connect(u, v, 2 * cost if twice[part] else cost)

    def _hold(self, v: int, cost: np.ndarray, held: np.ndarray) -> None:
        """Set the costs of a variable whose states keep so many bytes of a microbatch until backward: on the device, or away and
        back."""
        if "activations" in self.setting.offload:
            cost, held = cost + 2 * self._move_s * self.setting.microbatches * held, np.zeros_like(held)
        self.graph.cost[v] = reduce(np.add, self._ends.get(v, []), np.asarray(cost, float))
        self.graph.memory[v] = self.setting.in_flight * np.asarray(held, float)

    def _runs_again(self, template: str, part: str | int) -> bool:
        """Whether backward runs an op or a conversion of a template again, or gathers a parameter, by its slot, to do so."""
        again = self.recomputations[template]
        if isinstance(part, int):
            return self._gathered_again(self.program.templates[template], part)
        return part in again.again or part in again.hubs

    def _connect(self, u: int, v: int, cost: np.ndarray, part: _Part = None) -> None:
        """Add what a pair of variables costs. part: of a template, which pays it twice where it runs again."""
        if u == v:
            self._ends.setdefault(u, []).append(np.diagonal(cost))
        else:
            self._edges.append((u, v, cost, part))

    def _note(self, template: str, op: Operation, table: StrategyTable) -> None:
        """Note what an op under these strategies wants and makes."""
        for i, value in op.results.items():
            if (made := table.made[i]) is not None:
                self._made[template, value] = made
        for read, wanted in zip(op.reads, table.wanted, strict=True):
            if wanted is not None:
                self._wanted.setdefault((template, read.value), []).append(wanted)

    def _choices(self, key: Key, op: Operation) -> OpChoices:
        """The choices of an op. Raises PlanError where a plan that is given asks for something else."""
        rule, allowed = self.rules.rule(op.call), self.allowed
        choices = self.pricer.op_choices(op.call, rule)
        if self.given is not None:
            strategy: Strategy = self.given(key)
            if strategy not in choices.table.index:
                raise PlanError(
                    f"{'.'.join(key[1:])}: the plan's strategy does not fit the rule `{rule}` on mesh {self.mesh}; "
                    f"possible per axis: {', '.join(c or '(none)' for c in rule.choices())}"
                )
            return choices.only([choices.table.index[strategy]])
        if allowed is not None:
            choices = choices.only([i for i, strategy in enumerate(choices.strategies) if allowed(key, strategy)])
        with_room = np.flatnonzero(self._moment_bytes(key[1], op, choices) <= self.room_bytes)
        return choices.only(with_room.tolist()) if 0 < len(with_room) < len(choices.strategies) else choices

    def _moment_bytes(self, template: str, op: Operation, choices: OpChoices) -> np.ndarray:
        """Bytes that a rank has at least while it runs an op under each of its choices: blocks of what it reads and of its
        results, before what they owe is summed, without views, whose memory may be less; 0 where the room is no matter."""
        definition, nbytes = find(op.call.op), np.zeros(len(choices.strategies))
        if self.room_bytes == math.inf or definition is None or definition.free:
            return nbytes
        blocks = {read.value: (read.type, specs) for read, specs in zip(op.reads, choices.table.operands, strict=True)}
        t = self.program.templates[template]
        read = [
            self.pricer.shards(type_).of_bytes(type_, specs)
            for value, (type_, specs) in blocks.items()
            if specs is not None and view_of(t, resolve(t.nodes[value])[0]) is None
        ]
        return sum([*read, *(choices.result_bytes[i] for i in op.results)], nbytes)

    def largest_moment_bytes(self, choice: Sequence[int]) -> float:
        """Bytes that a rank has at least while it runs the op that needs most under an assignment."""
        largest = 0.0
        for template, facts in self.facts.items():
            for op in facts.operations.values():
                v, _ = self._ops[template, op.name]
                choices = self.pricer.op_choices(op.call, self.rules.rule(op.call))
                place = choices.table.index[self.graph.states[v][choice[v]]]
                largest = max(largest, float(self._moment_bytes(template, op, choices.only([place]))[0]))
        return largest

    def _add_places(self, template: Template) -> None:
        """The spec of every placeholder and hub."""
        for place in self.facts[template.name].places:
            key, specs = ("at", template.name, place.name), self.pricer.shards(place.type).letters.specs
            possible = self._possible(template.name, place)
            kept = self._kept(key, map(specs.__getitem__, possible.tolist()))
            numbers = (
                possible
                if len(kept) == len(possible) and self.given is None
                else numbers_of(self.pricer, place.type, kept)
            )
            self._at[template.name, place.name] = self._add(key, kept, *np.zeros((2, len(kept)))), numbers

    def _possible(self, template: str, place: Place) -> np.ndarray:
        """Numbers of the specs that a placeholder or hub may have: replicated, as ops want it, as its op leaves it."""
        owed, value = self.pricer.shards(place.type).letters.owed, (template, place.value)
        possible = np.concatenate([np.zeros(1, int), *self._wanted.get(value, ())])
        if not place.partial:
            possible = possible[owed[possible] == 0]
        if place.name.endswith("@save") and place.maker is not None:
            made = self._made[value]
            possible = np.concatenate([possible, made[owed[made] <= BIT["sum"]]])
        return distinct(possible)

    # --- edges ----------------------------------------------------------------------------------------------------------

    def _connect_inside(self, template: Template) -> None:
        facts, name = self.facts[template.name], template.name
        times = self.program.multiplicity[name] * self.setting.microbatches
        for place in facts.places:
            if place.source is None or place.converted is None:
                continue
            u, before = self._at[name, place.source]
            v, after = self._at[name, place.name]
            self._connect(u, v, times * conversions_s(self.pricer, place.converted, before, after), (name, place.name))
        for op in facts.operations.values():
            v, choices = self._ops[name, op.name]
            for read, wanted in zip(op.reads, choices.table.operands, strict=True):
                if wanted is not None:
                    u, before = self._at[name, read.place]
                    self._connect(u, v, times * conversions_s(self.pricer, read.type, before, wanted), (name, op.name))

    def _connect_calls(self) -> None:
        """Edges between calls (forward values, gradients back), from inputs and buffers, to outputs."""
        for (source, target, kind), count in call_edges(self.program).items():
            times = self.setting.microbatches * count
            v, specs = self._at[target]
            type_ = self.program.templates[target[0]].type_of(target[1])
            if source is None:
                self._ends.setdefault(v, []).append(times * ends_s(self.pricer, kind, type_, specs))
            else:
                u, before = self._at[source]
                self._connect(u, v, times * conversions_s(self.pricer, type_, before, specs))

    # --- parameters -----------------------------------------------------------------------------------------------------

    def _add_parameters(self) -> None:
        """The variable of every group of parameters, and its edges: from how it is stored to its uses, and from its gradients to
        the optimizer's shards, where it has any."""
        trained, costs = set(self.program.trained), self._parameter_costs
        for name, group in self.groups.items():
            type_ = self.program.parameters[group.names[0]].type
            updated = tuple(n for n in group.names if n in trained)
            kept = tuple(n for n in group.names if n in trained or n in self.setting.kept)
            resting = self._resting(name, type_, group, bool(kept))
            own = costs.own(type_, resting, len(group.names), updated, kept, self._reads(group))
            v = self._add(("param", name), resting.states, *own)
            for template_name, slot in group.slots:
                template, calls = self.program.templates[template_name], self.program.multiplicity[template_name]
                value, grad = template.params[slot], template.param_grads[slot]
                for kind in ("use", "late"):
                    if f"{value}@{kind}" in self.facts[template_name].flow.hubs:
                        u, wanted = self._at[template_name, f"{value}@{kind}"]
                        pair = costs.uses_s(type_, template.type_of(value), resting.stored, wanted)
                        part = (template_name, slot) if kind == "use" else None
                        self._connect(v, u, calls * self.setting.microbatches * pair, part)
                if grad is not None and updated:
                    u, before = self._at[template_name, grad]
                    self._connect(u, v, calls * costs.reductions_s(type_, before, resting.optimizer))

    def _resting(self, name: str, type_: TensorType, group: Group, updated: bool) -> Resting:
        """How a group of parameters may be stored and updated (`possible_states`), of this what is allowed."""
        key, whole = ("param", name), next((n for n in group.names if n in self.setting.optimizer.whole), None)
        if whole is not None and self.given is not None:
            given = self.given(key)[1]
            if any(given.dims) or (given.run and given.owner is None):
                raise PlanError(
                    f"its optimizer updates {whole} as a whole tensor, the plan shards it; compile again without plan=, or with "
                    "an elementwise optimizer"
                )
        runs = whole is None or "parameters" not in self.setting.offload
        shape = self.mesh.cut_alike(type_.shape)
        every = self.pricer.memo[possible_states](self.mesh.axes, shape, updated, whole is not None, runs)
        kept = self._kept(key, every.states)
        if whole is not None and not kept:
            raise InfeasibleError(
                f"its optimizer updates {whole} as a whole tensor, which the strategy or the constraints forbid; leave it whole "
                "(strategy 'dp' or 'auto'), or use an elementwise optimizer such as AdamW"
            )
        if not kept:
            possible_specs = ", ".join(dict.fromkeys(str(storage) for storage, _ in every.states))
            raise InfeasibleError(
                f"no choice is left for param {name} on mesh {self.mesh}, which may rest as {possible_specs}"
            )
        is_every = self.given is None and len(kept) == len(every.states)
        return every if is_every else Resting.of(kept, partial(numbers_of, self.pricer, type_))

    def _gathered_again(self, template: Template, slot: int) -> bool:
        """Whether what is recomputed needs a parameter that backward does not have anyway (taken to be wanted alike)."""
        has_late_point = f"{template.params[slot]}@late" in self.facts[template.name].flow.hubs
        return slot in self.recomputations[template.name].params and not has_late_point

    def held_s(self, price: float) -> float:
        """Seconds that a byte held by a microbatch costs, per microbatch, where a byte of the device has this price."""
        away = "activations" in self.setting.offload
        return 2 * self._move_s if away else price * self.setting.in_flight / self.setting.microbatches

    def _reads(self, group: Group) -> int:
        """How often in a step the parameters of a group are brought from storage to use."""
        calls = 0
        for name, slot in group.slots:
            hubs, value = self.facts[name].flow.hubs, self.program.templates[name].params[slot]
            calls += self.program.multiplicity[name] * sum(f"{value}@{kind}" in hubs for kind in ("use", "late"))
        return calls * self.setting.microbatches
