"""Adding a kind of device is adding its row, `runtime.comm.backends.Backend`; kernels of its own are those of `runtime/kernels`.

Here `npu`: the row of a device that torch knows and this machine has none of, behind a module of torch's that is made up; and
`sluggish`, whose devices are processors and whose messages go through a transport of its own, so that it runs for real. Nothing
else of the library knows either.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.cluster.device import device_preset
from autopar.cluster.here import base_device
from autopar.costmodel.calibrate import timed_s
from autopar.runtime.comm.backends import BACKENDS, HOST, OF_TYPE, Backend, Transport, register_backend, usual_backend
from autopar.runtime.comm.devices import Device, kind_of
from autopar.runtime.comm.environment import LaunchError
from autopar.runtime.comm.process import TorchComm
from autopar.runtime.comm.recorder import Recorder
from autopar.runtime.guards import Guards
from autopar.runtime.memory.tiers import Tiers
from autopar.runtime.preflight.facts import Place, own_facts
from autopar.runtime.preflight.finding import Expected
from autopar.runtime.preflight.links import Measured, slow_links
from autopar.runtime.preflight.machine import shared_memory
from autopar.runtime.program.arguments import parser
from autopar.runtime.program.machines import LinkRate, Machines
from autopar.runtime.run import metrics

NPU = Backend(
    "xpu",
    Transport("npu_cc", dtypes=frozenset({torch.float32}), slow_share=0.75, slow_remedy="look at npu-smi"),
    preset="mi300x",
    kernels=lambda index: ("npu", (index, 0)),
    versions=lambda: {"NPU": "3.1"},
)
SLUGGISH = replace(HOST, transport=Transport("sluggish", dtypes=frozenset({torch.uint8}), by_sockets=True))


@dataclass
class Module:
    """torch's module of a kind of device, which notes what is asked of it."""

    devices: int = 2
    asked: list[str] = field(default_factory=list)
    at_ms: float = 0.0

    def _note(self, what: str) -> Any:
        self.asked.append(what)
        return self

    def device_count(self) -> int:
        return self.devices

    def current_device(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        self._note("set device")

    def get_device_name(self, device: Any) -> str:
        return "Some NPU"

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=16 + (device.index or 0), pci_device_id=0)

    def max_memory_allocated(self, device: Any) -> int:
        return 12345

    def synchronize(self, device: Any = None) -> None:
        self._note("synchronize")

    def Stream(self, device: Any) -> Any:
        return self._note("stream")

    def current_stream(self, device: Any) -> Any:
        return self

    def wait_event(self, event: Any) -> None:
        self._note("wait for an event")

    def record_event(self) -> Any:
        return self._note("record")

    def Event(self, enable_timing: bool = False) -> Any:
        self.at_ms += 250.0
        return SimpleNamespace(
            record=lambda: self._note("mark"),
            at_ms=self.at_ms,
            elapsed_time=lambda end, at_ms=self.at_ms: end.at_ms - at_ms,
        )


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    module = Module()
    monkeypatch.setattr(torch, "xpu", module)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    before = dict(BACKENDS), dict(OF_TYPE)
    register_backend(NPU)
    yield module
    for rows, known in zip((BACKENDS, OF_TYPE), before, strict=True):
        rows.clear()
        rows.update(known)


DEVICE = torch.device("xpu", 1)


def test_ranks_that_are_told_none_take_it_and_it_can_be_asked_for(npu: Module) -> None:
    assert usual_backend(2) is NPU
    assert NPU.device(1) == DEVICE
    with pytest.raises(
        LaunchError, match="--backend npu_cc, where every rank sees one device that is its own, or --backend gloo"
    ):
        usual_backend(4)
    assert parser().parse_args(["--backend", "npu_cc"]).backend == "npu_cc"


