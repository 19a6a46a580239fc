"""The pages of the project name files that exist, link to what exists, stand in the site, and keep to their size.

Read are README.md, CONTRIBUTING.md and every page of docs/, and the links of CHANGELOG.md. A path in backquotes that starts
at a top-level folder (`passes/lower/cut.py`) is one of the tree; a bare name (`cut.py`) is the name of some file of it,
unless programs are emitted with a file of that name.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

import autopar
from tests.test_house import ORDER, ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
MAP = ROOT / "docs" / "design.md"
MECHANISMS = sorted((ROOT / "docs" / "design").glob("*.md"))
FOLDERS = ("autopar", "passes", "costmodel", "codegen", "tests", "benchmarks", "examples", "docs")
PATH = re.compile(rf"`(?:python (?:-m pytest )?)?((?:{'|'.join(FOLDERS)})/[\w./-]*)")
MODULE = re.compile(rf"python -m ((?:{'|'.join(FOLDERS)})\.[\w.]+)")
BARE_NAME = re.compile(r"`(\w+\.py)`")
EMITTED = ("run.py", "pipeline.py", "user_factories.py")
LINK = re.compile(r"\]\(([^)\s]+)\)")
LINKING = [*PAGES, ROOT / "CHANGELOG.md"]
OUTSIDE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages of the site that lie outside of docs/ (docs/site/links.py)."""
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)

MOST_LINES_OF_MAP = 250
MOST_LINES_OF_README = 150
MOST_WORDS = 40
LEAST_LINES, MOST_LINES = 80, 300
"""Lines of the page of a mechanism: shorter, and it is a section of another page; longer, and it is two."""

NAMES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def as_github(title: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def as_mkdocs(title: str) -> str:
    """The anchor that Python-Markdown makes of a heading, and so the site."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors(page: Path, slug: Callable[[str], str]) -> set[str]:
    """The anchors of a page's headings; of two that are alike the first has it alone."""
    return {slug(title) for title in re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)}


