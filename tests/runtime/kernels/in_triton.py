"""Triton's interpreter for tests: kernels run on CPU tensors, program by program, in numpy.

Triton decides when it is imported, and again where a kernel is defined, so `tests/every_test.py` says so before. Where there is a
GPU its compiler is used, and the tests run there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips where there is no Triton. Its interpreter holds bfloat16 as integers: float32 is cut off to it, where a GPU rounds
    to the nearest, and products are of the integers, so these two are done by torch."""
    pytest.importorskip("triton", reason="needs triton, which is in the extra dev")
    if DEVICE == "cpu":
        from triton.runtime import interpreter

        convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

        def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
            if (source.name, target.name) != ("fp32", "bf16"):
                return convert(data, source, target, mode)
            return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.uint16).numpy()

        def product(self: Any, a: Any, b: Any, *others: Any) -> Any:
            return dot(self, *(widened(x) for x in (a, b)), *others)

        def widened(x: Any) -> Any:
            if x.dtype.name != "bf16":
                return x
            data = torch.from_numpy(np.ascontiguousarray(x.data)).view(torch.bfloat16).float().numpy()
            return interpreter.TensorHandle(data, interpreter.tl.float32)

        monkeypatch.setattr(interpreter, "_convert_float", rounded)
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
