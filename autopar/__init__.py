"""autopar: a plain PyTorch model and a cluster in, one readable parallel PyTorch program per rank out.

The public names are imported when the first of them is asked for, so that what needs none of them, such as `autopar --help`,
starts at once.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.public import *  # noqa: F403
    from autopar.public import __all__ as __all__

_HERE = Path(__file__).parent
if not (_HERE / "passes").is_dir():  # a checkout: passes, costmodel and codegen lie beside this folder
    __path__.append(str(_HERE.parent))  # noqa: F405

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """A public name, or a module below this package. Raises AttributeError."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import autopar.public as public

    missing = [one for one in public.__all__ if one not in globals()]
    globals().update({one: getattr(public, one) for one in missing}, __all__=public.__all__)
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    """The names that are there, public names included."""
    from autopar.public import __all__ as public_names

    return sorted({*globals(), *public_names})
