"""Checks between ranks: they came, reach each other, and run the same program in the order of the plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from ipaddress import ip_address

from .facts import Facts
from .finding import Expected, Finding, alike, numbers_text, who

# ---- who came


def roll_call(
    ranks: int, came: Mapping[int, Sequence[Facts]], waited_s: float, machines: bool = False
) -> list[Finding]:
    """Who did not come, and who came twice. came: by rank, every process that said to be it."""
    noun = "machine" if machines else "rank"
    found = []
    absent = [rank for rank in range(ranks) if not came.get(rank)]
    if absent:
        present = [those[0] for those in came.values() if those]
        found.append(
            Finding(
                f"absent {noun}s",
                f"{noun}{'s' if len(absent) > 1 else ''} {numbers_text(absent)}",
                f"did not come in {waited_s:.0f} s; {who(present)} did",
                "see that it was started, with the same MASTER_ADDR and MASTER_PORT, that the first machine's firewall lets "
                "that port in, and that no two machines have the same NODE_RANK",
            )
        )
    twice = {rank: those for rank, those in came.items() if len({(o.host, o.process) for o in those}) > 1}
    for rank, those in list(twice.items())[:4]:
        found.append(
            Finding(
                f"the same {noun} twice",
                f"{noun} {rank}",
                "came from " + " and ".join(f"{one.host} (process {one.process})" for one in those[:3]),
                "give every machine a NODE_RANK of its own, and stop what an earlier start has left running",
            )
        )
    return found


# ---- the network


def socket_interfaces(facts: Sequence[Facts], _: Expected) -> Iterator[Finding]:
    """Interfaces that the environment names exist, are up and have an address."""
    for variable in sorted({name for one in facts for name in one.named}):
        for (names, problem), ranks in alike(facts, partial(_interface_problem, variable=variable)):
            if problem:
                have = ", ".join(i.name for i in ranks[0].interfaces if i.up and i.address) or "none"
                yield Finding(
                    "network interface",
                    who(ranks),
                    f"{variable}={names}, but {problem}",
                    f"set {variable} to one that is up and joins the machines; there are {have}",
                )


def _interface_problem(one: Facts, variable: str) -> tuple[str, str]:
    """The value of the variable on a rank, and what is wrong with it. Of NCCL's forms, `=name` is a whole name, others
    are the beginnings of names, and `^` leaves names out."""
    said = one.named.get(variable, "")
    if not said or said.startswith("^"):
        return said, ""
    exact = variable.startswith("GLOO") or said.startswith("=")
    for name in said.lstrip("=").split(","):
        matching = [i for i in one.interfaces if i.name == name or (not exact and i.name.startswith(name))]
        if not matching:
            return said, f"there is no interface {name}"
        if not any(i.up for i in matching):
            return said, f"{name} is down"
        if not any(i.address for i in matching):
            return said, f"{name} has no address"
    return said, ""


def addresses(facts: Sequence[Facts], _: Expected) -> Iterator[Finding]:
    """The master's name is known everywhere, and machines know each other by addresses that others can reach."""
    unknown = [one for one in facts if not one.master_addresses]
    if unknown:
        yield Finding(
            "address of the first machine",
            who(unknown),
            f"MASTER_ADDR={unknown[0].master} is no name that this machine knows",
            "set MASTER_ADDR to the first machine's address, or enter its name in the DNS or /etc/hosts",
        )
    if len({one.host for one in facts}) > 1:
        own = [one for one in facts if one.address and ip_address(one.address).is_loopback]
        if own:
            yield Finding(
                "network interface",
                who(own),
                f"it would be reached at {own[0].address}, which only its own machine reaches",
                f"set {own[0].backend.upper()}_SOCKET_IFNAME to the interface that joins the machines, or give the host's name "
                "that interface's address in /etc/hosts",
            )


# ---- the program


def program_files(facts: Sequence[Facts], _: Expected) -> Iterator[Finding]:
    """Every rank has all files of the program, and all have the same."""
    for fact, remedy in _MISSING:
        for names, ranks in alike(facts, fact):
            if names:
                shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                yield Finding("missing file", who(ranks), shown, remedy)
    kinds = alike([one for one in facts if not one.missing], lambda one: (one.files, one.changed))
    kinds.sort(key=lambda row: len(row[0][1]) > 0)  # as they were written: these are right
    for (digest, changed), ranks in kinds[1:]:
        evidence = f"{', '.join(changed[:3])} changed since" if changed else f"its files have the hash {digest}"
        yield Finding(
            "another program",
            who(ranks),
            f"{evidence}, unlike at {who(kinds[0][1])} ({kinds[0][0][0]})",
            "copy the same directory to every machine, or give one that all of them share",
        )


_MISSING: tuple[tuple[Callable[[Facts], tuple[str, ...]], str], ...] = (
    (lambda one: one.missing, "copy the whole directory of the program to the machine again"),
    (lambda one: one.wanted, "an argument names it: give a path that every machine has"),
)


def _version(one: Facts, name: str) -> str:
    return one.versions.get(name, "none")


def versions(facts: Sequence[Facts], _: Expected) -> Iterator[Finding]:
    """All ranks run the same Python, torch, CUDA and NCCL."""
    for name in sorted({name for one in facts for name in one.versions}):
        kinds = alike(facts, partial(_version, name=name))
        for version, ranks in kinds[1:]:
            yield Finding(
                "another version",
                who(ranks),
                f"{name} {version}, the others have {kinds[0][0]}",
                f"install {name} {kinds[0][0]} there, or start every machine from the same image",
            )


# ---- the ranks


def world_size(facts: Sequence[Facts], expected: Expected) -> Iterator[Finding]:
    """torchrun started as many ranks as the program has."""
    if expected.by_machine:
        return
    for ranks, those in alike(facts, lambda one: one.ranks):
        if ranks != expected.ranks:
            yield Finding(
                "number of ranks",
                who(those),
                f"torchrun started {ranks}, the program is for {expected.ranks}",
                "make --nnodes times --nproc-per-node that, the same on every machine",
            )


def order_of_ranks(facts: Sequence[Facts], expected: Expected) -> Iterator[Finding]:
    """The ranks of a machine follow each other, as the cluster's description counts them, and so do their devices."""
    if expected.by_machine:
        return
    per_node = expected.machines.ranks_per_node if expected.machines else facts[0].local_ranks
    hosts: dict[str, list[Facts]] = defaultdict(list)
    for one in facts:
        hosts[one.host].append(one)
    apart = [one for ranks in hosts.values() if _apart(ranks, per_node) for one in ranks]
    if apart and len(hosts) > 1:
        yield Finding(
            "swapped ranks",
            who(apart),
            f"the plan has {per_node} ranks that follow each other on a machine, beginning with a multiple of {per_node}",
            "give every machine a NODE_RANK of its own, 0, 1, …, and the same --nproc-per-node; set no RANK yourself",
        )
    turned = [one for ranks in hosts.values() for one in ranks if _turned(one, ranks)]
    if turned and not apart:
        yield Finding(
            "swapped ranks",
            who(turned),
            f"LOCAL_RANK is {numbers_text([one.local_rank for one in turned])}: neighbours in the plan are none here",
            "let torchrun set RANK and LOCAL_RANK: they count alike",
        )


def _apart(ranks: Sequence[Facts], per_node: int) -> bool:
    first = ranks[0].rank
    return [one.rank for one in ranks] != list(range(first, first + len(ranks))) or first % per_node != 0


def _turned(one: Facts, of_host: Sequence[Facts]) -> bool:
    return one.rank - of_host[0].rank != one.local_rank - of_host[0].local_rank
