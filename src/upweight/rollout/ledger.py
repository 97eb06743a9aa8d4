"""What became of the groups of a run, and why; belongs to the main loop's thread."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from upweight.rollout.exceptions import RolloutTimeout
from upweight.rollout.models import SampleID
from upweight.rollout.summary import GroupCounts
from upweight.rollout.validation import EncodedSample
from upweight.schedulers import BaseRolloutScheduler, DroppedGroup

logger = logging.getLogger(__name__)

KEPT_IDS = 4096


def fate_of(error: BaseException | None) -> str:
    """The name of what became of a group without samples, as `GroupCounts` calls it."""
    if error is None:
        return "rejected"
    return "timed_out" if isinstance(error, RolloutTimeout) else "failed"


class RecentIds:
    """Tells ids that come again: a sample object that a rollout returns twice, or the same one for the whole group.

    The server would take the second one for a repetition of the first. Only the latest ids are kept; such objects come often.
    """

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}
        self._is_warned = False

    def unique(self, samples: Sequence[EncodedSample]) -> list[EncodedSample]:
        """The samples, those under a new id whose id is known."""
        return [self._unique(sample) for sample in samples]

    def _unique(self, sample: EncodedSample) -> EncodedSample:
        if sample.id in self._ids:
            if not self._is_warned:
                self._is_warned = True
                logger.warning("Sample %s was returned again; it counts as a new one with an id of its own", sample.id)
            return sample._replace(id=SampleID.generate())
        self._ids[sample.id] = None
        if len(self._ids) > KEPT_IDS:
            del self._ids[next(iter(self._ids))]
        return sample


class Ledger:
    """`errors` counts failed attempts by reason; `dropped_ages` groups by staleness, `dropped_lengths` their samples by length."""

    def __init__(self) -> None:
        self.counts = GroupCounts()
        self.errors: Counter[str] = Counter()
        self.dropped_ages: Counter[int] = Counter()
        self.dropped_lengths: Counter[int] = Counter()

    def note_attempts(self, retries: int, reasons: Iterable[str]) -> None:
        self.counts.retries += retries
        self.errors.update(reasons)

    def note_loss(self, error: BaseException | None) -> None:
        """A group that came to nothing; without an error, because it was rejected."""
        fate = fate_of(error)
        setattr(self.counts, fate, getattr(self.counts, fate) + 1)

    def note_scheduled(self, scheduler: BaseRolloutScheduler, dropped: Iterable[DroppedGroup]) -> None:
        """Take over the scheduler's counts, and what it has just dropped."""
        self.counts.accepted = scheduler.accepted_groups
        self.counts.dropped_stale = scheduler.dropped_groups
        self.counts.surplus = scheduler.surplus_groups
        for group in dropped:
            lengths = [sample.n_tokens for sample in group.samples]
            self.dropped_ages[group.staleness] += 1
            self.dropped_lengths.update(1 << (n - 1).bit_length() for n in lengths)
            logger.info(
                "A group was dropped: staleness %d, %d to %d tokens; %d groups dropped so far",
                *(group.staleness, min(lengths), max(lengths), scheduler.dropped_groups),
            )

    def losses(self) -> str:
        """In words, with the reasons; empty when nothing was lost."""
        c = self.counts
        fates = {"rejected": c.rejected, "failed": c.failed, "dropped": c.dropped_stale, "timed out": c.timed_out}
        parts = [f"{n} {fate}" for fate, n in fates.items() if n]
        if self.errors:
            parts.append("errors: " + ", ".join(f"{n} × {reason}" for reason, n in self.errors.most_common()))
        return ", ".join(parts)
