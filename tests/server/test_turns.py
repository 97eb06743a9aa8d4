"""Turns in the event loop."""

from __future__ import annotations

import asyncio

from upweight.server.api.turns import Turns


def rounds_of(count: int, gone: tuple[int, ...] = ()) -> list[list[int]]:
    """Who went on in which round of the loop, when all ask at once; `gone` give up before their turn."""

    async def run() -> list[list[int]]:
        turns = Turns()
        rounds: list[list[int]] = []
        current: list[int] = []

        async def one(number: int) -> None:
            await turns.take()
            current.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(count)]
        await asyncio.sleep(0)
        for number in gone:
            tasks[number].cancel()
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            if current:
                rounds.append(list(current))
                current.clear()
        return rounds

    return asyncio.run(asyncio.wait_for(run(), 10))


def test_one_goes_on_in_a_round_in_the_order_of_asking() -> None:
    assert rounds_of(5) == [[0], [1], [2], [3], [4]]


def test_who_goes_away_takes_no_turn() -> None:
    assert rounds_of(5, gone=(0, 2, 3)) == [[1], [4]]
    assert rounds_of(2, gone=(0, 1)) == []
