"""How long a compile takes and how much memory: Llama shapes on the meta device, one JSON object per run.

    python benchmarks/compile_time.py                   # the whole table: layers, widths, 1D to 3D meshes, 405B
    python benchmarks/compile_time.py --quick           # three small cases
    python benchmarks/compile_time.py --layers 8 126 --dim 4096 --mesh 8x8
    python benchmarks/compile_time.py --case 405b-8x64
    python benchmarks/compile_time.py --growth          # everything searched, over layers and up to 98,304 GPUs

Each case runs in a process of its own, so that peak memory is its own and no cache is warm. `solver` holds the sizes of
the problem before and after exact reduction, and the optimality gap.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import command_line  # noqa: E402
from benchmarks.models import LLAMA_405B, Llama, LlamaShape  # noqa: E402

MESHES: dict[str, dict[str, int]] = {
    "8": {"dp": 8},
    "8x8": {"dp": 8, "tp": 8},
    "8x64": {"dp": 64, "tp": 8},
    "8x4x2": {"dp": 8, "tp": 4, "sp": 2},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its batch. mesh: None searches every mesh of `devices` GPUs. batch: one sequence a rank, unless given."""

    name: str
    shape: LlamaShape
    mesh: str | None
    seq: int = 2048
    batch: int | None = None
    devices: int = 0

    @staticmethod
    def of(layers: int, dim: int, mesh: str) -> Case:
        return Case(f"{layers}x{dim}-{mesh}", LlamaShape.of_width(layers, dim), mesh)

    @staticmethod
    def searched(layers: int, devices: int) -> Case:
        """A Llama as wide as the 405B one on so many GPUs, everything searched."""
        shape = dataclasses.replace(LLAMA_405B, layers=layers)
        return Case(f"{layers}-on-{devices}", shape, None, seq=8192, batch=max(2048, devices // 8), devices=devices)


LLAMA_200T = LlamaShape(layers=30, dim=655360, ffn=2516992, heads=4096, kv_heads=4096, vocab=131072)
"""200 trillion parameters."""

QUICK = (Case.of(2, 64, "8"), Case.of(4, 256, "8x8"), Case.of(2, 256, "8x4x2"))
CASES = (
    Case.of(2, 64, "8"),
    Case.of(8, 1024, "8"),
    Case.of(32, 4096, "8"),
    Case.of(8, 4096, "8x8"),
    Case.of(32, 4096, "8x8"),
    Case.of(126, 4096, "8x8"),
    Case.of(32, 4096, "8x64"),
    Case.of(32, 4096, "8x4x2"),
    Case("405b-8x64", LLAMA_405B, "8x64", batch=64),
)
GROWTH = (
    *(
        Case.searched(layers, devices)
        for layers, devices in (
            (32, 1024),
            (126, 1024),
            (126, 4096),
            (126, 16384),
            (500, 16384),
            (1000, 16384),
            (1000, 98304),
        )
    ),
    Case("200t-on-65536", LLAMA_200T, None, seq=4096, batch=64, devices=65536),
)


def parse_mesh(text: str) -> dict[str, int]:
    """A mesh by its name in MESHES, or any sizes such as 4x2: the axes are dp, tp, sp in this order."""
    if text in MESHES:
        return MESHES[text]
    return dict(zip(("dp", "tp", "sp"), map(int, text.split("x")), strict=False))


def emitted_lines(program: Any) -> int:
    """Lines of the generated programs; the runtime that travels with them is no part of it."""
    with tempfile.TemporaryDirectory() as directory:
        program.save(directory)
        files = (path for path in Path(directory).rglob("*.py") if not any("runtime" in part for part in path.parts))
        return sum(len(path.read_text().splitlines()) for path in files)


def measure(case: Case, time_limit_s: float) -> dict[str, Any]:
    """Compile one case in this process."""
    import torch

    import autopar

    torch.set_num_threads(1)
    mesh = parse_mesh(case.mesh) if case.mesh else None
    ranks = math.prod(mesh.values()) if mesh else case.devices
    with torch.device("meta"):
        model = Llama(case.shape, case.seq).to(torch.bfloat16)
        ids = torch.zeros(case.batch or ranks, case.seq, dtype=torch.long)
    parameters = sum(p.numel() for p in model.parameters())
    cluster = autopar.ClusterSpec.preset("dgx-h100", nodes=ranks // 8)
    options = autopar.Options(mesh=mesh, solver_time_limit_s=time_limit_s)
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    start = time.perf_counter()
    program = autopar.compile(
        model, cluster, (ids, ids), optimizer=functools.partial(torch.optim.AdamW, lr=1e-4), options=options
    )
    compile_s = time.perf_counter() - start
    lines = emitted_lines(program) if mesh else None
    timings = program.timings
    return {
        "case": case.name,
        "layers": case.shape.layers,
        "dim": case.shape.dim,
        "parameters": parameters,
        "devices": ranks,
        "mesh": mesh,
        "plan": program.plan.show_meshes(),
        "capture_s": round(timings["capture_s"], 3),
        "plan_s": round(timings["plan_s"], 3),
        "lower_s": round(timings["lower_s"], 3),
        "emit_s": round(timings["emit_s"], 3),
        "plan_lower_emit_s": round(sum(timings[key] for key in ("plan_s", "lower_s", "emit_s")), 3),
        "compile_s": round(compile_s, 3),
        "solver": dataclasses.asdict(program.solver),
        "predicted_step_s": program.predicted.step_time_s,
        "predicted_peak_gib": round(program.predicted.peak_bytes / 2**30, 2),
        "rss_before_gib": round(before_bytes / 2**30, 3),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30, 3),
        "emitted_lines": lines,
    }


def measure_apart(case: Case, time_limit_s: float, timeout_s: float) -> dict[str, Any]:
    """The same in a fresh process; a case that fails or runs out of time is reported as such, and the others go on."""
    command = [sys.executable, __file__, "--in-process", json.dumps(dataclasses.asdict(case))]
    command += ["--solver-time-limit", str(time_limit_s)]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"case": case.name, "error": f"not finished in {timeout_s:.0f} s"}
    if ran.returncode != 0:
        return {"case": case.name, "error": ran.stderr.strip().splitlines()[-1] if ran.stderr else "killed"}
    return json.loads(ran.stdout.splitlines()[-1])


def chosen_cases(args: argparse.Namespace) -> tuple[Case, ...]:
    if args.case:
        return tuple(case for case in (*CASES, *GROWTH) if any(wanted in case.name for wanted in args.case))
    if args.layers or args.dim or args.mesh:
        return tuple(
            Case.of(layers, dim, mesh)
            for layers in args.layers or [32]
            for dim in args.dim or [4096]
            for mesh in args.mesh or ["8x8"]
        )
    return QUICK if args.quick else GROWTH if args.growth else CASES


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="three small cases")
    parser.add_argument("--growth", action="store_true", help="meshes and stages searched, over layers and GPUs")
    parser.add_argument("--case", nargs="+", help="cases of the table whose name contains one of these")
    parser.add_argument("--layers", nargs="+", type=int)
    parser.add_argument("--dim", nargs="+", type=int)
    parser.add_argument("--mesh", nargs="+", help="8, 8x8, 8x64, 8x4x2, or any AxBxC")
    parser.add_argument("--solver-time-limit", type=float, default=60.0, help="seconds the solver may take")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a case may take")
    parser.add_argument("--in-process", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        fields = json.loads(args.in_process)
        case = Case(**{**fields, "shape": LlamaShape(**fields["shape"])})
        print(json.dumps(measure(case, args.solver_time_limit)))
        return
    results = []
    for case in chosen_cases(args):
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        results.append(measure_apart(case, args.solver_time_limit, args.timeout))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    host = {"machine": platform.machine(), "python": platform.python_version()}
    print(json.dumps({"benchmark": "compile_time", "host": host, "results": results}, indent=2))


if __name__ == "__main__":
    main()
