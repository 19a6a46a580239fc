"""Full tensors on every rank: parameters, buffers and gradients, from the stage that has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..program.layout import gather_full, local_shape
from .outputs import start_tell
from .shape_variants import Form


def full_value(form: Form, comm: Comm, name: str) -> Tensor:
    """A parameter or buffer, full, on every rank. form: the session's first; comm: of all ranks."""
    pipeline = form.pipeline
    index = pipeline.holders(name)[0]
    info = pipeline.tables(index).info(name)
    assert info is not None
    value: Tensor | None = None
    if index in form.stages:
        stage = form.stages[index]
        own = stage.rt.params[name] if name in stage.rt.params else stage.rt.buffers[name]
        value = gather_full(own, info.spec, stage.comm, f"full {name}", info.shape)
    return start_tell(pipeline, comm, index, value, info.shape, info).wait().clone()


def full_gradients(form: Form, comm: Comm, grads: Mapping[str, Tensor], absent: Collection[str]) -> dict[str, Tensor]:
    """The gradients of a form's step, full, on every rank; nothing of parameters that have none. comm: of all ranks; grads:
    reduced ones of this rank; absent: parameters that have none in eager."""
    pipeline, owned = form.pipeline, {name for stage in form.stages.values() for name in stage.opt_params}
    gradients, nowhere = dict[str, Tensor](), form.absent.everywhere({*absent} & owned)
    for index in pipeline.stages:
        tables = pipeline.tables(index)
        for name, info in tables.parameters.items():
            shared = name in pipeline.shared
            if not (pipeline.earners(name) if shared else name in tables.gradients):
                continue
            if not pipeline.owns(index, name) or name in nowhere:
                continue
            grad: Tensor | None = None
            if index in form.stages:
                own, what = form.stages[index].comm, f"full gradient of {name}"
                held = grads.get(name)
                if held is None:  # another rank has all of it
                    held = torch.empty(local_shape(info.shape, info.opt_spec, own), dtype=info.dtype, device=own.device)
                grad = gather_full(held, info.opt_spec, own, what, info.shape)
            gradients[name] = start_tell(pipeline, comm, index, grad, info.shape, info).wait().clone()
    return gradients
