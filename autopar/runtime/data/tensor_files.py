"""Files of torch.save, read as data: a zip file of a small pickle and of the numbers of tensors.

    archive/data.pkl | … | archive/data/0 | archive/byteorder | … | directory

torch's own reader believes such a file: an entry that is deflated becomes as large as it likes, and a storage may be said to be
longer than its entry. Here entries are stored, each in bytes of its own, under names that torch gives; the pickle is read as data
(pickles.py); a tensor has the dtype and the shape that are expected, and as many bytes as that takes. Nothing is allocated
but the tensors' own memory is that of the file's bytes.
"""

from __future__ import annotations

import collections
import itertools
import math
import re
import struct
import zlib
from typing import Any

import torch
from torch import Tensor

from . import pickles
from .pickles import Made, Name, Stored
from .schema import MOST_SIZE, SchemaError, integer, listed, must_be, shown, text

MOST_AROUND = 1 << 16
"""Bytes that a tensor's file has beside its numbers, at most."""
MOST_VALUE = 1 << 26
"""Bytes of the file of a value that is no tensor."""
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

_STORAGES = {
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.BoolStorage": torch.bool,
    "torch.ByteStorage": torch.uint8,
    "torch.CharStorage": torch.int8,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.IntStorage": torch.int32,
    "torch.LongStorage": torch.int64,
    "torch.ShortStorage": torch.int16,
}
_UNTYPED, _ORDERED, _COUNTER = "torch.storage.UntypedStorage", "collections.OrderedDict", "collections.Counter"
_REBUILD, _REBUILD_UNTYPED = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_NAMES = frozenset({*_STORAGES, *DTYPES, _UNTYPED, _ORDERED, _COUNTER, _REBUILD, _REBUILD_UNTYPED})
_SIZES = listed(integer(0, MOST_SIZE), most=64)


def read_tensor(data: bytearray, dtype: torch.dtype, sizes: torch.Size, *, crc: bool) -> Tensor:
    """The tensor of a file of torch.save, in the file's own memory. crc: hold the entries to their CRC-32, where they have one.
    Raises SchemaError where it is another tensor, or none."""
    held = _entries(memoryview(data), crc)
    tensor = _tensor(pickles.read(held["data.pkl"], _NAMES), held)
    if (tensor.dtype, tensor.shape) != (dtype, sizes):
        raise SchemaError(
            f"it holds a tensor of {tensor.dtype} and shape {list(tensor.shape)}, where {dtype} and {list(sizes)} are described"
        )
    return tensor


def read_value(data: bytearray, *, crc: bool) -> Any:
    """The value in a file of torch.save, where it is plain data: numbers, text, lists, mappings, tensors. Raises SchemaError."""
    if len(data) > MOST_VALUE:
        raise SchemaError(f"a value that is no tensor takes {len(data)} bytes, at most {MOST_VALUE} are read")
    held = _entries(memoryview(data), crc)
    return _plain(pickles.read(held["data.pkl"], _NAMES), held)


def _plain(value: Any, held: dict[str, memoryview]) -> Any:
    """A value that was read, with what stands in it for tensors and the like made anew."""
    if isinstance(value, list | tuple):
        return type(value)(_plain(one, held) for one in value)
    if isinstance(value, dict):
        return {_key(key): _plain(one, held) for key, one in value.items()}
    if isinstance(value, Name) and value.name in DTYPES:
        return DTYPES[value.name]
    if isinstance(value, Made):
        if value.name == _ORDERED and value.args == () and value.state is None:
            return collections.OrderedDict(_plain(value.items or {}, held))
        if value.name == _COUNTER and len(value.args) <= 1 and all(type(one) is dict for one in value.args):
            return collections.Counter(*(_plain(one, held) for one in value.args))
        return _tensor(value, held)
    if isinstance(value, Name | Stored):
        raise must_be("a value", "plain data", value)
    return value


def _key(key: Any) -> Any:
    if isinstance(key, Made):
        raise must_be("a key", "text or a number", key)
    return key


