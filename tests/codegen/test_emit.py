"""Emitted source is code that people read: it parses, names where lines come from, frees values, repeats nothing."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.codegen.actions import _text
from autopar.codegen.marks import local
from autopar.codegen.printer import Printer
from autopar.errors import EmitError
from autopar.runtime.program.manifest import Manifest
from tests.codegen.trace import trace, unrolled

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def program(layers: int = 2, ranks: int = 4, optimizer=ADAMW, **options):
    ids = torch.zeros(8, 4, dtype=torch.long)
    options = autopar.Options(**({"mesh": {"dp": 2, "tp": 2}} | options))
    cluster = autopar.ClusterSpec.local(ranks)
    cluster = cluster.with_tiers() if options.offload == "activations" else cluster
    return autopar.compile(Deep(layers), cluster, (ids, ids), loss_fn=loss, optimizer=optimizer, options=options)


@pytest.fixture(scope="module")
def two():
    return program(2)


def functions(source: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


def test_there_is_a_function_pair_per_template_whatever_the_depth(two):
    for made in (two, program(8), program(24)):
        learn = {made.ir.calls[i].template for i in made.ir.backward_calls}
        pairs = {f"{t}_forward" for t in made.ir.templates} | {f"{t}_backward" for t in learn}
        assert functions(made.source(0)).keys() == pairs | {"forward", "backward"}
        assert {"blocks_forward", "blocks_backward"} <= pairs
    shallow, deep = program(8), program(24)
    assert functions(shallow.source(0)).keys() == functions(deep.source(0)).keys()
    assert abs(len(deep.source(0).splitlines()) - len(shallow.source(0).splitlines())) < 10


def test_comments_name_module_and_source_line(two):
    source = two.source(0)
    assert re.search(r"# blocks\.0\.up · test_emit\.py:\d+: return x \+ self\.down", source)
    assert re.search(r"# head · test_emit\.py:\d+: return self\.head\(x\)", source)
    assert re.search(r"= ops\.linear\(.*\)  # f32\[8\S*, 4, 32\S*\]", source)


def test_no_line_is_longer_than_a_screen_is_wide(two):
    long = [line for line in two.source(0).splitlines() if len(line.split("  # ")[0]) > 160 and "dict(" not in line]
    assert not long, long


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "zero3"},
        {"strategy": "zero3", "recompute": "full", "microbatches": 2},
        {"pp": 2, "mesh": {"dp": 2}, "schedule": "zb-h1", "microbatches": 4},
        {"mesh": {"dp": 4}, "offload": "activations"},
    ],
    ids=str,
)
def test_functions_do_what_their_lines_do_and_hold_nothing_longer(options):
    """Names are made before they are read, values freed after their last use, whatever is a loop."""
    made = program(5, **options)
    for stage, source in zip(made.lowered.stages, made.sources, strict=True):
        printer = Printer(local=local)
        assert "    for i in " in source
        for function in stage.functions:
            emitted = functions(source)[function.name]
            returned = [n for n in function.returns if n]
            lists = {arg.arg: names for arg, names in zip(emitted.args.args[1:], taken(stage, function), strict=True)}
            plain = [f"{', '.join(names)}, = {source}" for source, names in lists.items() if names]
            plain += [f"{source}.clear()" for source in lists if source not in ("inputs", "prepared")]
            plain += unrolled(function, functools.partial(_text, stage=stage, printer=printer), returned)
            result = ast.parse("\n".join([*plain, f"return [{', '.join(returned)}]"])).body
            counts = {name: len(names) for name, names in lists.items()}
            ours, theirs = trace(emitted.body[1:], counts), trace(result, counts)
            assert ours[:-1] == theirs[:-1], function.name
            assert re.findall(r"#\d+", ours[-1][0]) == re.findall(r"#\d+", theirs[-1][0])


def taken(stage, function):
    """The names in each list that a stage's function is given."""
    rows = [row.name for row in stage.inputs]
    rest = [a for a in function.args if a not in rows]
    received, arrived = len(stage.received), [a for a in function.args if a in function.arg_types]
    return {
        "prepare": [rows, rest],
        "forward": [rows, rest[:received], rest[received:]],
        "backward": [list(stage.state), arrived],
        "weights": [list(function.args)],
    }[function.name.partition("_")[0]]


