"""Bytes, seconds and names of ops as people read them."""


def size_text(nbytes: float) -> str:
    """`1.5 GB`."""
    for unit, scale in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def time_text(seconds: float) -> str:
    """`12.3 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def short_op(op: str) -> str:
    """An op's name without the parts that all have in common."""
    return op.removeprefix("aten.").removeprefix("autopar.").removesuffix(".default")
