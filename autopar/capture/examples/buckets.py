"""Buckets: the example inputs of every shape of batch that one program is to run.

The user says which sizes a dim of an input may have, `{"input_ids": {1: (512, 1024)}, "labels": {1: (512, 1024)}}`. Dims with
the same sizes vary together, dims with others on their own, so lengths (512, 1024) and batches (8, 3) make four buckets.
Examples of other sizes than the given one repeat it or are cut off: of what is computed with them only shapes matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.capture.examples.trees import flatten, rebuild
from autopar.errors import InputError
from autopar.runtime.data.schema import is_integer, shown

Sizes = Mapping[str, Mapping[int, Sequence[int]]]
"""The sizes of dims of inputs, by the input's name and the dim."""
MOST = 64
"""Buckets that one program has at most: every one is captured and planned."""


def bucket_examples(inputs: Any, sizes: Sizes) -> list[Any]:
    """Example inputs of every bucket, the largest first. Raises InputError for sizes that cannot be."""
    leaves, names, structure = flatten(inputs)
    together = _together(sizes, leaves, names)
    count = math.prod(len(choices) for choices in together)
    if count > MOST:
        raise InputError(f"buckets make {count} combinations of sizes, the most are {MOST}; name fewer sizes")
    examples = []
    for chosen in itertools.product(*together):
        resized = list(leaves)
        for dims, size in zip(together.values(), chosen, strict=True):
            for index, dim in dims:
                resized[index] = _resized(resized[index], dim, size)
        examples.append(resized)
    examples.sort(key=lambda example: -sum(leaf.numel() for leaf in example))
    return [rebuild(structure, example) for example in examples]


def checked_pad_values(pad: Mapping[str, float] | None, inputs: Any) -> dict[str, float]:
    """The values that inputs are padded with, by name. Raises InputError for what is no input, or no number of its dtype."""
    if pad is None:
        return {}
    if not isinstance(pad, Mapping):
        raise InputError(f"pad_values maps inputs to numbers, such as {{'labels': -100}}; it is {shown(pad)}")
    leaves, names, _ = flatten(inputs)
    dtypes = {name: leaf.dtype for name, leaf in zip(names, leaves, strict=True)}
    for name, value in pad.items():
        if name not in dtypes:
            raise InputError(f"pad_values names {shown(name)}; inputs are {', '.join(names)}")
        integer = is_integer(value, -(1 << 63), (1 << 63) - 1)
        if not (integer or (dtypes[name].is_floating_point and isinstance(value, float) and math.isfinite(value))):
            raise InputError(f"pad_values[{name!r}] must be a number of {dtypes[name]}, it is {shown(value)}")
    return dict(pad)


def _together(
    sizes: Sizes, leaves: Sequence[torch.Tensor], names: Sequence[str]
) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """The dims, as (input, dim), that vary together, by their sizes."""
    if not isinstance(sizes, Mapping) or not sizes:
        raise InputError(
            f"buckets maps inputs to sizes of their dims, {{'input_ids': {{1: (512, 1024)}}}}; it is {shown(sizes)}"
        )
    together: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for name, dims in sizes.items():
        if name not in names:
            raise InputError(f"buckets names {shown(name)}; inputs are {', '.join(names)}")
        index = names.index(name)
        if not isinstance(dims, Mapping) or not dims:
            raise InputError(f"buckets[{name!r}] maps dims to their sizes, {{1: (512, 1024)}}; it is {shown(dims)}")
        for dim, choices in dims.items():
            if not is_integer(dim, 0, leaves[index].ndim - 1):
                raise InputError(f"buckets[{name!r}] names dim {shown(dim)}; its shape is {tuple(leaves[index].shape)}")
            one_or_more = isinstance(choices, Sequence) and not isinstance(choices, str) and choices
            if not one_or_more or not all(is_integer(n, 1, 1 << 40) for n in choices) or len({*choices}) < len(choices):
                raise InputError(
                    f"buckets[{name!r}][{dim}] lists different sizes from 1 on, such as (512, 1024); it is {shown(choices)}"
                )
            together.setdefault(tuple(sorted(choices)), []).append((index, dim))
    return together


def _resized(leaf: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """The example with another size of a dim: its first entries, or all of them again and again."""
    have = leaf.shape[dim]
    if size <= have:
        return leaf.narrow(dim, 0, size)
    if not have:
        raise InputError(f"buckets: dim {dim} of an example input is empty; give an example with entries")
    return leaf.index_select(dim, torch.arange(size, device=leaf.device) % have)
