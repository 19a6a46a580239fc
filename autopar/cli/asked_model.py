"""The argument MODEL of command lines: a function that returns arguments of `autopar.compile`, or a config.json."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.api import compile
from autopar.cli.model_config import read_config
from autopar.errors import InputError
from autopar.runtime.data.schema import did_you_mean, shown

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)


def arguments_of(name: str, batch: int, sequence: int, precision: str | None) -> Mapping[str, Any]:
    """The arguments of `compile` that MODEL stands for. batch, sequence, precision: of a config.json. Raises InputError."""
    return of_config(Path(name), batch, sequence, precision) if name.endswith(".json") else of_function(name)


def of_function(name: str) -> Mapping[str, Any]:
    """The result of `module:function`, as arguments of compile. Raises InputError."""
    module_name, _, function = name.partition(":")
    if not module_name or not function:
        raise InputError(f"MODEL {name!r} is neither module:function nor a config.json")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(f"MODEL {name!r}: {error}; run from the folder that holds it, or install it") from error
    finally:
        sys.path.remove(os.getcwd())
    make = getattr(module, function, None)
    if not callable(make):
        raise InputError(f"MODEL {name!r}: {module_name} has no function {function}")
    made = make()
    if isinstance(made, tuple) and len(made) == 2:
        return {"model": made[0], "example_inputs": made[1]}
    if isinstance(made, Mapping) and {"model", "example_inputs"} <= made.keys():
        taken = inspect.signature(compile).parameters.keys() - {"cluster"}
        if unknown := next((key for key in made if key not in taken), None):
            raise InputError(
                f"MODEL {name!r} returned a dict with {shown(unknown)}, which is no argument of autopar.compile beside the "
                f"cluster{did_you_mean(unknown, taken)}"
            )
        return made
    raise InputError(
        f"MODEL {name!r} returned {type(made).__name__}; return (model, example_inputs), or a dict of compile's arguments"
    )


def of_config(path: Path, batch: int, sequence: int, precision: str | None) -> Mapping[str, Any]:
    """A language model of transformers on the meta device, trained with AdamW; in float32, as mixed precision has it, where a
    precision is asked for, else in the dtype of the configuration. Raises InputError."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(f"{path}: a config.json needs transformers: pip install transformers") from error
    fields = read_config(path)
    try:
        config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
            model = model.float() if precision else model
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: transformers makes no language model of this configuration ({error})") from error
    with torch.device("meta"):
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
    return {"model": model, "example_inputs": {"input_ids": tokens, "labels": tokens}, "optimizer": ADAMW}
