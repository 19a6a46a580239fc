"""A rank that trains zoo models as exported files say: `worker.py FORMAT FOLDER`, started by torchrun.

Every folder in FOLDER is a case, named after its model: it has the exported file and layout.json, the degrees that a file leaves
to its launcher, and gets losses.json. Each format's function gives the model and optimizer as its system makes them of the file.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from tests.exchange.cases import STEPS, batch_of, model_of
from tests.zoo.eager import loss_of
from tests.zoo.models import BY_NAME, Batch, ZooModel

Step = Callable[[Sequence[Batch], Callable[[nn.Module, Batch], Any]], Tensor]
"""(microbatches of this rank, the loss of one, or that and its number of terms) -> the mean loss over all terms of all ranks."""


def loss_and_terms(zoo: ZooModel, model: nn.Module, batch: Batch) -> Any:
    """The loss of a part of a batch, with how many tokens it is the mean of where some of them do not count."""
    if zoo.name not in ("gpt2", "t5"):
        return loss_of(zoo, model, batch)
    assert isinstance(batch, tuple)
    terms = int((batch[-1] != -100).sum())
    if terms:
        return loss_of(zoo, model, batch), terms
    counted = (*batch[:-1], batch[-1].clamp(min=0))
    return loss_of(zoo, model, counted), 0


def part_of(batch: Batch, parts: int, place: int) -> Batch:
    """One of equal parts of a batch."""
    part: Batch = pytree.tree_map(lambda t: t.chunk(parts)[place], batch)
    return part


def fsdp2(case: Path, zoo: ZooModel, layout: dict[str, int]) -> Step:
    """The file is a module with functions of its own."""
    spec = importlib.util.spec_from_file_location(f"exported_{case.name.replace('-', '_')}", case / "parallelize.py")
    assert spec is not None
    assert spec.loader is not None
    exported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exported)
    model = exported.parallelize(model_of(zoo), "cpu")
    optimizer = zoo.optimizer(list(model.parameters()))
    return lambda batches, loss_of_part: exported.train_step(model, batches, loss_of_part, optimizer)


def accelerate(case: Path, zoo: ZooModel, layout: dict[str, int]) -> Step:
    """The file goes through the reader of `accelerate launch` into the environment. Its FSDP is for accelerators alone: the
    processes, which are on CPUs, are made to count as some."""
    package = importlib.import_module("accelerate")
    launch, environment = map(importlib.import_module, ("accelerate.commands.launch", "accelerate.utils.launch"))
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(case / "accelerate.yaml"), "train.py"])
    arguments, *_ = launch._validate_launch_command(arguments)
    own = dict(os.environ)
    os.environ.update(environment.prepare_multi_gpu_env(arguments) | own)
    package.state.AcceleratorState._reset_state(reset_partial_state=True)
    package.PartialState(cpu=True)
    if arguments.use_fsdp:
        package.PartialState._shared_state["distributed_type"] = package.utils.DistributedType.MULTI_GPU
    accelerator = package.Accelerator(cpu=True)
    model = model_of(zoo)
    model, optimizer = accelerator.prepare(model, zoo.optimizer(list(model.parameters())))
    os.environ.clear()
    os.environ.update(own)
    assert accelerator.distributed_type.value == ("FSDP" if arguments.use_fsdp else "MULTI_CPU")

    def scale(gradient: Tensor, terms: float) -> None:
        gradient.mul_(layout["dp"] / terms)  # it is the mean over ranks

    return stepping(model, optimizer, scale, 1, lambda: accelerator.no_sync(model), accelerator.backward)


def tp_plan(case: Path, zoo: ZooModel, layout: dict[str, int]) -> Step:
    """The plan is applied by transformers, over the ranks of tp that the launcher gives; the launcher adds up gradients over dp.
    Attention has as many heads as products that leave their result cut give it, as in models of transformers."""
    styles, mixin = map(
        importlib.import_module, ("transformers.distributed.tensor_parallel", "transformers.distributed.mixin")
    )
    plan = json.loads((case / "tp_plan.json").read_text())
    mesh = init_device_mesh("cpu", (layout["dp"], layout["tp"]), mesh_dim_names=("dp", "tp"))
    model = model_of(zoo)
    styled = mixin.DistributedMixin._expand_parallel_plan(model, plan)
    styles.apply_tensor_parallelism(model, mesh["tp"], styled)
    for module_name, module in model.named_modules():
        if any(styled.get(f"{module_name}.{child}") == "colwise" for child, _ in module.named_children()):
            for count in ("heads", "kv_heads"):
                if hasattr(module, count):
                    setattr(module, count, getattr(module, count) // layout["tp"])
    optimizer = zoo.optimizer(list(model.parameters()))

    def add_up(gradient: Tensor, terms: float) -> None:
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        dist.all_reduce(local, group=mesh.get_group("dp"))
        local.div_(terms)

    return stepping(model, optimizer, add_up, layout["tp"])


def stepping(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    finish: Callable[[Tensor, float], None],
    alike: int,
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> Step:
    """A step of a system that leaves the loop to its users. finish: makes the gradient of the mean over so many terms of what a
    rank has; alike: ranks that take the same part of the batch."""

    def step(batches: Sequence[Batch], loss_of_part: Callable[[nn.Module, Batch], Any]) -> Tensor:
        sums = torch.zeros(2, dtype=torch.float64)
        for index, batch in enumerate(batches):
            with nullcontext() if index == len(batches) - 1 else no_sync():
                result = loss_of_part(model, batch)
                loss, terms = result if isinstance(result, tuple) else (result, 1)
                backward(loss * terms)
            sums += torch.tensor([float(loss.detach() * terms), float(terms)], dtype=torch.float64)
        dist.all_reduce(sums)
        total, terms_of_all = sums / alike
        for parameter in model.parameters():
            if parameter.grad is not None:
                finish(parameter.grad, float(terms_of_all))
        optimizer.step()
        optimizer.zero_grad()
        return total / terms_of_all

    return step


SYSTEMS = {"fsdp2": fsdp2, "accelerate": accelerate, "tp_plan": tp_plan}
"""By format, what makes a step of an exported file."""


def losses(name: str, case: Path) -> list[float]:
    """The losses of STEPS steps of a case."""
    zoo, layout = BY_NAME[case.name.partition("_")[0]], json.loads((case / "layout.json").read_text())
    step = SYSTEMS[name](case, zoo, layout)
    found = []
    for seed in range(STEPS):
        own = part_of(batch_of(zoo, seed), layout["dp"], dist.get_rank() // layout["tp"])
        count = len(pytree.tree_leaves(own)[0]) // layout["micro_batch"]
        batches = [part_of(own, count, i) for i in range(count)]
        found.append(float(step(batches, lambda model, batch: loss_and_terms(zoo, model, batch))))
    return found


def main(name: str, folder: Path) -> None:
    """Train every case of the folder."""
    dist.init_process_group("gloo")
    for case in sorted(path for path in folder.iterdir() if path.is_dir()):
        found = losses(name, case)
        if dist.get_rank() == 0:
            (case / "losses.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
