"""Which rollouts may start and which batch their samples enter.

Pure bookkeeping: no I/O, no clock, not thread-safe.

Letters: B batch size, G samples per task, P parallel rollouts (counted in samples), S allowed staleness, N number of
batches, b the batch being filled, r its free places, v the current inference version.

Invariants
1. The staleness `batch − 1 − version` of every released sample is at most S (unless S is None).
2. The dropless scheduler discards nothing, as long as only this scheduler fills the job's batches and no samples turn out to
   be of an older version than the one their task was started at (`set_task_version`): these are dropped if they are too stale.
3. Dropless feasibility: for every version u, the outstanding samples (in flight or buffered) of versions ≤ u fit in the
   places of the batches b … u + 1 + S.
4. With N set, tasks are started until N full batches are certain: whatever is removed or dropped gives its budget back.

Places of all batches are numbered through: `_position` is the number of the next free one, so b = position // B.
With S < 0 (strict on-policy) a group may not reach into the next batch; a group that meets the boundary, which only
happens after resuming a batch with an odd number of samples, closes the batch and its rest is surplus.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "AnyStalenessRolloutScheduler",
    "BaseRolloutScheduler",
    "DropStaleRolloutScheduler",
    "DroplessRolloutScheduler",
    "DroppedGroup",
    "GroupSizeError",
    "RolloutSchedulerConfig",
    "create_rollout_scheduler",
]


class HasId(Protocol):
    """Anything that names itself; a task."""

    @property
    def id(self) -> str: ...


class GroupSizeError(AssertionError):
    """A sample group does not hold exactly G samples."""


@dataclass(frozen=True)
class DroppedGroup:
    """`staleness`: of the group in the batch that was being filled when it was dropped."""

    staleness: int
    samples: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class RolloutSchedulerConfig:
    """Sizes are in samples, but `num_batches`."""

    batch_size: int
    num_batches: int | None = None
    num_samples_per_task: int
    parallel_rollouts: int
    allowed_staleness: int | None
    drop_stale_trajectories: bool


class BaseRolloutScheduler(ABC):
    """Counts, budget and places; how arrivals are treated is left to the three policies below."""

    def __init__(self, config: RolloutSchedulerConfig) -> None:
        self.config = config
        self._position = 0
        self._initialised = False
        self._version: int | None = None
        self._in_flight: dict[str, int] = {}
        self._flying: Counter[int] = Counter()  # groups in flight by version, so that thousands cost nothing
        self._ready: list[Any] = []
        self._dropped: list[DroppedGroup] = []
        self.accepted_groups = 0
        self.dropped_groups = 0
        self.surplus_groups = 0
        self.surplus_samples = 0

    # -- what the caller tells

    def set_initial_batch_index(self, batch_index: int, n_samples: int | None = None) -> None:
        """Start (or resume) in `batch_index`, which already holds `n_samples`.

        Raises:
            RuntimeError: on a second call.
            ValueError: if the batch holds more than B samples.
        """
        if self._initialised:
            raise RuntimeError("The initial batch index can be set only once")
        taken = n_samples or 0
        if taken > self.config.batch_size:
            raise ValueError(f"n_samples {taken} is greater than batch size {self.config.batch_size}")
        self._initialised = True
        self._position = batch_index * self.config.batch_size + taken

    def set_inference_version(self, v: int) -> None:
        """Tell the version now served.

        Raises:
            RuntimeError: if it is lower than before; see `rollback_inference_version`.
        """
        if self._version is not None and v < self._version:
            raise RuntimeError(f"Inference version {v} must be greater or equal to the current one, {self._version}")
        self._version = v

    def rollback_inference_version(self, v: int) -> None:
        """Tell that the server went back to version `v`; groups in flight keep their stamps."""
        self._version = v

    def add_tasks(self, tasks: Iterable[HasId]) -> None:
        """Count tasks as in flight, stamped with the current version.

        Raises:
            RuntimeError: before a version is known, or beyond the remaining budget.
        """
        if self._version is None:
            raise RuntimeError("Inference version must be set before tasks are added")
        added = list(tasks)
        budget = self._remaining_budget()
        if budget is not None and len(added) * self.config.num_samples_per_task > max(
            0, _round_up(budget, self._group)
        ):
            raise RuntimeError(f"Got more tasks than allowed: {len(added)} tasks, budget {budget} samples")
        self._in_flight.update((task.id, self._version) for task in added)
        self._flying[self._version] += len(added)

    def set_task_version(self, task_id: str, version: int) -> None:
        """Replace the stamp of a task in flight by the version its samples really come from.

        Raises:
            KeyError: if the task is not in flight.
        """
        if task_id not in self._in_flight:
            raise KeyError(task_id)
        self._land(task_id)
        self._in_flight[task_id] = version
        self._flying[version] += 1

    def remove_task(self, task_id: str) -> None:
        """Forget a rejected or failed task; its budget is given back.

        Raises:
            KeyError: if the task is not in flight.
        """
        self._land(task_id)
        self._release()

    def add_sample_group(self, task_id: str, samples: Sequence[Any]) -> None:
        """Take the G samples of a task in flight.

        Raises:
            KeyError: if the task is not in flight.
            GroupSizeError: if there are not exactly G samples; the task then stays in flight.
        """
        if len(samples) != self._group:
            raise GroupSizeError(f"Task {task_id}: expected {self._group} samples in the group, got {len(samples)}")
        version = self._land(task_id)
        if self.is_all_finished:
            self._count_surplus()
        else:
            self._arrive(version, samples)

    def shift(self, n_places: int) -> None:
        """Tell that somebody else filled `n_places` of the job's places (a second runner)."""
        self._position += n_places
        self._release()

    # -- what the caller asks

    def get_num_rollouts_to_spawn(self) -> int:
        """How many samples may be started now; may be ≤ 0 or no multiple of G. 0 before a version is known."""
        if self._version is None:
            return 0
        policy = self._policy_limit(self._version)
        budget = self._remaining_budget()
        if budget is None:
            return policy
        if 0 < budget < self._group:
            budget = self._group  # the last group is whole; what does not fit is surplus
        return min(policy, budget)

    def get_ready_samples(self) -> list[Any]:
        """The samples accepted since the last call, in the order of their places."""
        ready, self._ready = self._ready, []
        return ready

    def get_dropped_groups(self) -> list[DroppedGroup]:
        """The groups dropped as too stale since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    @property
    def is_spawning_finished(self) -> bool:
        budget = self._remaining_budget()
        return budget is not None and budget <= 0

    @property
    def is_all_finished(self) -> bool:
        n = self.config.num_batches
        return n is not None and self.current_batch_index >= n

    @property
    def inference_version(self) -> int | None:
        return self._version

    @property
    def current_batch_index(self) -> int:
        return self._position // self.config.batch_size

    @property
    def samples_in_current_batch(self) -> int:
        return self._position % self.config.batch_size

    @property
    def n_in_flight(self) -> int:
        """Tasks started and neither arrived nor removed."""
        return len(self._in_flight)

    @property
    def buffered_groups(self) -> int:
        return 0

    # -- policies

    @abstractmethod
    def _policy_limit(self, version: int) -> int:
        """Samples that may be started at `version`, apart from the budget."""

    @abstractmethod
    def _arrive(self, version: int, samples: Sequence[Any]) -> None:
        """Place, buffer or drop a group that started at `version`."""

    def _release(self) -> None:  # noqa: B027 (only one policy buffers)
        """Place buffered groups that have become placeable."""

    def _counts_for_budget(self, version: int) -> bool:
        """Whether a task in flight of `version` can still bring samples."""
        return True

    # -- places

    @property
    def _group(self) -> int:
        return self.config.num_samples_per_task

    @property
    def _free_places(self) -> int:
        return self.config.batch_size - self.samples_in_current_batch

    @property
    def _is_strict(self) -> bool:
        return self.config.allowed_staleness is not None and self.config.allowed_staleness < 0

    @property
    def _parallel_room(self) -> int:
        return self.config.parallel_rollouts - len(self._in_flight) * self._group

    def _needed(self) -> int | None:
        """Samples still to be placed before N batches are full; None without N."""
        n = self.config.num_batches
        return None if n is None else max(0, n * self.config.batch_size - self._position)

    def _remaining_budget(self) -> int | None:
        """Needed samples that no outstanding task will bring; may be negative; None without N."""
        needed = self._needed()
        if needed is None:
            return None
        coming = self._useful_flights() + self.buffered_groups
        return needed - coming * self._group

    def _useful_flights(self) -> int:
        return sum(count for version, count in self._flying.items() if self._counts_for_budget(version))

    def _position_after_group(self) -> int:
        end = self._position + self._group
        if self._is_strict:
            end = min(end, (self.current_batch_index + 1) * self.config.batch_size)
        return end

    def _is_too_stale(self, version: int) -> bool:
        """Whether a group of `version`, placed now, would break the bound in the last batch it enters."""
        staleness = self.config.allowed_staleness
        if staleness is None:
            return False
        last_batch = (self._position_after_group() - 1) // self.config.batch_size
        if self.config.num_batches is not None:
            last_batch = min(last_batch, self.config.num_batches - 1)
        return last_batch - 1 - version > staleness

    def _places_through(self, version: int, position: int) -> int:
        """Places from `position` to the end of batch `version + 1 + S`, the last one that `version` may enter.

        Where the last group of these places may be cut (strict mode, end of the run) they are rounded up to whole groups.
        """
        assert self.config.allowed_staleness is not None
        batch_size, n = self.config.batch_size, self.config.num_batches
        end_batch = version + 2 + self.config.allowed_staleness
        places = end_batch * batch_size - position
        if places <= 0:
            return places
        if n is not None and end_batch >= n:
            return places + (position - n * batch_size) % self._group
        return places + (position - batch_size) % self._group if self._is_strict else places

    def _place(self, samples: Sequence[Any]) -> None:
        """Append a group to the ready samples; what finds no place is surplus."""
        end = self._position_after_group()
        if self.config.num_batches is not None:
            end = min(end, self.config.num_batches * self.config.batch_size)
        fitting = end - self._position
        self._ready.extend(samples[:fitting])
        self.surplus_samples += len(samples) - fitting
        self.accepted_groups += 1
        self._position = end

    def _land(self, task_id: str) -> int:
        """Take a task out of flight; returns its version."""
        version = self._in_flight.pop(task_id)
        self._flying[version] -= 1
        if not self._flying[version]:
            del self._flying[version]
        return version

    def _drop(self, version: int, samples: Sequence[Any]) -> None:
        self.dropped_groups += 1
        self._dropped.append(DroppedGroup(self.current_batch_index - 1 - version, samples))

    def _count_surplus(self) -> None:
        self.surplus_groups += 1
        self.surplus_samples += self._group


class AnyStalenessRolloutScheduler(BaseRolloutScheduler):
    """Accepts everything in order of arrival."""

    def _policy_limit(self, version: int) -> int:
        return self._parallel_room

    def _arrive(self, version: int, samples: Sequence[Any]) -> None:
        self._place(samples)


class DropStaleRolloutScheduler(BaseRolloutScheduler):
    """Accepts in order of arrival and drops groups beyond the bound; starts nothing that could only be dropped."""

    def _policy_limit(self, version: int) -> int:
        usable = self._places_through(version, self._position) - self._useful_flights() * self._group
        return min(self._parallel_room, usable)

    def _arrive(self, version: int, samples: Sequence[Any]) -> None:
        if self._is_too_stale(version):
            self._drop(version, samples)
        else:
            self._place(samples)

    def _counts_for_budget(self, version: int) -> bool:
        return not self._is_too_stale(version)


class DroplessRolloutScheduler(BaseRolloutScheduler):
    """Buffers groups so that older ones, still in flight, keep places within their bound (invariant 3)."""

    def __init__(self, config: RolloutSchedulerConfig) -> None:
        super().__init__(config)
        self._buffer: list[tuple[int, int, Sequence[Any]]] = []  # a heap: oldest version, then first arrival
        self._arrivals = itertools.count()

    @property
    def buffered_groups(self) -> int:
        return len(self._buffer)

    def _policy_limit(self, version: int) -> int:
        outstanding = self._outstanding()
        slacks = []
        for u in {version, *(other for other in outstanding if other > version)}:
            older = sum(count for other, count in outstanding.items() if other <= u)
            slacks.append(self._places_through(u, self._position) - older * self._group)
        return min(self._parallel_room, *slacks)

    def _arrive(self, version: int, samples: Sequence[Any]) -> None:
        heapq.heappush(self._buffer, (version, next(self._arrivals), samples))
        self._release()

    def _release(self) -> None:
        while self._buffer:
            version, _, samples = self._buffer[0]
            if self.is_all_finished:
                self._count_surplus()
            elif self._is_too_stale(version):
                self._drop(version, samples)  # places were taken by somebody else, or the stamp was lowered
            elif self._leaves_room_for_older(version):
                self._place(samples)
            else:
                return
            heapq.heappop(self._buffer)

    def _leaves_room_for_older(self, version: int) -> bool:
        """Whether invariant 3 holds for all older groups after one group of `version` is placed."""
        after = self._position_after_group()
        older = 0
        for u, count in sorted(self._outstanding().items()):
            if u >= version:
                return True
            older += count
            if older * self._group > self._places_through(u, after):
                return False
        return True

    def _outstanding(self) -> Counter[int]:
        """Groups in flight or buffered, by version."""
        return self._flying + Counter(version for version, _, _ in self._buffer)


def create_rollout_scheduler(config: RolloutSchedulerConfig) -> BaseRolloutScheduler:
    """The policy for a config: S None → any staleness; drop flag → drop stale; else dropless."""
    if config.allowed_staleness is None:
        return AnyStalenessRolloutScheduler(config=config)
    if config.drop_stale_trajectories:
        return DropStaleRolloutScheduler(config=config)
    return DroplessRolloutScheduler(config=config)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
