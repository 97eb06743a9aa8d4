"""The worked traces of the schedulers, and their invariants under random events."""

import dataclasses
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upweight.schedulers import (
    AnyStalenessRolloutScheduler,
    BaseRolloutScheduler,
    DroplessRolloutScheduler,
    DropStaleRolloutScheduler,
    RolloutSchedulerConfig,
    create_rollout_scheduler,
)


@dataclass
class T:
    id: str


def make(B, S, G=1, P=1000, N=None, drop=False, b=0, present=None) -> BaseRolloutScheduler:
    scheduler = create_rollout_scheduler(
        RolloutSchedulerConfig(
            batch_size=B,
            num_batches=N,
            num_samples_per_task=G,
            parallel_rollouts=P,
            allowed_staleness=S,
            drop_stale_trajectories=drop,
        )
    )
    scheduler.set_initial_batch_index(b, present)
    return scheduler


def start(scheduler, *names):
    scheduler.add_tasks([T(name) for name in names])


def done(scheduler, name):
    """Finish a task; its samples are its name, G times. Returns what became ready."""
    scheduler.add_sample_group(name, [name] * scheduler.config.num_samples_per_task)
    return scheduler.get_ready_samples()


def test_names_and_defaults():
    fields = {f.name: f.default for f in dataclasses.fields(RolloutSchedulerConfig)}
    assert list(fields) == [
        "batch_size",
        "num_batches",
        "num_samples_per_task",
        "parallel_rollouts",
        "allowed_staleness",
        "drop_stale_trajectories",
    ]
    assert {name for name, default in fields.items() if default is not dataclasses.MISSING} == {"num_batches"}
    assert fields["num_batches"] is None


def test_choice_of_policy():
    assert isinstance(make(2, None), AnyStalenessRolloutScheduler)
    assert isinstance(make(2, 0, drop=True), DropStaleRolloutScheduler)
    assert isinstance(make(2, 0), DroplessRolloutScheduler)


def test_any_staleness_traces():
    s = make(2, None, P=4)
    s.set_inference_version(0)
    start(s, *"abcd")
    assert [done(s, name) for name in "cadb"] == [["c"], ["a"], ["d"], ["b"]]
    s = make(4, None, G=2, P=5)
    s.set_inference_version(0)
    spawns = [s.get_num_rollouts_to_spawn()]
    for name in "ab":
        start(s, name)
        spawns.append(s.get_num_rollouts_to_spawn())
    assert spawns == [5, 3, 1]


@pytest.mark.parametrize(("S", "ready", "dropped"), [(0, [], 1), (1, ["a"], 0)])
def test_drop_stale_trace(S, ready, dropped):
    s = make(1, S, drop=True)
    s.set_inference_version(0)
    start(s, *"abc")
    assert done(s, "b") == ["b"]
    assert done(s, "c") == ["c"]
    assert done(s, "a") == ready
    assert s.dropped_groups == dropped


@pytest.mark.parametrize(("S", "spawn"), [(0, 8), (1, 12), (2, 16), (5, 28)])
def test_dropless_fresh_start(S, spawn):
    s = make(4, S)
    s.set_inference_version(0)
    assert s.get_num_rollouts_to_spawn() == spawn


def test_dropless_is_negative_when_the_trainer_is_far_behind():
    s = make(4, 0, b=5, present=2)
    s.set_inference_version(3)
    assert s.get_num_rollouts_to_spawn() == -2


def test_dropless_trace_on_policy():
    s = make(2, 0)
    s.set_inference_version(0)
    assert s.get_num_rollouts_to_spawn() == 4
    start(s, *"abcd")
    assert s.get_num_rollouts_to_spawn() == 0
    assert done(s, "a") == ["a"]
    assert done(s, "b") == ["b"]
    assert s.current_batch_index == 1
    s.set_inference_version(1)
    assert s.get_num_rollouts_to_spawn() == 2
    start(s, *"ef")
    assert s.get_num_rollouts_to_spawn() == 0
    assert done(s, "e") == []
    assert done(s, "c") == ["c"]
    assert done(s, "d") == ["d", "e"]
    assert done(s, "f") == ["f"]
    assert s.current_batch_index == 3
    s.set_inference_version(2)
    assert s.get_num_rollouts_to_spawn() == 2


def test_dropless_trace_straggler():
    s = make(2, 1)
    s.set_inference_version(0)
    start(s, *"sabc")
    s.set_inference_version(1)
    start(s, *"de")
    s.set_inference_version(2)
    start(s, *"fg")
    assert [done(s, name) for name in "abcdefg"] == [["a"], ["b"], ["c"], ["d"], ["e"], [], []]
    assert done(s, "s") == ["s", "f", "g"]
    assert s.current_batch_index == 4


