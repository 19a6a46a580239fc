"""Programs whose pages are looked at, and what a page holds."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import torch
from torch import nn

import autopar
from autopar.report import facts
from autopar.report.page import page_html

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Layers(nn.Module):
    """Token embeddings, so many layers, and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def compiled(layers: int = 4, cluster: autopar.ClusterSpec | None = None, **options: object) -> autopar.ParallelProgram:
    ids = torch.zeros(8, 4, dtype=torch.long)
    return autopar.compile(
        Layers(layers),
        cluster or autopar.ClusterSpec.local(4),
        (ids, ids),
        loss_fn=lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        optimizer=SGD,
        options=autopar.Options(**options),
    )


class Page(HTMLParser):
    """Tables of a page by their id, rows of cells; all elements with their attributes; all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self._table, self._cell, self._in_data = "", False, False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag == "table":
            self._table = attributes.get("id") or ""
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append("")
            self._cell = True
        self._in_data = attributes.get("id") == "data"

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")
        self._in_data = False

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data += data
        if self._cell:
            self.tables[self._table][-1][-1] += data

    def rows(self, table: str) -> list[list[str]]:
        """The rows of a table below its head."""
        return self.tables[table][1:]


def lanes_of(program: autopar.ParallelProgram) -> dict[str, Any]:
    """The data of the drawn schedule."""
    lanes: dict[str, Any] = json.loads(Page(page_html(facts(program), program.plan)).data)["lanes"]
    return lanes


def figures(html: str) -> dict[str, str]:
    """The answer's figures by name."""
    return dict(re.findall(r"<dt>(.*?)</dt><dd><strong>(.*?)</strong>", html))


def elements_of(html: str) -> Iterator[tuple[str, dict[str, str | None]]]:
    yield from Page(html).elements
