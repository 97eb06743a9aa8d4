"""Slots under random steps: what a slot claims to hold is what was loaded or computed into it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from upweight.inference.scheduler import Row
from upweight.inference.slots import Slots
from upweight.inference.types import Request, SamplingParams


def row(number: int) -> Row:
    request = Request(id=number, prompt_ids=(number, 1), params=SamplingParams(), on_done=lambda _: None)
    return Row(request=request, tokens=[number, 1], limit=99, seed=0)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sets(st.integers(0, 7), min_size=1), st.sampled_from([2, 4, 8]), st.sampled_from([16, 32])),
        min_size=1,
        max_size=30,
    ),
    restarts=st.lists(st.tuples(st.integers(0, 29), st.integers(0, 7))),
)
def test_rows_read_their_own_past(steps: list[tuple[set[int], int, int]], restarts: list[tuple[int, int]]) -> None:
    rows = [row(number) for number in range(8)]
    slots = Slots()
    cache: dict[int, list[tuple[int, int, int]]] = {}  # slot → (row, restarts, position) of what it holds
    for step, (chosen, size, width) in enumerate(steps):
        for at, number in restarts:
            if at == step:
                rows[number].restarts += 1
        batch = [rows[number] for number in sorted(chosen)][:size]
        placement = slots.place(batch, size, width)
        if placement.fresh:
            cache = {}
        assert len(set(placement.slots)) == len(batch)
        assert all(0 <= slot < size for slot in placement.slots)
        for at in placement.load:
            one = batch[at]
            known = range(len(one.tokens) - 1)
            cache[placement.slots[at]] = [(one.request.id, one.restarts, position) for position in known]
        for one, slot in zip(batch, placement.slots, strict=True):
            last = len(one.tokens) - 1
            past = cache.setdefault(slot, [])
            assert past == [(one.request.id, one.restarts, position) for position in range(last)]
            past.append((one.request.id, one.restarts, last))
            one.tokens.append(step)
