"""Format `tp_plan`: a JSON object {pattern of module names: style}, as transformers takes it (`from_pretrained(tp_plan=…)`).

DeepSpeed's AutoTP and other readers of `base_model_tp_plan` take it too. How many ranks there are is the launcher's to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import InputError
from autopar.exchange.keys import Facts, Format, Read, Written, lost
from autopar.exchange.layout import Layout
from autopar.exchange.patterns import patterns_of
from autopar.runtime.data.schema import shown

STYLES = {
    "colwise": "colwise",
    "colwise_gather": "colwise_gather_output",
    "rowwise": "rowwise",
    "rowwise_split": "rowwise_split_input",
    "vocab": "embedding_rowwise",
}
"""The styles by the names of transformers 5."""
OLDER = {
    "colwise_rep": "colwise_gather",
    "rowwise_rep": "rowwise_split",
    "colwise_allgather": "colwise_gather",
    "rowwise_allreduce": "rowwise",
    "vocab_allreduce": "vocab",
    "local_colwise": "colwise",
    "local_rowwise": "rowwise",
}
"""Names that other versions have for them."""


def write(layout: Layout, facts: Facts) -> Written:
    """The object, and what it says: all ranks of tp in one group, those of dp apart by the launcher."""
    carried = replace(
        Layout(), tp=layout.tp, modules=layout.modules, micro_batch=layout.micro_batch, global_batch=layout.global_batch
    )
    carried = carried.on(facts.ranks) if facts.ranks else replace(carried, dp=layout.dp)
    if carried.dp != layout.dp:
        carried = replace(carried, micro_batch=None)
    styles = {pattern: STYLES[style] for pattern, style in patterns_of(layout.modules).items()}
    return Written({"tp_plan.json": json.dumps(styles, indent=2) + "\n"}, carried, lost(layout, carried, "a tp_plan"))


def read(text: str) -> Read:
    """The styles that an object says; its degree is the launcher's. Raises InputError."""
    values = read_object(text, "a tp_plan")
    names = {own: style for style, own in STYLES.items()} | OLDER
    modules = {pattern: names[style] for pattern, style in values.items() if isinstance(style, str) and style in names}
    unknown = {pattern: shown(style) for pattern, style in values.items() if pattern not in modules}
    return Read(replace(Layout(), modules=modules), unknown)


def read_object(text: str, what: str) -> Mapping[str, Any]:
    """The object of a JSON text. Raises InputError where it is none."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InputError(f"{what} is a JSON object; this is none ({error})") from error
    if not isinstance(values, dict):
        raise InputError(f"{what} is a JSON object, this is {type(values).__name__}")
    return values


FORMAT = Format("tp_plan", "transformers 5.23", write, read)
