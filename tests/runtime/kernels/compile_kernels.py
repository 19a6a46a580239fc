"""Compiles the kernels of Triton for GPUs that need not be there, and prints a row of JSON about each.

Run as a script, as Triton compiles or interprets by what the environment said when it was imported.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autopar.runtime.kernels import triton_dropout
from autopar.runtime.kernels.attention import dropped, triton_attention

NAMES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16"}


def compiled(kernel: Any, arguments: dict[str, Any], capability: int) -> Any:
    """A kernel for arguments as a launch gives them, tensors by their dtypes: all that 16 divides is known to be so."""
    constants = {k: v for k, v in arguments.items() if k.isupper()}
    options = {k: v for k, v in arguments.items() if k.startswith("num_")}
    signature, attributes, unalike = {}, {}, {"key", *constants}
    for place, name in enumerate(kernel.arg_names):
        value = arguments[name]
        signature[name] = "constexpr" if name in constants else kind(value)
        for index, one in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
            if isinstance(one, torch.dtype) or (isinstance(one, int) and one % 16 == 0 and name not in unalike):
                attributes[(place,) if index is None else (place, index)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def kind(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(kind(one) for one in value)
    if isinstance(value, torch.dtype):
        return f"*{NAMES[value]}"
    return "fp32" if isinstance(value, float) else "i64" if value >= 1 << 31 else "i32"


def moved(ptx: str, what: str) -> int:
    """Bytes that a thread reads ("ld") or writes ("st") of global memory."""
    found = re.findall(rf"{what}\.global(?:\.v(\d))?\.b(\d+)", ptx)
    return sum(int(count or 1) * int(bits) // 8 for count, bits in found)


class Launch:
    """A kernel that is not launched: its arguments by name, tensors as their dtypes."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.calls = kernel, list[dict[str, Any]]()

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given, **told: self.calls.append(
            dict(zip(self.kernel.arg_names, map(without_data, given), strict=False)) | told
        )


def without_data(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(without_data, value))
    return value.dtype if isinstance(value, torch.Tensor) else value


def main(every: bool) -> None:
    """every: of attention all widths for all devices, and not the widest for the newest alone."""
    for dtype in (torch.bfloat16, torch.float64):
        launch = Launch(triton_dropout._dropout)
        triton_dropout._dropout = launch
        triton_dropout.dropout(torch.empty(4, 4096, dtype=dtype), 0.1, 1 << 62, (8, 4096), (2, 0))
        triton_dropout._dropout = launch.kernel
        for capability in (80, 90):
            made = compiled(launch.kernel, launch.calls[0], capability)
            bytes_ = {what: moved(made.asm["ptx"], what) for what in ("ld", "st")}
            elements = launch.calls[0]["WORDS"] * launch.calls[0]["ROWS"] * launch.calls[0]["LANES"]
            thread = elements * dtype.itemsize // (32 * made.metadata.num_warps)
            print(json.dumps({"kernel": "dropout", "dtype": str(dtype), **bytes_, "thread": thread}))
    for dtype, width in ((torch.bfloat16, 256), (torch.bfloat16, 64), (torch.float32, 128))[: 3 if every else 1]:
        q = torch.empty(2, 4, 128, width, dtype=dtype)
        names = ("_forward", "_of_rows", "_of_keys")
        kernels = {name: Launch(getattr(triton_attention, name)) for name in names}
        for name, launch in kernels.items():
            setattr(triton_attention, name, launch)
        told = (None, 0.1, True, 0.125, 1 << 62, None, (2, 4, 128, 128, 0, 0, 0, 0))
        out, lse = dropped.attend(q, q, q, *told)
        dropped.attend_grad(out, q, q, q, told[0], out, lse, *told[1:])
        for name, launch in kernels.items():
            setattr(triton_attention, name, launch.kernel)
        for capability in (90, 80)[: 2 if every else 1]:
            for name, launch in kernels.items():
                shared = compiled(launch.kernel, launch.calls[0], capability).metadata.shared
                print(json.dumps({"kernel": name, "dtype": str(dtype), "width": width, "shared": shared}))


if __name__ == "__main__":
    main("every" in sys.argv)
