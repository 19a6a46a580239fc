"""Crafted files that ask for more than they are worth, or for something else: what each kind of reader must refuse."""

from __future__ import annotations

import functools
import io
import pickle
import struct
import zipfile
import zlib

import torch

from .mutations import pickles as calling

GIGA = 1 << 30
META = "torch.distributed.checkpoint.metadata"


def nested_tuples(levels: int) -> bytes:
    """A tuple of one tuple twice, and so on: its hash takes 2 to the power of the levels."""
    body = b"\x80\x04)\x94"
    for n in range(levels):
        body += b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x94"
    return body


def shared_lists(levels: int, width: int) -> bytes:
    """A list of one list many times, and so on: width to the power of the levels values."""
    body = b"\x80\x04]\x94"
    for n in range(levels):
        body += b"](" + (b"h" + bytes([n])) * width + b"e\x94"
    return body + b"."


def number(value: int, nbytes: int) -> bytes:
    return value.to_bytes(nbytes, "little")


@functools.cache
def bombs() -> dict[str, bytes]:
    """Pickles that take for ever, or all memory, or are not what a checkpoint's file is made of."""
    deep = b"\x80\x04" + b"]" * 20_000 + b"a" * 19_999 + b"."
    return {
        "an array of 6 GB": b"\x80\x05\x96" + number(6 * GIGA, 8) + b".",
        "a byte string of 4 GB": b"\x80\x04\x8e" + number(4 * GIGA, 8) + b".",
        "text of 4 GB": b"\x80\x02X" + number(4 * GIGA - 1, 4) + b".",
        "text of 2 to the 63 bytes": b"\x80\x04\x8d" + number(1 << 63, 8) + b".",
        "a frame of 2 to the 63 bytes": b"\x80\x04\x95" + number(1 << 63, 8) + b"N.",
        "a number of 2 GB": b"\x80\x02\x8b" + number((1 << 31) - 1, 4) + b".",
        "a number of 255 bytes": b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
        "a number of a million digits": b"I" + b"9" * 1_000_000 + b"\n.",
        "nested shared tuples as a key": nested_tuples(40) + b"}h" + bytes([40]) + b"Ns.",
        "nested shared tuples": nested_tuples(60) + b"h" + bytes([60]) + b".",
        "shared lists of lists": shared_lists(8, 250),
        "shared lists in a megabyte": shared_lists(3, 150_000),
        "20,000 lists in each other": deep,
        "a list in itself": b"\x80\x04]\x94h\x00a.",
        "a tuple in itself": b"\x80\x04]\x94(h\x00t\x94h\x01a0h\x01.",
        "a mapping in itself": b"\x80\x04}\x94X\x01\x00\x00\x00ah\x00s.",
        "a million empty lists": b"\x80\x04](" + b"]" * 1_000_000 + b"e.",
        "a million lists, one by one": b"\x80\x04]" + b"]a" * 1_000_000 + b".",
        "a million mappings, kept": b"\x80\x04]" + b"}\x94a" * 1_000_000 + b".",
        "a million marks": b"\x80\x04" + b"(" * 1_000_000 + b".",
        "a memo of two billion": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "a recall of what is not there": b"\x80\x02h\x07.",
        "a recall of a negative place": b"\x80\x02Nq\x00j\xff\xff\xff\xff.",
        "keys that hash alike": b"\x80\x02}("
        + b"".join(b"\x8a\x0b" + number(3 + n * ((1 << 61) - 1), 11) + b"N" for n in range(60_000))
        + b"u.",
        "a key given twice": b"\x80\x02}(K\x01NK\x01Nu.",
        "a list as a key": b"\x80\x02}(]Nu.",
        "a persistent id": b"\x80\x02X\x03\x00\x00\x00oneQ.",
        "a persistent id as text": b"Pone\n.",
        "an extension": b"\x80\x02\x82\x01.",
        "an out-of-band buffer": b"\x80\x05\x97.",
        "protocol 0": pickle.dumps({"a": [1, 2.5, "x"]}, 0),
        "protocol 1": pickle.dumps({"a": [1, 2.5, "x"]}, 1),
        "protocol 3, bytes": pickle.dumps({"a": b"x"}, 3),
        "protocol 5, bytes": pickle.dumps(bytearray(b"x"), 5),
        "protocol 6": b"\x80\x06N.",
        "a set": pickle.dumps({1, 2}, 4),
        "two values": b"\x80\x02NN.",
        "no value": b"\x80\x02.",
        "no end": b"\x80\x02N",
        "nothing": b"",
        "an unknown opcode": b"\x80\x02\xff.",
        "a name without an end": b"\x80\x02c" + b"a" * 100_000,
        "text that is no UTF-8": b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
        "a state for a number": b"\x80\x02K\x01}b.",
        "an item for a number": b"\x80\x02K\x01K\x02a.",
        "more items than there are": b"\x80\x02}s.",
        "a size that is a call": b"\x80\x04\x8c\x05torch\x8c\x04Size\x93" + b"R" * 9 + b".",
        **{f"a call, {n}": data for n, data in enumerate(calling()[:6])},
    }