def test_dropless_trace_single_places():
    """Failure D2: no arrival overtakes a buffered group."""
    s = make(1, 0)
    s.set_inference_version(0)
    start(s, "t0")
    s.set_inference_version(1)
    start(s, "t1", "t2")
    assert [done(s, name) for name in ("t1", "t2", "t0")] == [["t1"], [], ["t0", "t2"]]


def test_removing_the_straggler_releases_buffered_groups():
    """Failure D3."""
    s = make(1, 0)
    s.set_inference_version(0)
    start(s, "t0")
    s.set_inference_version(1)
    start(s, "t1", "t2")
    done(s, "t1")
    assert done(s, "t2") == []
    s.remove_task("t0")
    assert s.get_ready_samples() == ["t2"]


def test_strict_on_policy_starts_one_batch_per_version():
    s = make(32, -1, G=8, b=3)
    s.set_inference_version(3)
    assert s.get_num_rollouts_to_spawn() == 32
    start(s, *"abcd")
    assert s.get_num_rollouts_to_spawn() == 0
    for name in "abcd":
        assert done(s, name) == [name] * 8
    assert s.current_batch_index == 4
    assert s.get_num_rollouts_to_spawn() == 0
    s.set_inference_version(4)
    assert s.get_num_rollouts_to_spawn() == 32


def test_strict_on_policy_after_an_odd_resumption_cuts_the_closing_group():
    s = make(4, -1, G=2, b=0, present=1)
    s.set_inference_version(0)
    assert s.get_num_rollouts_to_spawn() == 4
    start(s, "a", "b")
    assert done(s, "a") == ["a", "a"]
    assert done(s, "b") == ["b"]
    assert (s.current_batch_index, s.samples_in_current_batch, s.surplus_samples) == (1, 0, 1)


@pytest.mark.parametrize("drop", [False, True])
def test_budget_on_resumption(drop):
    """Failures W2, X1: samples that are there already are not needed."""
    s = make(4, 5, G=2, N=3, b=1, present=2, drop=drop)
    s.set_inference_version(0)
    assert s.get_num_rollouts_to_spawn() == 6
    start(s, *"abc")
    assert s.is_spawning_finished
    with pytest.raises(RuntimeError, match="more tasks than allowed"):
        start(s, "d")


def test_a_rejected_task_gives_its_budget_back():
    """Failure H1."""
    s = make(2, None, N=1)
    s.set_inference_version(0)
    start(s, *"ab")
    assert s.get_num_rollouts_to_spawn() == 0
    s.remove_task("a")
    assert s.get_num_rollouts_to_spawn() == 1
    with pytest.raises(KeyError):
        s.remove_task("a")


def test_group_straddles_the_boundary_and_the_last_one_is_cut():
    """Failure H4."""
    s = make(4, 1, G=2, N=2, present=3)
    s.set_inference_version(0)
    assert s.get_num_rollouts_to_spawn() == 5
    start(s, *"ab")
    assert s.get_num_rollouts_to_spawn() == 2
    start(s, "c")
    assert [len(done(s, name)) for name in "abc"] == [2, 2, 1]
    assert s.is_all_finished
    assert s.surplus_samples == 1


def test_errors():
    """Failures S2, X4."""
    s = make(4, 0, G=2)
    assert s.get_num_rollouts_to_spawn() == 0
    with pytest.raises(RuntimeError, match="set only once"):
        s.set_initial_batch_index(1)
    with pytest.raises(RuntimeError, match="Inference version must be set"):
        start(s, "a")
    s.set_inference_version(3)
    s.set_inference_version(3)
    with pytest.raises(RuntimeError, match="greater or equal"):
        s.set_inference_version(2)
    s.rollback_inference_version(2)
    assert s.inference_version == 2
    start(s, "a")
    with pytest.raises(AssertionError, match="expected 2 samples"):
        s.add_sample_group("a", ["x"])
    fresh = create_rollout_scheduler(s.config)
    with pytest.raises(ValueError, match="greater than batch size"):
        fresh.set_initial_batch_index(0, 5)


def test_places_taken_by_somebody_else_drop_what_became_too_stale():
    s = make(2, 0)
    s.set_inference_version(0)
    start(s, *"abcd")
    s.shift(3)
    assert [done(s, name) for name in "abcd"] == [["a"], [], [], []]
    assert s.dropped_groups == 3


