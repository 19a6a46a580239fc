"""`autopar`: one command line for all that is asked from a shell.

Only the module of the command that is run is imported, so that `autopar --help` starts at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence

from autopar.cli.command import COMMANDS, INTERRUPTED, Commands, start


def add_command(commands: Commands, name: str) -> None:
    """A command with its arguments, one of `COMMANDS`."""
    match name:
        case "plan":
            from autopar.cli import plan

            plan.add_parser(commands)
        case "price":
            from autopar.cli import price

            price.add_parser(commands)
        case "dump":
            from autopar.cli import dump

            dump.add_parser(commands)
        case "export":
            from autopar.cli import export

            export.add_parser(commands)
        case "tune":
            from autopar.cli import tune

            tune.add_parser(commands)
        case "doctor":
            from autopar.cli import doctor

            doctor.add_parser(commands)
        case "calibrate":
            from autopar.cli import calibrate

            calibrate.add_parser(commands)
        case "estimate":
            from autopar.cli import estimate

            estimate.add_parser(commands)
        case "completion":
            from autopar.cli import completion

            completion.add_parser(commands)


def parser(whole: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """The command line. whole: the commands that have their arguments in it; of others it has the name."""
    autopar_parser = argparse.ArgumentParser(
        prog="autopar",
        description="Parallel PyTorch programs from plain models: planned, priced, looked at, measured.",
        epilog="`autopar COMMAND --help` has the arguments of a command, and an example.",
    )
    autopar_parser.set_defaults(whole=parser)
    commands = autopar_parser.add_subparsers(metavar="COMMAND", required=True)
    for name, about in COMMANDS.items():
        if name in whole:
            add_command(commands, name)
        else:
            commands.add_parser(name, help=about)
    return autopar_parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Gives its exit status, as `command.start` does."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        known = parser([word for word in words if word in COMMANDS][:1])
    except KeyboardInterrupt:  # while the command is imported
        return INTERRUPTED
    return start(known, words)


if __name__ == "__main__":
    sys.exit(main())
