"""Scaled dot-product attention of a block of queries to a block of keys, forward and backward, without autograd.

Layout (batch, heads, query, head_dim) against (batch, kv_heads, key, head_dim); several query heads may share one
key/value head. Which kernel does it is asked of `kernels`; all have one form (`attention_kernels`). Of a row that sees nothing
the result is 0 and the log-sum-exp 0 in all. A causal block is a square, of which row r sees the keys <= r.

A GPU's kernel does a small block before it is used for the first time, forward and backward, and is compared with the plain
formula: one that fails, or differs, on this GPU with this torch is left out with a warning, and the next choice takes its place.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...comm.devices import device_of
from ..draws import Key
from ..kernels import AttentionCall, attention_kernels
from . import plain_scores as plain
from .attention_kernels import KERNELS, Kernel
from .plain_scores import Config

Tensor = torch.Tensor
_TRIED = 100
"""Rows and keys of the block that a kernel is compared on: of no kernel a whole number of tiles."""


def hidden_rows(lse: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """Which rows of a block see nothing of it, in a form that goes with their lse; None: all see something."""
    if mask is None:
        return None
    seen = mask if mask.dtype == torch.bool else mask > -torch.inf
    if causal:
        rows = lse.shape[2]
        seen = seen.expand(*mask.shape[:2], rows, rows).tril()
    return ~seen.any(-1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float,
    key: Key = 0,
    shape: tuple[int, ...] | None = None,
    offsets: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (out: like q with v's head dim, lse: (batch, heads, query) float).

    `key`, `shape`, `offsets`: dropout on the weights, by the place of the block in all scores.
    """
    config = Config(mask, p, causal, scale, key, shape, offsets)
    return kernel_for(q, k, v, config).attend(q, k, v, config)


def attend_grad(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    p: float,
    causal: bool,
    scale: float,
    key: Key = 0,
    shape: tuple[int, ...] | None = None,
    offsets: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    config = Config(mask, p, causal, scale, key, shape, offsets)
    with _in_order():
        return kernel_for(q, k, v, config).attend_grad(g, q, k, v, out, lse, config)


def mask_grad(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    out: Tensor,
    lse: Tensor,
    p: float,
    causal: bool,
    scale: float,
    key: Key = 0,
    shape: tuple[int, ...] | None = None,
    offsets: tuple[int, ...] | None = None,
) -> Tensor:
    """Gradient of an additive mask, at full size (batch, heads, query, key), in the dtype of the scores."""
    return plain.mask_grad(g, q, k, v, out, lse, plain.Config(mask, p, causal, scale, key, shape, offsets))


# --- which kernel


def kernel_for(q: Tensor, k: Tensor, v: Tensor, config: Config) -> Kernel:
    """The kernel that attends with these, and gives the gradients of that."""
    mask = None if config.mask is None else config.mask.dtype
    keys = min(k.shape[2], 2) if q.numel() and k.numel() else 0
    call = AttentionCall(q.dtype, q.shape[3], v.shape[3], mask, config.causal, config.p > 0, keys)
    names = attention_kernels(call, device_of(q))
    if q.is_cuda and len(names) > 1 and torch.cuda.is_available():
        by_rows, group = q.stride(1) < q.stride(2), q.shape[1] > k.shape[1]
        names = tuple(n for n in names if _is_allowed(n) and _equals_plain(n, call, by_rows, group, q.device))
    return KERNELS[names[0]]


@contextmanager
def _in_order() -> Iterator[None]:
    """Inside, kernels of GPUs add in a fixed order wherever others are asked to: backward of attention does so only where torch
    is to raise for those that cannot, and not where it is to warn."""
    asked, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    warns = asked and warns
    if warns:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if warns:
            torch.use_deterministic_algorithms(True, warn_only=True)


def _is_allowed(name: str) -> bool:
    """Whether the user allows torch a kernel."""
    match name:
        case "flash":
            return torch.backends.cuda.flash_sdp_enabled()
        case "efficient":
            return torch.backends.cuda.mem_efficient_sdp_enabled()
        case "cudnn":
            return torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    return True


@functools.cache
def _equals_plain(name: str, call: AttentionCall, by_rows: bool, group: bool, device: torch.device) -> bool:
    """Whether a kernel gives on a device what the plain formula gives, to the rounding of its dtype. by_rows: how queries, keys
    and values lie; group: two query heads to a key head."""
    if name == "plain":
        return True
    with _disable_current_modes(), torch.no_grad():
        try:
            difference = _difference(name, call, by_rows, group, device)
        except Exception as error:  # Triton's are of many kinds
            difference, said = float("inf"), f"fails: {(str(error).splitlines() or [repr(error)])[0]}"
        else:
            said = f"differs from the plain formula by {difference:.1e} of its scale"
    if difference <= 8 * (1e-4 if call.dtype == torch.float32 else torch.finfo(call.dtype).eps):
        return True
    text = f"the kernel {name} of attention {said} on {torch.cuda.get_device_name(device)}; the next choice is used"
    warnings.warn(text, RuntimeWarning, stacklevel=2)
    return False


def _difference(name: str, call: AttentionCall, by_rows: bool, group: bool, device: torch.device) -> float:
    """The largest difference over the largest number, of results and gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(heads: int, width: int) -> Tensor:
        shape = (2, _TRIED, heads, width) if by_rows else (2, heads, _TRIED, width)
        made = torch.randn(shape, generator=generator, device=device).to(call.dtype)
        return made.transpose(1, 2) if by_rows else made

    heads = 2 if group else 4
    q, k, v, g = drawn(4, call.head), drawn(heads, call.head), drawn(heads, call.value), drawn(4, call.value)
    mask = None
    if call.mask is not None:
        seen = torch.rand((2, 1, _TRIED, _TRIED), generator=generator, device=device) < 0.5
        seen[:, :, 3] = False
        mask = (
            seen if call.mask == torch.bool else torch.zeros_like(seen, dtype=call.mask).masked_fill_(~seen, -torch.inf)
        )
    place = ((4, 8, 300, 500), (1, 2, 3, 4)) if call.dropout else (None, None)
    config = Config(mask, 0.1 if call.dropout else 0.0, call.causal, call.head**-0.5, 11, *place)
    out, lse = KERNELS[name].attend(q, k, v, config)
    found = (out, lse, *KERNELS[name].attend_grad(g, q, k, v, out, lse, config))
    q, k, v, g = (x.double() for x in (q, k, v, g))
    out, lse = plain.attend(q, k, v, config)
    expected = (out, lse, *plain.attend_grad(g, q, k, v, out, lse, config))
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
