"""Hand-written pipelines: a chain of layers tanh(h w' + b), one or more per stage of its own dp × tp mesh.

A stage takes rows over dp (features whole) and gives features over tp. The last stage has the loss: the masked mean
square over the whole batch, for which `prepare` counts the mask, times a gain that stage 0 shrinks after every step (a
buffer of two stages). Stage 1 adds an input without batch dim. `skip` is a second road from stage 0 to stage 2;
`tied` names stages that use one weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .stages import Program, adamw

ROWS, WIDTH = 8, 8
Mesh = tuple[int, int]


def one_f_one_b(stages: int, microbatches: int, split: bool = False) -> list[str]:
    """The classical rows of a chain; split: B and W apart, W right after B."""
    rows = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, microbatches)
        words = [f"F{m}.{stage}" for m in range(ahead)]
        for m in range(microbatches):
            if ahead + m < microbatches:
                words.append(f"F{ahead + m}.{stage}")
            words += [f"B{m}.{stage}", f"W{m}.{stage}"] if split else [f"B{m}.{stage}"]
        rows.append(" ".join(words))
    return rows


def gpipe(groups: Sequence[Sequence[int]], microbatches: int, kinds: str = "FB") -> list[str]:
    """Per group all forwards by stage, then all backwards by stage from the last, then weights."""
    rows = []
    for stages in groups:
        words = [f"F{m}.{s}" for s in sorted(stages) for m in range(microbatches)]
        for kind in kinds[1:]:
            words += [f"{kind}{m}.{s}" for s in sorted(stages, reverse=True) for m in range(microbatches)]
        rows.append(" ".join(words))
    return rows


def name_of(stage: int, tied: Sequence[int]) -> str:
    return "w.tied" if stage in tied else f"w.{stage}"


def chain(
    meshes: Sequence[Mesh],
    table: Sequence[str],
    microbatches: int,
    groups: Sequence[Sequence[int]] | None = None,
    skip: bool = False,
    tied: Sequence[int] = (),
    split: bool = False,
    training: bool = True,
    zero: bool = False,
    silent: Sequence[int] = (),
    shrink: bool = True,
) -> Program:
    """meshes: (dp, tp) per stage; groups: stages by group (default: each its own). silent: stages that compute no
    gradient of their weight; shrink: whether stage 0 writes the gain."""
    groups = groups or [[s] for s in range(len(meshes))]
    first_of, end = {}, 0
    for stages in groups:
        for s in stages:
            first_of[s] = end
        end += meshes[stages[0]][0] * meshes[stages[0]][1]
    last, rows = len(meshes) - 1, ROWS // microbatches
    whole, cut = (("dp",), ()), (("dp",), ("tp",))
    transfers = []
    roads = [(s, s + 1) for s in range(last)] + ([(0, 2)] if skip else [])
    for s, t in roads:
        row = {"source": s, "target": t, "shape": (rows, WIDTH), "dtype": "float64"}
        transfers.append(row | {"name": f"h{s}{t}", "kind": "value", "source_spec": cut, "target_spec": whole})
    for t, s in roads if training else []:
        row = {"source": s, "target": t, "shape": (rows, WIDTH), "dtype": "float64"}
        transfers.append(row | {"name": f"d{s}{t}", "kind": "gradient", "source_spec": whole, "target_spec": cut})
    modules = [
        _stage(s, meshes[s], transfers, rows, s == last, name_of(s, tied), split, training, zero, s in silent, shrink)
        for s in range(last + 1)
    ]
    inputs = [("x", (ROWS, WIDTH), 0), ("y", (ROWS, WIDTH), 0), ("mask", (ROWS, WIDTH), 0), ("shift", (WIDTH,), None)]
    names = ("name", "shape", "batch_dim")
    shared = {"w.tied": list(tied)} if tied else {}
    pipeline = SimpleNamespace(
        WORLD=end,
        MICROBATCHES=microbatches,
        TRAINING=training,
        INPUTS=[dict(zip(names, row, strict=True)) | {"dtype": "float64"} for row in inputs],
        STAGES=[
            {"file": f"stages/stage_{s}.py", "mesh": modules[s].MESH, "first_rank": first_of[s]}
            for s in range(last + 1)
        ],
        TRANSFERS=transfers,
        SHARED=shared | ({"gain": [0, last]} if last and training else {}),
        TABLE=list(table),
        GROUPS=[list(stages) for stages in groups],
    )
    return Program(pipeline, modules)


def _stage(
    s: int,
    mesh: Mesh,
    transfers: list[Any],
    rows: int,
    last: bool,
    w_name: str,
    split: bool,
    training: bool,
    zero: bool,
    silent: bool,
    shrink: bool,
) -> Any:
    def ports(kind: str, end: str) -> list[str]:
        return [t["name"] for t in transfers if t["kind"] == kind and t[end] == s]

    b_name, sends = f"b.{s}", len(ports("value", "source"))
    gradient_sends = len(ports("gradient", "source"))

    def forward(rt: Any, inputs: list[Tensor], received: list[Tensor], prepared: list[Tensor]) -> Any:
        inputs = list(inputs)
        h = inputs.pop(0) if s == 0 else received[0]
        for other in received[1:]:
            h = h + other
        received.clear()
        if s == 1:
            h = h + inputs.pop(0)
        out = torch.tanh(h @ rt.params[w_name].t() + rt.params[b_name])
        if s == 0 and training and shrink and rt.microbatch == 0:
            rt.buffers["gain"].mul_(0.5)
        outputs, state = [], [h, out] if training else []
        if last and training:
            y, mask = inputs
            diff = (out - y) * mask * rt.buffers["gain"]
            count = prepared[0]
            outputs = [rt.comm.all_reduce((diff * (out - y)).sum() / count, ("dp", "tp"), site="loss")]
            state += [diff * (2.0 / count)]
        elif not training:
            outputs = [out] if last else [out.sum(1)] if s == 0 and mesh[1] == 1 else []
        return outputs, [out] * sends, state

    def backward(rt: Any, state: list[Tensor], received: list[Tensor]) -> Any:
        h, out, *d_last = state
        state.clear()
        d_out = d_last[0] if last else sum(received[1:], received[0])
        received.clear()
        d_pre = d_out * (1 - out * out)
        sent = []
        if gradient_sends:
            sent = [rt.comm.all_reduce(d_pre @ rt.params[w_name], "tp", site="dh")] * gradient_sends
        if split:
            return sent, [d_pre, h]
        _weights(rt, d_pre, h)
        return sent, []

    def weights(rt: Any, later: list[Tensor]) -> None:
        d_pre, h = later
        later.clear()
        _weights(rt, d_pre, h)

    def _weights(rt: Any, d_pre: Tensor, h: Tensor) -> None:
        if not silent:
            rt.grads.add(w_name, d_pre.t() @ h, owned=True)
        rt.grads.add(b_name, d_pre.sum(0))

    def prepare(rt: Any, inputs: list[Tensor], prepared: list[Tensor]) -> list[Tensor]:
        return [rt.comm.all_reduce(inputs[-1].sum(), ("dp", "tp"), site="count")]

    fine = (("tp", "dp"),) if zero else (("tp",),)
    gather = (("all_gather", ("dp",), 0),) if zero else ()
    steps = (("reduce_scatter", ("dp",), 0),) if zero else (("all_reduce", ("dp",)),)
    common = {"dtype": "float64", "trainable": True, "gather": gather}
    whole, cut = (("dp",), ()), (("dp",), ("tp",))
    inputs = [("x", (rows, WIDTH), whole, 0), ("y", (rows, WIDTH), cut, 0), ("mask", (rows, WIDTH), cut, 0)]
    inputs.append(("shift", (WIDTH,), ((),), None))
    mine = ([0] if s == 0 else []) + ([3] if s == 1 else []) + ([1, 2] if last and training else [])
    gain = {"gain": {"shape": (), "dtype": "float64", "spec": ()}} if training and (s == 0 or last) else {}
    earned = (b_name,) if silent else (w_name, b_name)
    outputs = []
    if last:
        shape, spec, how = ((), (), "sum") if training else ((rows, WIDTH), cut, "cat")
        outputs = [{"index": 0, "name": "out", "shape": shape, "dtype": "float64", "spec": spec, "join": (how, 0, 1)}]
    elif s == 0 and not training and mesh[1] == 1:
        row = {
            "index": 1,
            "name": "sums",
            "shape": (rows,),
            "dtype": "float64",
            "spec": (("dp",),),
            "join": ("cat", 0, 1),
        }
        outputs = [row]
    module = SimpleNamespace(
        STAGE=s,
        MESH={"dp": mesh[0], "tp": mesh[1]},
        TRAINING=training,
        PARAMETERS={
            w_name: {"shape": (WIDTH, WIDTH), "spec": (("tp",), ()), "opt_spec": (*fine, ())} | common,
            b_name: {"shape": (WIDTH,), "spec": (("tp",),), "opt_spec": fine} | common,
        },
        BUFFERS=gain,
        GRADS={name: {"contributions": 1, "steps": steps} for name in earned} if training else {},
        INPUTS=[
            {"index": i, "name": inputs[i][0], "shape": inputs[i][1], "dtype": "float64"}
            | {"spec": inputs[i][2], "batch_dim": inputs[i][3]}
            for i in mine
        ],
        OUTPUTS=outputs,
        RECEIVES=ports("value", "target"),
        SENDS=ports("value", "source"),
        GRADIENT_RECEIVES=ports("gradient", "target"),
        GRADIENT_SENDS=ports("gradient", "source"),
        forward=forward,
        backward=backward,
        weights=weights,
    )
    if last and training:
        module.prepare, module.PREPARED = prepare, ["sum"]
    return module


def weights(stages: int, tied: Sequence[int] = ()) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(5)
    found: dict[str, Tensor] = {}
    for s in range(stages):
        w, b = (torch.randn(shape, generator=make, dtype=torch.float64) / 2 for shape in ((WIDTH, WIDTH), (WIDTH,)))
        found |= {name_of(s, tied): w, f"b.{s}": b}
    return found | {"gain": torch.tensor(2.0, dtype=torch.float64)}


def batches(count: int) -> list[list[Tensor]]:
    make = torch.Generator().manual_seed(6)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    return [
        [values(ROWS, WIDTH), values(ROWS, WIDTH), (values(ROWS, WIDTH) > 0).double(), values(WIDTH)]
        for _ in range(count)
    ]


def layers(
    params: dict[str, Tensor],
    batch: Sequence[Tensor],
    stages: int,
    skip: bool,
    tied: Sequence[int],
    silent: Sequence[int] = (),
) -> Any:
    h, first = batch[0], None
    for s in range(stages):
        if s == 2 and skip:
            h = h + first
        if s == 1:
            h = h + batch[3]
        w = params[name_of(s, tied)]
        h = torch.tanh(h @ (w.detach() if s in silent else w).t() + params[f"b.{s}"])
        first = h if s == 0 else first
    return h, first


def reference(
    steps: int,
    stages: int,
    skip: bool = False,
    tied: Sequence[int] = (),
    silent: Sequence[int] = (),
    optimizer: Any = adamw,
) -> Any:
    """Losses, last gradients and final weights in plain torch. The loss reads the gain as the step began."""
    full = weights(stages, tied)
    gain = full.pop("gain")
    params = {name: nn.Parameter(value) for name, value in full.items()}
    optim = optimizer(list(params.values()))
    losses = []
    for batch in batches(steps):
        optim.zero_grad()
        out, _ = layers(params, batch, stages, skip, tied, silent)
        loss = gain * (batch[2] * (out - batch[1]) ** 2).sum() / batch[2].sum()
        gain = gain / 2
        loss.backward()
        optim.step()
        losses.append(loss.item())
    grads = {name: p.grad for name, p in params.items()}
    return {"losses": losses, "grads": grads, "weights": {n: p.data for n, p in params.items()} | {"gain": gain}}
