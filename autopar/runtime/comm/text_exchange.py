"""Text that ranks send each other beside the program's messages, of which each reads what its schema allows.

torch's own way (`all_gather_object`) unpickles what arrives, which runs whatever another rank, or who speaks for one, has
written. Here lengths go first, in one message of eight bytes a rank, then the text itself; nothing larger than MOST_BYTES is
taken.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import RuntimeProgramError

MOST_BYTES = 1 << 26
"""The most bytes that one rank may send at once."""
MOST_SAID = 1 << 14
"""Characters of an error that is told."""


def one_line(text: str) -> str:
    """Any text, as of an error, such that others may print it: their schema is `schema.paragraph`."""
    return "".join(c if c.isprintable() else " " for c in text[:MOST_SAID])


def tell_all(text: str, group: Any = None, device: torch.device | str = "cpu") -> list[str]:
    """Every rank's text, in the order of the group's ranks, all of which call it. device: what the group sends from. Raises
    RuntimeProgramError, and what torch raises where a rank is gone."""
    data, ranks = text.encode(), dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device), group=group)
    sizes = [int(length) for length in lengths]
    for rank, size in enumerate(sizes):
        if not 0 <= size <= MOST_BYTES:
            raise RuntimeProgramError(
                f"member {rank} of the group would tell {size} bytes; at most {MOST_BYTES} are taken"
            )
    longest = max(sizes)
    if not longest:
        return [""] * ranks
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    everyone = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(ranks)]
    dist.all_gather(everyone, own.to(device), group=group)
    try:
        return [one[:size].cpu().numpy().tobytes().decode() for one, size in zip(everyone, sizes, strict=True)]
    except UnicodeDecodeError as error:
        raise RuntimeProgramError(f"a rank told what is no text ({error.reason})") from error
