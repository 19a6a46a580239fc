"""torch's reader of checkpoints, made to read data only: checked metadata, and no pickled objects among the values.

Both run in torch's own loading, over processes or alone. What goes wrong there comes out as CheckpointError.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from .checkpoint_metadata import read_metadata
from .errors import CheckpointError
from .schema import SchemaError


class DataReader(FileSystemReader):
    """Reads the metadata once. Raises CheckpointError where the directory holds no checkpoint, or a damaged one."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__(str(directory))
        try:
            self.metadata = read_metadata(Path(directory))
        except OSError as error:
            raise CheckpointError(f"{directory} is no checkpoint directory: {error}") from error
        except SchemaError as error:
            raise CheckpointError(f"{directory}: the checkpoint's .metadata is not to be read: {error}") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


class DataPlanner(DefaultLoadPlanner):
    """Takes values that are no tensors as plain data: text and numbers. The state that is loaded is flat."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


@contextlib.contextmanager
def named(directory: str | Path, problem: str = "is damaged", instead: str = "take another one") -> Iterator[None]:
    """Inside, what torch raises about the files of a checkpoint is a CheckpointError."""
    try:
        yield
    except CheckpointException as error:
        causes = [failure for failure, _ in error.failures.values()] or [error]
        said = next((text for text in (str(cause).strip() for cause in causes) if text), type(causes[0]).__name__)
        raise CheckpointError(
            f"{directory}: the checkpoint {problem} ({type(causes[0]).__name__}: {said.splitlines()[0][:300]}); {instead}"
        ) from error
