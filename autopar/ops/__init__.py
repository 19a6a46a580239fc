"""The op dialect: one file per family of ops holds all that the compiler knows of them.

A family states for each op its sharding rule, work, local block and facts (`autopar.ops.registry`), for an op of
autopar's own also its schema, shape and gradient, and what ATen's ops become (`autopar.ops.dialect`). Importing this
package imports every module of it, which fills the table.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
