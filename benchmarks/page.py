"""Pages of plans: bytes, seconds to write, and in a Chromium seconds to open, console errors and violations of axe-core's rules.

    python -m benchmarks.page                        # the programs, one JSON object
    python -m benchmarks.page --case gpt pipeline    # those whose name contains one of these
    python -m benchmarks.page --node DIR             # a folder with puppeteer-core and axe-core from npm: also opened
    python -m benchmarks.page --pages DIR            # keep the pages

Without --node pages are written and not opened. CPU seconds of writing have the facts in them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import autopar
from benchmarks.harness import command_line
from benchmarks.models import LLAMA_8B, LLAMA_405B, Gpt, Llama, LlamaShape, UNet, next_token_loss
from benchmarks.published_models import DEEPSEEK_V3, Transformer
from tests.zoo.models import MODELS
from tests.zoo.programs import compiled_zoo

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)
OPENER = Path(__file__).with_name("page_open.js")


def llama(
    shape: LlamaShape, devices: int, batch: int, seq: int, device: str = "", **options: Any
) -> autopar.ParallelProgram:
    """A Llama on the meta device. device: of one machine without a preset, where it is another one."""
    with torch.device("meta"):
        model = Llama(shape, seq).to(torch.bfloat16)
        ids = torch.zeros(batch, seq, dtype=torch.long)
    if device:
        cluster = autopar.ClusterSpec.homogeneous(devices=devices, device=device)
    else:
        cluster = autopar.ClusterSpec.preset("dgx-h100", nodes=devices // 8)
    return autopar.compile(model, cluster, (ids, ids), optimizer=ADAMW, options=autopar.Options(**options))


def zoo(name: str, on: int | autopar.ClusterSpec = 4, **options: Any) -> autopar.ParallelProgram:
    """A model of the zoo."""
    (found,) = (one for one in MODELS if one.name == name)
    return compiled_zoo(found, on, options=autopar.Options(**options))


def gpt(cluster: autopar.ClusterSpec, layers: int = 8, **options: Any) -> autopar.ParallelProgram:
    """A GPT that is 64 wide, 16 sequences a step."""
    ids = torch.zeros(16, 32, dtype=torch.long)
    model = Gpt(vocab=128, seq=32, dim=64, heads=4, layers=layers)
    options_of = autopar.Options(**options)
    return autopar.compile(model, cluster, (ids, ids), loss_fn=next_token_loss, optimizer=ADAMW, options=options_of)


def deepseek_v3() -> autopar.ParallelProgram:
    """DeepSeek-V3 on 1,024 devices, on the meta device."""
    with torch.device("meta"):
        model = Transformer(DEEPSEEK_V3).to(torch.bfloat16)
        ids = torch.zeros(4096, DEEPSEEK_V3.seq_len, dtype=torch.long)
    cluster = autopar.ClusterSpec.preset("dgx-h100", nodes=128)
    options = autopar.Options(solver_time_limit_s=60.0)
    return autopar.compile(model, cluster, (ids, ids), optimizer=ADAMW, options=options)


def unet() -> autopar.ParallelProgram:
    """A U-Net that predicts noise, 16 images a step."""
    x, t = torch.zeros(16, 3, 32, 32), torch.zeros(16)
    loss = torch.nn.functional.mse_loss
    return autopar.compile(UNet(), HOST, (x, t, x), loss_fn=loss, optimizer=ADAMW)


def mixed() -> autopar.ClusterSpec:
    """Two machines of two A100 and two machines of two T4."""
    fast, slow = (
        autopar.ClusterSpec.homogeneous(devices=4, device=device, devices_per_node=2) for device in ("a100", "t4")
    )
    levels = autopar.ClusterSpec.homogeneous(devices=8, device="t4", devices_per_node=2).levels
    return dataclasses.replace(fast, name="mixed", devices=(*fast.devices, *slow.devices), levels=levels)


HOST = autopar.ClusterSpec.local(4)
CASES: dict[str, Callable[[], autopar.ParallelProgram]] = {
    "mlp on 4": lambda: zoo("mlp"),
    "gpt on 4": lambda: gpt(HOST),
    "bert on 4": lambda: zoo("bert"),
    "resnet on 4": lambda: zoo("resnet"),
    "vit on 4": lambda: zoo("vit"),
    "mixture of experts on 4": lambda: zoo("moe"),
    "pipeline 1f1b": lambda: gpt(HOST, pp=4, microbatches=8, schedule="1f1b"),
    "pipeline zb-v": lambda: gpt(HOST, pp=2, microbatches=8, schedule="zb-v", mesh={"dp": 2}),
    "mixed devices": lambda: gpt(mixed()),
    "not fitting": lambda: gpt(HOST, mesh={"dp": 4}, memory_bytes=1.5e6, explain_s=20.0),
    "u-net on 4": unet,
    "8B on 8": lambda: llama(LLAMA_8B, 8, 16, 2048),
    "8B on one of 40 GB, not fitting": lambda: llama(LLAMA_8B, 1, 16, 2048, device="a100-40", explain_s=30.0),
    "DeepSeek-V3 on 1024": deepseek_v3,
    "405B on 16384": lambda: llama(LLAMA_405B, 16384, 2048, 8192, solver_time_limit_s=60.0),
}


def written(made: autopar.ParallelProgram | autopar.InfeasibleError, path: Path) -> dict[str, Any]:
    """Write the page of a program, or of what does not fit; its bytes, and CPU seconds with the facts."""
    start_s = time.process_time()
    made.report_html(path)
    return {"write_s": round(time.process_time() - start_s, 3), "bytes": path.stat().st_size}


def opened(path: Path, node: Path) -> dict[str, Any]:
    """The findings of a Chromium about a page. node: has the packages that drive it."""
    command = ["node", str(OPENER), str(node.resolve()), shutil.which("chromium") or "chromium", str(path.resolve())]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--case", nargs="+", help="cases whose name contains one of these")
    parser.add_argument("--node", type=Path, help="a folder with node_modules")
    parser.add_argument("--pages", type=Path, help="where pages are kept")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.pages or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name, make in CASES.items():
            if args.case and not any(wanted in name for wanted in args.case):
                continue
            path = folder / f"{name.replace(' ', '_')}.html"
            made: autopar.ParallelProgram | autopar.InfeasibleError
            try:
                made = make()
                plan = made.plan.show_meshes()
            except autopar.InfeasibleError as error:
                made, plan = error, str(error).splitlines()[0]
            row = {"case": name, "plan": plan, **written(made, path)}
            results.append(row | (opened(path, args.node) if args.node else {}))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "page", "results": results}, indent=1))


if __name__ == "__main__":
    main()