def _tensor(made: Any, held: dict[str, memoryview]) -> Tensor:
    if not isinstance(made, Made) or made.name not in (_REBUILD, _REBUILD_UNTYPED) or made.state or made.items:
        raise must_be("the value", "a tensor", made)
    untyped = made.name == _REBUILD_UNTYPED
    least = 7 if untyped else 6
    if not least <= len(made.args) <= least + 1 or (made.args[least:] not in ((), ({},))):
        raise SchemaError(f"a tensor is described by {len(made.args)} values that torch does not write")
    stored, offset, size, stride, _, hooks = made.args[:6]
    if not (isinstance(hooks, Made) and hooks.name == _ORDERED and not hooks.items and not hooks.args):
        raise SchemaError("a tensor has hooks")
    key = stored.key if isinstance(stored, Stored) else None
    if not (isinstance(key, tuple) and len(key) == 5 and key[0] == "storage" and isinstance(key[1], Name)):
        raise must_be("a tensor's storage", "one of torch.save", key)
    data = held.get(f"data/{text()(key[2], 'storage')}")
    if data is None:
        raise SchemaError(f"a tensor lies in entry {shown(key[2])}, which is not there")
    nbytes = integer(0, MOST_SIZE)(key[4], "storage")
    if untyped:
        dtype = DTYPES.get(made.args[6].name) if isinstance(made.args[6], Name) else None
        right = key[1].name == _UNTYPED
    else:
        dtype, right = _STORAGES.get(key[1].name), True
        nbytes *= dtype.itemsize if dtype is not None else 0
    if dtype is None or not right or len(data) != nbytes or nbytes % dtype.itemsize:
        raise SchemaError(f"a storage of {nbytes} bytes ({shown(key[1])}) lies in an entry of {len(data)} bytes")
    elements = nbytes // dtype.itemsize
    sizes, strides = _SIZES(size, "size"), _SIZES(stride, "stride")
    first = integer(0, elements)(offset, "offset")
    reach = sum((n - 1) * step for n, step in zip(sizes, strides, strict=False)) + 1 if all(sizes) else 0
    if len(sizes) != len(strides) or math.prod(sizes) > elements or first + reach > elements:
        raise SchemaError(f"a tensor of {list(sizes)[:8]} with strides {list(strides)[:8]} in {elements} elements")
    if not elements:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=elements).as_strided(sizes, strides, first)


# --- the zip file ------------------------------------------------------------------------------------------------------

_END = struct.Struct("<4s4HIIH")
_END_64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5HII")
_LOCAL = struct.Struct("<4s5H3IHH")
_EXTRA = struct.Struct("<HH")
_ENTRY_NAME = re.compile(
    r"[^/]{1,256}/(data\.pkl|data/[0-9]{1,9}|byteorder|version|\.format_version|\.storage_alignment|\.data/serialization_id)"
)
_ENCRYPTED = 1


def _entries(data: memoryview, crc: bool) -> dict[str, memoryview]:
    """The entries of a zip file by name, without that of the archive. Raises SchemaError."""
    try:
        found = _listed(data)
    except struct.error as error:
        raise SchemaError("it is no zip file as torch.save writes them") from error
    held: dict[str, memoryview] = {}
    end = 0
    for start, stop, after, name, checksum in sorted(found):
        if start < end:
            raise SchemaError(f"entry {shown(name)} overlaps another one")
        end, piece = after, data[stop:after]
        if crc and checksum and zlib.crc32(piece) != checksum:
            raise SchemaError(f"entry {shown(name)} has another CRC-32 than its directory says")
        held[name] = piece
    if "data.pkl" not in held:
        raise SchemaError("it has no entry data.pkl")
    if bytes(held.get("byteorder", b"little")) != b"little":
        raise SchemaError("its numbers are not little-endian")
    return held


