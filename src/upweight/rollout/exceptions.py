"""What a rollout run raises, and how it speaks of what others raise.

Exceptions of others may do anything when they are looked at: raise, or even leave by `sys.exit()`. Hence the broad `except`s.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

from upweight.errors import RolloutError


class JobInitializationTimeout(RolloutError):
    """The job did not serve within `job_init_timeout` (None = there was no limit), or refused us."""

    def __init__(
        self, *, job_id: str, timeout_seconds: float | None, last_exception: BaseException | None = None
    ) -> None:
        limit = "" if timeout_seconds is None else f" within {timeout_seconds} seconds"
        message = f"Rollout job '{job_id}' did not become ready{limit}."
        if last_exception is not None:
            message += f" Last polling error: {last_exception}"
        super().__init__(message)
        self.job_id = job_id
        self.timeout_seconds = timeout_seconds
        self.last_exception = last_exception
        self.__cause__ = last_exception


class JobNotServing(RolloutError):
    """The status route answers but tells no inference version yet."""


class JobUnavailable(RolloutError):
    """The job cannot be reached any more, failed or was cancelled."""


class RolloutTimeout(RolloutError):
    """One attempt took longer than `rollout_timeout`."""


class EventLoopBlocked(RolloutError):
    """Something that no rollout owns kept the event loop for longer than `rollout_timeout`; the rollouts behind it are lost."""


class RolloutValidationError(RolloutError):
    """A rollout returned something that is no valid sample group; `reason` is a short name of the problem."""

    def __init__(self, message: str, reason: str = "invalid") -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.reason)


class RemoteError(RolloutError):
    """Stands for an exception that cannot be pickled, looked at or raised again; `reason` is the name of its type."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.reason)


def in_words(error: BaseException) -> str:
    """Type and text; some exceptions of others cannot even be shown."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 (whatever a foreign `__str__` raises)
        return f"{type(error).__name__} (its text cannot be shown)"


def traceback_of(error: BaseException, limit: int | None = None) -> str:
    """As `traceback.format_exc`; of an exception that cannot be looked at, where it was raised."""
    try:
        return "".join(traceback.format_exception(error, limit=limit))
    except BaseException:  # noqa: BLE001 (whatever a foreign attribute raises)
        frames = traceback.format_tb(BaseException.__getattribute__(error, "__traceback__"), limit)
        return "".join([*frames, in_words(error)])


def presentable(error: BaseException) -> BaseException:
    """The error itself, unless looking at it or raising it again raises another: then what stands for it."""
    try:
        isinstance(error, RolloutError)  # asks a foreign type for its `__class__`
        for name in ("reason", "remote_traceback", "__traceback__", "__notes__"):
            getattr(error, name, None)
        error.__traceback__ = error.__traceback__  # as `contextlib` does; a frozen dataclass refuses
    except BaseException:  # noqa: BLE001 (whatever a foreign attribute raises)
        frames = BaseException.__getattribute__(error, "__traceback__")
        return RemoteError(in_words(error), type(error).__name__).with_traceback(frames)
    return error


def reason_of(error: BaseException) -> str:
    """A short code to count failures by: the problem of a bad result, else the type of the exception."""
    reason = getattr(error, "reason", None) if isinstance(error, RolloutError) else None
    return reason if isinstance(reason, str) and reason else type(error).__name__


class DatasetExhausted(RolloutError):
    """The dataset ended before `num_batches` were full; the open batch can be resumed. `losses`: what became of the rest."""

    def __init__(self, *, filled: int, needed: int, open_samples: int, losses: str = "") -> None:
        super().__init__(
            f"The dataset ended with {filled} of {needed} batches filled and {open_samples} samples in the open one"
            f"{f' ({losses})' if losses else ''}; "
            "give more tasks and run again to resume, or wrap the dataset in CyclingDataset"
        )
        self.filled = filled
        self.needed = needed
        self.open_samples = open_samples


class WorkerDied(RolloutError):
    """A process worker ended while a rollout was inside it."""

    def __init__(self, exit_code: int | None, *, is_starting: bool = False) -> None:
        how = "" if exit_code is None else f" with exit code {exit_code}"
        hint = " while it started; a script needs `if __name__ == '__main__':` around its work" if is_starting else ""
        super().__init__(f"the worker process died{how}{hint}")
        self.exit_code = exit_code


class WorkerPoolBroken(RolloutError):
    """Process workers died again and again without one success between."""


class RolloutStalled(RolloutError):
    """No sample was accepted for `no_progress_timeout`."""


class UploadFailed(RolloutError):
    """Uploads failed for `upload_timeout`, or were refused; `samples` are those not stored."""

    def __init__(self, message: str, samples: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.samples = list(samples)


class BatchSizeMismatch(RolloutError, ValueError):
    """The client's `batch_size` is not the capacity of the server's batches."""
