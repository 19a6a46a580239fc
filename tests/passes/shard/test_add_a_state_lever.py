"""Adding a memory lever that changes what rests: the optimizer's state in 16 bits, in at most eight files of the library.

Here `optimizer_state="bf16"` is added to a copy of the library, as a developer would: the state rests in bfloat16, is widened
part by part for the update, and moves to memory tiers as it rests. The rows of `autopar/ir/resting.py` tell it to the solver, the
account, the bounds and the tiers, which are not touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.proof.test_memory_measured import NUMBERS, OVER, UNDER

ROOT = Path(__file__).parents[3]
LIBRARY = ("autopar", "passes", "costmodel", "codegen")
EDITS = {
    "autopar/runtime/program/run_options.py": [
        (
            "    cuda_graphs: bool = False\n",
            '    cuda_graphs: bool = False\n    optimizer_state: Annotated[str, choice(("", "bf16"))] = ""\n',
        )
    ],
    "autopar/api.py": [
        (
            "        examine(request.update, program, ranks),\n",
            "        replace(examine(request.update, program, ranks), narrow=bool(request.options.optimizer_state)),\n",
        )
    ],
    "autopar/ir/setting.py": [
        (
            "    group_of: Mapping[str, int] = field(default_factory=dict)\n",
            "    group_of: Mapping[str, int] = field(default_factory=dict)\n    narrow: bool = False\n",
        ),
        ("max(self.element_bytes, itemsize)\n", "(2 if self.narrow else max(self.element_bytes, itemsize))\n"),
        ("        return self.ratio(*names)\n", "        return self.ratio(*names) * (2.5 if self.narrow else 1.0)\n"),
    ],
    "autopar/runtime/update/optimizer_parts.py": [
        ("from torch import Tensor, nn\n", "import torch\nfrom torch import Tensor, nn\n"),
        (
            "        store: Callable[[Mapping[str, Tensor]], None] | None = None,\n",
            "        store: Callable[[Mapping[str, Tensor]], None] | None = None,\n"
            "        wide: Mapping[str, torch.dtype] | None = None,\n",
        ),
        (
            "        away = self.tier.keys() | self.values.keys()\n",
            "        self.wide = dict(wide or {})\n"
            "        away = self.tier.keys() | self.values.keys() | self.wide.keys()\n",
        ),
        (
            "name in self.tier or name in self.values for name in names",
            "name in self.tier or name in self.values or name in self.wide for name in names",
        ),
        (
            "        self.tiers.arrived(self._marks.pop(names[0], None))\n",
            "        self.tiers.arrived(self._marks.pop(names[0], None))\n        self._cast(names, self.wide)\n",
        ),
        (
            "        del updated\n",
            "        del updated\n        self._cast(names, dict.fromkeys(self.wide, torch.bfloat16))\n",
        ),
        (
            "    def park(self,",
            "    def _cast(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype]) -> None:\n"
            "        for name in names if dtypes else ():\n"
            "            state = self._state_of(name)\n"
            "            for key in [k for k, v in state.items() if isinstance(v, Tensor) and v.dim()]:\n"
            "                state[key] = state[key].to(dtypes[name])\n\n"
            "    def park(self,",
        ),
    ],
    "autopar/runtime/step/session.py": [
        (
            "        if not self.updater.optimizers or not (values or any(",
            "        wide = {n: p.dtype for n, p in self.opt_params.items()} if self.options.optimizer_state else {}\n"
            "        if not self.updater.optimizers or not (values or wide or any(",
        ),
        ("lambda n: self.grads.get(n), store)\n", "lambda n: self.grads.get(n), store, wide)\n"),
    ],
    "passes/price/tiers.py": [
        ("(p.optimizer_tier or p.tier)}", "(p.optimizer_tier or p.tier or setting.optimizer.narrow)}")
    ],
    "passes/memory/peak.py": [
        (
            "import dataclass, field, replace\n",
            "import dataclass, field, replace\n\nfrom autopar.ir.resting import on_rank\n",
        ),
        (
            "        worst = max(worst, state + coming + scratch, state - gone + coming + grown)\n",
            "        whole = replace(setting, optimizer=replace(setting.optimizer, narrow=False))\n"
            "        held = [on_rank(p, stage.mesh) for p in updated]\n"
            "        state += sum(one.state_bytes(whole) - one.state_bytes(setting) for one in held)\n"
            "        worst = max(worst, state + coming + scratch, state - gone + coming + grown)\n",
        ),
    ],
}
"""Edits by file: the text that stands there, and the text that then does."""

USER = """
import functools, json
import torch
from torch import nn
import autopar
from autopar.passes.price.pricer import Pricers
from autopar.passes.shard.evaluate import evaluate
from tests import measure

