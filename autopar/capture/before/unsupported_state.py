"""Parts of a model that no trace carries over, found before it runs: each finding is a named error with what to do instead.

A program is made of what `forward` computes. Hooks on gradients, modules that run outside Python, parameters without a
value or without a dense layout, and parameters that share memory without being the same parameter are part of what eager
does and leave no mark in a graph. Forward hooks do: they are traced like the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from autopar.errors import CaptureError, InputError
from autopar.runtime.data.origin import module_of

Sharing = tuple[str, str, bool]
"""Names of two tensors over the same bytes; whether one of them is a parameter."""
_WRAPPERS = {
    "DataParallel": "pass model.module: the parallel program takes the place of the wrapper",
    "DistributedDataParallel": "pass model.module: the parallel program takes the place of the wrapper",
    "FullyShardedDataParallel": "pass the module before it is wrapped: the parallel program takes the place of the wrapper",
    "ScriptModule": "pass the nn.Module that it was made of; TorchScript has no graph that export can read",
    "OptimizedModule": "pass the module before torch.compile (model._orig_mod)",
}


def check_model(model: nn.Module, loss_fn: object) -> None:
    """Raises CaptureError for what a trace of `model` and `loss_fn` would drop without a word."""
    roots = [("", model), *([("loss_fn", loss_fn)] if isinstance(loss_fn, nn.Module) else [])]
    _check_global_hooks()
    seen: set[int] = set()
    for prefix, root in roots:
        for path, module in root.named_modules(prefix=prefix):
            _check_module(path, module)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    _check_tensor(f"{path}.{name}" if path else name, tensor)
    if isinstance(loss_fn, nn.Module):
        _check_loss(model, loss_fn)
    _check_shared_memory(model)


def check_inputs(leaves: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raises InputError for example inputs that no program takes."""
    for leaf, name in zip(leaves, names, strict=True):
        what = _unusual(leaf)
        if what is not None:
            raise InputError(f"input {name or 0} is {what}; pass a dense tensor (to_dense, or padded with a mask)")
        if not leaf.numel():
            dim = tuple(leaf.shape).index(0)
            instead = (
                "pass a batch with samples in it"
                if dim == 0
                else "a program computes for the sizes of its example: give one with entries there, or call forward without this "
                "input (wrap the model in a module that makes it, if it needs one)"
            )
            raise InputError(f"input {name or 0} of shape {tuple(leaf.shape)} is empty along dim {dim}; {instead}")


def _check_global_hooks() -> None:
    if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
        raise CaptureError(
            "a backward hook for all modules is registered (register_module_full_backward_hook); hooks on gradients are not "
            "part of a program: remove it"
        )


