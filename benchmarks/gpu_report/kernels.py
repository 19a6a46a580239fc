"""The part `kernels`: single kernels by shape, from which prices of attention, grouped and odd-sized products are fitted.

Seconds are device-seconds: kernels in a row between two events, the row long enough that the host's launching does not count;
the minimum of three rows. Backward of attention is a row of backward passes of one graph that is kept. Of every kernel the
record has seconds and the rate in FLOP/s that its formula (`costmodel/compute.py`) counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_report.machine import Machine, attempt
from benchmarks.gpu_report.parts import Found

ROWS = 3
LEAST_S = 0.004
SIZES = (256, 512, 1024, 2048, 4096, 8192)
PRODUCTS = (
    *((s, s, s) for s in SIZES),
    *((8192, n, 8192) for n in (64, 128, 256, 512, 1024, 2048)),
    *((8192, 8192, k) for k in (64, 128, 256, 512, 1024, 2048)),
    *((m, 8192, 8192) for m in (16, 64, 128, 512, 2048)),
    *((m, 4096, 4096) for m in (1024, 4096, 16384)),
    *((4096, 14336, 4096), (4096, 4096, 14336), (8192, 28672, 8192), (8192, 128256, 4096)),
)
ODD = (
    *((8192 - d, 8192, 8192) for d in (1, 2, 4, 7, 8, 16, 64)),
    *((8192, 8192 - d, 8192) for d in (1, 2, 4, 7, 8, 16, 64)),
    *((8192, 8192, 8192 - d) for d in (1, 2, 4, 7, 8, 16, 64)),
    (8185, 8205, 8192),
)
SEQUENCES = (512, 1024, 2048, 4096, 8192, 16384)
HEADS = (64, 128, 256)
TOKENS = 16384
EXPERTS = ((8, 4096, 14336), (64, 2048, 1408), (128, 4096, 1536), (256, 7168, 2048))
ROWS_OF_EXPERT = (16, 64, 256, 1024, 4096)
REHEARSED = 64


def device_s(machine: Machine, run: Callable[[], Any]) -> float:
    """Device-seconds of a kernel, by events around rows of them."""
    run()
    machine.synchronize()
    if machine.rehearsal:
        return 1e-6
    count = 1
    while (seconds := _row_s(run, count)) < LEAST_S:
        count = max(2 * count, int(1.2 * count * LEAST_S / max(seconds, 1e-6)))
    return min(seconds, *(_row_s(run, count) for _ in range(ROWS - 1))) / count


def _row_s(run: Callable[[], Any], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(machine: Machine) -> Found:
    yield "products", list(products(machine, PRODUCTS))
    yield "odd products", list(products(machine, ODD))
    yield "transposed products", list(transposed(machine))
    yield "attention", list(attention(machine))
    yield "grouped products", list(grouped(machine))
    yield "launches", attempt(launches, machine)


def _cut(machine: Machine, shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(min(n, REHEARSED) if machine.rehearsal else n for n in shape)


def products(machine: Machine, shapes: Iterable[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    """Products (m, k) by (n, k) transposed, as a linear layer has them, in bfloat16."""
    for shape in shapes:
        m, n, k = _cut(machine, shape)
        a, b = (torch.randn(rows, k, device=machine.device, dtype=torch.bfloat16) for rows in (m, n))
        seconds = device_s(machine, lambda a=a, b=b: F.linear(a, b))  # type: ignore[misc]
        yield {"shape": [m, n, k], "seconds": seconds, "flops_a_second": 2 * m * n * k / seconds}


def transposed(machine: Machine) -> Iterator[dict[str, Any]]:
    """The three products of a linear layer's training, and odd ones among them."""
    for shape in ((8192, 8192, 8192), (4096, 14336, 4096), (8185, 8205, 8192), (8192, 8192, 8191)):
        m, n, k = _cut(machine, shape)
        x = torch.randn(m, k, device=machine.device, dtype=torch.bfloat16)
        w = torch.randn(n, k, device=machine.device, dtype=torch.bfloat16)
        dy = torch.randn(m, n, device=machine.device, dtype=torch.bfloat16)
        ways = {"y": lambda x=x, w=w: x @ w.t(), "dx": lambda dy=dy, w=w: dy @ w, "dw": lambda dy=dy, x=x: dy.t() @ x}
        for way, run in ways.items():
            yield {"shape": [m, n, k], "way": way, "seconds": device_s(machine, run)}


def attention(machine: Machine) -> Iterator[dict[str, Any]]:
    """Forward and backward of torch's kernels, by length, head size and mask."""
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for name, backend in backends.items():
        for head in HEADS:
            for length in SEQUENCES:
                for causal in (True, False):
                    found = attempt(_attention, machine, backend, head, length, causal)
                    yield {"kernel": name, "head": head, "length": length, "causal": causal, **found}


