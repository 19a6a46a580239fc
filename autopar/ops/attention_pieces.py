"""The work of attention beside its scores where a block of rows meets its keys piece by piece
(`autopar.runtime.kernels.attention.attention`).

A ring brings the keys rank by rank, and the keys before a causal block of rows are apart from its own triangle. Every piece is a
kernel of its own, and what it gives is put together. Bytes that are read and written, by rows and keys of the pieces:

    forward    a piece: the weights of old and new rows (24 numbers a row, 10 passes), out · old + new (5 numbers an element, 2)
               in the end, and to begin with: sums of zeros, and out / total (10 a row, 6 passes, and 3 an element, 2)
    backward   a piece: its part of dq, dk and dv is added (3 an element, 3 passes)
               to begin with: sums of zeros (1 an element), and turns of heads are joined (2)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from autopar.ir.call import OpCall
from autopar.ops.registry import Merged
from autopar.runtime.comm.devices import CPU, Device
from autopar.runtime.kernels.attention.rings import turn_count
from autopar.runtime.kernels.attention.triangle import pieces
from autopar.runtime.kernels.attention.zigzag import runs


def merged(call: OpCall, parts: Mapping[str, int], _: Device = CPU) -> Merged | None:
    """The pieces of attention on the rank with the last block of rows. None: one piece is all of it."""
    q, k, v = (call.operand(name) for name in "qkv")
    of_batch, of_heads, blocks, ranks = (math.ceil(parts.get(factor, 1)) for factor in "bhst")
    count, rows, keys = _of_last_block(q.shape[2], k.shape[2], blocks, ranks, call["causal"], call["order"])
    block_rows, block_keys = q.shape[2] // blocks, k.shape[2] // ranks
    if (count, rows, keys) == (1, block_rows, k.shape[2]):
        return None
    batch, heads, kv_heads = q.shape[0] // of_batch, q.shape[1] // of_heads, k.shape[1] // of_heads
    of_key = batch * kv_heads * (q.shape[3] + v.shape[3]) * k.dtype.itemsize
    turns = turn_count(kv_heads, block_keys * of_key) if ranks > 1 else 1
    kernels, of_rows = count * turns, batch * heads * max(q.dtype.itemsize, 4)
    if call.op.startswith("autopar.attention_grad"):
        moved = (3 * rows + block_rows) * of_rows * q.shape[3]
        moved += (3 * keys + (1 if turns == 1 else 3) * block_keys) * of_key
        return Merged(kernels, 3 * kernels + 1 + 2 * turns, moved)
    moved = rows * of_rows * (24 + 5 * v.shape[3]) + block_rows * of_rows * (10 + 3 * v.shape[3])
    return Merged(kernels, 12 * kernels + 8, moved)


@functools.cache
def _of_last_block(rows: int, keys: int, blocks: int, ranks: int, causal: bool, order: int) -> tuple[int, int, int]:
    """How many pieces the last of so many blocks of rows has with the keys of all ranks, and their rows and keys in all. Rows
    that are all here are put in their natural order, and so are keys."""
    order_of_rows = order if blocks > 1 or ranks > 1 else 0
    own = runs(rows - rows // blocks, rows, rows, order_of_rows)
    size = keys // ranks
    of_ranks = (runs(rank * size, (rank + 1) * size, keys, order if ranks > 1 else 0) for rank in range(ranks))
    found = [piece for block in of_ranks for piece in pieces(own, block, causal)]
    return len(found), sum(piece.rows.size for piece in found), sum(piece.keys.size for piece in found)
