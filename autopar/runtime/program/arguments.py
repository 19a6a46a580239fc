"""The arguments of run.py, and what values they take."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ..comm.backends import BACKENDS
from ..compiled.inductor import COMPILERS

_OF_A_DIRECTORY = (
    "keep",
    "keep_every",
    "on_nan",
    "spike",
    "grad_norm",
    "recheck",
    "recompute",
    "exclude_after",
    "exclude_slow",
)
"""Options that only a run with a directory heeds."""


def parser() -> argparse.ArgumentParser:
    """The command line of run.py."""
    made = argparse.ArgumentParser(prog="run.py", description="Run this program on the ranks torchrun started.")
    count = whole_number(0)
    made.add_argument(
        "--steps", type=count, default=10, help="the run's last step, those before --resume counted (default: 10)"
    )
    made.add_argument(
        "--data",
        help="MODULE:FUNCTION or FILE.py:FUNCTION giving global batches, or this rank's rows of them if it takes an "
        "argument "
        "`shard` (default: random numbers, for a try)",
    )
    made.add_argument("--eval-data", help="the same for --eval-entry, which takes all of it each time")
    made.add_argument(
        "--eval-every", metavar="N", type=count, default=0, help="evaluate after every N steps, and after the last one"
    )
    made.add_argument(
        "--eval-entry",
        metavar="NAME",
        default="evaluate",
        help="which entry of the program that is (default: evaluate)",
    )
    made.add_argument("--weights", help="checkpoint or Hugging Face directory to start from, not the emitted weights")
    made.add_argument("--save", help="checkpoint directory to write at the end")
    made.add_argument("--save-every", type=count, default=0, help="also write it every so many steps")
    made.add_argument("--resume", help="checkpoint directory to continue from, of any mesh")
    made.add_argument(  # torchrun takes `--run` for an abbreviation of one of its own options, also behind the script
        "--run-dir", "--run", dest="run", metavar="DIR", help="save there, and go on from there"
    )
    made.add_argument(
        "--keep", type=whole_number(1), default=3, help="with --run-dir: saved steps that stay (default: 3)"
    )
    made.add_argument("--keep-every", type=count, default=0, help="with --run-dir: every so manieth step stays, too")
    made.add_argument(
        "--on-nan",
        choices=("stop", "rewind", "skip"),
        default="stop",
        help="with --run-dir: if a loss is no number; skip: leave out the update, also where a gradient is none",
    )
    made.add_argument(
        "--spike",
        metavar="FACTOR",
        type=at_least_zero,
        default=0.0,
        help="with --run-dir: rewind where a loss is above so many times the median of those before; 0: never",
    )
    made.add_argument("--grad-norm", action="store_true", help="with --run-dir: say the gradients' norm in every step")
    made.add_argument(
        "--recheck",
        metavar="N",
        type=count,
        default=0,
        help="with --run-dir: compare copies of parameters every N steps",
    )
    made.add_argument(
        "--recompute",
        metavar="N",
        type=count,
        default=0,
        help="with --run-dir: every N steps ranks compute a microbatch's gradients as their neighbours do, and compare",
    )
    made.add_argument(
        "--exclude-after",
        metavar="N",
        type=count,
        default=0,
        help="with --run-dir: leave out a machine whose ranks ended the run N times in a day; 0: never",
    )
    made.add_argument(
        "--exclude-slow",
        metavar="N",
        type=count,
        default=0,
        help="with --run-dir: leave out a machine that is named as slow N times in a row; 0: never",
    )
    made.add_argument(
        "--synchronous", dest="asynchronous", action="store_false", help="with --run-dir: save, then train on"
    )
    made.add_argument("--seed", type=whole_number(-(1 << 63)), default=None, help="seed of random data and dropout")
    made.add_argument("--backend", choices=tuple(BACKENDS), default=None, help="default: nccl with GPUs, else gloo")
    made.add_argument("--timeout", type=above_zero, default=600.0, help="seconds a collective may take (default: 600)")
    made.add_argument(
        "--hang",
        type=at_least_zero,
        default=60.0,
        help="seconds, or two usual steps, for which a rank may stall before the run ends and says who; 0: any",
    )
    made.add_argument("--tier-directory", help="where what rests on NVMe has its files (default: temporary files)")
    made.add_argument(
        "--profile", metavar="DIR", help="write what every rank did when, a file per rank; see autopar-dump"
    )
    made.add_argument("--compiler", choices=COMPILERS, help="compile what is between messages (default: as compiled)")
    made.add_argument(
        "--rebalance",
        action="store_true",
        help="move rows of the batch to faster ranks (default: as compiled, Options(rebalance=True))",
    )
    made.add_argument("--metrics", metavar="FILE", help="a line of JSON per step (default: with --run-dir, in there)")
    made.add_argument("--tensorboard", metavar="DIR", help="the same as scalars for TensorBoard")
    made.add_argument(
        "--prometheus",
        metavar="[ADDRESS:]PORT",
        type=address,
        help="the last step's over HTTP, of rank 0, to this machine alone; 0.0.0.0:PORT: to anybody who reaches it",
    )
    made.add_argument(
        "--preflight", action="store_true", help="look at the machines, links and files in seconds, and do not run"
    )
    made.add_argument("--check", action="store_true", help="compare collectives across ranks before each (slow)")
    return made


def without_a_directory(arguments: argparse.Namespace) -> str:
    """The option that would do nothing in a run without a directory, as it is written; "" where there is none."""
    usual = parser().parse_args([])
    named = {name: f"--{name.replace('_', '-')}" for name in _OF_A_DIRECTORY} | {"asynchronous": "--synchronous"}
    idle = (said for name, said in named.items() if getattr(arguments, name) != getattr(usual, name))
    return "" if arguments.run else next(idle, "--save-every" if arguments.save_every and not arguments.save else "")


def whole_number(least: int) -> Callable[[str], int]:
    """A type of arguments: whole numbers from `least` on that fit into 64 bits."""

    def parse(words: str) -> int:
        value = int(words) if len(words) <= 20 else 1 << 63
        if not least <= value < 1 << 63:
            raise argparse.ArgumentTypeError(f"{words[:24]} is out of range; give a whole number from {least} on")
        return value

    return parse


def address(words: str) -> tuple[str, int]:
    """A type of arguments: an address of this machine, the loopback if there is none, and a port, 0 for any free one."""
    host, _, port = words.rpartition(":")
    value = whole_number(0)(port)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{port} is no port; give a number up to 65535")
    return host.strip("[]") or "127.0.0.1", value


def at_least_zero(words: str) -> float:
    """A type of arguments: seconds, or none."""
    return 0.0 if words == "0" else above_zero(words)


def above_zero(words: str) -> float:
    """A type of arguments: seconds."""
    value = float(words)
    if not 0 < value <= 1e8:
        raise argparse.ArgumentTypeError(f"{words} is out of range; give seconds above 0, of at most 1e8")
    return value
