"""Parameters and buffers that live in several stages: the first stage owns them.

After the actions of a step, the other stages send the owner their gradients, each under its own optimizer spec; the
owner adds them to its own and runs the optimizer; then the new values go to the others' storage. Stages on the same
ranks that store a parameter alike hold it once. A buffer goes from its owner to the others when the owner's stage
writes it, which the owners see in the first step and tell everyone.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..comm.comm import Comm
from ..data.schema import listed, text
from ..errors import RuntimeProgramError
from ..program.layout import TensorInfo
from ..program.tables import Pipeline
from .channels import Channel, exchange
from .stage import Stage

Route = tuple[str, int, int, Channel]
Gradients = dict[int, dict[str, Tensor]]


def held_alike(pipeline: Pipeline, a: int, b: int, name: str) -> bool:
    """Whether two stages store a parameter the same way on the same ranks."""
    first, second = pipeline.tables(a).parameters.get(name), pipeline.tables(b).parameters.get(name)
    if first is None or second is None or pipeline.meshes[a][1] != pipeline.meshes[b][1]:
        return False
    return list(pipeline.meshes[a][0].items()) == list(pipeline.meshes[b][0].items()) and first.spec == second.spec


class Shared:
    """The part of one rank in keeping shared tensors alike."""

    def __init__(self, pipeline: Pipeline, comm: Comm, stages: Mapping[int, Stage]) -> None:
        self._comm = comm
        self._stages = stages
        self._pipeline = pipeline
        self._tag = len(pipeline.boundary_tensors) * pipeline.microbatches
        self.earning: list[Route] = []
        self.parameters: list[Route] = []
        self.buffers: list[Route] = []
        self.written: list[Route] = []
        self._unknown = any(self._is_buffer(name) for name in pipeline.shared)
        self._before: dict[str, tuple[Tensor, int]] = {}
        for name, holders in pipeline.shared.items():
            if not any(stage in stages for stage in holders):
                continue
            owner, *others = holders
            for stage in others:
                if pipeline.training and stage in pipeline.earners(name):
                    self.earning += self._route(name, stage, owner, "opt_spec", 0)
                if not held_alike(pipeline, owner, stage, name):
                    routes = self.buffers if self._is_buffer(name) else self.parameters
                    routes += self._route(name, owner, stage, "spec", 1)

    def earn(self, gradients: Gradients) -> None:
        """Gradients of stages -> the owners', those of the other stages added."""
        routes = []
        for name, source, target, channel in self.earning:
            value = gradients[source].pop(name) if source in self._stages else None
            routes.append((channel, value, target in self._stages))
        for (name, _, owner, _), value in zip(self.earning, self._exchange(routes), strict=True):
            if value is not None:
                own = gradients[owner].get(name)
                gradients[owner][name] = value if own is None else own + value

    def spread_parameters(self) -> None:
        """Owners' parameters -> the other stages' storage."""
        self._spread(self.parameters, "params")

    def before_step(self) -> None:
        """Remember the owners' buffers in the first step."""
        if self._unknown:
            owned = {name: self._stages[h[0]] for name, h in self._pipeline.shared.items() if h[0] in self._stages}
            buffers = {name: stage.rt.buffers[name] for name, stage in owned.items() if self._is_buffer(name)}
            self._before = {name: (value, value._version) for name, value in buffers.items()}

    def spread_buffers(self, every: bool = False) -> None:
        """Owners' buffers -> the other stages: those that steps write, or every one."""
        if self._unknown and not every:
            written = [name for name, before in self._before.items() if self._written(name, *before)]
            names_written = {name for names in self._comm.share(written, listed(text())) for name in names}
            self.written = [route for route in self.buffers if route[0] in names_written]
            self._unknown, self._before = False, {}
        self._spread(self.buffers if every else self.written, "buffers")

    def _written(self, name: str, value: Tensor, version: int) -> bool:
        now = self._stages[self._pipeline.shared[name][0]].rt.buffers[name]
        return now is not value or now._version != version

    def _spread(self, routes: list[Route], table: str) -> None:
        plan = []
        for name, source, target, channel in routes:
            value = getattr(self._stages[source].rt, table)[name] if source in self._stages else None
            plan.append((channel, value, target in self._stages))
        for (name, _, target, _), value in zip(routes, self._exchange(plan), strict=True):
            if value is not None:
                getattr(self._stages[target].rt, table)[name].copy_(value)

    def _exchange(self, routes: list[tuple[Channel, Tensor | None, bool]]) -> list[Tensor | None]:
        return exchange(self._comm, routes) if routes else []

    def _is_buffer(self, name: str) -> bool:
        return name in self._pipeline.tables(self._pipeline.shared[name][0]).buffers

    def _info(self, stage: int, name: str) -> TensorInfo:
        info = self._pipeline.tables(stage).info(name)
        if info is None:
            raise RuntimeProgramError(f"the pipeline says stage {stage} holds {name!r}, its module does not")
        return info

    def _route(self, name: str, source: int, target: int, spec: str, way: int) -> list[Route]:
        """One route, where this rank is an end of it; tags count names, ways and stages, the same on every rank."""
        if source not in self._stages and target not in self._stages:
            return []
        pipeline, place = self._pipeline, list(self._pipeline.shared).index(name)
        other = source if way == 0 else target
        info, stages = self._info(source, name), len(pipeline.stages)
        channel = Channel(
            f"shared {name} ({'gradient' if way == 0 else 'value'}, stage {source} to {target})",
            info.shape,
            info.dtype,
            pipeline.placed(source, getattr(info, spec)),
            pipeline.placed(target, getattr(self._info(target, name), spec)),
            self._tag + (2 * place + way) * stages + other,
            self._comm,
        )
        return [(name, source, target, channel)]