def _attention(machine: Machine, backend: SDPBackend, head: int, length: int, causal: bool) -> dict[str, Any]:
    tokens, heads = (TOKENS, 2048 // head) if not machine.rehearsal else (REHEARSED, 1)
    length = min(length, tokens)
    shape = (tokens // length, heads, length, head)
    q, k, v = (torch.randn(shape, device=machine.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with sdpa_kernel([SDPBackend.MATH] if machine.rehearsal else [backend]):
        forward_s = device_s(
            machine, lambda: F.scaled_dot_product_attention(q.detach(), k, v, is_causal=causal).detach()
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        dy = torch.randn_like(y)
        backward_s = device_s(machine, lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True))
    flops = 4.0 * tokens * heads * head * length / (2 if causal else 1)
    rates = {"forward_flops_a_second": flops / forward_s, "backward_flops_a_second": 2.5 * flops / backward_s}
    return {"shape": list(shape), "forward_s": forward_s, "backward_s": backward_s, **rates}


def grouped(machine: Machine) -> Iterator[dict[str, Any]]:
    """Grouped products of experts: even rows, and the same rows with half of them on an eighth of the experts."""
    for experts, width, hidden in EXPERTS:
        for rows in ROWS_OF_EXPERT:
            for uneven in (False, True):
                found = attempt(_grouped, machine, experts, width, hidden, rows, uneven)
                yield {"experts": experts, "width": width, "hidden": hidden, "rows": rows, "uneven": uneven, **found}


def _grouped(machine: Machine, experts: int, width: int, hidden: int, rows: int, uneven: bool) -> dict[str, Any]:
    width, hidden = _cut(machine, (width, hidden))
    if machine.rehearsal:
        experts, rows = 8, 16
    counts = [rows] * experts
    if uneven:
        few = experts // 8
        counts = [rows * 4] * few + [rows * 4 // 7] * (experts - few)
    ends = torch.tensor(counts, device=machine.device).cumsum(0).to(torch.int32)
    total = sum(counts)
    x = torch.randn(total, width, device=machine.device, dtype=torch.bfloat16)
    w = torch.randn(experts, width, hidden, device=machine.device, dtype=torch.bfloat16)
    dy = torch.randn(total, hidden, device=machine.device, dtype=torch.bfloat16)
    product: Any = torch._grouped_mm if hasattr(torch, "_grouped_mm") else F.grouped_mm
    flops = 2.0 * total * width * hidden
    seconds = {
        "y": device_s(machine, lambda: product(x, w, offs=ends)),
        "dx": device_s(machine, lambda: product(dy, w.transpose(1, 2), offs=ends)),
        "dw": device_s(machine, lambda: product(x.t(), dy, offs=ends)),
    }
    loop_s = device_s(machine, lambda: [a @ b for a, b in zip(x.split(counts), w, strict=True)])
    return {"seconds": seconds, "loop_s": loop_s, "flops_a_second": flops / seconds["y"]}


def launches(machine: Machine) -> dict[str, float]:
    """Seconds of the host between kernels in a row that are so small that it is what takes the time."""
    from autopar.costmodel.calibrate import timed_s

    tiny = torch.zeros(32, 32, device=machine.device)
    half = tiny.bfloat16()
    one = torch.zeros(2, 2, 32, 32, device=machine.device, dtype=torch.bfloat16)
    ops: dict[str, Callable[[], Any]] = {
        "add_": lambda: tiny.add_(1),
        "add": lambda: tiny + tiny,
        "mm": lambda: tiny @ tiny,
        "linear bf16": lambda: F.linear(half, half),
        "to": lambda: tiny.bfloat16(),
        "view": lambda: tiny.view(16, 64),
        "sum": lambda: tiny.sum(1),
        "silu": lambda: F.silu(tiny),
        "layer_norm": lambda: F.layer_norm(tiny, (32,)),
        "softmax": lambda: tiny.softmax(1),
        "cat": lambda: torch.cat((tiny, tiny)),
        "attention": lambda: F.scaled_dot_product_attention(one, one, one),
        "embedding": lambda: F.embedding(torch.zeros(1, dtype=torch.long, device=machine.device), tiny),
    }

    def row(op: Callable[[], Any]) -> None:
        for _ in range(100):
            op()

    with torch.no_grad():
        found = {name: timed_s(lambda op=op: row(op), machine.device, 0.02) / 100 for name, op in ops.items()}  # type: ignore[misc]
    return found | {"and waited for": timed_s(lambda: tiny.add_(1), machine.device, 0.02)}


def lines(record: dict[str, Any]) -> list[str]:
    told = []
    for kind in ("products", "odd products"):
        told += [
            f"{kind[:-1]} {tuple(one['shape'])}: {one['flops_a_second'] / 1e12:.0f} TFLOP/s" for one in record[kind]
        ]
    for one in record["attention"]:
        if "forward_s" in one:
            mask = "causal" if one["causal"] else "full"
            rates = [f"{one[f'{way}_flops_a_second'] / 1e12:.0f}" for way in ("forward", "backward")]
            told.append(
                f"attention {one['kernel']} {one['head']} {one['length']} {mask}: {' and '.join(rates)} TFLOP/s"
            )
    for one in record["grouped products"]:
        if "seconds" in one:
            told.append(
                f"{one['experts']} experts of {one['width']} x {one['hidden']}, {one['rows']} rows"
                f"{' in the mean' if one['uneven'] else ''}: {one['flops_a_second'] / 1e12:.0f} TFLOP/s"
            )
    return told + [f"launch of {name}: {1e6 * seconds:.1f} us" for name, seconds in record["launches"].items()]
