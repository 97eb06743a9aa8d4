"""Prints the checks of `upweight doctor`."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from upweight.cli.checks import Check, all_checks


def run_doctor(*, as_json: bool) -> int:
    """Runs and prints all checks; the exit code is 1 when one that is needed is missing."""
    checks = list(all_checks())
    ok = all(check.ok or not check.needed for check in checks)
    if as_json:
        print(
            json.dumps({"ok": ok, "checks": [asdict(check) | {"status": check.status} for check in checks]}, indent=2)
        )
    else:
        print("\n".join(lines(checks)))
    return 0 if ok else 1


def lines(checks: Sequence[Check]) -> list[str]:
    """One line a check and, under one that is not ok, its next step."""
    width = max(len(check.name) for check in checks)
    texts: list[str] = []
    for check in checks:
        texts.append(f"{check.status:8} {check.name:{width}}  {check.detail}")
        if not check.ok:
            texts.append(f"{'':8} {'':{width}}  next: {check.next_step}")
    return texts
