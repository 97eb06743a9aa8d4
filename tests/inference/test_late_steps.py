"""A step that does not come back: its requests fail one by one, the engine goes on when it can and ends when it cannot."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from upweight.errors import ConfigError, EngineError
from upweight.inference.engine import Engine
from upweight.inference.gather import answers_to
from upweight.inference.types import FinishReason, GenerationOutput, SamplingParams
from upweight.weights.loading import LoadedModel

FEW = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
LIMIT = 0.3


class Stuck:
    """An engine for one row whose decode waits until `go` is set."""

    def __init__(self, model: LoadedModel) -> None:
        self.engine = Engine(model.config, model.params, model.tokenizer, max_rows=1)
        self.engine.warm_up(64)
        self.engine._watchdog.limit = LIMIT  # after the warm-up: compiling is not what is limited here
        self.go = threading.Event()
        self.outputs: list[GenerationOutput] = []
        decode = self.engine.runner.decode

        def slow(rows: Any) -> Any:
            self.go.wait(60)
            return decode(rows)

        self.engine.runner.decode = slow  # type: ignore[method-assign]
        self.engine.start()

    def ask(self, count: int) -> None:
        for _ in range(count):
            self.engine.submit([5, 6, 7], FEW, self.outputs.append)

    def answered(self, count: int) -> list[GenerationOutput]:
        until = time.monotonic() + 30
        while len(self.outputs) < count and time.monotonic() < until:
            time.sleep(0.005)
        assert len(self.outputs) == count
        return self.outputs


def test_a_late_step_fails_its_requests_and_the_engine_goes_on(model: LoadedModel) -> None:
    stuck = Stuck(model)
    stuck.ask(3)  # one runs, two wait behind it
    for output in stuck.answered(3):
        assert output.finish_reason is FinishReason.ERROR
        assert output.error == "EngineError: a step of the engine took longer than 0.3 s"
    assert not stuck.engine.alive
    with pytest.raises(EngineError, match="does not come back; try again later"):
        stuck.ask(1)
    stuck.go.set()
    until = time.monotonic() + 30
    while not stuck.engine.alive and time.monotonic() < until:
        time.sleep(0.005)
    after = answers_to(stuck.engine, [[5, 6, 7]], FEW)[0]
    assert len(stuck.outputs) == 3  # nobody is answered twice
    assert stuck.engine.stats()["active_tasks"] == stuck.engine.stats()["waiting_queue"] == 0
    stuck.engine.stop()
    with Engine(model.config, model.params, model.tokenizer, max_rows=1) as quiet:
        assert answers_to(quiet, [[5, 6, 7]], FEW)[0].token_ids == after.token_ids


def test_a_step_that_never_comes_back_ends_the_engine(model: LoadedModel) -> None:
    stuck = Stuck(model)
    stuck.ask(1)
    stuck.answered(1)
    swap_failed = threading.Event()

    def swap() -> None:
        with pytest.raises(EngineError, match=r"did not come back within 0\.9 s"):
            stuck.engine.set_weights(model.params, 1)
        swap_failed.set()

    threading.Thread(target=swap, daemon=True).start()
    assert stuck.engine.wait_for_end() == "a step of the engine did not come back within 0.9 s"
    assert swap_failed.wait(10)
    stuck.engine.stop()  # does not wait for the step
    assert len(stuck.outputs) == 1
    stuck.go.set()


def test_stopping_does_not_wait_for_a_late_step(model: LoadedModel) -> None:
    stuck = Stuck(model)
    stuck.ask(1)
    stuck.answered(1)
    began = time.monotonic()
    stuck.engine.stop()
    assert time.monotonic() - began < 5
    stuck.go.set()
    assert stuck.engine.wait_for_end() is None


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), float("nan")])
def test_a_limit_that_is_none_is_refused(model: LoadedModel, limit: float) -> None:
    with pytest.raises(ConfigError, match=f"step_timeout is {limit}; it must be a positive number of seconds"):
        Engine(model.config, model.params, model.tokenizer, step_timeout=limit)
