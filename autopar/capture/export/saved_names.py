"""Under which names the model's own state dict has what a program holds.

    model.embed_tokens.weight    model.embed_tokens.weight, lm_head.weight    tied: two names for one tensor
    model.rotary_emb.inv_freq    —                                            a buffer that is not persistent

What has no name there (such buffers, tensors that forward captured) is in no file of weights either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.runtime.data.state_names import of_model


def saved_names(model: nn.Module, held: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Names in the state dict by the program's names `held`. The first is the one that is written: no name that the model
    itself (one of transformers) calls a tied copy of another, and the program's own where there are several."""
    copies = getattr(model, "all_tied_weights_keys", None)
    copies = copies if isinstance(copies, Mapping) else {}
    named: Mapping[str, Tensor] = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    unsaved = {
        f"{path}.{buffer}" if path else buffer
        for path, module in model.named_modules(remove_duplicate=False)
        for buffer in module._non_persistent_buffers_set
    }
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in named.items():
        if name not in unsaved:
            by_tensor.setdefault(id(tensor), []).append(name)
    names = {}
    for name in held:
        also = by_tensor.get(id(named[name]), []) if name in named else []
        names[name] = tuple(sorted(also, key=lambda one: (one in copies, one != name)))
    return names


def saved_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """A program's full state as the model's own state dict has it, names in its order; what modules add there that is no tensor
    (`get_extra_state`) is theirs."""
    now = of_model(state, saved_names(model, state))
    before = model.state_dict(keep_vars=True)
    return {
        name: now.get(name, value) for name, value in before.items() if name in now or not isinstance(value, Tensor)
    }
