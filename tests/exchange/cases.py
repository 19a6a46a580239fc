"""Zoo models in float64 without dropout, whose random numbers are each system's own, and the plans that are exported of them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autopar
from tests.zoo.models import Batch, ZooModel

STEPS = 3
PLANS = {
    "mlp_shards": ({"dp": 4}, "zero3", 1),
    "mlp_copies": ({"dp": 4}, "dp", 2),
    "mlp_columns": ({"dp": 2, "tp": 2}, "megatron", 1),
    "llama_shards": ({"dp": 4}, "zero3", 1),
    "llama_both": ({"dp": 2, "tp": 2}, "megatron-zero3", 2),
    "llama_columns": ({"dp": 1, "tp": 4}, "megatron", 1),
    "bert_both": ({"dp": 2, "tp": 2}, "megatron", 1),
    "bert_gradients": ({"dp": 4}, "zero2", 2),
    "gpt2_copies": ({"dp": 4}, "dp", 1),
    "gpt2_states": ({"dp": 4}, "zero1", 1),
    "t5_shards": ({"dp": 4}, "zero3", 1),
    "vit_both": ({"dp": 2, "tp": 2}, "megatron-zero1", 1),
    "gru_shards": ({"dp": 4}, "zero3", 1),
    "partly-frozen_shards": ({"dp": 4}, "zero3", 1),
}
"""Mesh, strategy and microbatches by case: the zoo's model, and a word."""
OVER_DP = tuple(case for case, (mesh, _, _) in PLANS.items() if "tp" not in mesh)
OVER_TP = tuple(case for case, (mesh, _, _) in PLANS.items() if "tp" in mesh)
STACKS = (("fsdp2", "torch", tuple(PLANS)), ("accelerate", "accelerate", OVER_DP), ("tp_plan", "transformers", OVER_TP))
"""Format, the package that runs it, and the cases that it can: accelerate and transformers cut parameters along one axis."""


def model_of(zoo: ZooModel) -> nn.Module:
    model = zoo.make().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def batch_of(zoo: ZooModel, seed: int) -> Batch:
    batch: Batch = pytree.tree_map(in_double, zoo.batch(seed))
    return batch


def in_double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def program_of(zoo: ZooModel, case: str) -> autopar.Program:
    mesh, strategy, microbatches = PLANS[case]
    options = autopar.Options(mesh=mesh, strategy=strategy, microbatches=microbatches)
    cluster = autopar.ClusterSpec.local(4)
    return autopar.compile(
        model_of(zoo), cluster, batch_of(zoo, 0), loss_fn=zoo.loss_fn, optimizer=zoo.optimizer, options=options
    )
