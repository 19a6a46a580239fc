"""A command of `autopar`: a parser among those of the others, and a function that does what was asked.

Each command's module has `add_parser(commands)`, which calls `add`, and `run(args)`, which gives the exit status. How words are
read, and what becomes of errors, is here and the same for all.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from autopar.errors import AutoparError

COMMANDS = {
    "plan": "what autopar.compile would do with a model on a cluster",
    "price": "how long a step of another system's configuration will take",
    "dump": "what a saved program is",
    "export": "a checkpoint as safetensors that from_pretrained loads",
    "tune": "measure the plans of a saved program and keep the fastest",
    "doctor": "who stalled or failed a run; machines before a run",
    "calibrate": "measure this machine for the cost model",
    "estimate": "seconds and bytes of a transformer's step, by formula",
    "completion": "a script that completes these commands in a shell",
}
"""The purpose of each command, in a few words."""
PASSING = ("tune", "doctor")
"""Commands whose words after `--` are for another program."""
USAGE_ERROR = 2
INTERRUPTED = 130
Commands = Any
"""The result of `add_subparsers`."""


def add(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    about: str,
    example: str,
    *,
    passes: bool = False,
) -> argparse.ArgumentParser:
    """The parser of a command. about: what `--help` says before the options; example: a command line, which it ends with;
    passes: words that the command does not know are for another program, and stand in `args.more`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=COMMANDS[name],
        description=about,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, own_parser=parser, passes=passes)
    return parser


def alone(name: str, add_parser: Callable[[Commands], None], argv: Sequence[str] | None = None) -> int:
    """A command that was started as a program of its own, `autopar-NAME`. Gives its exit status."""
    whole = argparse.ArgumentParser(prog="autopar")
    commands = whole.add_subparsers()
    add_parser(commands)
    commands.choices[name].prog = f"autopar-{name}"
    return start(whole, [name, *(sys.argv[1:] if argv is None else argv)])


def start(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command that the words name. Gives its exit status: 2 where something is wrong that a user can change, which is
    told on standard error; 130 after Ctrl-C; 0 where nobody reads the output any more."""
    split = words.index("--") if words[:1] and words[0] in PASSING and "--" in words else len(words)
    args, unknown = parser.parse_known_args(words[:split])
    own: argparse.ArgumentParser = args.own_parser
    args.prog, args.more = own.prog, [*unknown, *words[split + 1 :]]
    if unknown and not args.passes:
        own.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        said = _told(error)
        if said is None:
            raise
        return refuse(args, said)
    return status


def refuse(args: argparse.Namespace, said: object) -> int:
    """The exit status after a mistake that a user can mend, which is told on standard error."""
    print(f"{args.prog}: {said}", file=sys.stderr)
    return USAGE_ERROR


def _told(error: Exception) -> str | None:
    """The message of an error that a user can mend; None of any other."""
    from autopar.runtime.errors import RuntimeProgramError

    if isinstance(error, AutoparError | RuntimeProgramError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return None
