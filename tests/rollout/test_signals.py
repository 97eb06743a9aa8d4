"""What a run does with the signal handlers of the program around it."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from upweight.rollout.models import SampleGroup

from . import helpers

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signal here"),
    pytest.mark.skipif(
        threading.current_thread() is not threading.main_thread(), reason="signals need the main thread"
    ),
]


def signalling(number: int) -> Any:
    def rollout(task: int, context: Any) -> SampleGroup:
        if task == 5:
            os.kill(os.getpid(), number)
        return helpers.rollout(task, context)

    return rollout


def test_a_registration_of_faulthandler_works_during_and_after_a_run(make_runner: Any, tmp_path: Path) -> None:
    """Report H11: our own report takes no signal that the program already uses."""
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            assert make_runner(signalling(signal.SIGUSR1)).run().batches_filled == 3
            during = (tmp_path / "stacks").read_text()
            os.kill(os.getpid(), signal.SIGUSR1)
            after = (tmp_path / "stacks").read_text()
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert "most recent call first" in during
    assert len(after) > len(during)


def test_a_handler_of_the_program_is_kept(make_runner: Any) -> None:
    seen: list[int] = []

    def own(number: int, frame: object) -> None:
        seen.append(number)

    former = signal.signal(signal.SIGUSR1, own)
    try:
        make_runner(signalling(signal.SIGUSR1)).run()
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert seen == [signal.SIGUSR1]


def test_all_handlers_come_back(make_runner: Any) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    assert make_runner(signalling(signal.SIGTERM), num_batches=None).run().reason == "stopped by SIGTERM"
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_handler_from_outside_of_python_is_left_alone(make_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python tells None for a handler that was there before the interpreter, and takes no None back."""
    tell, take = signal.getsignal, signal.signal
    taken: list[int] = []

    def telling(number: int) -> Any:
        return None if number == signal.SIGTERM else tell(number)

    def taking(number: int, handler: Any) -> Any:
        taken.append(number)
        return take(number, handler)

    monkeypatch.setattr(signal, "getsignal", telling)
    monkeypatch.setattr(signal, "signal", taking)
    assert make_runner().run().batches_filled == 3
    assert signal.SIGINT in taken
    assert signal.SIGTERM not in taken


def test_a_handler_that_the_program_sets_meanwhile_stays(make_runner: Any) -> None:
    def own(number: int, frame: object) -> None:
        """Does nothing."""

    runner = make_runner()
    runner._publish = lambda progress: signal.signal(signal.SIGTERM, own)  # called in the main thread
    former = signal.getsignal(signal.SIGTERM)
    try:
        runner.run()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, former)