def test_templates_free_values_after_their_last_use(two):
    for name, function in functions(two.source(0)).items():
        if not name.startswith("blocks"):
            continue
        gone: set[str] = set()
        outside = {"rt", "call", "saved", "ops", "aten", "attention", "rnn", "torch", "float"}
        known = {a.arg for a in function.args.args} | outside
        for statement in function.body:
            names = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
            assert {n.id for n in names if isinstance(n.ctx, ast.Load)} <= known - gone, name
            known |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
            gone |= {n.id for n in names if isinstance(n.ctx, ast.Del)}
        kept = {n.id for n in ast.walk(function.body[-1]) if isinstance(n, ast.Name)}
        assert known - gone - outside <= kept | {"_"}, name
        assert gone


def test_emission_is_the_same_every_time(two, tmp_path):
    again = program(2)
    assert again.source(0) == two.source(0)
    texts = []
    for made, name in ((two, "a"), (again, "b"), (two, "c")):
        out = made.save(tmp_path / name)
        texts.append(
            {
                str(p.relative_to(out)): p.read_bytes()
                for p in out.rglob("*")
                if p.is_file()
                and p.suffix != ".distcp"
                and p.name not in (".metadata", "complete.json", "program.json")
            }
        )
    assert texts[0] == texts[1] == texts[2]


def test_alike_ranks_share_one_file(two, tmp_path):
    out = two.save(tmp_path / "out")
    assert [p.name for p in sorted((out / "stages").iterdir())] == ["stage_0.py"]
    ranks = sorted((out / "ranks").iterdir())
    assert [p.name for p in ranks] == [f"rank_{r}.py" for r in range(4)]
    assert "{'dp': 1, 'tp': 0}" in ranks[2].read_text()
    assert (out / "stages" / "stage_0.py").read_text() == two.source(0) == two.source(3)


def test_emitted_files_import_torch_and_the_copied_runtime_only(two, tmp_path):
    out = two.save(tmp_path / "out")
    standard = {"torch", "autopar_runtime", "__future__"}
    for path in out.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom) and not node.level
                else []
            )
            for name in found:
                top = name.split(".")[0]
                if top == "triton" and path.name.startswith("triton_"):
                    continue  # torch for CUDA brings it along, and nothing imports these files where no kernel is launched
                assert top in standard or top in sys.stdlib_module_names, f"{path}: imports {name}"


def test_saving_again_leaves_nothing_of_the_program_before(tmp_path):
    out = program(2).save(tmp_path / "out")
    program(2, ranks=2, mesh={"dp": 2}).save(out)
    assert len(list((out / "ranks").iterdir())) == 2


def test_scripts_start_the_right_number_of_ranks(two, tmp_path):
    out = two.save(Path(tmp_path) / "out")
    assert "--nproc-per-node 4" in (out / "launch.sh").read_text()
    assert (out / "launch.sh").stat().st_mode & 0o100
    slurm = (out / "slurm.sh").read_text()
    assert "#SBATCH --nodes=1\n" in slurm
    assert '\n  srun --kill-on-bad-exit=1 torchrun --nnodes "$1" --nproc-per-node 4 ' in slurm
    assert "\nstart 1 3 29501 " in slurm
    assert "--no-kill" not in slurm
    assert "parallelism: 1" in (out / "kubernetes.yaml").read_text()


def test_machines_of_slurm_may_come_and_go_where_there_is_a_plan_for_fewer(tmp_path):
    made = program(2, ranks=2, mesh={"dp": 2})
    slurm = (made.save(tmp_path / "out", also=[1, 4]) / "slurm.sh").read_text()
    assert "#SBATCH --nodes=1-2\n#SBATCH" in slurm
    assert "#SBATCH --no-kill\n#" in slurm
    assert "\nexport TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in slurm
    assert '\n  srun --no-kill torchrun --nnodes "$1" --nproc-per-node 2 ' in slurm
    assert '\nstart "$SLURM_JOB_NUM_NODES" 0 29500 --preflight ' in slurm
    assert "\nstart 1:2 3 29501 " in slurm


def test_an_optimizer_without_a_name_is_saved_by_its_source(tmp_path):
    rate = 0.125
    out = program(optimizer=lambda params: torch.optim.SGD(params, lr=rate)).save(tmp_path / "out")
    assert "\n    import user_factories" in (out / "run.py").read_text()
    rule = Manifest.read(out).update_rule()
    assert rule.optimizer([torch.nn.Parameter(torch.ones(1))]).param_groups[0]["lr"] == 0.125


def test_an_optimizer_that_no_source_says_cannot_be_saved(tmp_path):
    rate = torch.ones(1)
    with pytest.warns(UserWarning, match="cannot be saved"):
        made = program(optimizer=lambda params: torch.optim.SGD(params, lr=rate.item()))
    with pytest.raises(EmitError, match=r"uses rate, which is a Tensor; use functools\.partial"):
        made.save(tmp_path / "out")
