"""Command lines of Megatron that are written have its parser's flags, and pass its own checks where it is installed."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import shlex
from dataclasses import replace

import pytest

from autopar.exchange import megatron
from autopar.exchange.keys import Facts
from autopar.exchange.layout import Layout, StageUnits
from tests.exchange.megatron_table import TABLE, faults
from tests.exchange.published import RUNS, Run, layout_of

UNEVEN = Layout(
    dp=1,
    pp=2,
    schedule="1f1b",
    stages=(StageUnits(3, embedding=True), StageUnits(1, loss=True)),
    micro_batch=1,
    global_batch=8,
    precision="bf16",
)


def variants(run: Run) -> tuple[Layout, ...]:
    """A published layout, and with what no published one says."""
    layout = layout_of(run)
    return (
        layout,
        replace(layout, offload="optimizer"),
        replace(layout, overlap_gradients=True, overlap_parameters=True),
        replace(layout, recompute="full", recompute_layers=1),
    )


def command(layout: Layout) -> str:
    return megatron.write(layout, Facts(ranks=layout.ranks)).files["megatron.sh"]


def test_every_published_layout_is_a_command_line_that_megatron_takes() -> None:
    found = {run.id: faults(command(layout)) for run in RUNS for layout in variants(run)}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert faults(command(UNEVEN)) == []


def test_the_keys_are_those_of_the_version_that_the_format_names() -> None:
    assert TABLE["version"] == megatron.FORMAT.version
    assert {key.name for key in megatron.KEYS} <= TABLE["flags"].keys()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("--tensor-parallel-size 2", "there is no flag tensor_parallel_size"),
        ("--tensor-model-parallel-size two", "is no int"),
        ("--bf16 1", "is no switch"),
        ("--recompute-granularity some", "is none of"),
        ("--bf16 --fp16", "bf16 and fp16 exclude each other"),
        ("--use-distributed-optimizer --use-megatron-fsdp", "ckpt_format"),
    ],
)
def test_what_megatron_would_not_take_is_found(text: str, wrong: str) -> None:
    assert wrong in "; ".join(faults(text))


def test_messages_of_tensor_parallelism_go_through_one_queue_where_its_checks_ask_for_it() -> None:
    assert command(Layout(dp=1, tp=2)).startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 ")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in command(Layout(dp=2, tp=2, zero=3))  # its FSDP asks for several
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in command(Layout(dp=2))


@pytest.mark.slow
def test_the_table_is_megatrons_parser() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    pytest.importorskip("megatron.training.arguments").add_megatron_arguments(parser)
    assert TABLE["version"] == f"megatron-core {importlib.metadata.version('megatron-core')}"
    actions = {
        option[2:].replace("-", "_"): one
        for one in parser._actions
        for option in one.option_strings
        if option.startswith("--")
    }
    for name, row in TABLE["flags"].items():
        action = actions[name]
        assert row["type"] == ("switch" if action.nargs == 0 else getattr(action.type, "__name__", "str"))
        assert row.get("choices") == (list(action.choices) if action.choices else None)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*(one for run in RUNS for one in variants(run)), UNEVEN], ids=str)
def test_megatron_takes_what_is_written(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = pytest.importorskip("megatron.training.arguments")
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    words = shlex.split(command(layout).replace("\\\n", " "))
    environment = [word for word in words[: words.index("torchrun")] if "=" in word]
    layers = sum(stage.layers for stage in layout.stages) or 2 * layout.pp * layout.virtual_stages
    model = {"num-layers": layers, "hidden-size": 1024, "num-attention-heads": 64, "seq-length": 1024}
    model |= {"max-position-embeddings": 1024, "train-iters": 1, "lr": 1e-4, "tokenizer-type": "NullTokenizer"}
    model |= {"vocab-size": 1000} | ({"num-experts": 64} if layout.ep > 1 else {})
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    for name, _, value in (word.partition("=") for word in (*environment, f"WORLD_SIZE={layout.ranks}", "RANK=0")):
        monkeypatch.setitem(os.environ, name, value)
    own = [*words[words.index("pretrain_gpt.py") + 1 :], "--disable-bias-linear"]
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *own, *(f"--{name}={value}" for name, value in model.items())])
    parsed = arguments.parse_args()
    arguments.validate_args(parsed)
    config = arguments.core_transformer_config_from_args(parsed)
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (layout.tp, layout.pp)
    assert parsed.data_parallel_size == layout.dp
    assert parsed.global_batch_size == layout.global_batch
