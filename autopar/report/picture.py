"""Pictures as self-contained SVG with text that stays text and hints that show on hovering; drawn by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from autopar.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SVG = "http://www.w3.org/2000/svg"


def empty_picture(
    width: float, height: float, *, left: float, right: float, top: float, bottom: float
) -> tuple[Figure, Axes]:
    """A picture of so many pixels, and axes inside its margins. Raises InputError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "pictures are drawn by matplotlib, which is not installed; pip install 'autopar[plots]'"
        ) from None
    inside = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    axes = figure.add_axes(inside)
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(color="#e5e5e5")
    axes.tick_params(length=0, labelcolor="#555555")
    return figure, axes


def svg_text(figure: Figure, hints: Mapping[str, str]) -> str:
    """The picture as SVG. hints: what hovering shows, by the id (gid) of what was drawn."""
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "autopar", "font.size": 11}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    ElementTree.register_namespace("", _SVG)
    root = ElementTree.fromstring(written.getvalue())
    for group in root.iter(f"{{{_SVG}}}g"):
        if hint := hints.get(group.get("id", "")):
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = hint
            group.insert(0, title)
    return ElementTree.tostring(root, encoding="unicode") + "\n"
