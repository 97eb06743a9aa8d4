"""Looking at threads never stops the process: no garbage is collected meanwhile."""

import gc
import sys
import threading

import pytest

from upweight.rollout.frames import current_frames


def test_nothing_is_collected_inside_of_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, collected = [False], []
    real = sys._current_frames

    def watched() -> dict:
        inside[0] = True
        try:
            return real()
        finally:
            inside[0] = False

    def note(phase: str, info: dict) -> None:
        collected.append(inside[0])

    monkeypatch.setattr(sys, "_current_frames", watched)
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    before = gc.get_threshold()
    gc.callbacks.append(note)
    try:
        gc.set_threshold(1)
        for _ in range(50):
            sys._current_frames()  # as it is: frames are made inside, and a collection comes due
        assert any(collected)
        collected.clear()
        for _ in range(50):
            assert threading.get_ident() in current_frames()
        assert not any(collected)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
        stop.set()
        for thread in threads:
            thread.join()


def test_collections_stay_as_they_were() -> None:
    gc.disable()
    try:
        current_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()
    current_frames()
    assert gc.isenabled()
