"""Folders of saved states, `<kind>-000012`: which are complete, which is the newest, which go.

Invariants:
* A folder of such a name is complete: it is written under another name and renamed at the end.
* What stands under a name is never replaced while it is the newest: a second state of one number gets `<kind>-000012.1`.
* Where a name must be kept (`replace`), what stands there goes only once the new folder is complete.
* One process at a time writes to a place; what an interrupted save left behind is removed by the next prune.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

LAST_WRITTEN = "_METADATA"  # orbax writes it after the arrays


def is_complete(path: Path, kind: str) -> bool:
    return _order(path, kind) is not None and (path / LAST_WRITTEN).is_file()


def complete(folder: Path, kind: str) -> list[Path]:
    """Oldest first."""
    found = [(_order(path, kind), path) for path in folder.glob(f"{kind}-*") if is_complete(path, kind)]
    return [path for _, path in sorted(found)]


def newest(folder: Path, kind: str) -> Path | None:
    found = complete(folder, kind)
    return found[-1] if found else None


def free_name(folder: Path, kind: str, number: int) -> Path:
    """`<kind>-000012`, or the first of `.1`, `.2`, … that nothing stands under."""
    plain = folder / f"{kind}-{number:06d}"
    path, again = plain, 0
    while path.exists():
        again += 1
        path = plain.with_name(f"{plain.name}.{again}")
    return path


def replace(path: Path, write: Callable[[Path], None]) -> None:
    """`write` makes a complete folder of the name it is given; that takes the place of whatever stands at `path`."""
    if not path.exists() and not _beside(path, "old").exists():
        write(path)
        return
    fresh, old = _beside(path, "new"), _beside(path, "old")
    if standing(path) == fresh:  # the process that wrote it was killed between the two renames
        fresh.rename(path)
    for rest in (fresh, old):
        if rest.exists():
            shutil.rmtree(rest)
    write(fresh)
    if path.exists():
        path.rename(old)
    fresh.rename(path)
    if old.exists():
        shutil.rmtree(old)


def standing(path: Path) -> Path:
    """Where the folder of this name is: `path`, unless a `replace` was killed between its two renames."""
    fresh = _beside(path, "new")
    return fresh if not path.exists() and _beside(path, "old").exists() and fresh.exists() else path


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def prune(folder: Path, kind: str, keep: int) -> list[Path]:
    """Deletes all but the newest `keep` (at least one stays), and remains of interrupted saves."""
    whole = complete(folder, kind)
    stay = whole[-max(1, keep) :]
    gone = [path for path in sorted(folder.glob(f"{kind}-*")) if path not in stay]
    for path in gone:
        # Renamed first, so that a prune cut short leaves nothing that looks complete.
        doomed = path if path not in whole else path.rename(path.with_name(f"{path.name}.deleted"))
        shutil.rmtree(doomed)
    return gone


def _order(path: Path, kind: str) -> tuple[int, int] | None:
    found = re.fullmatch(rf"{kind}-(\d{{6,}})(?:\.(\d+))?", path.name)
    return None if found is None else (int(found[1]), int(found[2] or 0))