def archive(*entries: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, data in entries:
            file.writestr(name, data)
    return buffer.getvalue()


def torch_file(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def tensor_pickle(
    dtype: str = "FloatStorage", elements: int = 16, size: str = "K\x10\x85", stride: str = "K\x01\x85"
) -> bytes:
    """data.pkl of a tensor of 16 numbers, or one that says something else. size, stride: opcodes."""
    key = b"(X\x07\x00\x00\x00storagectorch\n" + dtype.encode() + b"\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    own = b"\x8a\x08" + number(elements, 8) + b"tQ"
    shape = size.encode("latin1") + stride.encode("latin1")
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + key + own + b"K\x00" + shape + hooks + b"tR."


@functools.cache
def archives() -> dict[str, bytes]:
    """Files in the place of torch.save's of `torch.arange(16.0)`."""
    whole = torch_file(torch.arange(16.0))
    numbers = torch.arange(16.0).numpy().tobytes()
    plain = ("a/data.pkl", tensor_pickle())
    stored = archive(plain, ("a/data/0", numbers))
    end = stored.rindex(b"PK\x05\x06")
    first, start = stored.index(b"PK\x01\x02"), struct.unpack_from("<I", stored, end + 16)[0]
    second = stored.index(b"PK\x01\x02", first + 1)
    local = stored.index(b"PK\x03\x04", 1)

    def patched(at: int, form: str, value: int, data: bytes = stored) -> bytes:
        changed = bytearray(data)
        struct.pack_into(form, changed, at, value)
        return bytes(changed)

    return {
        "deflated numbers": archive(plain, ("a/data/0", numbers), method=zipfile.ZIP_DEFLATED),
        "deflated zeros": archive(plain, ("a/data/0", bytes(300_000_000)), method=zipfile.ZIP_DEFLATED),
        "a deflated pickle": archive(
            ("a/data.pkl", b"\x80\x02" + b"N" * 50_000_000 + b"."), method=zipfile.ZIP_DEFLATED
        ),
        "packed by bzip2": archive(plain, ("a/data/0", numbers), method=zipfile.ZIP_BZIP2),
        "packed by lzma": archive(plain, ("a/data/0", numbers), method=zipfile.ZIP_LZMA),
        "an entry said to have 4 GB": patched(
            patch := second + 24, "<I", 4 * GIGA - 2, patched(patch - 4, "<I", 4 * GIGA - 2)
        ),
        "unpacked larger than packed": patched(second + 24, "<I", 1 << 20),
        "a wrong CRC-32": patched(second + 16, "<I", zlib.crc32(numbers) ^ 1),
        "numbers that were changed": stored.replace(numbers, numbers[::-1]),
        "overlapping entries": patched(second + 42, "<I", 0),
        "an entry that starts in the directory": patched(second + 42, "<I", start),
        "an entry that starts after the end": patched(second + 42, "<I", len(stored) + 9),
        "an encrypted entry": patched(second + 8, "<H", 1),
        "another header in the file": patched(local + 26, "<H", 3),
        "65535 entries": patched(end + 10, "<H", 65535, patched(end + 8, "<H", 65535)),
        "no entries": patched(end + 10, "<H", 0, patched(end + 8, "<H", 0)),
        "a directory of 4 GB": patched(end + 12, "<I", 4 * GIGA - 2),
        "a directory elsewhere": patched(end + 16, "<I", 0),
        "a comment": stored[:-2] + b"\x05\x00hello",
        "bytes after the end": stored + b"more",
        "a name with ..": archive(("a/../data.pkl", plain[1]), ("a/data/0", numbers)),
        "an absolute name": archive(("/a/data.pkl", plain[1]), ("/a/data/0", numbers)),
        "an entry twice": archive(plain, ("b/data.pkl", plain[1]), ("a/data/0", numbers)),
        "code beside it": archive(plain, ("a/data/0", numbers), ("a/code/run.py", b"import os")),
        "no pickle": archive(("a/data/0", numbers)),
        "no numbers": archive(plain),
        "other numbers": archive(plain, ("a/data/1", numbers)),
        "fewer numbers": archive(plain, ("a/data/0", numbers[:-4])),
        "more elements than numbers": archive(("a/data.pkl", tensor_pickle(elements=1 << 40)), ("a/data/0", numbers)),
        "another dtype": archive(("a/data.pkl", tensor_pickle("DoubleStorage", 8)), ("a/data/0", numbers)),
        "a dtype that is quantized": archive(("a/data.pkl", tensor_pickle("QInt8Storage")), ("a/data/0", numbers)),
        "strides beyond the numbers": archive(("a/data.pkl", tensor_pickle(stride="K\x02\x85")), ("a/data/0", numbers)),
        "a shape of more than there is": archive(
            ("a/data.pkl", tensor_pickle(size="J\xff\xff\xff\x7f\x85", stride="K\x00\x85")), ("a/data/0", numbers)
        ),
        "strides of nobody": archive(("a/data.pkl", tensor_pickle(stride=")")), ("a/data/0", numbers)),
        "big-endian": archive(plain, ("a/data/0", numbers), ("a/byteorder", b"big")),
        "a list of it": torch_file([torch.arange(16.0)]),
        "half of it": whole[: len(whole) // 2],
        "a value that is none": torch_file("text"),
        "a parameter": torch_file(torch.nn.Parameter(torch.arange(16.0))),
        "sparse": torch_file(torch.arange(16.0).to_sparse()),
        "no zip": b"\x80\x02N.",
        "nothing": b"",
        **{f"with {name}": archive(("a/data.pkl", data), ("a/data/0", numbers)) for name, data in bombs().items()},
    }


def header(content: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    raw = content.encode() if isinstance(content, str) else content
    return number(len(raw) if length is None else length, 8) + raw + data


def row(shape: str = "[4]", dtype: str = "F32", start: object = 0, stop: object = 16) -> str:
    return f'{{"dtype": "{dtype}", "shape": {shape}, "data_offsets": [{start}, {stop}]}}'


@functools.cache
def safetensors() -> dict[str, bytes]:
    data = bytes(16)
    return {
        "a header of 2 to the 63 bytes": header("{}", length=1 << 63),
        "a header of 90 MB": header("{}", length=90_000_000),
        "a header of a million lists": header("[" + "[]," * 1_000_000 + "[]]"),
        "a header of three million numbers": header('{"a": [' + "1.5," * 3_000_000 + "1]}"),
        "a header of a million keys": header("{" + ",".join(f'"k{n}":{{}}' for n in range(1_000_000)) + "}"),
        "a header of 40 MB of text": header('{"__metadata__": {"a": "' + "x" * 40_000_000 + '"}}'),
        "a header of levels": header("[" * 100_000),
        "levels in a tensor": header('{"a": ' * 50_000),
        "a shape of levels": header(f'{{"a": {row("[" * 900 + "]" * 900)}}}', data),
        "a number of a million digits": header(f'{{"a": {row(stop="9" * 1_000_000)}}}', data),
        "a shape of 2 to the 60": header(f'{{"a": {row("[1152921504606846976, 16]")}}}', data),
        "a shape of a million": header(f'{{"a": {row("[" + "1," * 1_000_000 + "4]")}}}', data),
        "a negative shape": header(f'{{"a": {row("[-4]")}}}', data),
        "a shape that is text": header(f'{{"a": {row(chr(34) + "4" + chr(34))}}}', data),
        "a shape that is a float": header(f'{{"a": {row("[4.0]")}}}', data),
        "a shape that is no number": header(f'{{"a": {row("[NaN]")}}}', data),
        "a shape that is infinite": header(f'{{"a": {row("[1e999]")}}}', data),
        "a dtype of nobody": header(f'{{"a": {row(dtype="F31")}}}', data),
        "offsets in reverse": header(f'{{"a": {row(start=16, stop=0)}}}', data),
        "offsets beyond the file": header(f'{{"a": {row("[4000]", stop=16000)}}}', data),
        "a gap": header(f'{{"a": {row("[2]", start=8)}}}', data),
        "an overlap": header(f'{{"a": {row()}, "b": {row()}}}', data),
        "more than is described": header(f'{{"a": {row()}}}', data + b"x"),
        "less than is described": header(f'{{"a": {row()}}}', data[:-1]),
        "a name twice": header(f'{{"a": {row()}, "a": {row()}}}', data),
        "a name of a megabyte": header(f'{{"{"x" * 1_000_000}": {row()}}}', data),
        "a name with an end of line": header(f'{{"a\\nb": {row()}}}', data),
        "no UTF-8": header(b'{"a\xff": 1}'),
        "a list": header("[]"),
        "a key too many": header('{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], "code": "x"}}', data),
        "metadata that is a list": header('{"__metadata__": []}'),
        "seven bytes": b"\0" * 7,
        "nothing": b"",
        "no JSON": header("import os"),
        "text before its end": header('{"a'),
    }


@functools.cache
def texts() -> dict[str, bytes]:
    """Texts in the place of JSON, and of YAML."""
    return {
        "a million lists": b"[" + b"[]," * 1_000_000 + b"[]]",
        "three million numbers": b"[" + b"1.5," * 3_000_000 + b"1]",
        "a million keys": b"{" + b",".join(b'"k%d":0' % n for n in range(1_000_000)) + b"}",
        "a million texts": b"[" + b",".join(b'"%d"' % n for n in range(1_000_000)) + b"]",
        "a hundred thousand levels": b"[" * 100_000,
        "levels of mappings": b'{"a":' * 100_000,
        "900 levels": b"[" * 900 + b"]" * 900,
        "a million digits": b'{"a": ' + b"9" * 1_000_000 + b"}",
        "a million digits after the point": b'{"a": 0.' + b"9" * 1_000_000 + b"}",
        "NaN": b'{"a": NaN}',
        "infinity": b'{"a": -Infinity}',
        "1e999": b'{"a": 1e999}',
        "a key twice": b'{"a": 1, "a": 2}',
        "no UTF-8": b'{"a": "\xff"}',
        "half a character": b'{"a": "\\ud800"}',
        "UTF-16": '{"a": 1}'.encode("utf-16"),
        "30 MB of text": b'"' + b"x" * 30_000_000 + b'"',
        "30 MB of backslashes": b'"' + b"\\\\" * 15_000_000 + b'"',
        "30 MB of spaces": b" " * 30_000_000,
        "a character beyond": b'{"a": "\xf4\x90\x80\x80"}',
        "two values": b"{} {}",
        "a comment": b"{} // x",
        "a comma too many": b'{"a": 1,}',
        "single quotes": b"{'a': 1}",
        "no end": b'{"a": [1, 2',
        "a null byte": b'{"a": "\0"}',
        "nothing": b"",
        "a number": b"1",
        "a text": b'"a"',
        "null": b"null",
        "code": b"__import__('os').system('true')",
        "a hundred anchors": b"\n".join(
            [b"a0: &a0 [x]", *(b"a%d: &a%d [*a%d, *a%d]" % (n, n, n - 1, n - 1) for n in range(1, 100))]
        ),
        "an object of Python": b"a: !!python/object/apply:os.system [true]",
        "a hundred thousand keys of YAML": b"\n".join(b"k%d: 0" % n for n in range(100_000)),
        "levels of YAML": b"\n".join(b" " * n + b"a:" for n in range(2_000)),
    }
