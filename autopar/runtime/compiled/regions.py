"""The regions of a stage file that a compiler may take: its templates' functions, cut where they speak to other ranks.

A region is a run of statements of a function that only compute. It becomes a function of tensors; what sends,
waits, draws random numbers or looks at data stays where it is, so that messages start and end in the order of the file.

    def block_forward(rt, call, w, v, x):              def block_forward(rt, call, w, v, x):
        h = ops.linear(x, w)                               _given = [x, w, v]
        a = aten.gelu(h)                                   del w, v
        del w, h                                           y = block_forward_1(rt, _given)
        y = ops.linear(a, v)                               y_reduced = rt.comm.all_reduce(y, 'tp')
        del v, a                                           del y
        y_reduced = rt.comm.all_reduce(y, 'tp')            return y_reduced, [x]
        del y
        return y_reduced, [x]                          def block_forward_1(rt, _given):
                                                           x, w, v = _given
                                                           _given.clear()
                                                           h = ops.linear(x, w)
                                                           … return y

Tensors come in a list that the region empties, so that one that nobody else holds is freed after its last use. The statements
are those of the file, and a function without messages is one region. What is not known here to be a computation is none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MODULES = (
    *("aten", "torch", "attention", "batch_norm", "images", "moves", "ops", "pools", "scans", "selection", "softmax"),
    "zigzag",
)
"""Names of the file whose functions compute with tensors alone. Not among them: experts (what they do depends on the data),
losses (in chunks, in place), recurrent layers (one kernel), and the user's own ops (anything)."""
METHODS = ("reshape", "permute", "expand", "sum", "to")
MOVES = ("reshape", "permute", "expand")
OF_THE_RANK = ("rt.comm.axis_index", "rt.comm.shard")
"""The questions that a region may ask of its rank: the answers are the same in every step, and nothing is sent."""
GIVEN = "_given"
"""The list of what a region is given."""
FEWEST = 2
"""Statements that are not views of what there is; fewer have nothing to be fused with."""


@dataclass(frozen=True)
class Region:
    """A run of statements as a function. function: whose they are; line: of the file, where they begin; source: the line of the
    model that this one comes from."""

    name: str
    function: str
    line: int
    source: str


@dataclass(frozen=True)
class CutModule:
    """A stage file whose template functions call their regions, and these."""

    tree: ast.Module
    regions: tuple[Region, ...]


def cut(source: str) -> CutModule:
    """A stage file in regions."""
    tree, lines = ast.parse(source), source.splitlines()
    body: list[ast.stmt] = []
    regions: list[Region] = []
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and [a.arg for a in statement.args.args[:2]] == ["rt", "call"]:
            for made, region in _cut_function(statement, lines):
                body.append(made)
                regions.append(region)
        body.append(statement)
    tree.body = body
    return CutModule(ast.fix_missing_locations(tree), tuple(regions))


def _cut_function(function: ast.FunctionDef, lines: Sequence[str]) -> Iterator[tuple[ast.FunctionDef, Region]]:
    """Puts calls of its regions into a function; gives these."""
    local = {a.arg for a in function.args.args} - {"rt"}
    body: list[ast.stmt] = []
    number = 0
    for run in _runs(function.body):
        if run.worth:
            number += 1
            name = f"{function.name}_{number}"
            takes, gives, first = run.takes(local), run.gives(), run.statements[0]
            made = _function(name, [*_taken(takes), *run.statements, _return(gives)], first)
            yield made, Region(name, function.name, first.lineno, _comment_above(lines, first.lineno))
            body += _call(name, takes, [n for n in run.deleted if n not in run.made], gives, first)
        else:
            body += run.statements
        local |= set(run.made)
    function.body = body


@dataclass
class _Run:
    """Statements that follow each other. computes: whether all of them compute (deletions aside)."""

    computes: bool
    statements: list[ast.stmt] = field(default_factory=list)

    @property
    def worth(self) -> bool:
        moves = [s for s in self.statements if isinstance(s, ast.Assign) and not _is_move(s.value)]
        return self.computes and len(moves) >= FEWEST

    @property
    def made(self) -> list[str]:
        return [name for s in self.statements for name in _names(s, ast.Store)]

    @property
    def deleted(self) -> list[str]:
        return [name for s in self.statements for name in _names(s, ast.Del)]

    def takes(self, local: set[str]) -> list[str]:
        """Local names that the statements read and do not make, in order."""
        read = dict.fromkeys(name for s in self.statements for name in _names(s, ast.Load))
        return [name for name in read if name in local and name not in self.made]

    def gives(self) -> list[str]:
        """Names that are alive at the end."""
        gone = {*self.deleted, "_"}
        return [name for name in dict.fromkeys(self.made) if name not in gone]