def staleness_breaches(s, first_place, ready_versions):
    B, S = s.config.batch_size, s.config.allowed_staleness
    return [(i, v) for i, v in enumerate(ready_versions, first_place) if S is not None and i // B - 1 - v > S]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups=st.integers(1, 4),
    G=st.integers(1, 3),
    S=st.one_of(st.none(), st.integers(-1, 3)),
    drop=st.booleans(),
    N=st.integers(1, 6),
    P=st.integers(1, 12),
    reject=st.sampled_from([0.0, 0.1, 0.6]),
    rollback=st.booleans(),
    data=st.data(),
)
def test_random_runs_end_full_and_within_the_bound(seed, groups, G, S, drop, N, P, reject, rollback, data):
    """Failures D2, H1, H2 and report A3: any order of arrivals, removals, resumptions and version jumps."""
    B, P = groups * G, max(P, G)
    b = data.draw(st.integers(0, N - 1))
    present = data.draw(st.integers(0, B - 1))
    s = make(B, S, G=G, P=P, N=N, drop=drop, b=b, present=present)
    rng = random.Random(seed)
    version = rng.randint(max(0, b - 3), b)
    s.set_inference_version(version)
    first_place, names, placed, started, gone = b * B + present, iter(range(10**6)), [], 0, 0
    version_of, in_flight = {}, []
    for _ in range(20_000):
        if s.is_all_finished:
            break
        event = rng.random()
        if event < 0.15:
            lowest = 0 if rollback and rng.random() < 0.1 else version
            version = rng.randint(min(lowest, s.current_batch_index), s.current_batch_index)
            if version < (s.inference_version or 0):
                s.rollback_inference_version(version)
            else:
                s.set_inference_version(version)
        elif event < 0.5:
            for _ in range(s.get_num_rollouts_to_spawn() // G):
                name = str(next(names))
                start(s, name)
                version_of[name] = version
                in_flight.append(name)
                started += 1
            assert len(in_flight) * G <= P
        elif in_flight:
            name = in_flight.pop(rng.randrange(len(in_flight)))
            if rng.random() < reject:
                s.remove_task(name)
                gone += 1
            else:
                s.add_sample_group(name, [version_of[name]] * G)
        placed += s.get_ready_samples()
        assert not staleness_breaches(s, first_place, placed)
    assert s.is_all_finished
    assert first_place + len(placed) == N * B
    assert (
        started == s.accepted_groups + s.dropped_groups + s.surplus_groups + gone + len(in_flight) + s.buffered_groups
    )
    if not drop:
        assert s.dropped_groups == 0
    if (S is not None and S >= 0) or present == 0:
        assert s.surplus_samples < G or drop


@pytest.mark.parametrize("seed", range(60))
def test_groups_of_new_versions_that_come_first_overtake_nobody(seed):
    """Failure D2: the worst order of arrivals, newest first, with stragglers that come last of all."""
    rng = random.Random(seed)
    G, S, N = rng.choice([1, 2]), rng.choice([0, 1, 2]), 8
    s = make(2 * G, S, G=G, N=N)
    s.set_inference_version(0)
    names, version_of, in_flight, placed, buffered = iter(range(10**6)), {}, [], [], 0
    while not s.is_all_finished:
        s.set_inference_version(rng.randint(s.inference_version, s.current_batch_index))
        for _ in range(s.get_num_rollouts_to_spawn() // G):
            name = str(next(names))
            start(s, name)
            version_of[name] = s.inference_version
            in_flight.append(name)
        if in_flight:
            name = in_flight.pop(-1 if rng.random() < 0.8 else 0)
            s.add_sample_group(name, [version_of[name]] * G)
        buffered += s.buffered_groups
        placed += s.get_ready_samples()
        assert not staleness_breaches(s, 0, placed)
    assert s.dropped_groups == 0
    assert len(placed) == N * 2 * G
    assert buffered > 0


@pytest.mark.parametrize(("S", "drop"), [(None, False), (0, True), (0, False), (-1, False)])
def test_before_a_version_is_known_nothing_is_started(S, drop):
    """Failure S2: all policies alike."""
    s = make(4, S, G=2, drop=drop)
    assert s.get_num_rollouts_to_spawn() == 0
    with pytest.raises(RuntimeError, match="Inference version must be set"):
        start(s, "a")


@pytest.mark.parametrize(("S", "drop"), [(None, False), (0, True), (0, False)])
def test_beyond_the_last_batch_is_finished_too(S, drop):
    """Failure H3."""
    s = make(4, S, N=2, drop=drop, b=5)
    s.set_inference_version(5)
    assert s.is_all_finished
    assert s.is_spawning_finished
    assert s.get_num_rollouts_to_spawn() <= 0
