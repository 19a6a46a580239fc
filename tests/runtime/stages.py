"""Hand-written programs as the emitter writes them: a two-layer MLP on a dp × tp mesh with ZeRO level 0, 1 or 3, and a
linear layer for inference. Pipelines of several stages are in pipelines.py.

The reference is `reference(...)`: the same training in plain torch on one device.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

BATCH, WIDTH, HIDDEN = 8, 8, 16


class Program:
    """A pipeline module and its stage modules."""

    def __init__(self, pipeline: Any, modules: list[Any]) -> None:
        self.pipeline = pipeline
        self.modules = modules

    @property
    def stage(self) -> Any:
        return self.modules[0]

    @property
    def ranks(self) -> int:
        return self.pipeline.WORLD

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh of all ranks."""
        first = self.pipeline.STAGES[0]["mesh"]
        return first if len(self.modules) == 1 else {"rank": self.ranks}


def single(stage: Any, microbatches: int) -> Program:
    """The program of one stage on all ranks."""
    dp, tp = stage.MESH.values()
    inputs = []
    for row in stage.INPUTS:
        shape = tuple(n * microbatches if dim == row["batch_dim"] else n for dim, n in enumerate(row["shape"]))
        inputs.append({"name": row["name"], "shape": shape, "dtype": row["dtype"], "batch_dim": row["batch_dim"]})
    kinds = "FB" if stage.TRAINING else "F"
    pipeline = SimpleNamespace(
        WORLD=dp * tp,
        MICROBATCHES=microbatches,
        TRAINING=stage.TRAINING,
        INPUTS=inputs,
        STAGES=[{"file": "stages/stage_0.py", "mesh": stage.MESH, "first_rank": 0}],
        TRANSFERS=[],
        SHARED={},
        TABLE=[" ".join(f"{kind}{m}.0" for m in range(microbatches) for kind in kinds)],
        GROUPS=[[0]],
    )
    return Program(pipeline, [stage])


def mlp(dp: int, tp: int, zero: int = 0, microbatches: int = 1, dtype: str = "float64") -> Program:
    """Column-parallel w1, b1, row-parallel w2, replicated b2; a frozen gain and a running-mean buffer."""
    all_dp = (("all_reduce", ("dp",)),)

    def row(shape, spec, opt_spec, gather, trainable=True):
        stored = opt_spec if zero == 3 else spec
        own = opt_spec if zero else spec
        moved = own != stored
        table = {"shape": shape, "dtype": dtype, "spec": stored, "opt_spec": own, "trainable": trainable}
        return table | {"gather": gather if moved else ()}

    gathers = {
        "w1": (("all_gather", ("dp",), 0),),
        "b1": (("all_gather", ("dp",), 0),),
        "w2": (("all_gather", ("dp",), 1),),
        "b2": (("all_gather", ("tp",), 0), ("all_gather", ("dp",), 0)),
    }
    parameters = {
        "w1": row((HIDDEN, WIDTH), (("tp",), ()), (("tp", "dp"), ()), gathers["w1"]),
        "b1": row((HIDDEN,), (("tp",),), (("tp", "dp"),), gathers["b1"]),
        "w2": row((WIDTH, HIDDEN), ((), ("tp",)), ((), ("tp", "dp")), gathers["w2"]),
        "b2": row((WIDTH,), ((),), (("dp", "tp"),), gathers["b2"]),
        "gain": {"shape": (), "dtype": dtype, "spec": (), "opt_spec": (), "trainable": False, "gather": ()},
    }
    scatter = {
        "w1": (("reduce_scatter", ("dp",), 0),),
        "b1": (("reduce_scatter", ("dp",), 0),),
        "w2": (("reduce_scatter", ("dp",), 1),),
        "b2": (("reduce_scatter", ("dp",), 0), ("shard", ("tp",), 0)),
    }
    grads = {name: {"contributions": 1, "steps": scatter[name] if zero else all_dp} for name in scatter}
    rows = BATCH // microbatches
    batch_spec = (("dp",), ())
    count = BATCH * WIDTH

    def forward(rt: Any, inputs: list[Tensor], received: list[Tensor], prepared: list[Tensor]) -> Any:
        x, y = inputs
        comm = rt.comm
        if zero == 3:
            rt.prefetch("first", [(n, gathers[n]) for n in ("w1", "b1")])
            rt.prefetch("second", [(n, gathers[n]) for n in ("w2", "b2")])
            w1, b1 = rt.take("first")
            w2, b2 = rt.take("second")
        else:
            w1, b1, w2, b2 = (rt.params[n] for n in ("w1", "b1", "w2", "b2"))
        pre = x @ w1.t() + b1
        act = pre.relu()
        out = comm.all_reduce(act @ w2.t(), "tp", site="mlp.fc2") + b2
        diff = out * rt.params["gain"] - y
        loss = rt.grads.start_sum((diff * diff).sum() / count, "dp")
        mean = comm.all_reduce(x.sum(0), "dp", site="mlp.seen") / rows
        rt.buffers["seen"].copy_(0.9 * rt.buffers["seen"] + 0.1 * mean)
        return [loss, out], [], [x, pre, act, diff, w2]

    def backward(rt: Any, state: list[Tensor], received: list[Tensor]) -> Any:
        x, pre, act, diff, w2 = state
        state.clear()
        d_out = diff * rt.params["gain"] * (2.0 / count)
        rt.grads.add("b2", d_out.sum(0), owned=True)
        rt.grads.add("w2", d_out.t() @ act, owned=True)
        d_pre = (d_out @ w2) * (pre > 0)
        rt.grads.add("b1", d_pre.sum(0))
        rt.grads.add("w1", d_pre.t() @ x)
        return [], []

    stage = SimpleNamespace(
        STAGE=0,
        MESH={"dp": dp, "tp": tp},
        TRAINING=True,
        PARAMETERS=parameters,
        BUFFERS={"seen": {"shape": (WIDTH,), "dtype": dtype, "spec": ((),)}},
        INPUTS=[
            {"index": 0, "name": "x", "shape": (rows, WIDTH), "dtype": dtype, "spec": batch_spec, "batch_dim": 0},
            {"index": 1, "name": "y", "shape": (rows, WIDTH), "dtype": dtype, "spec": batch_spec, "batch_dim": 0},
        ],
        OUTPUTS=[
            {"index": 0, "name": "loss", "shape": (), "dtype": dtype, "spec": (), "join": ("sum", 0, 1)},
            {
                "index": 1,
                "name": "out",
                "shape": (rows, WIDTH),
                "dtype": dtype,
                "spec": batch_spec,
                "join": ("cat", 0, 1),
            },
        ],
        GRADS=grads,
        forward=forward,
        backward=backward,
    )
    return single(stage, microbatches)