batch = torch.randn(16, 128, generator=torch.manual_seed(1)), torch.randn(16, 128, generator=torch.manual_seed(2))
WAYS = {"plain": {}, "narrow": {"optimizer_state": "bf16"}, "away": {"optimizer_state": "bf16", "offload": "optimizer"}}

try:
    autopar.Options(optimizer_state="int3")
except autopar.InputError as error:
    told = {"refused": str(error)}

for name, options in WAYS.items():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(128, 128, bias=False), nn.GELU())))
    program = autopar.compile(
        model,
        autopar.ClusterSpec.local(2).with_tiers(),
        batch,
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
        options=autopar.Options(strategy="zero1", mesh={"dp": 2}, pp=1, microbatches=2, **options),
    )
    measure.DEFAULTS = program.options.at_run_time()  # with which sessions run that are measured
    account, (device, tiers) = program.account, measure.measure_tiers(program, batch)[0]
    solved = evaluate(program.ir, program.plan, Pricers(program.cluster), program.rules, program.setting)
    told[name] = {
        "optimizer": account.resting_bytes["optimizer"],
        "solver": solved.memory,
        "predicted": [account.peaks[0], account.tier_peaks[0].get("ddr", 0.0)],
        "measured": [device, tiers.get("ddr", 0.0)],
        "moved": sum(move.nbytes for move in account.moves),
        "losses": [loss.item() for loss in program.run(batch, steps=5).losses],
    }
print(json.dumps(told))
"""
STATE = 6 * 2 * 4 * 128 * 128 / 2
"""Bytes of Adam's state on one of two ranks, in float32."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The facts that a user of a copy of the library with the lever finds."""
    copy = tmp_path_factory.mktemp("library")
    for folder in LIBRARY:
        shutil.copytree(ROOT / folder, copy / folder)
    for name, changes in EDITS.items():
        text = (copy / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (copy / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", USER]
    done = subprocess.run(command, env=environment, cwd=copy, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_it_costs_at_most_eight_files_of_the_library() -> None:
    assert len(EDITS) <= 8


@pytest.mark.timeout(180)
def test_options_refuse_what_it_may_not_be(told: dict[str, Any]) -> None:
    assert "optimizer_state" in told["refused"]


def test_solver_and_account_count_half_of_the_state(told: dict[str, Any]) -> None:
    assert told["plain"]["optimizer"] - told["narrow"]["optimizer"] == STATE / 2
    assert told["plain"]["solver"] - told["narrow"]["solver"] == STATE / 2
    assert told["narrow"]["solver"] - told["away"]["solver"] == STATE / 2
    assert told["away"]["moved"] == 2 * STATE / 2, "there and back, as it rests"


@pytest.mark.parametrize("way", ["plain", "narrow", "away"])
def test_ranks_hold_what_was_predicted(told: dict[str, Any], way: str) -> None:
    for predicted, measured in zip(told[way]["predicted"], told[way]["measured"], strict=True):
        assert (1 - UNDER) * measured - NUMBERS <= predicted <= (1 + OVER) * measured + NUMBERS


def test_it_trains_as_well(told: dict[str, Any]) -> None:
    """Sixteen bits of state change the later digits of losses, and where state rests changes none."""
    plain, narrow, away = (told[way]["losses"] for way in ("plain", "narrow", "away"))
    assert narrow == away
    assert narrow != plain
    assert narrow == pytest.approx(plain, rel=1e-2)
    assert narrow[-1] < narrow[0]
