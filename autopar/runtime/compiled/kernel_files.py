"""The C++ kernels of a region in one file, built while the next region is lowered.

Inductor gives every kernel a file of its own, though most of what g++ does for one is the same for all (reading torch's
headers, linking), and waits for a region's kernels before anything else happens:

    cpp_fused_0 = async_compile.cpp_pybinding(['float*', …], '… extern "C" void kernel(…) { … }')
    cpp_fused_1 = async_compile.cpp_pybinding(['float*', …], '… extern "C" void kernel(…) { … }')
    async_compile.wait(globals())

Inside `one_file` the kernels that this thread makes are collected, to be `kernel_0`, `kernel_1`, … of one library, each with
inductor's own binding to Python, and who asked for the file waits for it. Only this module knows inductor's insides; where they
are not as expected it raises, and the region is compiled as torch does it.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

_DEFINITION = re.compile(r'(extern "C"\s+void\s+)kernel\(')
_HEADERS = "#include <Python.h>\n#include <cerrno>\n#include <cstdlib>\n#include <sstream>\n"
"""The headers that bindings include: each binding lies in a namespace, where nothing may be included for the first time."""


@dataclass
class KernelFile:
    """The kernels of a region, and who waits for them."""

    texts: list[str] = field(default_factory=list)
    kernels: list[Future[Any]] = field(default_factory=list)
    waits: list[Callable[[], None]] = field(default_factory=list)
    library: Callable[[], Any] | None = None

    def add(self, argument_types: Sequence[str], source: str) -> Future[Any]:
        """A kernel, which is there when the file has been waited for. Raises ValueError for a source that is not one kernel."""
        name = f"kernel_{len(self.texts)}"
        text, definitions = _DEFINITION.subn(rf"\g<1>{name}(", source)
        if definitions != 1:
            raise ValueError(f"a kernel of inductor with {definitions} definitions of `kernel`")
        self.texts.append(f"{text}\nnamespace of_{name} {{\n{_binding(name, argument_types)}\n}}\n")
        self.kernels.append(Future())
        return self.kernels[-1]

    def start(self) -> None:
        """Begin to build."""
        from torch._inductor.async_compile import AsyncCompile, get_compile_threads

        if self.texts:
            submit = AsyncCompile.submit if get_compile_threads() > 1 else None
            self.library = _code_cache().load_async(_HEADERS + "".join(self.texts), submit_fn=submit)

    def wait(self) -> None:
        """Wait until the kernels are where they are called from. Raises what the C++ compiler or the loading of the
        library raises."""
        if self.library is not None:
            first = self.library()
            for number, kernel in enumerate(self.kernels):
                name = f"kernel_{number}"
                kernel.set_result(getattr(first if number == 0 else _sibling(first, name), name))
        for wait in self.waits:
            wait()


@contextmanager
def one_file() -> Iterator[KernelFile]:
    """Inside, what this thread compiles for a CPU has its kernels in a file, which is built from the end on."""
    from torch._inductor.async_compile import AsyncCompile

    file, thread = KernelFile(), threading.get_ident()
    bind, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def bind_here(self: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        return (file.add if threading.get_ident() == thread else partial(bind, self))(argtypes, source_code)

    def wait_later(self: AsyncCompile, scope: dict[str, Any]) -> None:
        own = partial(wait, self, scope)
        if threading.get_ident() == thread:
            file.waits.append(own)
        else:
            own()

    AsyncCompile.cpp_pybinding, AsyncCompile.wait = bind_here, wait_later  # type: ignore[method-assign]
    try:
        yield file
    finally:
        AsyncCompile.cpp_pybinding, AsyncCompile.wait = bind, wait  # type: ignore[method-assign]
    file.start()


def _code_cache() -> Any:
    """Inductor's builder of kernels with bindings, for a library whose first module is `kernel_0`."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return type("KernelFileCache", (CppPythonBindingsCodeCache,), {"entry_function": "kernel_0"})


def _binding(name: str, argument_types: Sequence[str]) -> str:
    """A Python module of the library, with one function."""
    types = [kind.replace("const ", "") for kind in argument_types]
    arguments = ", ".join(f"parse_arg<{kind}>(args, {number})" for number, kind in enumerate(types))
    return str(
        _code_cache().suffix_template.format(
            arg_len=len(types),
            call_entry_func=f"{name}({arguments}); Py_RETURN_NONE;",
            entry_func=name,
            extra_parse_arg="",
        )
    )


def _sibling(module: Any, name: str) -> Any:
    """Another module of a module's library."""
    full = f"{module.__name__.rpartition('.')[0]}.{name}"
    if full not in sys.modules:
        spec = spec_from_file_location(full, module.__file__, loader=ExtensionFileLoader(full, module.__file__))
        assert spec is not None
        assert spec.loader is not None
        sibling = module_from_spec(spec)
        spec.loader.exec_module(sibling)
        sys.modules[full] = sibling
    return sys.modules[full]
