"""The list of packages; everything else is in pyproject.toml.

The folders `passes`, `costmodel` and `codegen` install inside `autopar`, never beside it, so the usual discovery
(which takes a folder's name for its package's name) does not fit.
"""

from setuptools import find_packages, setup

WINGS = {
    "autopar": "autopar",
    "autopar.passes": "passes",
    "autopar.costmodel": "costmodel",
    "autopar.codegen": "codegen",
}

setup(
    packages=[
        name
        for package, folder in WINGS.items()
        for name in (package, *(f"{package}.{inner}" for inner in find_packages(folder)))
    ]
)
