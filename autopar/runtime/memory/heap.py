"""Memory that a step frees stays in the process, for the next step.

glibc gives the end of its heap back to the system when much of it is free, which is so after every step, and maps large
tensors anew each time: the next step touches those pages for the first time, and the system clears them again. That took up to
a quarter of a step of programs on CPUs.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_MOST = (1 << 31) - 1
_LARGEST_IN_HEAP = 32 << 20  # glibc takes no more


def keep_freed_memory() -> None:
    """Tell malloc to keep what is freed; tensors of more than 32 MiB still come from the system. Does nothing where malloc
    is not glibc's."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    for setting, value in ((_TRIM_THRESHOLD, _MOST), (_TOP_PAD, 16 << 20), (_MMAP_THRESHOLD, _LARGEST_IN_HEAP)):
        mallopt(setting, value)
