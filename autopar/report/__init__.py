"""The report of a compiled program: in words for people, as plain data for tools."""

from autopar.report.facts import facts
from autopar.report.words import report

__all__ = ["facts", "report"]
