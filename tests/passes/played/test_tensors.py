"""Code over tensors without data holds what it holds over real ones, byte by byte: ops, views, and the whole gradient store."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.counter import ByteCounter
from autopar.ir.lowered import StoredParameter
from autopar.ir.mesh import Mesh
from autopar.ir.spec import Spec
from autopar.ir.steps import RuntimeStep
from autopar.ir.types import TensorType
from autopar.passes.played.gradients import PlayedStore
from autopar.passes.played.meta_comm import MetaComm
from autopar.passes.played.tensors import Layout, Ledger
from autopar.passes.rules.memo import Memo
from autopar.runtime.gradients.compression import CODECS
from autopar.runtime.gradients.grads import GradStore

OPS: dict[str, Callable[[Any, Any], Any]] = {
    "a sum": lambda x, y: x + y,
    "a sum in place": lambda x, y: x.add_(y),
    "a sum in a third": lambda x, y: torch.add(x, y, out=y),
    "a part": lambda x, y: x[2:, 1:3],
    "a row": lambda x, y: x[0],
    "rows": lambda x, y: [row.clone() for row in x],
    "a view that fits": lambda x, y: x.view(4, 3, 2),
    "a transposed copy": lambda x, y: x.t().contiguous(),
    "what is contiguous": lambda x, y: x.contiguous(),
    "a copy in another dtype": lambda x, y: x.to(torch.float64),
    "two results": lambda x, y: torch.frexp(x).exponent,
    "one that needs room for a moment": lambda x, y: (x / y).lt(2.0).logical_not().to(torch.float32),
    "room of another dtype": lambda x, y: x.new_empty(3, 5, dtype=torch.int8),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_makes_what_it_makes_of_real_tensors(name: str) -> None:
    counter, ledger = ByteCounter(), Ledger()
    with counter:
        x, y = torch.ones(4, 6), torch.ones(4, 6)
        result = OPS[name](x, y)
        real = counter.alive, counter.peak
    played = [ledger.tensor(Layout.of(torch.empty(4, 6))) for _ in range(2)]
    made = OPS[name](*played)
    if name != "rows":
        assert Layout.of(result) == made.layout
        assert (ledger.alive, ledger.top) == real
    else:
        assert len(made) == 3, "the others are alike"


def test_a_storage_goes_with_the_last_tensor_that_lies_in_it() -> None:
    ledger = Ledger()
    x = ledger.tensor(Layout.dense((8,), torch.float32))
    part = x[2:4]
    del x
    assert ledger.alive == 32
    del part
    assert (ledger.alive, ledger.top) == (0, 32)


# --- the gradient store

MESH = Mesh.of(dp=4, tp=2)
WAYS: dict[str, tuple[RuntimeStep, ...]] = {
    "local": (),
    "all_reduce": (RuntimeStep("all_reduce", ("dp",)),),
    "two sums": (RuntimeStep("all_reduce", ("dp",)), RuntimeStep("all_reduce", ("tp",))),
    "scatter": (RuntimeStep("reduce_scatter", ("dp",), (0,)),),
    "scatter the last dim": (RuntimeStep("reduce_scatter", ("dp",), (1,)),),
    "scatter twice": (RuntimeStep("reduce_scatter", ("dp",), (0,)), RuntimeStep("reduce_scatter", ("tp",), (0,))),
    "scatter over both": (RuntimeStep("reduce_scatter", ("dp", "tp"), (0,)),),
    "shard, then sum": (RuntimeStep("shard", ("dp",), (0,)), RuntimeStep("all_reduce", ("tp",))),
    "shard the last dim": (RuntimeStep("shard", ("dp",), (1,)),),
    "exchange, then sum": (RuntimeStep("all_to_all", ("dp",), (0, 1)), RuntimeStep("all_reduce", ("tp",))),
    "gather, then sum": (RuntimeStep("all_gather", ("dp",), (0,)), RuntimeStep("all_reduce", ("tp",))),
}


def parameter(name: str, rng: random.Random, compression: str, tiers: bool) -> StoredParameter:
    """Between 64 bytes and 12 MB, so that gradients are packed, sent where they lie, and fill buckets."""
    type_ = TensorType((8 * rng.choice([1, 4, 150, 750]), 8 * rng.choice([1, 4, 60])), torch.float32)
    whole, reduce = Spec.replicated(2), WAYS[rng.choice([*WAYS])]
    tier = rng.choice(["", "ddr"]) if tiers else ""
    codec = compression if reduce else ""
    return StoredParameter(name, type_, whole, whole, True, (), rng.choice([1, 1, 2]), reduce, True, tier, "", codec)


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tiers", [False, True], ids=["on the device", "in tiers"])
@pytest.mark.parametrize("compensated", [False, True], ids=["", "compensated"])
@pytest.mark.parametrize("compression", ["", *CODECS])
def test_the_played_gradient_store_holds_what_the_real_one_holds(
    compression: str, compensated: bool, tiers: bool, seed: int
) -> None:
    """Two steps, of which the first is the one after which what compression has lost rests, gradient by gradient."""
    rng, microbatches = random.Random(seed), 1 + seed
    parameters = {f"p{i}": parameter(f"p{i}", rng, compression, tiers) for i in range(12)}
    store = PlayedStore([*parameters.values()], MESH, microbatches, Memo(), compensated)
    comm, tier_of = MetaComm(MESH.sizes, device="cpu"), {n: p.tier for n, p in parameters.items() if p.tier}
    sizes = store._buckets.sizes
    real, counter = GradStore(comm, store.table, microbatches, sizes, compensated, tier_of=tier_of), ByteCounter()
    order = [p for p in parameters.values() for _ in range(p.contributions)]
    rng.shuffle(order)
    reduced: Any = {}

    def same(what: str, with_peak: bool) -> None:
        rests = store.unsent_bytes
        assert counter.alive == store.ledger.alive + rests, what
        assert not with_peak or counter.peak == store.ledger.top + rests, what
        assert counter.parked == store.ledger.parked, what
        counter.restart()
        store.ledger.top = store.ledger.alive

    with counter:
        for rests_already in (False, True):
            for microbatch in range(microbatches):
                for p in order:
                    dtype, owned = rng.choice([torch.float32, torch.float32, torch.bfloat16]), rng.random() < 0.7
                    layout = Layout.dense(p.type.shape, dtype)
                    if rng.random() < 0.2:
                        layout = Layout(layout.shape, (1, layout.shape[0]), dtype)
                    gradient: Any = layout.tensor("cpu")
                    real.add(p.name, gradient, owned)
                    with counter.paused():
                        played: Any = store.ledger.tensor(layout)
                        store.add(p.name, played, owned)
                    del gradient, played
                    same(f"{p.name} of microbatch {microbatch}", rests_already)
            real.flush()
            with counter.paused():
                store.flush()
            same("what is open is sent", rests_already)
            reduced = real.finish()
            with counter.paused():
                reduced = reduced, store.finish()
            same("all is reduced", rests_already)
            assert real.borrowed == store.borrowed
            reduced = ()