def test_a_group_that_has_its_transport_computes_on_it(npu: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,xpu:npu_cc")
    try:
        comm = TorchComm({"a": 1})
        assert (comm.device, comm.transport, comm.in_order, comm.gloo) == (DEVICE, NPU.transport, True, False)
    finally:
        dist.destroy_process_group()


def test_kernels_are_chosen_by_what_the_row_says(npu: Module) -> None:
    assert kind_of(DEVICE) == Device("npu", (1, 0))
    npu.devices = 0
    assert kind_of(DEVICE) == Device("xpu")


def test_a_recorder_reads_its_events(npu: Module) -> None:
    recorder = Recorder(DEVICE)
    with recorder.step():
        pass
    assert recorder.steps[0].seconds == 0.25
    assert npu.asked == ["mark", "mark", "synchronize"]


def test_tiers_copy_on_its_streams(npu: Module) -> None:
    tiers = Tiers(DEVICE)
    tiers.arrived(tiers.mark())
    assert npu.asked == ["stream", "stream", "record", "wait for an event"]


def test_what_it_wrote_down_is_read_when_it_has_arrived(npu: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnNpu(torch.Tensor):
        device = DEVICE

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **given: empty(*size, **given))
    Guards().look([(torch.zeros(3).as_subclass(OnNpu), (3,), lambda value, place: "")])
    assert npu.asked == ["mark"]


def test_metrics_ask_for_its_memory_and_know_that_it_is_no_processor(npu: Module) -> None:
    manifest: Any = SimpleNamespace(machines=Machines(2, "npu", True, peak_s=2.0))
    assert metrics.peak_seconds(manifest, DEVICE) == 2.0
    assert NPU.peak_bytes(DEVICE) == 12345


def test_calibration_waits_for_it_and_starts_from_its_preset(npu: Module) -> None:
    assert timed_s(lambda: npu._note("run"), DEVICE, 0.0) >= 0.0
    assert npu.asked == ["run", "synchronize"] * 4
    assert base_device(DEVICE) == device_preset("mi300x")


def test_preflight_looks_at_its_devices_and_judges_its_links(npu: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_CC_SOCKET_IFNAME", "npu0")
    own = own_facts(Place(1, 2, 1, 2, "127.0.0.1", 29500), [], "npu_cc", None, [])
    assert [one.bus for one in own.devices] == ["0000:10:00.0", "0000:11:00.0"]
    assert own.device == own.devices[1]
    assert own.versions["NPU"] == "3.1"
    assert own.named["NPU_CC_SOCKET_IFNAME"] == "npu0"
    machines = Machines(2, "npu", True, (LinkRate("node", 2, 1e9, 1e-6),))
    facts = [replace(own, rank=rank, shm=1 << 20, shm_free=1 << 20) for rank in range(2)]
    (slow,) = slow_links([Measured("node", (0, 1), 0.7e9, 1e-6)], machines, facts)
    assert slow.remedy == "look at npu-smi"
    assert not slow_links([Measured("node", (0, 1), 0.8e9, 1e-6)], machines, facts)
    assert [one.stops for one in shared_memory(facts, Expected(2))] == [True]


# ---- a program on it


@pytest.mark.timeout(120)
def test_a_program_trains_on_one(tmp_path: Path) -> None:
    from tests.runtime import stages  # which the processes import by themselves
    from tests.warm import torchrun

    done = torchrun(4, Path(__file__), tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(4):
        assert torch.load(tmp_path / f"{rank}.pt") == pytest.approx(stages.reference(2)["losses"], rel=1e-12)


def train(out: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.runtime import scenarios, stages

    dist.Backend.register_backend("sluggish", lambda *place: dist.ProcessGroupGloo(*place), devices=["cpu"])
    register_backend(SLUGGISH)
    dist.init_process_group("sluggish")
    program = stages.mlp(2, 2, 1)
    comm = TorchComm(program.mesh)
    assert (comm.transport, comm.in_order) == (SLUGGISH.transport, True)
    comm.transport = replace(comm.transport, dtypes=None)
    torch.save(scenarios.train(comm, program, 2)["losses"], out / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


# ---- and nobody else knows a kind by its name

ROOT = Path(__file__).parents[3]
LIBRARY = [path for folder in ("autopar", "passes", "costmodel", "codegen") for path in (ROOT / folder).rglob("*.py")]
MAY_NAME_KINDS = {
    "autopar/runtime/comm/backends.py": "the rows",
    "autopar/runtime/kernels/": "which kernels a kind has",
    "autopar/runtime/step/cuda_graphs.py": "graphs, which are CUDA's",
}
NAMES = ("cuda", "nccl", "gloo")


def named_kinds(tree: ast.AST) -> Iterator[int]:
    """Lines that name a kind of device, ask torch's module of one, or compare the type of one."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if text in NAMES:
                yield node.lineno
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda") | ast.Attribute(attr="is_cuda"):
                yield node.lineno
            case ast.Compare(
                left=ast.Attribute(value=ast.Attribute(attr="device") | ast.Name(id="device"), attr="type"),
                comparators=[ast.Constant(value="cpu")],
            ):
                yield node.lineno


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("x.device.type == 'cpu'", 1),
        ("f(backend='gloo')", 1),
        ("torch.cuda.synchronize()", 1),
        ("y = x if x.is_cuda else None", 1),
        ("backend_of(x.device).is_host", 0),
        ("x.device.type == 'meta'", 0),
    ],
)
def test_a_kind_that_is_named_is_seen(text: str, names: int) -> None:
    assert len(list(named_kinds(ast.parse(text)))) == names


def test_no_other_file_names_a_kind() -> None:
    named = [
        f"{name}:{line}"
        for name, path in ((path.relative_to(ROOT).as_posix(), path) for path in LIBRARY)
        if not name.startswith(tuple(MAY_NAME_KINDS))
        for line in named_kinds(ast.parse(path.read_text()))
    ]
    assert named == []


if __name__ == "__main__":
    train(Path(sys.argv[1]))
