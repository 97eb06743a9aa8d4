"""The ASGI application: parts are made when it starts and taken down when it stops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from upweight import __version__
from upweight.errors import UpweightError
from upweight.server import leftovers
from upweight.server.api import (
    capabilities,
    checkpoint_routes,
    errors,
    file_routes,
    health,
    inference,
    job_routes,
    page,
    prometheus,
    rl_routes,
    sample_routes,
    stats,
)
from upweight.server.api.context import Parts, ResolveModel
from upweight.server.ascii_json import AsciiJSON
from upweight.server.home import Home
from upweight.server.rates import Rates
from upweight.server.settings import Settings
from upweight.server.store import keys, repeats
from upweight.server.store.database import Database
from upweight.server.supervision.supervisor import Supervisor


def create_app(settings: Settings, *, resolve_model: ResolveModel | None = None, home: Home | None = None) -> FastAPI:
    """The server of the home folder in `settings`. `resolve_model(name)` returns an object with `.path`, or raises ModelError.

    `home`: that folder, if the caller has locked it already. An error of ours that ends the start is kept in `state.start_error`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            parts = await _start(settings, home or Home(settings.home), resolve_model or _resolve_installed)
        except UpweightError as error:
            app.state.start_error = error
            raise
        app.state.parts = parts
        try:
            yield
        finally:
            await _stop(parts)

    app = FastAPI(
        title="upweight",
        version=__version__,
        lifespan=lifespan,
        default_response_class=AsciiJSON,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    errors.install(app)
    app.include_router(rl_routes.uploads)  # first: routes are looked through in order, and it is asked most often
    for module in (
        page,
        health,
        capabilities,
        file_routes,
        job_routes,
        checkpoint_routes,
        rl_routes,
        sample_routes,
        inference,
        stats,
        prometheus,
    ):
        app.include_router(module.router)
    return app


async def _start(settings: Settings, home: Home, resolve_model: ResolveModel) -> Parts:
    home.lock()
    try:
        database = Database(settings.store or home.store, alone=True)
    except BaseException:  # the lock is given back, whatever ends the start
        home.unlock()
        raise
    key, _ = home.api_key()
    await database.write(lambda c: keys.add_key(c, key))
    await database.write(repeats.forget_old)
    if leftovers.belongs_to(home, await database.write(leftovers.owner)):
        await database.read(lambda c: leftovers.remove(c, home))
    supervisor = Supervisor(database, home, settings)
    parts = Parts(
        settings=settings,
        home=home,
        database=database,
        supervisor=supervisor,
        rates=Rates(settings.max_requests_per_second),
        resolve_model=resolve_model,
    )
    await supervisor.start()
    return parts


async def _stop(parts: Parts) -> None:
    await parts.supervisor.stop()
    await parts.reader.close()
    parts.database.close()
    parts.home.withdraw()
    parts.home.unlock()


def _resolve_installed(name: str) -> Any:
    # On use: the weights package is only needed once a job is created.
    from upweight.weights.source import resolve

    return resolve(name)
