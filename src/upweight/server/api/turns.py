"""Turns in the event loop: many requests that come at once are worked on one by one, with everybody else's between them."""

from __future__ import annotations

import asyncio


class Turns:
    """Who awaits `take` goes on in order of asking, one in each round of the event loop.

    A hundred uploads that arrive together are a hundred pieces of work in one round otherwise, and a status call waits for all.
    """

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def take(self) -> None:
        """Return when it is the caller's turn; it lasts until the caller awaits something."""
        async with self._one:
            await asyncio.sleep(0)
