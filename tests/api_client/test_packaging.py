"""Failure P1: what the SDK imports is declared, so that a fresh install can import it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SDK = ("api_client", "rollout", "examples", "schedulers.py", "errors.py")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def imported() -> set[str]:
    """Top-level modules that the SDK imports anywhere, also inside functions."""
    names: set[str] = set()
    for part in SDK:
        place = ROOT / "src" / "upweight" / part
        for file in [place] if place.suffix else place.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    names |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                    names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"upweight"}


def module_name(requirement: str) -> str:
    return re.split(r"[<>=\[;! ~]", requirement)[0].replace("-", "_")


@pytest.mark.parametrize("name", sorted(imported()))
def test_every_imported_distribution_is_declared(name: str) -> None:
    extras = [PROJECT["optional-dependencies"][extra] for extra in ("ray", "math")]
    assert name in {module_name(one) for group in [PROJECT["dependencies"], *extras] for one in group}
