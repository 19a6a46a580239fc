"""Plans that the solver finds by itself, stated as claims."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import ClusterSpec, InfeasibleError, Options, ParallelProgram

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm_1(x)
        q, k, v = (m(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, vocab: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class SmallConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)


def two_nodes(per_node: int = 8) -> ClusterSpec:
    return ClusterSpec.preset("dgx-a100", nodes=2) if per_node == 8 else ClusterSpec.local(2 * per_node)


def transformer(
    cluster: ClusterSpec, batch: int, dim: int = 4096, layers: int = 2, **options: object
) -> ParallelProgram:
    with torch.device("meta"):
        model = Transformer(layers, dim, 32)
    ids = torch.empty(batch, 512, dtype=torch.long, device="meta")
    return autopar.compile(model, cluster, (ids, ids), optimizer=ADAMW, options=Options(**options))  # type: ignore[arg-type]


def axes_of(program: ParallelProgram, kind: str) -> dict[str, float]:
    """Bytes per axis of collectives on activations (`kind` "values") or on gradients and parameters ("weights")."""
    assert program.account is not None
    found: dict[str, float] = {}
    for c in program.account.collectives:
        weights = c.what.startswith(("gradient", "regather", "gather"))
        if weights == (kind == "weights"):
            found[c.axis] = found.get(c.axis, 0.0) + c.nbytes * c.times
    return found


def test_wide_transformer_is_tensor_parallel_inside_nodes_and_data_parallel_across() -> None:
    program = transformer(two_nodes(), batch=32)
    tp = program.mesh["tp"]
    assert 1 < tp <= 8, "the inner axis lies inside a node, whose links are fast"
    for name, planned in program.plan.stages[0].parameters.items():
        if any(part in name for part in (".q.", ".o.", ".up.", ".down.")):
            assert any("tp" in dim for dim in planned.storage.dims), f"{name} is not sharded inside the node"
    values = axes_of(program, "values")
    assert values["tp"] > 0
    assert values.get("dp", 0.0) < 0.01 * values["tp"], "activations cross nodes"
    assert axes_of(program, "weights")["dp"] > 0, "gradients are reduced across nodes"


def test_small_convolutional_net_is_pure_data_parallel() -> None:
    x, y = torch.randn(256, 3, 32, 32), torch.zeros(256, dtype=torch.long)
    cluster = ClusterSpec.preset("dgx-a100", nodes=1)
    program = autopar.compile(SmallConv(), cluster, (x, y), optimizer=ADAMW)
    stage = program.plan.stages[0]
    assert all(p.storage.is_replicated for p in stage.parameters.values())
    strategies = [pair for t in stage.templates.values() for pair in t.strategies.items()]
    convs = [s for n, s in strategies if n.startswith("conv") and "_d" not in n]
    assert len(convs) == 2
    assert all(set(s) == {"n"} for s in convs)


def test_short_memory_shards_storage() -> None:
    free = transformer(two_nodes(), batch=16, strategy="dp")
    limit = 0.6 * free.predicted.peak_bytes
    program = transformer(two_nodes(), batch=16, memory_bytes=limit, pp=1)
    assert program.predicted.peak_bytes <= limit
    whole = [p.storage.is_replicated and p.optimizer.is_replicated for p in program.plan.stages[0].parameters.values()]
    assert not all(whole)


def test_zero3_comes_out_when_parameters_alone_do_not_fit() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    x = torch.empty(64, 2048, device="meta")
    parameters = 8 * 2048 * 2048 * 4
    program = autopar.compile(
        model,
        ClusterSpec.local(8),
        (x, x),
        loss_fn=F.mse_loss,
        optimizer=ADAMW,
        options=Options(mesh={"dp": 8}, memory_bytes=parameters * 0.9),
    )
    stored = program.plan.stages[0].parameters.values()
    assert sum("dp" in dim for p in stored for dim in p.storage.dims) >= 6
    assert program.predicted.peak_bytes <= parameters * 0.9


@pytest.mark.slow
def test_infeasible_says_what_is_short_by_how_much_and_what_would_fit() -> None:
    with pytest.raises(InfeasibleError) as error:
        transformer(ClusterSpec.local(2), batch=2, memory_bytes=1e8)
    text = str(error.value)
    for part in ("100 MB per rank", "needs", "too much", "parameters", "ranks instead of 2"):
        assert part in text


@pytest.mark.slow
def test_baselines_are_among_the_alternatives() -> None:
    program = transformer(two_nodes(), batch=16, dim=1024, pp=1)
    names = " ".join(a.name for a in program.alternatives)
    for baseline in ("dp ", "zero3", "megatron"):
        assert baseline in names


def test_forced_strategies_give_their_storage() -> None:
    cluster = ClusterSpec.local(4)
    x, y = torch.randn(16, 32), torch.zeros(16, dtype=torch.long)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))

    def plan(strategy: str, **more: object) -> ParallelProgram:
        return autopar.compile(
            model,
            cluster,
            (x, y),
            loss_fn=F.cross_entropy,
            optimizer=ADAMW,
            options=Options(strategy=strategy, mesh={"dp": 4}, **more),  # type: ignore[arg-type]
        )

    assert all(p.optimizer.is_replicated for p in plan("dp").plan.stages[0].parameters.values())
    assert all(not p.storage.is_replicated for p in plan("zero3").plan.stages[0].parameters.values())
    zero1 = plan("zero1").plan.stages[0].parameters.values()
    assert all(p.storage.is_replicated and not p.optimizer.is_replicated for p in zero1)


def test_constraint_pins_a_parameter() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    x, y = torch.randn(16, 32), torch.zeros(16, dtype=torch.long)
    program = autopar.compile(
        model,
        ClusterSpec.local(4),
        (x, y),
        loss_fn=F.cross_entropy,
        optimizer=ADAMW,
        options=Options(mesh={"dp": 2, "tp": 2}, constraints={"0.weight": "[@tp, .]", "2.weight": "[., @tp]"}),
    )
    stored = program.plan.stages[0].parameters
    assert str(stored["0.weight"].storage) == "[@tp, .]"
    assert str(stored["2.weight"].storage) == "[., @tp]"
    assert autopar.verify(program, model, (x, y)).ok


def test_three_axes_solve_to_optimality() -> None:
    with torch.device("meta"):
        model = Transformer(2, 512, 8)
    ids = torch.empty(16, 64, dtype=torch.long, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = autopar.compile(
            model,
            ClusterSpec.preset("dgx-h100", nodes=2),
            (ids, ids),
            optimizer=ADAMW,
            options=Options(mesh={"dp": 4, "tp": 2, "cp": 2}),
        )
    assert program.solver.gap <= 1e-3
    assert program.solver.variables_before > 100_000
