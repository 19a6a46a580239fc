"""Pages and docstrings as the site has them, where what builds it is installed (the extra `docs`)."""

from __future__ import annotations

import importlib.util
from types import ModuleType, SimpleNamespace

import pytest

from tests.test_docs import OUTSIDE
from tests.test_house import ROOT

SITE = ROOT / "docs" / "site"


def of_site(name: str, needs: str) -> ModuleType:
    """A module of docs/site; the test is skipped where the package that it needs is not installed."""
    pytest.importorskip(needs)
    spec = importlib.util.spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Files:
    """The pages of a site by name, as mkdocs gives them to hooks."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def get_file_from_path(self, name: str) -> str | None:
        return name if name in self.names else None


def led(page: str, text: str) -> str:
    links = of_site("links", "mkdocs")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    return links.on_page_markdown(
        text, page=SimpleNamespace(file=SimpleNamespace(src_uri=page)), config=None, files=Files(*pages, *links.OUTSIDE)
    )


def test_links_of_the_repository_lead_to_pages_of_the_site() -> None:
    assert led("index.md", "[a](docs/data.md#x)") == "[a](data.md#x)"
    assert led("design/ops.md", "[a](../../README.md)") == "[a](../index.md)"
    assert led("design.md", "[`a`](../CONTRIBUTING.md#b)") == "[`a`](contributing.md#b)"
    assert led("data.md", "[a](clusters.md), [b](https://pytorch.org)") == "[a](clusters.md), [b](https://pytorch.org)"


def test_links_to_sources_become_their_words_and_missing_files_stay_wrong() -> None:
    assert led("design/capture.md", "see [`p`](../../autopar/ir/program.py).") == "see `p`."
    assert led("data.md", "[a](no_such_page.md)") == "[a](no_such_page.md)"


def test_links_in_code_stay() -> None:
    text = "```text\n[a](docs/data.md)\n```\n"
    assert led("index.md", text) == text


def test_what_is_said_of_arguments_is_a_list() -> None:
    listed = of_site("named_items", "griffe").listed
    text = "Compile.\n\nmodel: any, real\nor not. size(x), n: two: of them.\n\nRaises: nothing."
    assert listed(text, ["model", "size", "n"]) == (
        "Compile.\n\n- `model`: any, real or not.\n- `size(x), n`: two: of them.\n\nRaises: nothing."
    )
    assert listed("one: two", []) == "one: two"


def test_the_site_is_of_files_that_are_there() -> None:
    files = {"iframe-worker.js", "links.py", "named_items.py", "quiet.css"}
    assert {path.name for path in SITE.iterdir() if path.is_file()} == files


def test_pages_from_outside_are_those_of_the_navigation() -> None:
    assert of_site("links", "mkdocs").OUTSIDE == OUTSIDE
