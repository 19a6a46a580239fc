"""The page's data as one HTML file: a template with its styles and its script inside, which asks nothing of a network."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from autopar.errors import EmitError
from autopar.plan import Plan
from autopar.report.page.data import PageData, page_data
from autopar.report.predicted_vs_measured import Profile
from autopar.report.program_facts import ProgramFacts
from autopar.runtime.data.schema import shown
from autopar.runtime.data.whole_files import replace_file

ASSETS = "autopar.report.page"


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader(ASSETS, "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def _asset(name: str) -> str:
    return (files(ASSETS) / "assets" / name).read_text(encoding="utf-8")


def page_html(program: ProgramFacts, plan: Plan, profile: Profile | None = None, **answers: Any) -> str:
    """The page of a program as HTML, with a recorded run beside the prediction where one is given. answers: as `page_data` takes
    them. Raises InputError for answers that lack a field."""
    return render(page_data(program, plan, profile, **answers))


def render(data: PageData) -> str:
    """The HTML of a page's data."""
    drawn = {"codes": data.model.codes, "lanes": data.schedule.lanes}
    return (
        _environment()
        .get_template("page.html.j2")
        .render(page=data, styles=_asset("page.css"), script=_asset("page.js"), drawn=_harmless_json(drawn))
    )


def write_page(html: str, path: str | Path) -> Path:
    """Write a page as a file. Raises EmitError where it cannot be written."""
    if not isinstance(path, str | Path) or not str(path) or "\0" in str(path):
        raise EmitError(f"report_html takes the path of a file, not {shown(path)}")
    try:
        replace_file(Path(path), html.encode())
    except OSError as error:
        raise EmitError(f"cannot write the page {path}: {error.strerror}") from error
    return Path(path)


def _harmless_json(value: object) -> str:
    """JSON that ends no script element and opens no comment, whatever names it has."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
