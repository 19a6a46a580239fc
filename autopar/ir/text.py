"""Bytes, seconds, runs of calls and names of ops as people read them."""


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


def energy_text(joules: float) -> str:
    """`1.2 kJ`."""
    for unit, scale in (("GJ", 1e9), ("MJ", 1e6), ("kJ", 1e3), ("J", 1.0)):
        if joules >= scale:
            return f"{joules / scale:.3g} {unit}"
    return f"{joules * 1e3:.3g} mJ"


def calls_text(first: int, end: int) -> str:
    """`3–7`: calls 3 to 7, where end is 8; `none` for a stage that has none."""
    if first == end:
        return "none"
    return str(first) if first == end - 1 else f"{first}–{end - 1}"


def short_op(op: str) -> str:
    """An op's name without the parts that all have in common."""
    return op.removeprefix("aten.").removeprefix("autopar.").removesuffix(".default")
