"""Where a node of a captured graph comes from: the user's module and line; which modules are blocks."""

from __future__ import annotations

import re

from torch import fx


def module_path(node: fx.Node) -> str:
    """Path of the innermost user module a node belongs to (`layers.0.attn`)."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return own_path(paths[-1]) if paths else ""


def source_of(node: fx.Node) -> str:
    """`layers.0.attn · model.py:12: code` of a captured node."""
    path = module_path(node)
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', node.meta.get("stack_trace") or "")
    own = [f for f in frames if "/torch/" not in f[0] and not f[0].startswith("<") and "/autopar/capture/" not in f[0]]
    if not own and "self.loss_fn(" in (node.meta.get("stack_trace") or ""):
        return "the loss"
    if not own:
        return path
    file, line, code = own[-1]
    place = f"{file.rsplit('/', 1)[-1]}:{line}: {code.strip()}"
    return f"{path} · {place}" if path else place


def place_in(source: str) -> tuple[str, int] | None:
    """The file and line that `source_of` names; None where it names none."""
    found = re.match(r"(?:.* · )?([^\s/:]+):(\d+): ", source)
    return None if found is None else (found[1], int(found[2]))


def own_path(path: str) -> str:
    """A module's path below the user's model, which torch.export holds as `model`."""
    return "" if path == "model" else path.removeprefix("model.")


def is_block(cls: str) -> bool:
    """Whether a module class may be a block on its own: torch's own layers (a Linear, a ReLU) are too small to be one."""
    return not cls.startswith("torch.nn.modules.") or cls.startswith(
        ("torch.nn.modules.transformer.", "torch.nn.modules.container.")
    )
