"""The request of a call of `compile`, and what is held against what in it."""

from autopar.request.checks import as_computed, checked_options
from autopar.request.request import Request, make_request

__all__ = ["Request", "as_computed", "checked_options", "make_request"]
