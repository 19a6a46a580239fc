"""The report of a compiled program as one HTML file that needs nothing else."""

from autopar.report.page.write import page_html, write_page

__all__ = ["page_html", "write_page"]
