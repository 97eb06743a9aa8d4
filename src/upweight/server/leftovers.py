"""What a kill left half-made in the home folder goes at the next start: uploads, exports, folders of jobs that were never stored.

Invariants:
* Only the store that named the things of a home folder removes from it what it does not name. One that was put beside it later,
  another database say, removes nothing.
* Whole weights are never removed.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from pathlib import Path

from sqlalchemy import Connection, insert, select

from upweight.server.home import Home, write_atomically
from upweight.server.store import files, schema

log = logging.getLogger(__name__)

STORE_ID = "store_id"  # name of a property, and of a file in the home folder


def owner(connection: Connection) -> str:
    """The store's own name, made at its first start. To be called as a write."""
    table = schema.properties
    found: str | None = connection.scalar(select(table.c.value).where(table.c.name == STORE_ID))
    if found is None:
        found = secrets.token_hex(12)
        connection.execute(insert(table).values(name=STORE_ID, value=found))
    return found


def belongs_to(home: Home, store_id: str) -> bool:
    """Whether the things in `home` are those of this store. A home folder without an owner has none of its things removed yet."""
    place = home.root / STORE_ID
    if place.exists():
        return place.read_text().strip() == store_id
    write_atomically(place, store_id + "\n", mode=0o600)
    return False


def remove(connection: Connection, home: Home) -> None:
    """To be called before the server answers anybody."""
    models = set(connection.scalars(select(schema.models.c.id)))
    jobs = set(connection.scalars(select(schema.jobs.c.id)))
    for folder, known in (
        (home.files, files.present_ids(connection)),
        (home.models, models),
        (home.jobs, jobs | models),
    ):
        for path in folder.iterdir():
            if path.name in known:
                continue
            if holds_weights(path):
                log.warning("%s: the store does not name it; it is kept", path)
            else:
                _remove(path)


def holds_weights(path: Path) -> bool:
    """Whole ones, which an older store that was put back may not know: that is no reason to lose them."""
    found = ("checkpoints", "weights", "config.json")
    return not path.name.startswith(".") and any((path / name).exists() for name in found)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
