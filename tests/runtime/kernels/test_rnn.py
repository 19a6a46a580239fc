"""The mode in which recurrent layers run, on which torch depends where no device of these tests can show it."""

from __future__ import annotations

import pytest
import torch
from torch import _VF

from autopar.runtime.kernels.rnn import rnn, rnn_grad

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@pytest.mark.parametrize("mode", GATES)
def test_layers_are_differentiated_in_training_mode_alone(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN refuses to differentiate what ran in inference mode, and keeps more where it may be asked to."""
    name, trained = "lstm" if mode == "lstm" else mode, []
    layer = getattr(_VF, name)

    def noted(*arguments: object) -> object:
        result = layer(*arguments)
        trained.append((arguments[6], result[0].requires_grad))
        return result

    monkeypatch.setattr(_VF, name, noted)
    n = GATES[mode]
    x, h, c = torch.randn(3, 2, 5), torch.randn(2, 4), torch.randn(2, 4) if mode == "lstm" else None
    weights = torch.randn(4 * n, 5), torch.randn(4 * n, 4), torch.randn(4 * n), torch.randn(4 * n), None
    out, last, cell = rnn(mode, x, h, c, *weights)
    rnn_grad(mode, x, h, c, *weights, torch.ones_like(out), torch.ones_like(last), torch.ones_like(cell))
    assert trained == [(False, False), (True, True)]