def _runs(statements: Sequence[ast.stmt]) -> Iterator[_Run]:
    """Statements in runs of what computes and of what does not; a deletion belongs to what stands before it."""
    run = _Run(False)
    for statement in statements:
        computes = run.computes if isinstance(statement, ast.Delete) else _gives_results(statement)
        if computes != run.computes:
            yield run
            run = _Run(computes)
        run.statements.append(statement)
    yield run


def _gives_results(statement: ast.stmt) -> bool:
    """Whether a statement gives names to results; a name for what has one already does not compute."""
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Call | ast.BinOp | ast.UnaryOp)
        and _computes(statement.value)
    )


def _computes(value: ast.expr) -> bool:
    """Whether an expression is made of tensors, constants, and functions that compute."""
    match value:
        case ast.Constant():
            return True
        case ast.Name(id=name):
            return name != "rt"
        case ast.Attribute():
            return _path(value).partition(".")[0] in MODULES or _path(value) == "rt.device"
        case ast.Call(func=function, args=args, keywords=keywords):
            return _is_known(function) and all(map(_computes, [*args, *(k.value for k in keywords)]))
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return all(map(_computes, parts))
        case ast.BinOp(left=left, right=right):
            return _computes(left) and _computes(right)
        case ast.UnaryOp(operand=operand):
            return _computes(operand)
    return False


def _is_known(function: ast.expr) -> bool:
    path = _path(function)
    if path == "float" or path in OF_THE_RANK or path.partition(".")[0] in MODULES:
        return True
    return isinstance(function, ast.Attribute) and function.attr in METHODS and _computes(function.value)


def _is_move(value: ast.expr) -> bool:
    """Whether an expression is a view of a value, or a part of one."""
    return (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in (*MOVES, "shard")
    )


def _path(value: ast.expr) -> str:
    """`rt.comm.shard` of attributes of a name, nothing of anything else."""
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Attribute) and (head := _path(value.value)):
        return f"{head}.{value.attr}"
    return ""


def _names(statement: ast.stmt, kind: type[ast.expr_context]) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, kind):
            yield node.id


def _comment_above(lines: Sequence[str], number: int) -> str:
    """The nearest comment over a line of a function, which says where in the model it comes from."""
    for line in reversed(lines[: number - 1]):
        if line.startswith("    # "):
            return line[6:]
        if line.startswith("def "):
            break
    return ""


# --- text of its own --------------------------------------------------------------------------------------------------


def _function(name: str, body: list[ast.stmt], at: ast.stmt) -> ast.FunctionDef:
    arguments = ast.arguments([], [ast.arg("rt"), ast.arg(GIVEN)], None, [], [], None, [])
    return ast.copy_location(ast.FunctionDef(name, arguments, body, []), at)


def _taken(takes: list[str]) -> list[ast.stmt]:
    """The names of what is given, which the list then holds no longer."""
    return [ast.Assign([_tuple(takes, ast.Store())], ast.Name(GIVEN, ast.Load())), *ast.parse(f"{GIVEN}.clear()").body]


def _call(name: str, takes: list[str], gone: list[str], gives: list[str], at: ast.stmt) -> Iterator[ast.stmt]:
    """The call of a region. gone: names that are not read after it."""
    given = ast.List([ast.Name(n, ast.Load()) for n in takes], ast.Load())
    yield ast.copy_location(ast.Assign([ast.Name(GIVEN, ast.Store())], given), at)
    if gone:
        yield ast.copy_location(ast.Delete([ast.Name(n, ast.Del()) for n in gone]), at)
    call = ast.Call(ast.Name(name, ast.Load()), [ast.Name(n, ast.Load()) for n in ("rt", GIVEN)], [])
    yield ast.copy_location(ast.Assign([_tuple(gives, ast.Store())], call), at)


def _return(gives: list[str]) -> ast.Return:
    return ast.Return(_tuple(gives, ast.Load()))


def _tuple(names: list[str], context: ast.expr_context) -> ast.Tuple:
    return ast.Tuple([ast.Name(n, context) for n in names], context)
