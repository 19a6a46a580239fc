"""A compiled program in torch's structured trace: artefacts that tlparse lists beside those of torch.compile.

With TORCH_TRACE=DIR set torch writes what it compiles to a log in DIR. The plan, the report and the emitted files go there too,
through `torch._logging.trace_structured`, which is private to torch: nothing else here calls it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from torch._logging import trace_structured

from autopar.compiled import Compiled
from autopar.report.words import report


def artifacts(program: Compiled) -> Iterator[tuple[str, str, str]]:
    """Names, encodings ("json" or "string") and texts of a program's artefacts: the plan, the report, and the graph, as the
    emitted files have it: stages that are alike once."""
    yield "autopar_plan", "json", json.dumps(program.plan.to_dict(), indent=1)
    yield "autopar_report", "string", report(program)
    yield "autopar_graph", "string", "\n\n".join(dict.fromkeys((program.pipeline, *program.sources)))


def trace(program: Compiled) -> None:
    """Write a program's artefacts to torch's trace, where one is asked for."""
    if os.environ.get("TORCH_TRACE"):
        for name, encoding, text in artifacts(program):
            _write(name, encoding, text)


def _write(name: str, encoding: str, text: str) -> None:
    said = {"name": name, "encoding": encoding}
    trace_structured("artifact", metadata_fn=lambda: said, payload_fn=lambda: text, expect_trace_id=False)
