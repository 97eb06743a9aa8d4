"""Commands: parsing and printing only."""

from upweight.cli.main import main

__all__ = ["main"]
