"""Linear recurrences as Hugging Face's transformers writes them, known by the names of classes and functions.

A loop over time steps is traced as as many ops as there are steps, and no rank can have a part of the sequence. What it
computes is h[t] = a[t] · h[t-1] + b[t], one op (`autopar.linear_scan`). The rest of a module's forward stays as its author
wrote it: it runs with another function in the place of the loop.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.known.known_blocks import below, forward_class, know
from autopar.capture.known.known_transformers import instead, known
from autopar.ops.scan import linear_scan
from autopar.runtime.data.origin import module_of

Function = Callable[..., Any]


def few(module: Any) -> int:
    """Steps that a proof needs: a loop over all takes time that grows with their square, as each one's gradient is padded to
    all. Where they come in chunks, three of these."""
    return max(32, 3 * getattr(module, "chunk_size", 0))


def know_by_function(
    name: str, function: Function, passed_on: Sequence[str], steps: Callable[[nn.Module], int] = few
) -> None:
    """Trace modules of transformers whose forward calls its file's function `name` with `function` in its place, which is also
    given the one that it replaces, as `loop`. steps: that a proof needs."""

    def matches(module: nn.Module) -> bool:
        own = _own_forward(module)
        return (
            isinstance(own, types.FunctionType)
            and module_of(own).startswith("transformers.models.")
            and name in own.__code__.co_names
            and name in own.__globals__
        )

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = _own_forward(self)
        scope = {**own.__globals__, name: functools.partial(function, loop=own.__globals__[name])}
        changed = types.FunctionType(own.__code__, scope, own.__name__, own.__defaults__, own.__closure__)
        changed.__kwdefaults__ = own.__kwdefaults__
        return changed(self, *args, **kwargs)

    forward.__name__ = forward.__qualname__ = f"{function.__name__} in its forward"
    know(matches, forward, below(2), passed_on, steps)


def _own_forward(module: nn.Module) -> Any:
    return inspect.unwrap(vars(forward_class(module))["forward"])


def before(x: Tensor, dim: int, start: float = 0.0) -> Tensor:
    """x of the step before, `start` at the first; a shift, which a sharded dim can do."""
    shape = [n if i == dim else 1 for i, n in enumerate(x.shape)]
    return x.roll(1, dim).masked_fill(torch.arange(x.shape[dim], device=x.device).view(shape) == 0, start)


# --- Mamba, Falcon Mamba, Jamba, Zamba


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    """hidden_states, dt, z: (batch, channels, steps), A: (channels, n), B, C: (batch, n, steps) -> like hidden_states.

    h[t] = exp(A · dt[t]) · h[t-1] + dt[t] · B[t] · x[t],  y[t] = C[t] · h[t]
    """
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = F.softplus(dt) if delta_softplus else dt
    steps, x = dt.transpose(1, 2).unsqueeze(-1), hidden_states.transpose(1, 2).unsqueeze(-1)
    states = linear_scan(torch.exp(A * steps), steps * B.transpose(1, 2).unsqueeze(2).float() * x.float(), 1)
    y = torch.einsum("btcn,bnt->bct", states.to(hidden_states.dtype), C)
    if D is not None:
        y = y + hidden_states * D[None, :, None]
    if z is not None:
        y = y * F.silu(z)
    return (y, states[:, -1]) if return_last_state else y


know_by_function("mamba_selective_scan", selective_scan, ["cache_params"])


# --- Mamba 2 and those with its layers: products inside of chunks, a recurrence between chunks


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    """hidden_states: (batch, steps, heads, p), dt: (batch, steps, heads), A: (heads,), B, C: (batch, steps, groups, n).

    In the einsums: b c l is a step by chunk and place in it (s: another place), h a head, p and n dims of a state.
    """
    length, heads = hidden_states.shape[1:3]
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = torch.clamp(F.softplus(dt) if dt_softplus else dt, dt_limit[0], dt_limit[1]).float()
    x = hidden_states.float()
    skipped = None if D is None else D[..., None] * x

    def chunked(value: Tensor) -> Tensor:
        """Steps to chunks, with zeros after the last."""
        more = [0, 0] * (value.ndim - 2) + [0, -length % chunk_size]
        return F.pad(value, more).unflatten(1, (-1, chunk_size))

    B, C = (chunked(t.float().repeat_interleave(heads // t.shape[2], 2)) for t in (B, C))
    rate, x = chunked(A.float() * dt), chunked(x * dt[..., None])
    decay = rate.cumsum(2)
    scores = torch.einsum("bclhn,bcshn->bclsh", C, B) * torch.exp(_sums_between(rate))
    inside = torch.einsum("bclsh,bcshp->bclhp", scores, x)
    whole = decay[:, :, -1:]
    added = torch.einsum("bclhn,bclhp->bchpn", B * torch.exp(whole - decay)[..., None], x)
    factor = torch.exp(whole)[:, :, 0, :, None, None]
    if initial_states is not None:
        first = (torch.arange(added.shape[1], device=added.device) == 0)[:, None, None, None]
        added = added + first * factor * initial_states[:, None].to(added.dtype)
    ends = linear_scan(factor, added, 1)
    starts = before(ends, 1)
    if initial_states is not None:
        starts = starts + first * initial_states[:, None].to(added.dtype)
    y = inside + torch.einsum("bclhn,bchpn->bclhp", C, starts) * torch.exp(decay)[..., None]
    y = y.flatten(1, 2)[:, :length].contiguous()
    y = y if skipped is None else y + skipped
    return (y, ends[:, -1]) if return_final_states else y


def _sums_between(rate: Tensor) -> Tensor:
    """(b, c, l, h) -> (b, c, l, s, h): the sum of the rates after s up to l, -inf where s is later than l."""
    size = rate.shape[2]
    places = torch.arange(size, device=rate.device)
    later = places[:, None, None] > places[:, None]
    sums = rate.unsqueeze(3).masked_fill(~later, 0).cumsum(2)
    return sums.masked_fill(places[:, None, None] < places[:, None], -torch.inf)


know_by_function("mamba2_chunk_scan", chunk_scan, ["cache_params"])


# --- Kimi's delta rule: a triangular system inside of chunks, which its author solves row by row

_CHUNK = 64
"""Steps of a chunk where the forward says nothing."""


def delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = _CHUNK,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> Any:
    """query, key, g: (batch, steps, heads, n), value: (batch, steps, heads, p), beta: (batch, steps, heads) -> like value.

    S[t] = exp(g[t]) · S[t-1] + beta[t] · k[t] (v[t] - k[t] · exp(g[t]) · S[t-1]),  y[t] = q[t] · S[t]; chunk after chunk.
    """
    dtype, length = query.dtype, query.shape[1]

    def chunked(x: Tensor) -> Tensor:
        """(batch, steps, heads, n) -> (batch, chunks, heads, steps of a chunk, n), with zeros after the last step."""
        padded = F.pad(x.float(), [0, 0, 0, 0, 0, -length % chunk_size])
        return padded.unflatten(1, (-1, chunk_size)).transpose(2, 3)

    query, key, value, beta, g = (chunked(x) for x in (query, key, value, beta.unsqueeze(-1), g))
    if use_qk_l2norm_in_kernel:
        query, key = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, decay = query / query.shape[-1] ** 0.5, g.cumsum(-2)
    places = torch.arange(chunk_size, device=query.device)
    later = (places[:, None] < places)[..., None]
    between = (decay.unsqueeze(-2) - decay.unsqueeze(-3)).masked_fill(later, -torch.inf).exp()
    weighted = between * key.unsqueeze(-3)
    system, scores = ((x.unsqueeze(-2) * weighted).sum(-1) for x in (beta * key, query))
    solve = functools.partial(torch.linalg.solve_triangular, system, upper=False, unitriangular=True)
    new, read = solve(beta * value), solve(beta * key * decay.exp())
    if initial_state is None:
        state = value.new_zeros(value.shape[0], value.shape[2], key.shape[-1], value.shape[-1])
    else:
        state = initial_state.to(value.dtype)
    begins, ends = query * decay.exp(), decay[..., -1:, :]
    kept, passed = (key * (ends - decay).exp()).mT, ends.exp().mT
    y = []
    for i in range(query.shape[1]):
        added = new[:, i] - read[:, i] @ state
        y.append(begins[:, i] @ state + scores[:, i] @ added)
        state = passed[:, i] * state + kept[:, i] @ added
    out = torch.stack(y, 1).transpose(2, 3).flatten(1, 2)[:, :length].contiguous()
    return out.to(dtype), state if output_final_state else None


know_by_function("chunk_kimi_delta_attention", delta_attention, ["cache_params"], lambda module: 3 * _CHUNK)


# --- RWKV: a weighted mean of the values so far, whose weights decay


def wkv(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: Any = None,
    return_state: bool = False,
    *,
    loop: Function,
) -> Any:
    """key, value: (batch, steps, d) -> (batch, steps, d), and no state; with one it is the loop that its author wrote.

    Numerator and denominator are recurrences. Both are scaled by exp(-m), with m of about the largest exponent so far, which
    the quotient does not depend on: m[t] = max over s up to t of (k[s] + (t - s) · w), found as a running maximum.
    """
    if state is not None or return_state:
        return loop(time_decay, time_first, key, value, state=state, return_state=return_state)
    w, k, steps = -torch.exp(time_decay), key.float(), torch.arange(key.shape[1], device=key.device)[:, None]
    with torch.no_grad():
        passed = steps * w
        m = torch.cummax(k - passed, 1).values + passed
        m_before = before(m, 1, -1e38)
        top = torch.maximum(m_before, k + time_first)
    a, b = torch.exp(m_before + w - m), torch.exp(k - m)
    past, now = torch.exp(m_before - top), torch.exp(k + time_first - top)
    numerator = past * before(linear_scan(a, b * value, 1), 1) + now * value
    denominator = past * before(linear_scan(a, b, 1), 1) + now
    return (numerator / denominator).to(key.dtype), None


know_by_function("rwkv_linear_attention", wkv, ["state"])


# --- RG-LRU


@known("recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRglru", below(2), steps=few)
def rg_lru(self: Any, activations: Tensor, position_ids: Tensor) -> Any:
    """The layer's own forward, with the loop as one op."""

    def scan(hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, recurrent_states: Tensor | None) -> Any:
        a, b = (recurrent_gate * ~reset).float(), hidden_states.float()
        if recurrent_states is not None:
            first = (torch.arange(b.shape[1], device=b.device) == 0)[:, None]
            b = b + first * a * recurrent_states[:, None]
        states = linear_scan(a, b, 1)
        return states.to(hidden_states.dtype), states[:, -1]

    own: Any = forward_class(self)
    with instead(self, _rnn_scan=scan):
        return own.forward(self, activations, position_ids)
