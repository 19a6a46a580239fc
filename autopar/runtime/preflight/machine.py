"""Checks of every machine: devices, shared memory, processors, limits, and the directory that the run writes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..comm.backends import transport_named
from .facts import Facts
from .finding import Expected, Finding, alike, numbers_text, who

LEAST_SHM_PER_RANK = 128 << 20
"""Bytes of shared memory that a rank's NCCL and data loading take; a container has 64 MiB unless told otherwise."""
LEAST_LOCKED = 1 << 30
"""Bytes that a rank must be able to lock for messages over InfiniBand."""


def devices(facts: Sequence[Facts], expected: Expected) -> Iterator[Finding]:
    """Every rank has a GPU of its own, machines have the same ones, in the order in which they sit."""
    if expected.machines is None or not expected.machines.gpu:
        return
    few = [one for one in facts if _sees_too_few(one)]
    if few:
        yield Finding(
            "visible devices",
            who(few),
            f"{len(few[0].devices)} GPUs for {few[0].local_ranks} ranks of {expected.machines.device}",
            "let CUDA_VISIBLE_DEVICES name as many, and the scheduler or container give them; see nvidia-smi -L",
        )
    enough = [(one, one.device) for one in facts if one.device is not None and not _sees_too_few(one)]
    used = Counter((one.host, device.bus) for one, device in enough if device.bus)
    shared = [(one, device) for one, device in enough if used[one.host, device.bus] > 1]
    if shared:
        yield Finding(
            "visible devices",
            who([one for one, _ in shared]),
            f"they share the GPU at {shared[0][1].bus}",
            "give all ranks of a machine the same CUDA_VISIBLE_DEVICES; torchrun picks one of them by LOCAL_RANK",
        )
    turned = [one for one, _ in enough if [d.bus for d in one.devices] != sorted(d.bus for d in one.devices)]
    if turned:
        yield Finding(
            "order of devices",
            who(turned),
            f"GPUs come in the order {', '.join(d.bus for d in turned[0].devices[:8])}",
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID and name them in CUDA_VISIBLE_DEVICES in that order: neighbours share links",
            stops=False,
        )
    kinds = alike([one for one, _ in enough], lambda one: one.device and one.device.name)
    for name, ranks in kinds[1:]:
        yield Finding(
            "another device",
            who(ranks),
            f"{name}, the others have {kinds[0][0]}",
            "describe the mixed cluster in its file and compile again, or leave these machines out",
            stops=False,
        )


def _sees_too_few(one: Facts) -> bool:
    """Whether the ranks of a machine cannot have a device each; a rank that sees one alone may be shown its own."""
    return 1 != len(one.devices) < one.local_ranks


def shared_memory(facts: Sequence[Facts], _: Expected) -> Iterator[Finding]:
    """There is shared memory for all ranks of a machine."""
    for one in _one_per_host(facts):
        needed = LEAST_SHM_PER_RANK * one.local_ranks
        if one.shm is not None and one.local_ranks > 1 and min(one.shm, one.shm_free or 0) < needed:
            yield Finding(
                "shared memory",
                one.host,
                f"/dev/shm has {_mib(one.shm)}, {_mib(one.shm_free or 0)} free; {one.local_ranks} ranks want {_mib(needed)}",
                "start the container with --shm-size=8g or --ipc=host (Kubernetes: an emptyDir with medium Memory at /dev/shm)",
                stops=not transport_named(one.backend).by_sockets,
            )


def processors(facts: Sequence[Facts], _: Expected) -> Iterator[Finding]:
    """The ranks of a machine have enough CPUs, and those beside their device."""
    for one in _one_per_host(facts):
        of_host = [other for other in facts if other.host == one.host]
        cpus = {cpu for other in of_host for cpu in other.cpus}
        if cpus and len(cpus) < one.local_ranks:
            yield Finding(
                "CPU binding",
                one.host,
                f"{one.local_ranks} ranks may use {len(cpus)} CPUs",
                "ask for more (Slurm: --cpus-per-task), or bind ranks to CPUs of their own",
                stops=False,
            )
        elif cpus and one.threads * one.local_ranks > len(cpus):
            yield Finding(
                "CPU threads",
                one.host,
                f"{one.local_ranks} ranks of {one.threads} threads each have {len(cpus)} CPUs",
                f"set OMP_NUM_THREADS={max(len(cpus) // one.local_ranks, 1)}",
                stops=False,
            )
    far = [one for one in facts if _is_far(one)]
    if far and far[0].device is not None:
        numa = far[0].device.numa
        yield Finding(
            "NUMA binding",
            who(far),
            f"bound to CPUs {numbers_text(far[0].cpus)}, its GPU is at node {numa}",
            f"bind it with numactl --cpunodebind={numa} --membind={numa}, or leave ranks unbound",
            stops=False,
        )


def _is_far(one: Facts) -> bool:
    """Whether a rank may use no CPU of the node that its device is at."""
    if one.device is None:
        return False
    beside = one.numa_cpus.get(str(one.device.numa), ())
    return bool(beside) and not set(beside) & set(one.cpus)


def limits(facts: Sequence[Facts], expected: Expected) -> Iterator[Finding]:
    """Ranks may open enough files and lock enough memory."""
    needed = 256 + 8 * expected.ranks
    few = [one for one in facts if one.open_files is not None and one.open_files < needed]
    if few:
        yield Finding(
            "open files",
            who(few),
            f"at most {few[0].open_files}, {expected.ranks} ranks want {needed}",
            f"ulimit -n {needed} before torchrun, or LimitNOFILE of its service",
        )
    locking = [one for one in facts if one.infiniband and not transport_named(one.backend).by_sockets]
    small = [one for one in locking if one.locked is not None and one.locked < LEAST_LOCKED]
    if small:
        yield Finding(
            "locked memory",
            who(small),
            f"at most {_mib(small[0].locked or 0)}, which InfiniBand registers its buffers in",
            "ulimit -l unlimited (docker: --ulimit memlock=-1)",
        )


def run_directory(facts: Sequence[Facts], expected: Expected) -> Iterator[Finding]:
    """The run directory can be written by every rank, and two checkpoints have room."""
    for why, ranks in alike(facts, lambda one: one.writable):
        if why:
            yield Finding(
                "run directory",
                who(ranks),
                f"{ranks[0].run} cannot be written: {why}",
                "give a directory that every rank can write, or its rights to the user of the job",
            )
    needed = 2 * (expected.machines.state_bytes if expected.machines else 0.0)
    full = [one for one in facts if one.free is not None and one.free < needed]
    if full:
        yield Finding(
            "room for checkpoints",
            who(full),
            f"{full[0].run} has {_mib(full[0].free or 0)} free, two checkpoints take {_mib(needed)}",
            "make room, or give another --run-dir",
        )


def _one_per_host(facts: Sequence[Facts]) -> list[Facts]:
    return list({one.host: one for one in reversed(facts)}.values())[::-1]


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB" if nbytes < 1 << 34 else f"{nbytes / (1 << 30):,.0f} GiB"
