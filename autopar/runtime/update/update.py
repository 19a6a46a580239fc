"""From reduced gradients to updated parameters: what one optimizer step does on a rank.

    unscale -> clamp -> norm, overflow and what is no number of all ranks, one message -> clip -> optimizers -> scheduler

Optimizers see shards: elementwise ones (SGD, Adam, …) compute exactly what they would on full tensors, and for others
the plan keeps tensors whole. Every rank takes the same decisions from the same numbers, so a skipped step is skipped by
all: one that overflows under loss scaling, and on request one whose loss or gradients are no numbers; too many in a row end the
run (skips.py). Where nobody skips, every tenth step sees whether parameters were spoilt by such gradients. The step may run in
parts, a few parameters at a time with no gradient on the others, between which state can be brought in and taken away (`bring`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.backends import Arriving
from ..comm.calls import Handle
from ..comm.comm import Comm
from ..comm.devices import CPU
from ..errors import RuntimeProgramError
from .clipping import alike, both_nan, clip_factor, count_not_finite, joined_norm, powered_norm
from .optimizer_forms import choose_forms
from .scaling import Scaler
from .scheduler_steps import step_scheduler
from .skips import Skips
from .update_rule import UpdateRule, make_optimizers, norm_power, stand_in
from .update_state import groups_text, plain_text, read_groups, read_scaling, read_schedulers, restore_groups

Kind = tuple[int, torch.dtype]  # of a parameter: number of dims, dtype
Bring = Callable[[Sequence[str]], AbstractContextManager[Any]]
LOOK_EVERY = 10
"""Steps from one look at gradients that nobody skips for to the next: two passes that read, and a message of 16 bytes."""
SKIPPED = "optim_skipped"


@dataclass(frozen=True)
class _Look:
    """A look at parameters and gradients. updates: up to it; names: of the parameters; numbers: how many of all ranks are spoilt,
    and which of these."""

    updates: int
    names: Sequence[str]
    numbers: Arriving


class Updater:
    """The optimizers of one rank with what surrounds them; every method is called by all ranks together.

    parts: names that one `optimizer.step()` updates at a time (None: all at once), inside `bring(names)`; away: parameters that
    rest in memory tiers, with their gradients, which the host may use after `settle()`. skip_not_finite,
    measure_norm: on request; late: steps that are done before it is read whether parameters were spoilt; set alike on all ranks.
    Set by a step: skipped, not_finite (it was skipped because the loss or a gradient is no number), grad_norm, skips.
    """

    def __init__(
        self,
        rule: UpdateRule,
        own: Mapping[str, nn.Parameter],
        every: Mapping[str, Kind],
        counted: Collection[str],
        comm: Comm,
    ) -> None:
        """own: this rank's optimizer shards; every: all trained parameters of the program, in the order that the
        factory sees; counted: those of own that this rank counts in the global norm; comm: of all ranks."""
        self.rule = rule
        self.own = dict(own)
        self.comm = comm
        self.counted = frozenset(counted)
        self.parts: list[list[str]] | None = None
        self.bring: Bring = lambda names: nullcontext()
        self.away: Collection[str] = ()
        self.settle: Callable[[], None] = lambda: None
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        if rule.optimizer is not None and every:
            named = [(name, own[name] if name in own else stand_in(*kind, comm.device)) for name, kind in every.items()]
            self.optimizers = make_optimizers(rule.optimizer, named)
            choose_forms(self.optimizers, comm.device)
        self.schedulers = [rule.scheduler(one) for one in self.optimizers] if rule.scheduler is not None else []
        self.scaler = Scaler(rule.loss_scaling) if rule.loss_scaling is not None else None
        self.grad_norm: Tensor | None = None
        self.skipped = False
        self.not_finite = False
        self.skip_not_finite = False
        self.measure_norm = False
        self.skips = Skips()
        self.late = 0
        self._look: _Look | None = None
        self._steps = 0
        self._taken_by = {id(p): one for one in self.optimizers for group in one.param_groups for p in group["params"]}

    @property
    def loss_scale(self) -> float:
        """The factor of the loss that backward starts from."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def settings(self) -> list[float]:
        """The numbers that the optimizers' groups are set to, which are the same on every rank; those in the host's memory."""
        groups = [group for one in self.optimizers for group in one.param_groups]
        values = [value for group in groups for key, value in group.items() if key != "params"]
        numbers = [number for value in values for number in (value if isinstance(value, tuple) else (value,))]
        here = (n for n in numbers if not isinstance(n, Tensor) or (n.numel() == 1 and n.device.type == CPU.type))
        return [float(number) for number in here if isinstance(number, float | int | Tensor)]

    # ---- the step

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor], loss: Handle[Tensor], borrowed: Collection[str] = ()) -> bool:
        """Update parameters from reduced gradients, which are unscaled and clipped in place; whether it was done. Parameters
        without one have none for their optimizer either.

        borrowed: gradients that somebody else may hold too, to be copied before they are changed.
        """
        self._copy_where_needed(grads, borrowed if self.rule.changes_gradients else ())
        self.skipped = not self._prepare(grads, loss)
        self.skips.count(self.skipped, not self.not_finite)
        if self.skipped or not self.optimizers:
            return False
        self.step_in_parts(grads, [list(self.own)] if self.parts is None else self.parts)
        for scheduler in self.schedulers:
            step_scheduler(scheduler, lambda: self._agreed(loss))
        return True

    def _agreed(self, loss: Handle[Tensor]) -> float:
        """The loss as rank 0 has it: what is compared with a threshold must be the same number everywhere."""
        told = loss.wait().detach().to(torch.float64).reshape(1)
        return self.comm.broadcast(told, tuple(self.comm.mesh), site="loss for the scheduler").item()

    def judge(self, step: int, loss: Handle[Tensor]) -> str:
        """The message after a step whose update was left out, as those before it. Raises TooManySkips, and
        RuntimeProgramError where parameters were spoilt."""
        if self._look is not None and self._steps - self._look.updates >= self.late:
            self.settle_look(step)
        return self.skips.judge(step, loss.wait().item(), self.loss_scale) if self.skips.in_a_row > 1 else ""

    def settle_look(self, step: int) -> None:
        """Raises RuntimeProgramError where the last look found a parameter of any rank and its gradient to be no numbers. step:
        the last one."""
        look = self._look
        self.forget_look()
        if look is None:
            return
        count, both = look.numbers.wait()
        if count.item():
            spoiled = [name for name, nan in zip(look.names, both.tolist(), strict=True) if nan]
            raise RuntimeProgramError(
                f"step {step - self._steps + look.updates}: there are parameters with entries that are no numbers, and so are "
                f"their gradients ({', '.join(spoiled[:4]) or 'on other ranks'}); no later step trains them. Go back to a "
                "checkpoint and look for what overflows or divides by zero there; --run-dir with --on-nan skip leaves such "
                "updates out"
            )

    def forget_look(self) -> None:
        """A look that was not read is of a step that was taken back."""
        self._look = None

    def step_in_parts(self, grads: Mapping[str, Tensor], parts: Iterable[Sequence[str]]) -> None:
        """The optimizers' step, over the parameters of one part after the other; gradients stay on the parameters."""
        for names in parts:
            for parameter in self.own.values():
                parameter.grad = None
            for name in names:
                self.own[name].grad = grads.get(name)
            with self.bring(names):
                for optimizer in self.optimizers:
                    optimizer.step()
        for name, parameter in self.own.items():
            parameter.grad = grads.get(name)

    def forget_gradients(self) -> None:
        """Gradients of the last step are dropped before the next one needs their room."""
        for parameter in self.own.values():
            parameter.grad = None

    def _copy_where_needed(self, grads: dict[str, Tensor], borrowed: Collection[str]) -> None:
        """Gradients that may be written to, laid out as parameters are where kernels are fused, which go by places. They are
        copied one at a time, so that the first is let go before the last one's copy needs room."""
        fused = any(group.get("fused") for one in self.optimizers for group in one.param_groups)
        for name in grads:
            grad = grads[name].contiguous() if fused and name in self.own else grads[name]
            grads[name] = grad.clone() if name in borrowed and grad is grads[name] else grad
            del grad

    def _prepare(self, grads: dict[str, Tensor], loss: Handle[Tensor]) -> bool:
        """Unscale and clip; False where the step is to be skipped, on all ranks alike."""
        clip, value, scaler, device = self.rule.clip_norm, self.rule.clip_value, self.scaler, self.comm.device
        norm_type = clip.norm_type if clip is not None else 2.0 if self.measure_norm else None
        self._steps += 1
        looked = scaler is None and not self.skip_not_finite and self._steps % LOOK_EVERY == 0
        reduced = norm_type is not None or scaler is not None or self.skip_not_finite or looked
        self.not_finite = False
        if not reduced and value is None:
            return True
        if self.away:
            self.settle()
        own = list(grads.values())
        overflowed = not_finite = torch.zeros(1, dtype=torch.float64, device=device)
        if self.skip_not_finite:
            checked = [loss.wait()] if scaler is not None else [*own, loss.wait()]  # scaling looks at gradients itself
            not_finite = count_not_finite(checked, device)
        if scaler is not None:
            overflowed = scaler.unscale(own, device).double()
        if value is not None and own:
            torch._foreach_clamp_min_(own, -value)
            torch._foreach_clamp_max_(own, value)
        names = (
            [n for n in grads if n not in self.away and grads[n].numel() == self.own[n].numel() > 0] if looked else []
        )
        both = both_nan([(grads[name], self.own[name]) for name in names], device)
        if looked:
            not_finite = both.sum().reshape(1)
        kind, parts = "sum", [overflowed, not_finite]
        if norm_type is not None:
            kind = norm_power(norm_type)[0]
            parts.append(powered_norm([grads[n] for n in grads if n in self.counted], norm_type, device))
        if reduced:
            total = self.comm.all_reduce(
                torch.cat(parts), tuple(self.comm.mesh), kind, "norm and overflow of gradients"
            )
            if norm_type is not None:
                self.grad_norm = joined_norm(total[2], norm_type)
            if scaler is not None:
                overflow = bool(total[0].item())
                scaler.update(overflow)
            self.not_finite = self.skip_not_finite and bool(total[1].item())
            if looked:
                self._look = _Look(self._steps, names, Arriving([total[1], both]))
            if self.not_finite or (scaler is not None and overflow):
                return False
        if clip is not None and own:
            assert self.grad_norm is not None
            factor = clip_factor(self.grad_norm, clip.max_norm)
            for (where, dtype), members in alike(own).items():
                torch._foreach_mul_(members, factor.reshape(()).to(where, dtype))
        return True

    # ---- state

    def state_of(self, name: str) -> dict[str, Any]:
        """Optimizer state of one of this rank's parameters ({} when no optimizer has it)."""
        parameter = self.own[name]
        optimizer = self._taken_by.get(id(parameter))
        return {} if optimizer is None else optimizer.state[parameter]

    def counts_on_device(self, name: str) -> bool:
        """Whether a parameter's number of steps lies where the parameter does, as a fused kernel reads it."""
        optimizer = self._taken_by.get(id(self.own[name]))
        groups = [] if optimizer is None else optimizer.param_groups
        return any(group.get("fused") or group.get("capturable") for group in groups)

    def takes(self, name: str) -> bool:
        """Whether an optimizer has this rank's parameter."""
        return name in self.own and id(self.own[name]) in self._taken_by

    def dump(self) -> dict[str, str]:
        """The state of the optimizers that a checkpoint holds beside the state of parameters, as text by entry name:
        the same on every rank."""
        if not self.optimizers:
            return {}
        dumped = {"optim_groups": groups_text(self.optimizers)}
        if self.schedulers:
            dumped["optim_schedulers"] = plain_text([one.state_dict() for one in self.schedulers])
        if self.scaler is not None:
            dumped["optim_scaling"] = self.scaler.dump()
        if self.scaler is not None or self.skip_not_finite:
            dumped[SKIPPED] = self.skips.dump()
        return dumped

    def restore(self, dumped: Mapping[str, str]) -> None:
        """The inverse of dump; what is missing stays as it is. Raises CheckpointError, before anything changes."""
        groups = read_groups(dumped["optim_groups"], self.optimizers) if "optim_groups" in dumped else None
        scheduled = "optim_schedulers" in dumped and self.schedulers
        states = read_schedulers(dumped["optim_schedulers"], self.schedulers) if scheduled else []
        scaling = read_scaling(dumped["optim_scaling"]) if "optim_scaling" in dumped else None
        skipped = Skips.read(dumped[SKIPPED]) if SKIPPED in dumped else None
        for one, saved in zip(self.optimizers, groups or (), strict=groups is not None):
            restore_groups(one, saved)
        for scheduler, state in zip(self.schedulers, states, strict=bool(scheduled)):
            scheduler.load_state_dict(state)
        if scaling is not None and self.scaler is not None:
            self.scaler.restore(*scaling)
        if skipped is not None:
            self.skips.in_a_row = skipped
