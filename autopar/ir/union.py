"""A program among others over one set of parameters and buffers: under the names that these have there, with all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.program import Buffer, Parameter, Program, ValueRef


def of_union(
    program: Program, names: Mapping[str, str], parameters: Mapping[str, Parameter], buffers: Mapping[str, Buffer]
) -> Program:
    """The program with its parameters and buffers under other names, beside those that it does not use.

    names: from the program's own, where they differ. parameters, buffers: of the whole set, in its order.
    """

    def named(name: str) -> str:
        return names.get(name, name)

    def at(ref: ValueRef) -> ValueRef:
        return replace(ref, name=named(ref.name)) if ref.kind == "buffer" else ref

    own = {named(name): replace(p, name=named(name)) for name, p in program.parameters.items()}
    held = {named(name): replace(b, name=named(name)) for name, b in program.buffers.items()}
    return replace(
        program,
        calls=tuple(
            replace(call, params=tuple(map(named, call.params)), inputs=tuple(map(at, call.inputs)))
            for call in program.calls
        ),
        parameters={name: replace(p, trainable=own.get(name, p).trainable) for name, p in parameters.items()},
        buffers=dict(buffers) | {name: buffer for name, buffer in held.items() if name not in buffers},
        outputs=tuple(map(at, program.outputs)),
        buffer_updates={named(name): at(ref) for name, ref in program.buffer_updates.items()},
        conditions={named(name): ways for name, ways in program.conditions.items()},
    )
