"""The config.json of a Hugging Face model, as a file that the user names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autopar.errors import InputError


def read_config(path: str | Path) -> dict[str, Any]:
    """The fields of a config.json. Raises InputError where the file cannot be read, or holds something else."""
    try:
        config = json.loads(Path(path).read_text())  # such files hold infinities
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot read the model config ({error})") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: a model config is an object with fields, this is {type(config).__name__}")
    return config
