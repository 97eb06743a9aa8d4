"""Counts what XLA compiles."""

from collections.abc import Iterator

import jax
import pytest

COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    def __init__(self) -> None:
        self.total = 0

    def __call__(self, event: str, duration: float, **_: object) -> None:
        self.total += event == COMPILED


@pytest.fixture(scope="session")
def compilations() -> Iterator[Compilations]:
    """`compilations.total` grows with every program that is compiled or taken from the cache on disk."""
    counter = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter)
