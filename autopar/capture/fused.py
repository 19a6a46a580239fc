"""Layers of torch that compute something else in inference than what is captured.

`nn.TransformerEncoder` without gradients drops padded positions (nested tensors) and gives zeros there, if the mask's data
allows it; captured, and with gradients, it computes them. A program cannot follow a choice that depends on the data.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from autopar.errors import CaptureError

_SIGNATURE = inspect.signature(nn.TransformerEncoder.forward)


@contextmanager
def noted_padding(model: nn.Module) -> Iterator[dict[str, bool]]:
    """The encoders that are called, while the context lasts, such that torch may drop padded positions without gradients:
    by path, whether there are none even in training."""
    paths: dict[str, bool] = {}

    def note(path: str) -> Any:
        def before(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = _SIGNATURE.bind(encoder, *args, **kwargs).arguments
            if call.get("src_key_padding_mask") is not None and call.get("mask") is None and call["src"].dim() == 3:
                tensors = (call["src"], *encoder.parameters())
                paths[path] = not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))

        return before

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
                if not module.layers[0].training:
                    hooks.callback(module.register_forward_pre_hook(note(path), with_kwargs=True).remove)
        yield paths


def refuse_padding(paths: dict[str, bool], training: bool) -> None:
    """Raises CaptureError where a program has such an encoder, and no gradient there."""
    for path in [path for path, frozen in paths.items() if frozen or not training]:
        raise CaptureError(
            f"{path or 'the model'}: without gradients nn.TransformerEncoder with a padding mask gives zeros at padded positions "
            "if every mask is aligned to the left, and values if not, which no fixed program does; build it with "
            "enable_nested_tensor=False (the weights stay the same), which gives values always"
        )
