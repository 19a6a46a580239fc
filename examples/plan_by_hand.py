"""A plan is a small JSON file: write one, change it by hand, and compile with it.

Here the plan of pure data parallelism becomes ZeRO-1: gradient and optimizer state of the weight matrices are sharded
over the ranks. The compiler solves nothing, it lowers what the file says, and refuses a file that cannot be.
"""

import functools
import json
from pathlib import Path

import torch
from torch import nn

import autopar

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8))
batch = (torch.randn(32, 64), torch.randint(0, 8, (32,)))
compile_model = functools.partial(
    autopar.compile,
    model,
    autopar.ClusterSpec.local(4),
    batch,
    loss_fn=nn.functional.cross_entropy,
    optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
)

chosen = compile_model(options=autopar.Options(mesh={"dp": 4}, strategy="dp"))
path = Path("plan.json")
chosen.plan.save(path)

plan = json.loads(path.read_text())
print("parameter 0.weight in the plan:", plan["stages"][0]["parameters"]["0.weight"])
for name, parameter in plan["stages"][0]["parameters"].items():
    if name.endswith("weight"):
        parameter["optimizer"] = "[@dp, .]"
plan["origin"] = "by hand"
path.write_text(json.dumps(plan, indent=1))
print("                       by hand:", plan["stages"][0]["parameters"]["0.weight"])

mine = compile_model(plan=path)
for name, program in (("data parallel", chosen), ("by hand", mine)):
    held = ", ".join(f"{kind} {nbytes / 1e3:.0f} kB" for kind, nbytes in program.account.resting_bytes.items())
    print(f"{name:>13}: {held} per rank")
checked = autopar.check(mine)
print(checked)

try:
    plan["stages"][0]["parameters"]["4.weight"]["storage"] = "[@tp, .]"
    compile_model(plan=autopar.Plan.from_dict(plan))
except autopar.AutoparError as error:
    print(f"an axis that the mesh does not have: {type(error).__name__}: {error}")
if not checked.ok:
    raise SystemExit("the plan does not compute what one device computes")