def _check_module(path: str, module: nn.Module) -> None:
    place = f"module {path}" if path else "the model"
    for cls in type(module).__mro__:
        foreign = module_of(cls).startswith(("torch.nn.parallel", "torch.distributed", "torch.jit", "torch._dynamo"))
        if foreign and cls.__name__ in _WRAPPERS:
            raise CaptureError(f"{place} is a {cls.__name__}; {_WRAPPERS[cls.__name__]}")
    if module_of(type(module)).startswith(
        ("torch.ao.nn.quantized", "torch.nn.quantized", "torch.ao.nn.intrinsic.quant")
    ):
        raise CaptureError(f"{place} is a quantized {type(module).__name__}; compile the float model")
    if module._backward_hooks or module._backward_pre_hooks:
        raise CaptureError(
            f"{place} has a backward hook (register_full_backward_hook); hooks on gradients are not part of a program: remove "
            "it, or write what it does as a torch.autograd.Function"
        )
    for name in (*module._modules, *module._parameters, *module._buffers):
        if not name.isprintable() or set(name) & set("\\\"'"):
            raise CaptureError(f"{name!r} in {place} cannot be the name of a module or tensor in a program; rename it")


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise CaptureError(
            f"{name} is not initialized: its module is lazy; run the model once on a batch, so that it takes its shape"
        )
    what = _unusual(tensor)
    if what is not None:
        raise CaptureError(
            f"{name} is {what}; a program holds dense tensors: convert it, or pass the model before it became so"
        )
    if isinstance(tensor, nn.Parameter) and any(
        n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise CaptureError(
            f"the elements of the parameter {name} share memory (it was expanded), so no optimizer can step it; make it "
            "contiguous, or expand a smaller parameter in forward"
        )
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise CaptureError(
            f"{name} has a gradient hook (register_hook, register_post_accumulate_grad_hook); hooks on gradients are not part "
            "of a program: remove it; clipping is an option of compile (clip_grad_norm, clip_grad_value)"
        )


def _unusual(tensor: torch.Tensor) -> str | None:
    """The kind of a tensor that a dense program cannot hold, in words; None for a tensor that it can."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout})"
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype})"
    overridden = type(tensor).__torch_function__ is not torch.Tensor.__torch_function__
    disabled = getattr(type(tensor).__torch_function__, "__func__", None) is torch._C._disabled_torch_function_impl
    plain = type(tensor).__torch_function__ in (nn.Parameter.__torch_function__, nn.Buffer.__torch_function__)
    dispatches = type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    if dispatches or (overridden and not plain and not disabled and _owner(tensor) not in _TORCH):
        return f"a {type(tensor).__name__}, a tensor type with operations of its own"
    return None


_TORCH = (torch.Tensor, nn.Parameter, nn.Buffer)


def _owner(tensor: torch.Tensor) -> type | None:
    """The class that defines how operations of a tensor are overridden."""
    return next((cls for cls in type(tensor).__mro__ if "__torch_function__" in vars(cls)), None)


def _check_loss(model: nn.Module, loss_fn: nn.Module) -> None:
    own = {id(p) for p in model.parameters()}
    for name, parameter in loss_fn.named_parameters():
        if id(parameter) not in own and parameter.requires_grad:
            raise CaptureError(
                f"loss_fn has the parameter {name}, which is none of the model and would not be trained; make the loss a part of "
                "the model, or freeze it with requires_grad_(False)"
            )


def check_written_buffers(sharing: Sequence[Sharing], written: Collection[str]) -> None:
    """Raises CaptureError where forward writes to a buffer that shares memory with another tensor of the model. sharing: of the
    model with its own tensors; written: names of buffers."""
    for first, second, _ in sharing:
        if first in written or second in written:
            raise CaptureError(
                f"forward writes to {first if first in written else second}, and {first} and {second} are the same memory; keep "
                "the buffer in one module that both use, or give each memory of its own (clone)"
            )


def shared_memory(model: nn.Module) -> list[Sharing]:
    """Pairs of tensors over the same bytes that are neither one parameter nor one tensor of a module that is used twice."""
    spans: list[tuple[int, int, int, str, torch.Tensor]] = []
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.numel() and tensor.layout is torch.strided:
                start = tensor.storage_offset() * tensor.element_size()
                full = f"{path}.{name}" if path else name
                spans.append((tensor.untyped_storage()._cdata, start, start + _bytes(tensor), full, tensor))
    spans.sort(key=lambda span: span[:3])
    return [
        (first, second, isinstance(one, nn.Parameter) or isinstance(other, nn.Parameter))
        for (storage, _, end, first, one), (same, start, _, second, other) in pairwise(spans)
        if storage == same and start < end and not (one is other and isinstance(one, nn.Parameter))
    ]


def _check_shared_memory(model: nn.Module) -> None:
    """Two parameters over the same bytes change together in eager, and would be two parameters of the program."""
    for first, second, with_parameter in shared_memory(model):
        if with_parameter:
            raise CaptureError(
                f"{first} and {second} share memory but are not the same parameter; tie them ({second} = {first}), or give one "
                "of them memory of its own (clone)"
            )


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the last."""
    return (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * tensor.element_size()
