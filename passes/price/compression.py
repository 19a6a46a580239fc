"""Bytes that compressed gradients (`runtime.compression`) send, and the passes over memory before and after that.

A sum of S bytes over n ranks is an exchange of w · S, where w is what a codec makes of a byte, and for an all_reduce a gather of
as much. Passes are counted in the runtime's order, in bytes that kernels read or write per byte of S:

    int8    what was unsent added (3), encoded (9.25), what is lost kept (2); n rows of S/n decoded (3.25) and added (3)
    bf16    encoded (1.5); rows decoded (1.5) and added (3)

and for the second leg a row of S/n encoded, its loss added (int8: 3), and S decoded.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.types import TensorType
from autopar.runtime.gradients.compression import CODECS

_ENCODE = {"bf16": 1.5, "int8": 9.25}
_DECODE = {"bf16": 1.5, "int8": 3.25}
_FEEDBACK = {"bf16": 0.0, "int8": 5.0}
_ADD = 3.0
LEAST_ITEMSIZE = 4
"""Bytes of an element from which on gradients are compressed: narrower ones would lose what is sent later."""


def compression_of(type_: TensorType, compression: str) -> str:
    """How gradients of a type travel where so much is asked for."""
    return compression if type_.dtype.is_floating_point and type_.dtype.itemsize >= LEAST_ITEMSIZE else ""


def wire_share(compression: str, itemsize: int) -> float:
    """Bytes on the wire per byte of a gradient."""
    codec = CODECS[compression]
    return codec.block_bytes / (codec.block * itemsize)


def compressed_messages(kind: str, nbytes: float, compression: str, itemsize: int) -> Iterator[tuple[str, float]]:
    """The messages of a sum (all_reduce or reduce_scatter) of nbytes, each with the bytes of its full array."""
    sent = nbytes * wire_share(compression, itemsize)
    yield "all_to_all", sent
    if kind == "all_reduce":
        yield "all_gather", sent


def compressing_bytes(kind: str, nbytes: float, compression: str, size: int) -> float:
    """Bytes that a rank's kernels read and write for such a sum over `size` ranks."""
    encode, decode, feedback = _ENCODE[compression], _DECODE[compression], _FEEDBACK[compression]
    passes = feedback + encode + decode + _ADD
    if kind == "all_reduce":
        passes += (encode + (_ADD if feedback else 0.0)) / size + decode
    return passes * nbytes
