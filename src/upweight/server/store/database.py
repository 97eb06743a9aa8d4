"""One store, one writer thread with group commits, separate readers.

Invariants:
* A future of `write` is resolved only after the commit that holds its operation: what was answered survives a kill.
* Each operation stands in a savepoint of its own: one that raises changes nothing and disturbs no neighbour. Neighbours of one
  kind may be done together, in one savepoint; if that raises, they are done one by one.
* SQLite with `synchronous=FULL`, as PostgreSQL by default: a commit is on the disk, so a power cut loses nothing that was answered either. It costs one fsync per
  commit, and operations that wait together share a commit.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from sqlalchemy import Connection, insert, select, text, update
from sqlalchemy.exc import DatabaseError

from upweight.errors import StoreError
from upweight.server.store import schema
from upweight.server.store.engines import (
    READERS,
    StorePlace,
    give_back,
    in_transaction,
    mend,
    name_of,
    open_engine,
    take_alone,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
Operation = Callable[[Connection], T]


@runtime_checkable
class Joint(Protocol):
    """An operation that can be done together with its neighbours of equal `kind`."""

    @property
    def kind(self) -> Hashable: ...

    def together(self, connection: Connection, operations: Sequence[Any]) -> Sequence[Any]:
        """What the operations, of this kind, have as results; an exception stands for a refusal."""
        ...

    def __call__(self, connection: Connection) -> Any: ...


Outcome = tuple[Any, Exception | None]

LARGEST_GROUP = 128
GATHER_SECONDS = 0.002  # that the writer waits for company where there was some a moment ago: a commit takes as long


class Database:
    """Open (or create) the store at `place`. Raises StoreError with one line when that is impossible.

    `alone`: refuse to open what another server has open. A SQLite file is guarded by its home folder's lock instead.
    """

    def __init__(self, place: StorePlace, *, alone: bool = False) -> None:
        self.name = name_of(place)
        self._writer = open_engine(place, writer=True)
        self._reader = open_engine(place, writer=False)
        self._guard = self._keep_others_out() if alone and not isinstance(place, Path) else None
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-read")
        self._orders: queue.SimpleQueue[tuple[Operation[Any], Future[Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._prepare()
        self._thread = threading.Thread(target=self._run, name="store-write", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation[T]) -> Future[T]:
        """Queue `operation` for the writer; the future answers after its commit."""
        if self._closed:
            raise StoreError("the store is closed")
        future: Future[T] = Future()
        self._orders.put((operation, future))
        return future

    async def write(self, operation: Operation[T]) -> T:
        return await asyncio.wrap_future(self.submit(operation))

    async def read(self, operation: Operation[T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, self.read_now, operation)

    def read_now(self, operation: Operation[T]) -> T:
        """As `read`, in the calling thread: one consistent snapshot."""
        with self._reader.begin() as connection:
            return operation(connection)

    def close(self) -> None:
        """Commit what is queued, then close. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._orders.put(None)
        self._thread.join()
        self._readers.shutdown()
        if self._guard is not None:
            give_back(self._guard)
        self._reader.dispose()
        self._writer.dispose()

    def _keep_others_out(self) -> Connection:
        try:
            connection = self._writer.connect()
        except DatabaseError as error:
            raise StoreError(f"store {self.name} cannot be opened: {error.orig}; is PostgreSQL running?") from error
        if not take_alone(connection):
            connection.close()
            raise StoreError(f"the store {self.name} is in use by another server; stop it or use another database")
        return connection

    def _prepare(self) -> None:
        try:
            with self._writer.begin() as connection:
                schema.metadata.create_all(connection)
                table = schema.properties
                found = connection.scalar(select(table.c.value).where(table.c.name == "schema"))
                if found is None:
                    connection.execute(insert(table).values(name="schema", value=str(schema.SCHEMA_VERSION)))
                found = _upgraded(connection, found)
        except DatabaseError as error:
            raise StoreError(f"store {self.name} cannot be opened: {error.orig}; {_remedy(str(error.orig))}") from error
        if found is not None and found != str(schema.SCHEMA_VERSION):
            raise StoreError(
                f"store {self.name} has schema {found}, this server writes {schema.SCHEMA_VERSION}; use another --home"
            )

    def _run(self) -> None:
        with self._writer.connect() as connection:
            had_company = False
            while (order := self._orders.get()) is not None:
                group = [order]
                if had_company:
                    time.sleep(GATHER_SECONDS)
                while len(group) < LARGEST_GROUP and not self._orders.empty():
                    following = self._orders.get()
                    if following is None:
                        self._orders.put(None)
                        break
                    group.append(following)
                had_company = len(group) > 1
                mend(connection)
                _commit(connection, group)


def _remedy(problem: str) -> str:
    if "locked" in problem:
        return "another program holds it: end that"
    if "disk" in problem:
        return "is the disk full or broken?"
    return "restore it or use another --home"


def _upgraded(connection: Connection, found: str | None) -> str | None:
    """The version after all steps that are known from an older one."""
    while found in schema.UPGRADES:
        for statement in schema.UPGRADES[found]:
            connection.execute(text(statement))
        found = str(int(found) + 1)
        table = schema.properties
        connection.execute(update(table).where(table.c.name == "schema").values(value=found))
    return found


def _commit(connection: Connection, group: list[tuple[Operation[Any], Future[Any]]]) -> None:
    """Run the operations of one group, commit once, then answer. If the commit fails, all of them are refused."""
    live = [(operation, future) for operation, future in group if future.set_running_or_notify_cancel()]
    try:
        with connection.begin():
            outcomes = _outcomes(connection, [operation for operation, _ in live])
    except Exception as error:  # noqa: BLE001 - it belongs to the callers who wait on the futures
        for _, future in live:
            future.set_exception(StoreError(f"the store did not commit: {_first_cause(error)}"))
        return
    for (_, future), (result, problem) in zip(live, outcomes, strict=True):
        if problem is None:
            future.set_result(result)
        else:
            future.set_exception(problem)


def _outcomes(connection: Connection, operations: list[Operation[Any]]) -> list[Outcome]:
    """Of all operations, in order."""
    found: list[Outcome] = []
    for _, neighbours in itertools.groupby(operations, lambda one: one.kind if isinstance(one, Joint) else one):
        several: list[Any] = list(neighbours)
        if len(several) > 1 and isinstance(several[0], Joint):
            results, problem = _attempt(connection, functools.partial(_together, several))
            if results is not None:
                found += [(None, one) if isinstance(one, Exception) else (one, None) for one in results]
                continue
            log.warning("%d operations cannot be done together, one by one now: %r", len(several), problem)
        found += [_attempt(connection, operation) for operation in several]
    return found


def _together(several: Sequence[Joint], connection: Connection) -> Sequence[Any]:
    return several[0].together(connection, several)


def _attempt(connection: Connection, operation: Operation[T]) -> tuple[T | None, Exception | None]:
    """Result or exception of one operation in its savepoint. Raises when the whole transaction is lost."""
    try:
        with connection.begin_nested():
            return operation(connection), None
    except Exception as error:  # of one operation; its neighbours in the transaction go on
        # On a full disk SQLite rolls the whole transaction back: what the neighbours wrote is gone too, and a commit would
        # succeed without it.
        if not in_transaction(connection):
            raise
        return None, error


def _first_cause(error: BaseException) -> BaseException:
    """What set off a chain of errors: the failed clean-up is raised last, the reason lies at its start."""
    while error.__context__ is not None:
        error = error.__context__
    return error
