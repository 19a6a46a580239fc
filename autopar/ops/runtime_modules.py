"""The modules of the runtime whose functions emitted lines call, by the names that the files know them by."""

from __future__ import annotations

import types
from collections.abc import Iterable

from autopar import runtime
from autopar.runtime.kernels import bags, batch_norm, losses, moves, ops, rnn, scans, selection, softmax
from autopar.runtime.kernels.attention import attention, zigzag
from autopar.runtime.kernels.experts import experts
from autopar.runtime.kernels.images import images, pools

RUNTIME_MODULES: dict[str, types.ModuleType] = {
    "attention": attention,
    "bags": bags,
    "batch_norm": batch_norm,
    "experts": experts,
    "images": images,
    "losses": losses,
    "moves": moves,
    "ops": ops,
    "pools": pools,
    "rnn": rnn,
    "scans": scans,
    "selection": selection,
    "softmax": softmax,
    "zigzag": zigzag,
}


def home_packages(names: Iterable[str]) -> dict[str, list[str]]:
    """Packages of the runtime, below its own name, with the modules of `names` that lie in each: `kernels.images: pools`."""
    packages: dict[str, list[str]] = {}
    for name in sorted(names):
        package = RUNTIME_MODULES[name].__name__.removeprefix(f"{runtime.__name__}.").rpartition(".")[0]
        packages.setdefault(package, []).append(name)
    return dict(sorted(packages.items()))
