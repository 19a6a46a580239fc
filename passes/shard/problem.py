"""The sharding problem of a whole program on one mesh, as one factor graph over templates.

Variables: a strategy per op of each template; a spec per placeholder and hub (`autopar.passes.rules.hubs`); a (storage,
optimizer) pair of specs per group of parameters that share a template slot or are tied. Every call of a template shares
its variables, so an edge counts as often as calls use it, and depth costs nothing. Every edge is priced, also those
between calls, gradients going back between calls, batch slicing, parameter gathers, gradient reductions and the gather
after the optimizer step. What the plan recomputes is priced twice, and only what it keeps counts as memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from autopar.errors import InfeasibleError, PlanError
from autopar.ir.call import OpCall
from autopar.ir.program import Program, Template, operand_nodes, resolve
from autopar.ir.setting import Setting
from autopar.ir.spec import Spec
from autopar.ir.types import TensorType
from autopar.passes.price.pricer import OpChoices, Pricer
from autopar.passes.rules.book import RuleBook
from autopar.passes.rules.hubs import Flow, flow
from autopar.passes.rules.lattice import Specs
from autopar.passes.rules.recomputation import Recomputation, recomputation
from autopar.passes.rules.structure import (
    Group,
    call_edges,
    parameter_groups,
    shows_held,
    storage_states,
    value_at,
    value_names,
)
from autopar.passes.rules.widening import wide_gradients
from autopar.passes.shard.allowed import Allowed
from autopar.passes.shard.graph import FactorGraph, Key
from autopar.passes.shard.overlap import overlap_shares
from autopar.passes.shard.parameters import State, moved_bytes, parameter_bytes

StateCost = Callable[[State], float]


class Problem:
    """Builds the factor graph; `allowed(key, state)` filters states (constraints, baselines), `given` fixes them.

    recompute: per template the values that backward makes again (`autopar.passes.recompute`).
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
    ) -> None:
        self.program, self.pricer, self.mesh, self.rules = program, pricer, pricer.mesh, rules
        self.setting = setting
        away = (
            (pricer.device.tiers or (pricer.device.tier("ddr"),))[0] if setting.offload and program.training else None
        )
        self._move_s = 1 / away.bandwidth_Bps if away else 0.0  # seconds per byte to a memory tier and back, one way
        self.given = given
        self.allowed = allowed
        self.shares = overlap_shares(program, pricer, rules, setting)
        self.graph = FactorGraph()
        self.flows: dict[str, Flow] = {name: flow(t) for name, t in program.templates.items()}
        self.recompute = dict(recompute or {})
        self.recomputations: dict[str, Recomputation] = {
            name: recomputation(t, self.flows[name], self.recompute.get(name, ()))
            for name, t in program.templates.items()
        }
        self.choices: dict[Key, OpChoices] = {}
        self.groups = parameter_groups(program)
        self._wanted: dict[tuple[str, str], dict[Spec, None]] = {}
        for template in program.templates.values():
            self._add_ops(template)
        for template in program.templates.values():
            self._add_hubs(template)
            self._connect_inside(template)
        self._connect_calls()
        self._add_parameters()

    # --- variables ------------------------------------------------------------------------------------------------------

    def _kept(self, key: Key, states: Iterable[Any]) -> tuple[Any, ...]:
        """The states of a variable: those of a plan that is given, or what is allowed of these."""
        if self.given is not None:
            return (self.given(key),)
        return tuple(s for s in states if self.allowed is None or self.allowed(key, s))

    def _add(self, key: Key, states: tuple[Any, ...], cost: np.ndarray, memory: np.ndarray) -> int:
        if not states:
            raise InfeasibleError(f"no choice is left for {' '.join(key)}; loosen the constraints that match it")
        return self.graph.add(key, states, cost, memory)

    def _add_held(self, key: Key, states: tuple[Any, ...], cost: np.ndarray, held: np.ndarray) -> int:
        """A variable whose states keep so many bytes of a microbatch until backward: on the device, or away and back."""
        v = self._add(key, states, cost, held)
        if "activations" in self.setting.offload:
            self.graph.cost[v] = (
                self.graph.cost[v] + 2 * self._move_s * self.setting.microbatches * self.graph.memory[v]
            )
            self.graph.memory[v] = np.zeros_like(self.graph.memory[v])
        else:
            self.graph.memory[v] = self.setting.in_flight * self.graph.memory[v]
        return v

    def _add_ops(self, template: Template) -> None:
        calls = self.program.multiplicity[template.name]
        microbatches = self.setting.microbatches
        flow_, recomputed = self.flows[template.name], self.recomputations[template.name]
        rests = self._rests(template)
        for node in template.ops:
            times = calls * microbatches * (2 if node.name in recomputed.again else 1)
            call = template.op_calls[node.name]
            key = ("op", template.name, node.name)
            choices = self._choices(key, call)
            results = value_names(node)
            held = [i for i, v in results.items() if recomputed.kept.get(v) == v]
            if shows_held(template, node, rests):
                held = []
            nbytes = calls * sum((choices.result_bytes[i] for i in held), np.zeros(len(choices.strategies)))
            self._add_held(key, choices.strategies, times * choices.seconds, nbytes)
            self.choices[key] = choices
            for i, operand in enumerate(operand_nodes(node)):
                source = flow_.reads[node.name, i]
                value = source.split("@")[0] if source else operand.name
                wanted = self._wanted.setdefault((template.name, value), {})
                wanted.update((spec, None) for spec in choices.operands[i] if spec is not None)

    def _choices(self, key: Key, call: OpCall) -> OpChoices:
        """What an op may do. Raises PlanError where a plan that is given asks for something else."""
        rule = self.rules.rule(call)
        if self.given is None:
            choices, allowed = self.pricer.op_choices(call, rule), self.allowed
            return choices.only(lambda strategy: allowed(key, strategy)) if allowed is not None else choices
        strategy = self.given(key)
        if not rule.allows(strategy, self.mesh):
            raise PlanError(
                f"{'.'.join(key[1:])}: the plan's strategy does not fit the rule `{rule}` on mesh {self.mesh}; "
                f"possible per axis: {', '.join(c or '(none)' for c in rule.choices())}"
            )
        return self.pricer.op_under(call, rule, (strategy,))

    def _rests(self, template: Template) -> set[str]:
        """Values that are in memory when backward runs: those that are kept, and parameters."""
        return {*self.recomputations[template.name].kept, *template.params}

    def _add_hubs(self, template: Template) -> None:
        calls = self.program.multiplicity[template.name]
        flow_, recomputed = self.flows[template.name], self.recomputations[template.name]
        rests = self._rests(template)
        owed = {t for t in template.tangents if t is not None}
        params = set(template.params)
        for name in (*template.inputs, *(t for t in template.tangents if t is not None)):
            type_ = template.type_of(name)
            specs = self._specs(template, name, partial=type_.is_float or name in owed)
            counted = recomputed.kept.get(name) == name
            self._add_at(template, name, specs, type_, calls if counted else 0)
        for hub in flow_.hubs.values():
            type_ = template.type_of(hub.value)
            specs = self._specs(template, hub.value, partial=hub.value not in params)
            producer = resolve(template.nodes[hub.value])
            if hub.kind == "save" and producer[0].op == "call_function":
                key = ("op", template.name, producer[0].name)
                own = (s for s in self.choices[key].results[producer[1]] if s is not None and _sums_only(s))
                specs.update(dict.fromkeys(own))
            counted = recomputed.kept.get(hub.value) == hub.name and not shows_held(template, producer[0], rests)
            self._add_at(template, hub.name, specs, type_, calls if counted else 0)

    def _add_at(self, template: Template, name: str, specs: Iterable[Spec], type_: TensorType, times: int) -> None:
        """The spec of a placeholder or hub. times: calls of a microbatch that keep the value there until backward."""
        key = ("at", template.name, name)
        kept = self._kept(key, specs)
        nbytes = [times * spec.local_bytes(type_, self.mesh) if times else 0.0 for spec in kept]
        self._add_held(key, kept, np.zeros(len(kept)), np.array(nbytes))

    def _specs(self, template: Template, value: str, partial: bool) -> dict[Spec, None]:
        wanted = self._wanted.get((template.name, value), {})
        rank = len(template.type_of(value).shape)
        return dict.fromkeys([Spec.replicated(rank), *(s for s in wanted if partial or not s.partial)])

    # --- edges ----------------------------------------------------------------------------------------------------------

    def _source(self, template: Template, value: str) -> tuple[int, Specs]:
        """(variable, spec per state) of the producer of a value."""
        node, index = resolve(template.nodes[value])
        if node.op == "placeholder":
            v = self.graph.index["at", template.name, value]
            return v, self.graph.states[v]
        key = ("op", template.name, node.name)
        return self.graph.index[key], _present(self.choices[key].results[index])

    def _at(self, template: Template, hub: str) -> tuple[int, Specs]:
        v = self.graph.index["at", template.name, hub]
        return v, self.graph.states[v]

    def _conversion(self, type_: TensorType, before: Specs, after: Specs, bucketed: bool = False) -> np.ndarray:
        ops = {"sum"} | {op for s in (*before, *after) for _, op in s.partial}
        try:
            return self.pricer.lattice(type_, tuple(sorted(ops)), bucketed).between(before, after)
        except KeyError as error:
            raise PlanError(
                f"the plan's spec {error.args[0]} does not fit a tensor of shape {type_.shape} on mesh {self.mesh} (dims must "
                "divide, and axes that share a dim stand in mesh order)"
            ) from None

    def _connect_inside(self, template: Template) -> None:
        flow_, recomputed = self.flows[template.name], self.recomputations[template.name]
        times = self.program.multiplicity[template.name] * self.setting.microbatches
        params, wide = set(template.params), wide_gradients(template)
        for hub in flow_.hubs.values():
            if hub.value in params:
                continue
            u, before = self._at(template, hub.source) if hub.source else self._source(template, hub.value)
            v, after = self._at(template, hub.name)
            twice = 2 if hub.name in recomputed.hubs else 1
            type_ = wide.get(hub.value) or template.type_of(hub.value)
            self.graph.connect(u, v, twice * times * self._conversion(type_, before, after))
        for (name, i), source in flow_.reads.items():
            key = ("op", template.name, name)
            wanted = _present(self.choices[key].operands[i])
            value = value_at(template.nodes[name], i)
            u, before = self._at(template, source) if source else self._source(template, value)
            twice = 2 if name in recomputed.again else 1
            matrix = twice * times * self._conversion(wide.get(value) or template.type_of(value), before, wanted)
            self.graph.connect(u, self.graph.index[key], matrix)

    def _connect_calls(self) -> None:
        """Edges between calls (forward values, gradients back), from inputs and buffers, to outputs."""
        counts: dict[tuple[Any, ...], int] = {}
        for source, target, kind in call_edges(self.program):
            counts[source, target, kind] = counts.get((source, target, kind), 0) + 1
        for (source, (template, value), kind), count in counts.items():
            times = self.setting.microbatches * count
            v, specs = self._source(self.program.templates[template], value)
            type_ = self.program.templates[template].type_of(value)
            if source is None:
                self.graph.cost[v] = self.graph.cost[v] + times * self._end_s(kind, type_, specs)
            else:
                u, before = self._source(self.program.templates[source[0]], source[1])
                self.graph.connect(u, v, times * self._conversion(type_, before, specs))

    def _end_s(self, kind: str, type_: TensorType, specs: Specs) -> np.ndarray:
        """Seconds per spec of a value where it enters or leaves the program (kind: as of `call_edges`)."""
        whole = (Spec.replicated(len(type_.shape)),)
        if kind == "depart":
            return np.array([self.pricer.departure(type_, s)[1] for s in specs])
        if kind == "arrive":
            return np.array([self.pricer.arrival(type_, s)[1] for s in specs])
        if kind == "read":
            return self._conversion(type_, whole, specs)[0]
        if kind == "settled":
            return np.array([self.pricer.convert_s(type_, s, s.without_partial()) for s in specs])
        return self._conversion(type_, specs, whole, bucketed=kind == "loss")[:, 0]

    # --- parameters -----------------------------------------------------------------------------------------------------

    def _add_parameters(self) -> None:
        trained = set(self.program.trained)
        for name, group in self.groups.items():
            type_ = self.program.parameters[group.names[0]].type
            updated = tuple(n for n in group.names if n in trained)
            v = self._add_parameter(
                name,
                storage_states(type_, self.mesh, bool(updated)),
                self._parameter_s(type_, group, updated),
                self._parameter_bytes(type_, group, updated),
            )
            self._connect_parameter(v, type_, group, bool(updated))

    def _parameter_s(self, type_: TensorType, group: Group, updated: tuple[str, ...]) -> Callable[[State], float]:
        """Seconds of a step for a group's parameters alone: to and from memory tiers, the update, the gather after it."""
        count, lattice = len(group.names), self.pricer.lattice(type_, bucketed=True)
        reads = self._reads(group) / count

        def seconds(state: State) -> float:
            moved = moved_bytes(type_, state, updated, reads, self.setting, self.mesh) if self._move_s else 0.0
            if not updated:
                return count * moved * self._move_s
            shard = state[1].local_bytes(type_, self.mesh)
            update_s = self.setting.optimizer.update_s(shard, self.pricer.copy_s, *updated)
            return count * moved * self._move_s + count * (
                self.shares.update * _gather_s(lattice, state[1], state[0]) + update_s
            )

        return seconds

    def _parameter_bytes(self, type_: TensorType, group: Group, updated: tuple[str, ...]) -> Callable[[State], float]:
        """Bytes that a group's parameters take on a rank's device."""
        return lambda state: len(group.names) * parameter_bytes(type_, state, updated, self.setting, self.mesh)

    def _connect_parameter(self, v: int, type_: TensorType, group: Group, updated: bool) -> None:
        """Edges from how a group's parameters are stored to their uses, and from their gradients to the optimizer's shards."""
        states = self.graph.states[v]
        for template_name, slot in group.slots:
            template = self.program.templates[template_name]
            value = template.params[slot]
            calls = self.program.multiplicity[template_name]
            for kind in ("use", "late"):
                if f"{value}@{kind}" in self.flows[template_name].hubs:
                    u, wanted = self._at(template, f"{value}@{kind}")
                    pair = self._use_s(type_, template.type_of(value), tuple(s[0] for s in states), wanted)
                    twice = 2 if kind == "use" and self._gathered_again(template, slot) else 1
                    self.graph.connect(v, u, twice * calls * self.setting.microbatches * pair)
            grad = template.param_grads[slot]
            if grad is not None and updated:
                u, before = self._source(template, grad)
                pair = self._conversion(type_, before, tuple(s[1] for s in states), bucketed=True)
                self.graph.connect(u, v, calls * self.shares.reduce * pair)

    def _add_stored(self, name: str, states: list[State], cost: StateCost, memory: StateCost) -> int:
        kept = self._kept(("param", name), states)
        return self._add(("param", name), kept, np.array([cost(s) for s in kept]), np.array([memory(s) for s in kept]))

    def _add_parameter(self, name: str, states: list[State], cost: StateCost, memory: StateCost) -> int:
        """The variable of a group of parameters, whole where its optimizer asks for that."""
        whole = next((n for n in self.groups[name].names if n in self.setting.optimizer.whole), None)
        if whole is None:
            return self._add_stored(name, states, cost, memory)
        states, why = [s for s in states if s[1].is_replicated], f"its optimizer updates {whole} as a whole tensor"
        if self.given is not None and not self.given(("param", name))[1].is_replicated:
            raise PlanError(f"{why}, the plan shards it; compile again without plan=, or with an elementwise optimizer")
        try:
            return self._add_stored(name, states, cost, memory)
        except InfeasibleError as error:
            raise InfeasibleError(
                f"{why}, which the strategy or the constraints forbid; leave it whole (strategy 'dp' or 'auto'), or use an "
                "elementwise optimizer such as AdamW"
            ) from error

    def _use_s(self, stored: TensorType, used: TensorType, before: Specs, after: Specs) -> np.ndarray:
        """Seconds from storage to use, per pair of specs: shards are cast, then gathered as they are used."""
        seconds = self.shares.each * self._conversion(used, before, after)
        if used == stored:
            return seconds
        return np.asarray(seconds + np.array([[self.pricer.cast_s(stored, used, s)] for s in before]))

    def _gathered_again(self, template: Template, slot: int) -> bool:
        """Whether what is recomputed needs a parameter that backward does not have anyway (taken to be wanted alike)."""
        has_late_point = f"{template.params[slot]}@late" in self.flows[template.name].hubs
        return slot in self.recomputations[template.name].params and not has_late_point

    def held_s(self, price: float) -> float:
        """Seconds that a byte held by a microbatch costs, per microbatch, where a byte of the device has this price."""
        away = "activations" in self.setting.offload
        return 2 * self._move_s if away else price * self.setting.in_flight / self.setting.microbatches

    def _reads(self, group: Group) -> int:
        """How often in a step the parameters of a group are brought from storage to use."""
        calls = 0
        for name, slot in group.slots:
            hubs, value = self.flows[name].hubs, self.program.templates[name].params[slot]
            calls += self.program.multiplicity[name] * sum(f"{value}@{kind}" in hubs for kind in ("use", "late"))
        return calls * self.setting.microbatches


def _gather_s(lattice: Any, before: Spec, after: Spec) -> float:
    for spec in (before, after):
        if spec not in lattice.index:
            raise PlanError(
                f"the plan's spec {spec} does not fit a parameter of shape {lattice.type.shape} on mesh {lattice.mesh} (axes "
                "must be the mesh's, dims must divide, and axes that share a dim stand in mesh order)"
            )
    return float(lattice.costs[lattice.index[before], lattice.index[after]])


def _present(specs: tuple[Spec | None, ...]) -> Specs:
    """Specs of a value that is there under every strategy, or under none."""
    return tuple(s for s in specs if s is not None)


def _sums_only(spec: Spec) -> bool:
    return all(op == "sum" for _, op in spec.partial)
