"""Layouts read back token by token: every target once, and each query sees its own sample's past and nothing else."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from upweight.ops.packing import PackedBatch, bucket, pack, pack_apart, quarter_bucket
from upweight.ops.samples import TrainBatch
from upweight.training.microbatches import split_rows


def batch_of(samples: list[tuple[list[int], list[int]]]) -> TrainBatch:
    """Samples given as (token ids, mask)."""
    lengths = np.array([len(tokens) for tokens, _ in samples], np.int32)
    total, n = int(lengths.sum()), len(samples)
    return TrainBatch(
        lengths=lengths,
        token_ids=np.array([t for tokens, _ in samples for t in tokens], np.int32),
        logprobs=np.zeros(total, np.float32),
        mask=np.array([m for _, mask in samples for m in mask], np.uint8),
        reward=np.zeros(n, np.float32),
        group=np.arange(n, dtype=np.int32),
        temperature=np.ones(total, np.float32),
        raw_logprobs=np.full(total, np.nan, np.float32),
        versions=np.full(total, -1, np.int32),
        filtered=np.zeros(total, np.uint8),
        matched=np.ones(n, np.uint8),
    )


@st.composite
def samples(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """Few different prompts and token ids, so that contexts are often shared, also by chance; masks have holes."""
    prompts = draw(st.lists(st.lists(st.integers(1, 3), min_size=0, max_size=12), min_size=1, max_size=3))
    out = []
    for _ in range(draw(st.integers(1, 9))):
        prompt = draw(st.sampled_from(prompts))
        rest = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1)), min_size=1, max_size=20))
        out.append((prompt + [t for t, _ in rest], [0] * len(prompt) + [m for _, m in rest]))
    return out


def targets_of(batch: TrainBatch, only: list[int]) -> set[tuple[int, int]]:
    """(sample, flat index) of every trained token that has a predecessor."""
    starts = batch.starts
    return {(i, f) for i in only for f in range(starts[i] + 1, starts[i + 1]) if batch.mask[f]}


def seen_by(packed: PackedBatch, query: int) -> tuple[list[int], list[int]]:
    """Token ids and positions that a flat query place may look at, in order of position."""
    width = packed.tokens.shape[1]
    r, at = divmod(query, width)
    keys = [
        k
        for k in range(at + 1)
        if packed.block[r, k] == packed.block[r, at] and packed.segment[r, k] in (0, packed.segment[r, at])
    ]
    keys.sort(key=lambda k: int(packed.positions[r, k]))
    return packed.tokens[r, keys].tolist(), packed.positions[r, keys].tolist()


def check(batch: TrainBatch, pieces: list[PackedBatch], only: list[int]) -> None:
    starts = batch.starts
    found = []
    for packed in pieces:
        for n in np.flatnonzero(packed.weight):
            sample, source = int(packed.sample[n]), int(packed.source[n])
            found.append((sample, source))
            assert packed.target[n] == batch.token_ids[source]
            assert packed.block.reshape(-1)[packed.query[n]] >= 0
            tokens, positions = seen_by(packed, int(packed.query[n]))
            assert tokens == batch.token_ids[starts[sample] : source].tolist()
            assert positions == list(range(source - starts[sample]))
        assert set(packed.weight.tolist()) <= {0.0, 1.0}
        assert (packed.query >= 0).all()
        assert (packed.query < packed.tokens.size).all()
    assert len(found) == len(set(found))
    assert set(found) == targets_of(batch, only)


@given(samples(), st.booleans(), st.integers(1, 80), st.integers(1, 200))
@settings(max_examples=150, deadline=None)
def test_every_target_once_seeing_what_it_would_see_alone(
    given_samples: list, share: bool, max_row: int, micro: int
) -> None:
    batch = batch_of(given_samples)
    packed = pack(batch, share_context=share, max_row=max_row)
    everyone = list(range(batch.num_samples))
    check(batch, [packed], everyone)
    check(batch, list(split_rows(packed, micro)), everyone)
    longest = max(len(tokens) for tokens, _ in given_samples)
    assert packed.tokens.shape[1] <= bucket(max(longest, max_row))


@given(samples(), st.data())
@settings(max_examples=50, deadline=None)
def test_part_of_a_batch_keeps_the_indices_of_the_whole(given_samples: list, data: st.DataObject) -> None:
    batch = batch_of(given_samples)
    only = data.draw(st.lists(st.integers(0, batch.num_samples - 1), unique=True))
    check(batch, [pack(batch, only=np.array(only, int))], only)


def test_a_shared_context_is_laid_out_once() -> None:
    context = list(range(1, 41))
    batch = batch_of([([*context, 50 + i, 60 + i], [0] * 40 + [1, 1]) for i in range(8)])
    assert pack(batch).num_tokens == 40 + 8 * 2
    assert pack(batch, share_context=False).num_tokens == 8 * 42
    assert pack(batch).tokens.shape == (1, 64)


def test_a_block_too_long_for_a_row_is_split() -> None:
    batch = batch_of([(list(range(1, 21)) + [7] * 30, [0] * 20 + [1] * 30) for _ in range(6)])
    packed = pack(batch, max_row=96)  # 20 + 2·30 = 80 fits, 20 + 3·30 = 110 does not
    assert packed.tokens.shape == (3, 96)
    assert packed.num_tokens == 3 * 80
    check(batch, [packed], list(range(6)))


def test_a_first_token_that_is_trained_has_no_query_and_is_left_out() -> None:
    batch = batch_of([([5, 6], [1, 1]), ([5], [1]), ([7, 8, 9], [1, 0, 1])])
    packed = pack(batch)
    assert sorted(packed.source[packed.weight > 0].tolist()) == [1, 5]


def test_layout_depends_on_the_batch_alone() -> None:
    batch = batch_of([([*list(range(1, 5 + i)), 9], [0] * (3 + i) + [1, 1]) for i in range(7)])
    for first, second in zip(vars(pack(batch)).values(), vars(pack(batch)).values(), strict=True):
        np.testing.assert_array_equal(first, second)


def test_places_are_at_most_a_quarter_too_many_above_a_chunk_of_the_head() -> None:
    sizes = {quarter_bucket(n) for n in range(1, 5000)}
    assert sizes == {64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120}
    assert all(n <= quarter_bucket(n) for n in range(1, 5000))
    assert all(quarter_bucket(n) <= max(1.25 * n, n + 256) for n in range(512, 5000))


def test_buckets_are_few_and_never_more_than_half_too_large() -> None:
    sizes = {bucket(n) for n in range(1, 4097)}
    assert sorted(sizes) == [32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
    assert all(n <= bucket(n) <= max(64, 1.5 * n) for n in range(1, 4097))


def test_packed_apart_each_row_holds_one_context_with_its_samples() -> None:
    mask = [0, 0, 1, 1]
    batch = batch_of([([1, 2, 3, 3], mask), ([1, 2, 4, 4], mask), ([5, 6, 3, 3], mask)])
    together, apart = pack(batch), pack_apart(batch)
    assert (together.tokens.shape[0], apart.tokens.shape[0]) == (1, 2)
    assert [sorted(set(row[row >= 0].tolist())) for row in apart.block] == [[0], [0]]
    assert sorted(apart.source[apart.weight > 0].tolist()) == sorted(together.source[together.weight > 0].tolist())
