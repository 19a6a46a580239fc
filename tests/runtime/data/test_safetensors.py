"""The safetensors format: parts are read byte for byte, and a header that lies is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.data import safetensors
from autopar.runtime.data.safetensors import DTYPES, StoredTensor, file_order, header, read_header, read_part, runs
from autopar.runtime.data.schema import SchemaError
from tests.runtime import safetensors_files as files

TENSORS = {
    "a.weight": torch.arange(60.0, dtype=torch.float64).reshape(3, 4, 5),
    "b": torch.tensor([[1, -2], [3, 4]]),
    "scalar": torch.tensor(1.5),
    "flags": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4),
    "half": torch.tensor([0.5, -2.0], dtype=torch.float16),
}


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def test_hand_written_bytes_are_read_as_the_tensors_they_are(tmp_path: Path) -> None:
    stored = read_header(files.write(tmp_path / "model.safetensors", TENSORS))
    assert list(stored) == list(TENSORS)
    for name, tensor in TENSORS.items():
        got = read_part(stored[name], whole(stored[name].shape))
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor)


def test_a_written_file_is_byte_for_byte_what_the_format_says(tmp_path: Path) -> None:
    rows = [("x", torch.float32, (2, 1)), ("y", torch.bfloat16, (3,))]
    content = header(rows)
    assert len(content) % 8 == 0
    (tmp_path / "f").write_bytes(content + bytes(8 + 6))
    stored = read_header(tmp_path / "f")
    assert stored == {
        "x": StoredTensor(tmp_path / "f", len(content), torch.float32, (2, 1)),
        "y": StoredTensor(tmp_path / "f", len(content) + 8, torch.bfloat16, (3,)),
    }
    assert json.loads(content[8:])["__metadata__"] == {"format": "pt"}


def test_wide_tensors_come_first_so_that_every_one_is_aligned() -> None:
    kinds = {name: (dtype, (1,)) for name, dtype in DTYPES.items()}
    widths = [kinds[name][0].itemsize for name in file_order(kinds)]
    assert widths == sorted(widths, reverse=True)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    pairs = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return shape, tuple(slice(*pair) for pair in pairs)


@given(cuts())
def test_any_part_is_that_slice_and_no_byte_beside_it_is_read(tmp_path_factory: Any, cut: Any) -> None:
    shape, slices = cut
    tensor = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    path = files.write(tmp_path_factory.mktemp("part") / "f", {"before": torch.ones(3), "t": tensor})
    stored = read_header(path)["t"]
    part = read_part(stored, slices)
    assert torch.equal(part, tensor[slices])
    read = (
        [byte for start, length in runs(stored, slices) for byte in range(start, start + length)]
        if part.numel()
        else []
    )
    assert len(set(read)) == len(read) == part.numel() * 4
    content = path.read_bytes()
    assert bytes(content[byte] for byte in read) == files.data(part)


def test_a_part_of_rows_is_one_run_and_a_part_of_columns_one_a_row() -> None:
    stored = StoredTensor(Path("f"), 100, torch.float32, (8, 6))
    assert list(runs(stored, (slice(2, 4), slice(0, 6)))) == [(100 + 2 * 24, 48)]
    assert list(runs(stored, (slice(2, 4), slice(3, 6)))) == [(100 + 2 * 24 + 12, 12), (100 + 3 * 24 + 12, 12)]


def lying(change: Any) -> bytes:
    """A file of two tensors whose header was changed."""
    tensors = {"a": torch.ones(2, 2), "b": torch.zeros(3)}
    content = b"".join(map(files.data, tensors.values()))
    rows = files.rows(tensors)
    return files.encoded(json.dumps(change(rows) or rows).encode(), content)


def set_offsets(name: str, first: Any, last: Any) -> Any:
    return lambda rows: rows[name].update(data_offsets=[first, last])


TWICE = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lying(set_offsets("b", 16, 100)), "bytes 16 to 100 are no F32 of shape"),
        (
            lying(set_offsets("b", 400, 412)),
            "'b' starts at byte 400 of the data, where the tensors before it end at 16",
        ),
        (lying(set_offsets("b", 4, 16)), "'b' starts at byte 4 of the data"),
        (lying(set_offsets("b", 28, 16)), "are no F32"),
        (lying(set_offsets("b", -12, 0)), r"b.data_offsets\[0\] must be a whole number"),
        (lying(set_offsets("b", 16.0, 28)), "must be a whole number"),
        (lying(set_offsets("b", True, 28)), "must be a whole number"),
        (lying(lambda rows: rows["b"].update(dtype="I64")), "are no I64"),
        (lying(lambda rows: rows["b"].update(dtype="F4")), "b.dtype must be one of"),
        (lying(lambda rows: rows["b"].update(shape=[3, 2])), "are no F32"),
        (lying(lambda rows: rows["b"].update(shape=[1 << 59, 1 << 59])), "are no F32"),
        (lying(lambda rows: rows["b"].update(shape=[-3])), "must be a whole number"),
        (lying(lambda rows: rows["b"].update(more=1)), "unknown key 'more'"),
        (lying(lambda rows: rows.pop("b") and None), "the tensors take 16 bytes, and the file has 28"),
        (lying(lambda rows: {"x\ny": rows["a"], "b": rows["b"]}), "printable text"),
        (lying(lambda rows: {**rows, "__metadata__": {"format": 1}}), "must be text"),
        (lying(lambda rows: {**rows, "__metadata__": []}), "__metadata__ must be a mapping"),
        (lying(lambda rows: [rows]), "the header must be a mapping"),
        (files.encoded(TWICE.encode(), bytes(8)), "the key 'a' is given twice"),
        (files.encoded(b"[" * 5000, b""), "nesting"),
        (files.encoded(b'{"a": NaN}', b""), "NaN"),
        (files.encoded(b"{\xff}", b""), "no UTF-8"),
        (b"", "a header of 0 bytes follows; the file has 0"),
        (b"\xff" * 8, "a header of 18446744073709551615 bytes"),
        ((200_000_000).to_bytes(8, "little") + bytes(16), "a header of 200000000 bytes"),
        (lying(lambda rows: None)[:-1], "the file has 27 bytes of data"),
        (lying(lambda rows: None) + b"x", "the file has 29 bytes of data"),
    ],
)
def test_a_header_that_lies_is_refused_by_name(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(SchemaError, match=says):
        read_header(tmp_path / "f")


def test_a_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file:
        file.write((safetensors.MOST_HEADER + 1).to_bytes(8, "little"))
        file.truncate(2 * safetensors.MOST_HEADER)
    with pytest.raises(SchemaError, match=f"at most {safetensors.MOST_HEADER}"):
        read_header(tmp_path / "f")


def test_a_file_that_shrinks_after_its_header_was_read_is_named(tmp_path: Path) -> None:
    path = files.write(tmp_path / "f", {"a": torch.ones(4)})
    stored = read_header(path)["a"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(SchemaError, match="ends inside a tensor"):
        read_part(stored, whole((4,)))


def test_files_are_those_of_the_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    tensors = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items() if "8_E" not in name}
    tensors |= TENSORS | {"ä": torch.ones(1, dtype=torch.bfloat16)}
    library.save_file(tensors, tmp_path / "f", metadata={"format": "pt"})
    stored = read_header(tmp_path / "f")
    for name, tensor in tensors.items():
        assert torch.equal(read_part(stored[name], whole(tensor.shape)), tensor)
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    order = file_order(kinds)
    assert order == list(stored)
    content = header((name, *kinds[name]) for name in order)
    assert (tmp_path / "f").read_bytes().startswith(content)
