"""The plain parts of the engine: pages, prefixes, plans. Invariants under random requests, lengths, cancels and weight changes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upweight.inference.pages import PagePool, PrefixTree
from upweight.inference.scheduler import Row, Scheduler, StepPlan, beside_tokens
from upweight.inference.types import Request, SamplingParams


def row(number: int, prompt: list[int], limit: int, *, streamed: bool = False) -> Row:
    on_text = (lambda _: None) if streamed else None
    params = SamplingParams()
    request = Request(id=number, prompt_ids=tuple(prompt), params=params, on_done=lambda _: None, on_text=on_text)
    return Row(request=request, tokens=list(prompt), limit=limit, seed=0)


def check(scheduler: Scheduler, known: dict[int, int]) -> None:
    """Every page is free or used as often as rows and tree say; every row has pages for what is computed."""
    uses: Counter[int] = Counter()
    for one in scheduler.running:
        assert len(one.pages) >= one.computed
        uses.update(one.pages)
    uses.update(node.page for node in scheduler.prefixes._nodes())
    pool = scheduler.pool
    assert 0 not in uses
    assert all(pool.uses(page) == count for page, count in uses.items())
    assert pool.num_free + len(uses) == pool.num_pages - 1
    for one in scheduler.waiting:
        assert one.pages == []
    assert len(scheduler.running) <= scheduler.max_rows


def run_device(scheduler: Scheduler, plan: StepPlan, contents: dict[int, tuple[int, ...]]) -> None:
    """Plays the device: writes what each page now holds, and checks that what a row reads is its own past."""
    for piece in plan.prefill if plan.beside is None else [*plan.prefill, plan.beside]:
        tokens = piece.row.tokens
        for at in range(piece.start, piece.start + piece.count):
            contents[piece.row.pages[at]] = tuple(tokens[: at + 1])
    for one in plan.decode:
        last = len(one.tokens) - 1
        contents[one.pages[last]] = tuple(one.tokens)
        for at in range(last + 1):
            assert contents[one.pages[at]] == tuple(one.tokens[: at + 1])


def check_gap(scheduler: Scheduler, plan: StepPlan, ready: list[Row]) -> None:
    """Beside rows that somebody reads along, a step prefills one small piece, of a row that decodes later."""
    if any(one.request.on_text is not None for one in ready if one in plan.decode):
        pieces = plan.prefill if plan.beside is None else [*plan.prefill, plan.beside]
        assert len(pieces) <= 1
        assert all(
            piece.count <= min(beside_tokens(len(plan.decode)), scheduler.prefill_budget)
            and piece.row not in plan.decode
            for piece in pieces
        )


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=10)


@settings(max_examples=150, deadline=None)
@given(
    work=st.lists(st.tuples(prompts, st.integers(1, 8)), min_size=1, max_size=12),
    num_pages=st.integers(20, 40),
    max_rows=st.integers(1, 5),
    budget=st.integers(1, 12),
    swaps=st.sets(st.integers(0, 30), max_size=3),
    cancels=st.sets(st.integers(0, 11), max_size=3),
    streamed=st.sets(st.integers(0, 11), max_size=12),
    data=st.data(),
)
def test_every_row_reads_its_own_past_and_finishes(
    work: list[tuple[list[int], int]],
    num_pages: int,
    max_rows: int,
    budget: int,
    swaps: set[int],
    cancels: set[int],
    streamed: set[int],
    data: st.DataObject,
) -> None:
    scheduler = Scheduler(max_rows=max_rows, num_pages=num_pages, prefill_budget=budget)
    rows = [row(i, prompt, len(prompt) + more, streamed=i in streamed) for i, (prompt, more) in enumerate(work)]
    for one in rows:
        scheduler.add(one)
    contents: dict[int, tuple[int, ...]] = {}
    done: set[int] = set()
    for step in range(2000):
        if step in swaps:
            scheduler.set_version(scheduler.version + 1)
        if step == 3:
            for number in cancels & (set(range(len(rows))) - done):
                scheduler.finish(rows[number])
                done.add(number)
        ready = [one for one in scheduler.running if not one.missing]
        plan = scheduler.plan()
        check(scheduler, {})
        check_gap(scheduler, plan, ready)
        run_device(scheduler, plan, contents)
        for one in plan.decode:
            scheduler.advance(one, data.draw(st.integers(0, 2)) if step < 20 else 1)
            if len(one.tokens) >= one.limit:
                scheduler.finish(one)
                done.add(one.request.id)
        check(scheduler, {})
        if len(done) == len(rows):
            break
        assert not plan.empty
    assert len(done) == len(rows)


def test_a_group_is_prefilled_once() -> None:
    scheduler = Scheduler(max_rows=8, num_pages=200)
    prompt = list(range(20))
    for i in range(8):
        scheduler.add(row(i, prompt, 30))
    plan = scheduler.plan()
    assert [(piece.start, piece.count) for piece in plan.prefill] == [(0, 19)]
    assert len(plan.decode) == 8
    assert scheduler.prefilled_tokens == 19


def test_long_prompts_are_prefilled_in_pieces_while_others_decode() -> None:
    scheduler = Scheduler(max_rows=4, num_pages=400, prefill_budget=16)
    short = row(0, [1, 2, 3], 50)
    scheduler.add(short)
    scheduler.add(row(1, list(range(100)), 150))
    decoded = 0
    for _ in range(8):
        plan = scheduler.plan()
        assert sum(piece.count for piece in plan.prefill) <= 16
        decoded += short in plan.decode
        for one in plan.decode:
            scheduler.advance(one, 7)
    assert decoded == 8
    assert len(scheduler.running) == 2


def test_the_youngest_row_makes_room_and_goes_on_with_its_tokens() -> None:
    scheduler = Scheduler(max_rows=2, num_pages=13)
    old, young = row(0, [1, 2, 3], 10), row(1, [4, 5, 6], 10)
    scheduler.add(old)
    scheduler.add(young)
    for _ in range(40):
        plan = scheduler.plan()
        for one in plan.decode:
            scheduler.advance(one, 9)
            if len(one.tokens) >= one.limit:
                scheduler.finish(one)
    assert scheduler.preemptions > 0
    assert old.tokens == [1, 2, 3] + [9] * 7
    assert young.tokens == [4, 5, 6] + [9] * 7
    assert not scheduler.running
    assert not scheduler.waiting


def test_no_prefix_outlives_its_weights() -> None:
    scheduler = Scheduler(max_rows=2, num_pages=50)
    running = row(0, [1, 2, 3, 4], 20)
    scheduler.add(running)
    scheduler.plan()
    scheduler.advance(running, 5)
    scheduler.set_version(1)
    assert scheduler.prefixes.size == 0
    plan = scheduler.plan()
    scheduler.advance(plan.decode[0], 6)
    scheduler.finish(running)  # its keys and values are of two versions: not remembered
    assert scheduler.prefixes.size == 0


def test_eviction_keeps_what_rows_use() -> None:
    pool = PagePool(8)
    tree = PrefixTree(pool)
    pages = [pool.take() for _ in range(4)]
    tree.insert([1, 2, 3, 4], pages, 0)
    for page in pages:
        pool.release(page)
    held, version = tree.match([1, 2])
    assert version == 0
    tree.evict(7)
    assert tree.match([1, 2, 3, 4]) == (held, 0)
    assert pool.num_free == 5
    assert len({pool.take() for _ in range(5)}) == 5
    with pytest.raises(IndexError):
        pool.take()


def test_a_row_that_makes_room_itself_costs_no_other_row_its_pages() -> None:
    """Found at random: the youngest row is out of pages, gives its own back, and older rows decode on theirs."""
    scheduler = Scheduler(max_rows=4, num_pages=12, prefill_budget=2)
    work = [([0] * 6, 3), ([1] * 3, 1), ([1] * 2, 2), ([1], 1)]
    rows = [row(i, prompt, len(prompt) + more) for i, (prompt, more) in enumerate(work)]
    for one in rows:
        scheduler.add(one)
    while scheduler.running or scheduler.waiting:
        for one in scheduler.plan().decode:
            assert len(one.pages) == len(one.tokens)
            scheduler.advance(one, 0)
            if len(one.tokens) >= one.limit:
                scheduler.finish(one)
    assert [len(one.tokens) for one in rows] == [9, 4, 4, 2]


def test_a_long_prompt_is_prefilled_in_small_pieces_beside_rows_that_decode() -> None:
    scheduler = Scheduler(max_rows=8, num_pages=4000, prefill_budget=512, busy_prefill=64)
    first, long = row(1, [1, 2, 3], 99), row(2, list(range(1000)), 2000)
    scheduler.add(first)
    scheduler.advance(scheduler.plan().decode[0], 4)
    scheduler.add(long)
    sizes = []
    while long.missing:
        plan = scheduler.plan()
        assert first in plan.decode
        sizes.append(sum(piece.count for piece in plan.prefill))
        scheduler.advance(first, 5)
    assert set(sizes[:-1]) == {64}
    scheduler.finish(first)
    scheduler.add(row(3, list(range(5000, 6000)), 2000))
    scheduler.finish(long)
    assert sum(piece.count for piece in scheduler.plan().prefill) == 512  # nobody decodes


def test_beside_a_streamed_answer_prompts_come_in_pieces_however_many_wait() -> None:
    scheduler = Scheduler(max_rows=8, num_pages=4000)
    first = row(1, [1, 2, 3], 99, streamed=True)
    scheduler.add(first)
    scheduler.advance(scheduler.plan().decode[0], 4)
    later = [row(number, list(range(100 * number, 100 * number + 50)), 99) for number in range(2, 8)]
    for one in later:
        scheduler.add(one)
    sizes = []
    while any(one.missing for one in later):
        plan = scheduler.plan()
        assert first in plan.decode
        assert plan.prefill == []
        assert plan.beside is not None
        sizes.append(plan.beside.count)
        for one in plan.decode:
            scheduler.advance(one, 5)
    assert sizes == [24, 24, 1, 24, 24, 1, *[32, 17] * 4]
