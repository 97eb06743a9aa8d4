"""What a run reports, during and after."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class GroupCounts:
    """What became of the groups started. At the end of a run the fates add up to `started`; `retries` stand apart.

    `accepted` groups were given places; `unfinished` ones were in flight or buffered when the run ended. `requeued` of the
    lost ones were put back to be started again.
    """

    started: int = 0
    accepted: int = 0
    rejected: int = 0
    failed: int = 0
    timed_out: int = 0
    dropped_stale: int = 0
    surplus: int = 0
    unfinished: int = 0
    retries: int = 0
    requeued: int = 0

    @property
    def fates(self) -> int:
        return (
            self.accepted
            + self.rejected
            + self.failed
            + self.timed_out
            + self.dropped_stale
            + self.surplus
            + self.unfinished
        )

    @property
    def fraction_accepted(self) -> float:
        return self.accepted / self.started if self.started else 0.0


@dataclass
class RunSummary(GroupCounts):
    """Result of `run()`. The sample counts concern accepted groups that were not stored in full.

    `surplus_samples`: had no place in the last batch; `dropped_samples`: somebody else had taken their places;
    `unsent_samples`: not uploaded when the run ended; `refused_samples`: left by an earlier run, and the server will not take
    them. `staleness` counts stored samples by `batch − 1 − version`,
    `waited` is seconds by cause, `evaluations` are the held-out means by version. `errors` counts failed attempts by reason.
    `dropped_ages` counts groups dropped as stale by their staleness, `dropped_lengths` their samples by length in tokens,
    rounded up to a power of two. `resumed_samples` were left unsent by an earlier run: `stored_before` of them had arrived.
    """

    batches_filled: int = 0
    seconds: float = 0.0
    reason: str = ""
    surplus_samples: int = 0
    dropped_samples: int = 0
    unsent_samples: int = 0
    refused_samples: int = 0
    resumed_samples: int = 0
    stored_before: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    dropped_ages: dict[int, int] = field(default_factory=dict)
    dropped_lengths: dict[int, int] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunProgress:
    """A snapshot of a run; `counts.unfinished` is what is in flight or buffered now."""

    counts: GroupCounts
    batches_filled: int
    num_batches: int | None
    samples_in_batch: int
    in_flight: int
    buffered: int
    backlog: int
    inference_version: int | None
    seconds: float
    waiting_for: str | None
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
