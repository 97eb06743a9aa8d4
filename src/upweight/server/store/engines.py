"""Where a store lies: a SQLite file in the home folder, or a PostgreSQL database by URL.

Invariants:
* A reader's transaction sees one consistent snapshot; the writer's holds whatever its commit will hold.
* A password in a URL is in no text that is made here.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import NullPool, QueuePool

from upweight.errors import StoreError

StorePlace = Path | str  # a SQLite file, or the URL of a PostgreSQL database

READERS = 4
TAKE_SECONDS = 2.0  # for the lock of a server that was killed a moment ago
CONNECT_SECONDS = 10
BUSY_SECONDS = 30.0  # that a locked SQLite file is waited for
ONE_SERVER = 0x7570_7765_6967_6874  # the advisory lock of the one server that may write: "upweight"


def name_of(place: StorePlace) -> str:
    """The place as it may be shown."""
    return str(place) if isinstance(place, Path) else _parsed(place).render_as_string(hide_password=True)


def open_engine(place: StorePlace, *, writer: bool) -> Engine:
    """For the one writing thread, or for readers. Raises StoreError for a URL that names no PostgreSQL database."""
    pool: dict[str, Any] = {"poolclass": NullPool} if writer else {"poolclass": QueuePool, "pool_size": READERS}
    if isinstance(place, Path):
        return _sqlite(place, "BEGIN IMMEDIATE" if writer else "BEGIN", pool)
    return _postgresql(place, "READ COMMITTED" if writer else "REPEATABLE READ", pool)


def in_transaction(connection: Connection) -> bool:
    """Whether what was written in the present transaction can still be committed."""
    if connection.invalidated:
        return False
    driver: Any = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite":
        return bool(driver.in_transaction)
    return not driver.closed


def mend(connection: Connection) -> None:
    """Notice that the database went away since the last transaction, so that the next one begins on a new connection."""
    if connection.dialect.name != "sqlite":
        with contextlib.suppress(DBAPIError):  # a connection that is broken is marked so by this very error
            connection.exec_driver_sql("SELECT 1")
        connection.rollback()


def take_alone(connection: Connection) -> bool:
    """Keep other servers out of a PostgreSQL database for as long as `connection` lives; False if another one stays in."""
    end = time.monotonic() + TAKE_SECONDS
    while not _asked(connection, "pg_try_advisory_lock"):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def give_back(connection: Connection) -> None:
    """Let others in now: the end of a connection is noticed a moment later."""
    with contextlib.suppress(DBAPIError):
        _asked(connection, "pg_advisory_unlock")
    connection.close()


def _asked(connection: Connection, function: str) -> bool:
    answer = connection.exec_driver_sql(f"SELECT {function}(%s)", (ONE_SERVER,)).scalar()
    connection.commit()  # the lock is the session's, not the transaction's
    return bool(answer)


def _sqlite(path: Path, begin: str, pool: dict[str, Any]) -> Engine:
    engine = create_engine(
        f"sqlite:///{path}", connect_args={"check_same_thread": False, "timeout": BUSY_SECONDS}, **pool
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "temp_store=MEMORY", "cache_size=-32000"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


def _parsed(url: str) -> URL:
    try:
        return make_url(url)
    except ArgumentError:  # its message repeats the whole text, password and all
        raise StoreError("store: not a URL; postgresql://USER:PASSWORD@HOST/DATABASE is needed") from None


def _postgresql(url: str, isolation: str, pool: dict[str, Any]) -> Engine:
    parsed = _parsed(url)
    if parsed.drivername.partition("+")[0] not in ("postgresql", "postgres"):
        raise StoreError(f"store {name_of(url)}: postgresql://USER:PASSWORD@HOST/DATABASE is needed")
    try:
        return create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            isolation_level=isolation,
            pool_pre_ping=True,
            connect_args={"connect_timeout": CONNECT_SECONDS, "tcp_user_timeout": CONNECT_SECONDS * 1000},
            **pool,
        )
    except ModuleNotFoundError as error:
        raise StoreError(f"{error.name} is not installed: pip install 'upweight[postgres]'") from error