def inference(dp: int, tp: int, microbatches: int = 1) -> Program:
    """One linear layer with rows over dp and columns over tp; the output stays sharded both ways."""

    def forward(rt: Any, inputs: list[Tensor], received: list[Tensor], prepared: list[Tensor]) -> Any:
        y = inputs[0] @ rt.params["w"].t()
        return [y, rt.comm.all_reduce(inputs[0].sum(), "dp")], [], []

    rows = BATCH // microbatches
    x = {"index": 0, "name": "x", "shape": (rows, WIDTH), "dtype": "float64", "spec": (("dp",), ()), "batch_dim": 0}
    y = {"index": 0, "name": "y", "shape": (rows, HIDDEN), "dtype": "float64", "spec": (("dp",), ("tp",))}
    stage = SimpleNamespace(
        STAGE=0,
        MESH={"dp": dp, "tp": tp},
        TRAINING=False,
        PARAMETERS={"w": {"shape": (HIDDEN, WIDTH), "dtype": "float64", "spec": (("tp",), ()), "trainable": True}},
        BUFFERS={},
        INPUTS=[x],
        OUTPUTS=[
            y | {"join": ("cat", 0, 1)},
            {"index": 1, "name": "sum", "shape": (), "dtype": "float64", "spec": (), "join": ("sum", 0, 1)},
        ],
        forward=forward,
    )
    return single(stage, microbatches)


def weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(7)
    shapes = {"w1": (HIDDEN, WIDTH), "b1": (HIDDEN,), "w2": (WIDTH, HIDDEN), "b2": (WIDTH,), "seen": (WIDTH,)}
    full = {name: torch.randn(shape, generator=make, dtype=dtype) for name, shape in shapes.items()}
    return full | {"gain": torch.tensor(1.5, dtype=dtype)}


def batches(count: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    make = torch.Generator().manual_seed(11)
    return [tuple(torch.randn(BATCH, WIDTH, generator=make, dtype=dtype) for _ in range(2)) for _ in range(count)]


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def reference(steps: int, optimizer: Any = adamw) -> dict[str, Any]:
    """Losses, last gradients and final weights of the same training in plain torch."""
    full = weights()
    seen, gain = full.pop("seen"), full.pop("gain")
    params = {name: nn.Parameter(full[name]) for name in ("w1", "b1", "w2", "b2")}
    optim = optimizer(list(params.values()))
    losses = []
    for x, y in batches(steps):
        optim.zero_grad()
        out = (x @ params["w1"].t() + params["b1"]).relu() @ params["w2"].t() + params["b2"]
        loss = ((out * gain - y) ** 2).mean()
        loss.backward()
        optim.loss = loss.item()
        optim.step()
        seen = 0.9 * seen + 0.1 * x.mean(0)
        losses.append(loss.item())
    grads = {name: p.grad for name, p in params.items()}
    final = {name: p.data for name, p in params.items()}
    return {"losses": losses, "grads": grads, "weights": final | {"seen": seen, "gain": gain}}