def section(page: Path, title: str) -> str:
    return re.split(r"^## ", page.read_text().split(f"\n## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[str]:
    """The rows of the tables in a text, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [line for line, after in zip(lines, [*lines[1:], ""], strict=True) if not {line[:4], after[:4]} & {"|---"}]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_named_file_exists(page: Path) -> None:
    text = page.read_text()
    named = [ROOT / path for path in PATH.findall(text)]
    named += [ROOT / (module.replace(".", "/") + ".py") for module in MODULE.findall(text)]
    missing = [name_of(path) for path in named if not path.exists()]
    missing += [name for name in BARE_NAME.findall(text) if name not in NAMES and name not in EMITTED]
    assert not missing, missing


def links(page: Path) -> list[str]:
    return LINK.findall(FENCED.sub("", page.read_text()))


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    """Its anchor is there both in the repository and on the site, which make them of headings in their own ways."""
    broken = []
    for link in links(page):
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        there = (page.parent / target).resolve() if target else page
        known = there.exists() and there.is_relative_to(ROOT)
        if not known or (anchor and not all(anchor in anchors(there, slug) for slug in (as_github, as_mkdocs))):
            broken.append(link)
    assert not broken, broken


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_links_that_leave_the_project_are_addresses(page: Path) -> None:
    for link in links(page):
        if re.match(r"\w+:", link):
            address = urlsplit(link)
            assert address.scheme == "https", link
            assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", address.netloc), link


@pytest.mark.parametrize(
    ("title", "github", "mkdocs"),
    [
        ("What is refused", *["what-is-refused"] * 2),
        ("`autopar.parallelize`: a script", *["autoparparallelize-a-script"] * 2),
        ("Time — and memory", "time--and-memory", "time-and-memory"),
        ("Größe", "größe", "groe"),
    ],
)
def test_anchors_are_made_as_they_are_made_there(title: str, github: str, mkdocs: str) -> None:
    assert (as_github(title), as_mkdocs(title)) == (github, mkdocs)


SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def listed(nav: Any) -> Iterator[str]:
    """The pages of a navigation in their order."""
    for entry in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from [entry] if isinstance(entry, str) else listed(entry)


def test_every_page_stands_in_the_navigation_once() -> None:
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed(SITE["nav"])) == sorted([*pages, *OUTSIDE]), "mkdocs.yml lists every page, one line each"
    assert all((ROOT / page).exists() for page in OUTSIDE.values())


def test_the_site_fetches_nothing_from_elsewhere() -> None:
    assert SITE["theme"]["font"] is False
    assert "offline" in SITE["plugins"]
    named = [*SITE["extra_css"], *SITE["extra"]["polyfills"]]
    assert all((ROOT / "docs" / path).exists() for path in named)
    assert "://" not in (ROOT / "mkdocs.yml").read_text()


def in_sources() -> set[str]:
    """The options of command lines that sources and tests have."""
    sources = [path for folder in FOLDERS[:-1] for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".j2")]
    text = "\n".join(path.read_text() for path in [*sources, ROOT / "Makefile"])
    return set(re.findall(r"--[a-z][a-z0-9-]+", text))


def of_megatron() -> set[str]:
    """The flags of Megatron that its parser is known by."""
    table = json.loads((ROOT / "tests/exchange/megatron_arguments.json").read_text())
    return {f"--{name.replace('_', '-')}" for name in table["flags"]}


def test_options_that_pages_name_are_options() -> None:
    known = in_sources() | of_megatron()
    for page in PAGES:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w-])", page.read_text()))
        assert named <= known, (name_of(page), named - known)


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_python_names_that_pages_use_are_there(page: Path) -> None:
    text, fields = page.read_text(), {one.name for one in dataclasses.fields(autopar.Options)}
    for name in re.findall(r"`autopar\.(\w+)", text):
        assert hasattr(autopar, name) or importlib.util.find_spec(f"autopar.{name}"), name
    assert {*re.findall(r"\bOptions\.(\w+)", text), *re.findall(r"\bOptions\((\w+)=", text)} <= fields
    assert all(hasattr(autopar.ParallelProgram, name) for name in re.findall(r"`program\.(\w+)\(", text))


API = re.findall(r"^(?:::: |### `)([\w.]+)`?$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)


def test_every_public_name_is_on_the_page_of_names() -> None:
    other_names = {"Program": "ParallelProgram"}  # the same class
    public = {f"autopar.{other_names.get(name, name)}" for name in autopar.__all__}
    assert public <= set(API)
    assert {name for name in API if re.fullmatch(r"autopar\.\w+", name)} == public
    assert len(API) == len(set(API))


@pytest.mark.parametrize("name", [name for name in API if not name.startswith("autopar.integrations.")])
def test_names_of_the_page_are_there(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    module = module if module.startswith("autopar") else f"autopar.{module}"
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", [name for name in API if name.startswith("autopar.integrations.")])
def test_names_of_trainers_are_in_their_files(name: str) -> None:
    """Importing them needs the packages that they are for."""
    module, _, attribute = name.rpartition(".")
    text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert re.search(rf"^(?:class|def) {attribute}\b", text, re.MULTILINE)


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES_OF_README


def test_the_map_fits_on_a_few_screens() -> None:
    assert len(MAP.read_text().splitlines()) <= MOST_LINES_OF_MAP


def test_the_glossary_is_short() -> None:
    words = rows(section(MAP, "Words"))
    assert 20 < len(words) <= MOST_WORDS


def test_the_map_names_every_room_in_the_order_of_their_imports() -> None:
    named = re.findall(r"`([\w/.]+)`", "".join(row.split("|")[1] for row in rows(section(MAP, "Rooms"))))
    rooms = [name.removeprefix("autopar/").removesuffix(".py").replace("/", ".") for name in named]
    assert rooms == ORDER.split()


@pytest.mark.parametrize("page", MECHANISMS, ids=name_of)
def test_a_mechanism_has_one_page_that_the_map_links(page: Path) -> None:
    assert f"(design/{page.name})" in MAP.read_text()
    assert LEAST_LINES <= len(page.read_text().splitlines()) <= MOST_LINES
