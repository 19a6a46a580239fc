"""A module's forward, run once on tensors without memory: what it notes of itself on the host is then there on every rank, also
where another one captured it, or its program was kept."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autopar.capture.export.fake import fake_like, fake_mode, faked


def rehearse(module: nn.Module, example: Mapping[str, Tensor]) -> None:
    """Call a module with fake tensors like these of an example, by name."""
    mode = fake_mode()
    with faked(module, mode), torch.no_grad():
        inputs = {name: fake_like(tensor, mode) for name, tensor in example.items()}
        with mode:
            module(**inputs)