def _listed(data: memoryview) -> list[tuple[int, int, int, str, int]]:
    """For every entry where its header starts, where its bytes start and end, its name and CRC-32."""
    count, start, stop = _directory(data)
    found, names = list[tuple[int, int, int, str, int]](), set[str]()
    for _ in range(count):
        row = _ENTRY.unpack_from(data, start)
        signature, flags, method, checksum, packed, size = row[0], row[3], row[4], *row[7:10]
        name_bytes, extra_bytes, comment_bytes, offset = *row[10:13], row[16]
        after = start + _ENTRY.size + name_bytes + extra_bytes + comment_bytes
        if signature != b"PK\x01\x02" or after > stop:
            raise SchemaError("its directory is damaged")
        name_end = start + _ENTRY.size + name_bytes
        raw = bytes(data[start + _ENTRY.size : name_end])
        size, packed, offset = _wide(data[name_end : name_end + extra_bytes], size, packed, offset)
        whole = raw.decode("ascii", "replace")
        if not _ENTRY_NAME.fullmatch(whole):
            raise SchemaError(f"it has an entry {shown(whole)}, which torch.save does not write")
        name = whole.partition("/")[2]
        if name in names:
            raise SchemaError(f"entry {shown(name)} is there twice")
        if method or packed != size or flags & _ENCRYPTED:
            raise SchemaError(
                f"entry {shown(name)} is packed ({packed} bytes for {size}); entries are stored as they are"
            )
        found.append((offset, *_extent(data, offset, raw, size), name, checksum))
        if found[-1][2] > stop:
            raise SchemaError(f"entry {shown(name)} is not inside the file")
        names.add(name)
        start = after
    if start != stop:
        raise SchemaError(f"its directory has {stop - start} bytes beside its {count} entries")
    return found


def _extent(data: memoryview, offset: int, raw: bytes, size: int) -> tuple[int, int]:
    """Where an entry's bytes start and end, by its own header."""
    row = _LOCAL.unpack_from(data, offset)
    first = offset + _LOCAL.size
    if row[0] != b"PK\x03\x04" or row[3] or bytes(data[first : first + row[9]]) != raw:
        raise SchemaError(f"entry {shown(raw)} has another header than its directory says")
    start = first + row[9] + row[10]
    if start + size > len(data):
        raise SchemaError(f"entry {shown(raw)} of {size} bytes is not inside the file")
    return start, start + size


def _directory(data: memoryview) -> tuple[int, int, int]:
    """How many entries are listed, and where their list starts and ends."""
    at = len(data) - _END.size
    if at < 0:
        raise SchemaError(f"{len(data)} bytes are no zip file")
    signature, *_, here, count, size, start, comment = _END.unpack_from(data, at)
    if signature != b"PK\x05\x06" or comment:
        raise SchemaError("it does not end as a zip file does")
    locator = at - _LOCATOR.size
    if locator >= 0 and bytes(data[locator : locator + 4]) == b"PK\x06\x07":
        _, _, at, _ = _LOCATOR.unpack_from(data, locator)
        if at + _END_64.size != locator:
            raise SchemaError("the end of its directory is not where it says")
        signature, *_, here, wide_count, wide_size, wide_start = _END_64.unpack_from(data, at)
        pairs = ((count, wide_count, 16), (size, wide_size, 32), (start, wide_start, 32))
        if signature != b"PK\x06\x06" or any(one not in (wide, (1 << bits) - 1) for one, wide, bits in pairs):
            raise SchemaError("its directory is described in two ways that differ")
        count, size, start = wide_count, wide_size, wide_start
    if here != count or start + size != at or count * _ENTRY.size > size:
        raise SchemaError(
            f"its directory of {count} entries is said to be {size} bytes at byte {start}, of {len(data)}"
        )
    return count, start, at


def _wide(extra: memoryview, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """Sizes and place of an entry, of which those that do not fit into 32 bits stand in its extra field."""
    most, at = (1 << 32) - 1, 0
    while at + _EXTRA.size <= len(extra):
        kind, length = _EXTRA.unpack_from(extra, at)
        field = extra[at + _EXTRA.size : at + _EXTRA.size + length]
        at += _EXTRA.size + length
        if kind == 1:
            wide = iter(one for (one,) in itertools.islice(struct.iter_unpack("<Q", field[: length - length % 8]), 3))
            size, packed, offset = (next(wide, most) if one == most else one for one in (size, packed, offset))
    return size, packed, offset
