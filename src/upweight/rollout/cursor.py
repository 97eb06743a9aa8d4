"""Which tasks of a dataset are done, so that a later run skips none and repeats none but those that were in flight.

Invariants
1. A task is *settled* when its samples were handed to the uploader (and are on disk, with a spool), or when it was rejected,
   failed for good or dropped. All others come again.
2. What is saved is the dataset's own state before the oldest draw that is not settled in full, and which tasks since then are.
3. The file is written after the spool and before the samples can be sent; a task whose samples are in the spool is settled,
   whatever the file says. So a crash at any point neither skips a task nor repeats one whose samples are kept.
4. Numbers count the draws of the dataset since its first run, over all processes that go on with this file.

Not restored: tasks in flight and buffered groups (they are drawn again), retries already made, the order in which groups end.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard
from urllib.parse import quote

logger = logging.getLogger(__name__)


class HasCursor(Protocol):
    """What a dataset needs to be resumed: a JSON state, taken before a draw, and the way back to it."""

    def state(self) -> Any: ...
    def restore(self, state: Any, /) -> None: ...


def has_cursor(dataset: object) -> TypeGuard[HasCursor]:
    return callable(getattr(dataset, "state", None)) and callable(getattr(dataset, "restore", None))


class DataCursor:
    """Numbers the tasks as they are drawn; belongs to the main loop's thread.

    It lives as long as the runner, and in `directory` (the spool's) longer. A dataset without a cursor is only numbered.
    """

    def __init__(self, dataset: object, directory: Path | None, job_id: str) -> None:
        self._dataset = dataset if has_cursor(dataset) else None
        self._file = (
            None if directory is None or self._dataset is None else directory / quote(job_id, safe="") / "cursor"
        )
        self._next = 0
        self._marks: list[tuple[int, Any]] = []  # number of a draw's first task, state before it
        self._settled: set[int] = set()
        self._is_dirty, self._is_new, self._is_told = False, True, False

    def rewind(self, spooled: Iterable[int] = ()) -> None:
        """Bring the dataset to the oldest task that is not settled. Called at the start of each run.

        `spooled`: numbers of tasks whose samples an earlier process left in the spool.

        Raises:
            ValueError: the file is no cursor, or the dataset cannot go there.
        """
        if self._dataset is None:
            return
        saved = self._load() if self._is_new else self._saved()
        self._is_new = False
        if saved is None:  # nothing was drawn yet, or the first samples were not noted any more
            self._settled.update(spooled)
            return
        first = int(saved.get("first", 0))
        self._next, self._marks = first, []
        self._dataset.restore(saved["state"])
        self._settled = {first + int(number) for number in saved["settled"]}
        self._settled.update(number for number in spooled if number >= first)
        logger.info("The dataset goes on at %s; %d tasks after it are done too", saved["state"], len(self._settled))

    def number(self, specs: Sequence[Any], state: Any) -> list[tuple[int, Any]]:
        """Tasks as drawn → (number, task) of those still to be done. `state`: before the draw, None if it goes on."""
        if state is not None:
            self._marks.append((self._next, state))
        numbered = list(enumerate(specs, self._next))
        self._next += len(specs)
        return [(number, spec) for number, spec in numbered if number not in self._settled]

    def settle(self, number: int) -> None:
        if self._dataset is None:
            return
        self._settled.add(number)
        self._is_dirty = True
        self._forget()

    def save(self) -> None:
        """Write what has changed, if there is a file."""
        if not self._is_dirty or self._file is None or (saved := self._saved()) is None:
            return
        self._is_dirty = False
        try:
            text = json.dumps(saved)
        except (TypeError, ValueError) as error:
            raise TypeError(f"the state of the dataset, {saved['state']!r}, is no JSON: {error}") from error
        part = self._file.with_suffix(".part")
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text, encoding="utf-8")
            part.replace(self._file)
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                logger.warning(
                    "The place in the data cannot be kept on disk; a later run would repeat tasks: %s", error
                )

    def _forget(self) -> None:
        """Drop draws that are settled in full."""
        while len(self._marks) > 1 and self._settled.issuperset(range(self._marks[0][0], self._marks[1][0])):
            self._settled.difference_update(range(self._marks[0][0], self._marks[1][0]))
            del self._marks[0]

    def _saved(self) -> dict[str, Any] | None:
        if not self._marks:
            return None
        first, state = self._marks[0]
        return {"state": state, "first": first, "settled": sorted(number - first for number in self._settled)}

    def _load(self) -> dict[str, Any] | None:
        if self._file is None or not self._file.exists():
            return None
        try:
            saved = json.loads(self._file.read_text(encoding="utf-8"))
            _ = saved["state"], [int(number) for number in saved["settled"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._file} is no dataset cursor ({error}); delete it to start the data anew") from None
        return dict(saved)
