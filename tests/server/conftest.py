"""The fixture that starts servers; their parts are in server_harness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres import Cluster, NewDatabase, cluster
from server_harness import Running, Start, servers

from upweight.server.store.database import Database


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a server: `start(behaviour, **settings)`; the home folder is the same for all of one test."""
    with servers(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for tests that need no worker of their own: its only place is taken, so that other jobs stay queued."""
    with servers(tmp_path_factory.mktemp("shared")) as begin:
        server = begin()
        server.create_job()
        yield server


@pytest.fixture(scope="session")
def postgresql_cluster() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@pytest.fixture(scope="session")
def postgresql(postgresql_cluster: Cluster) -> NewDatabase:
    """Makes an empty database and returns its URL."""
    return postgresql_cluster.new_database


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.ci)])
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A store of either kind."""
    if request.param == "sqlite":
        store = Database(tmp_path_factory.mktemp("store") / "store.sqlite3")
    else:
        store = Database(request.getfixturevalue("postgresql")())
    yield store
    store.close()
