"""Every argument of a trainer is honoured, decided by autopar, without effect, or refused by name; the docs say which."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import InputError
from autopar.integrations.training_arguments import check_arguments, table, unlisted

PAGE = Path(__file__).parent.parent.parent / "docs" / "trainers.md"


def test_the_docs_have_the_table_of_the_code() -> None:
    assert table() in PAGE.read_text()


def test_every_argument_of_the_installed_package_is_in_one_row() -> None:
    transformers = pytest.importorskip("transformers")
    assert unlisted(transformers.TrainingArguments) == []


def test_what_autopar_does_not_do_is_refused_by_name(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    check_arguments(args)
    args.torch_compile = True
    with pytest.raises(InputError, match="torch_compile=True"):
        check_arguments(args)
