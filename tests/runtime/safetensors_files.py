"""Files of safetensors written by hand, without the code under test: a header of JSON after its length, then the bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LETTERS = {
    torch.float32: "f",
    torch.float64: "d",
    torch.int64: "q",
    torch.int32: "i",
    torch.bool: "?",
    torch.float16: "e",
}
WORDS = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.float16: "F16",
}


def data(tensor: Tensor) -> bytes:
    """Little-endian, row-major."""
    numbers = tensor.flatten().tolist()
    return struct.pack(f"<{len(numbers)}{LETTERS[tensor.dtype]}", *numbers)


def rows(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The header of tensors that lie one after another."""
    end, header = 0, {}
    for name, tensor in tensors.items():
        first, end = end, end + len(data(tensor))
        header[name] = {"dtype": WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, end]}
    return header


def encoded(header: bytes, content: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + content


def write(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    header = {"__metadata__": {"format": "pt"}, **rows(tensors)}
    path.write_bytes(encoded(json.dumps(header).encode(), b"".join(map(data, tensors.values()))))
    return path


def write_shards(folder: Path, *shards: Mapping[str, Tensor]) -> Path:
    """A directory of several files with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {}
    for number, shard in enumerate(shards):
        path = write(folder / f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors", shard)
        places |= dict.fromkeys(shard, path.name)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
