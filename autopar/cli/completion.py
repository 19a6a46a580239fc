"""`autopar completion SHELL`: a script that completes the commands of autopar in bash, zsh or fish.

It is written by shtab, which is installed with `pip install 'autopar[completion]'`. bash reads it from
~/.local/share/bash-completion/completions/autopar, zsh from a file _autopar in a folder of its fpath, and fish from
~/.config/fish/completions/autopar.fish.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from autopar.cli.command import Commands, add
from autopar.cli.terminal import show
from autopar.errors import InputError

EXAMPLE = "autopar completion bash > autopar.bash"
SHELLS = ("bash", "zsh", "fish")


def add_parser(commands: Commands) -> None:
    """The command among those of `autopar`."""
    parser = add(commands, "completion", run, __doc__, EXAMPLE)
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    """Print the script; 0. args.whole: makes the command line with the arguments of every command. Raises InputError where shtab
    is missing."""
    try:
        shtab: Any = importlib.import_module("shtab")
    except ImportError as error:
        raise InputError("completions are written by shtab: pip install 'autopar[completion]'") from error
    whole: argparse.ArgumentParser = args.whole()
    complete_paths(whole, shtab.FILE)
    show(shtab.complete(whole, shell=args.shell))
    return 0


def complete_paths(parser: argparse.ArgumentParser, files: object) -> None:
    """Mark, in all commands, the arguments that name files or directories. files: the mark."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices.values():
                complete_paths(own, files)
        elif action.type is Path:
            action.complete = files  # type: ignore[attr-defined]
