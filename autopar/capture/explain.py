"""Why a model cannot be captured: the user's source line, and the usual fix."""

from __future__ import annotations

import functools
import io
import linecache
import logging
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from autopar.errors import AutoparError, CaptureError, DataError, InputError

_DYNAMIC = (
    "its shape or branch depends on the data. Use a static form: torch.where instead of if, masks instead of boolean "
    "indexing or nonzero, tensors instead of .item(). A loop over the experts that a batch chose: a grouped product "
    "(autopar.grouped_mm), or leave the module as it is and give its class another forward to be traced by: "
    "@autopar.forward_of(TheModule)"
)
_FIXES = (
    (
        ("aten.bincount",),
        "how many counts bincount gives depends on the data. Pass minlength=, the number of classes, to which the data is then "
        "held",
    ),
    (
        (
            "data-dependent",
            "data dependent",
            "guardondatadependent",
            "datadependentoutput",
            "unbacked",
            "dynamicoutputshape",
            "tolist",
            "_local_scalar_dense",
            "constrain_range",
            "element of type number",
        ),
        _DYNAMIC,
    ),
    (
        (".numpy() is not supported", "can't convert", "numpy"),
        "it leaves torch for numpy, which has no graph and no gradient. Use the torch op of the same name",
    ),
    (
        ("functorch", "vmap", "tensorwrapper", "batchedtensor"),
        "it transforms a function (torch.func.grad, vmap, jvp), which has no graph of its own. Write it with batched torch ops",
    ),
)
_INSTEAD = {
    "aten.istft": (
        "it wants to know whether windows that overlap are zero anywhere. Write it out: frames = torch.fft.irfft(x, n, dim=-2) * "
        "window[:, None], F.fold(frames, (1, length), (1, n), stride=(1, hop)), divided by F.fold of window ** 2 in the place of "
        "frames, and n // 2 samples cut off at both ends for center=True"
    )
}
"""Op → what to write in its place, where torch looks at values inside it."""


def explain(error: Exception, model: nn.Module) -> Exception:
    """The named error for what export or tracing raised."""
    if isinstance(error, AutoparError):
        return error
    text = f"{type(error).__name__} {error}"
    where = user_frame(error)
    place = f" at {where}" if where else f" in {type(model).__name__}"
    for signs, fix in _FIXES:
        if any(s in text.lower() for s in signs):
            kind = DataError if fix is _DYNAMIC else CaptureError
            return kind(f"the model cannot be captured{place}: {fix}. ({first_line(text)})")
    if isinstance(error, TypeError) and "argument" in text and f"{type(model).__name__}.forward" in text:
        return InputError(f"example inputs do not match {type(model).__name__}.forward: {first_line(str(error))}")
    return CaptureError(f"the model cannot be captured{place}: {first_line(text)}")


def dynamic_node(graph: fx.Graph) -> fx.Node | None:
    """The first value whose size, or number, only the data decides."""
    for node in graph.nodes:
        value = node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else [value]
        if any(isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) or _unsized(v) for v in values):
            return node
    return None


def dynamic(target: object, model: nn.Module) -> CaptureError:
    """The error for a value that only the data decides, when no line is known."""
    return DataError(f"the model cannot be captured in {type(model).__name__} ({target}): {_DYNAMIC}")


def untraceable(target: object, source: str, error: Exception) -> CaptureError:
    """The error for a captured op that cannot be traced. source: where it stands, in words."""
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        name = ".".join(str(target).split(".")[:2])
        instead = _INSTEAD.get(name, "write what it computes with torch ops that do not")
        return CaptureError(
            f"{name.replace('aten.', 'torch.')} at {source} looks inside at values of its operands, which a trace does not "
            f"have; {instead}"
        )
    return CaptureError(f"cannot trace {target} at {source}: {first_line(str(error))}")


def _unsized(value: object) -> bool:
    return isinstance(value, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape)


def user_frame(error: BaseException) -> str:
    """`file:line in function: code` of the innermost frame outside torch and autopar, else inside torch.nn, or ''."""
    frames: list[traceback.FrameSummary] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames += traceback.extract_tb(current.__traceback__)
        current = current.__cause__ or current.__context__
    frames_shown = [f for f in frames if is_user_file(f.filename)]
    frames_shown = frames_shown or [
        f for f in frames if "/torch/nn/modules/" in f.filename and not f.filename.endswith("module.py")
    ]
    if not frames_shown:
        return ""
    frame = frames_shown[-1]
    code = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    return f"{frame.filename}:{frame.lineno} in {frame.name}: `{code}`"


def current_user_line() -> str:
    """As `user_frame`, of the code that runs now."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}: `{code}`"
        frame = frame.f_back
    return ""


def refusal(does: str, instead: str, kind: type[CaptureError] = CaptureError) -> CaptureError:
    """The error for what forward does at the line of user code that runs now."""
    where = current_user_line()
    return kind(f"forward {does}{f' at {where}' if where else ''}: {instead}")


@functools.cache
def is_user_file(filename: str) -> bool:
    """Whether a file is neither torch's nor the compiler's."""
    path = filename.replace("\\", "/")
    own = any(f"/autopar/{part}" in path for part in ("capture/", "api", "ops/"))
    return not own and "/torch/" not in path and not path.startswith("<") and "/contextlib.py" not in path


def first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else ""


@contextmanager
def quiet() -> Iterator[None]:
    """Within the context export does not print graphs and guards of what it cannot capture: the error says it."""
    loggers = [
        logging.getLogger(n)
        for n in (
            "torch.fx.experimental.symbolic_shapes",
            "torch.export",
            "torch._export",
            "torch._subclasses.fake_tensor",
        )
    ]
    levels = [(one, one.level) for one in loggers]
    for one in loggers:
        one.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", ".*assigned during export", UserWarning
            )  # what outlives a step is refused
            yield
    finally:
        for one, level in levels:
            one.setLevel(level)
