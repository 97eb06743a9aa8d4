"""A step that does not come back: its requests fail one by one, the engine goes on when it can and ends when it cannot."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from upweight.errors import ConfigError, EngineError
from upweight.inference import engine as engine_module
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

        def slow(rows: Any, beside: Any) -> Any:
            self.go.wait(60)
            return decode(rows, beside)

        self.engine.runner.decode = slow  # type: ignore[method-assign]
        self.engine.start()

    def ask(self, count: int, params: SamplingParams = FEW) -> None:
        for _ in range(count):
            self.engine.submit([5, 6, 7], params, self.outputs.append)

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


def test_what_was_answered_is_not_computed_afterwards(model: LoadedModel) -> None:
    """Neither the row of the late step nor those that waited behind it."""
    stuck = Stuck(model)
    stuck.ask(3, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    stuck.answered(3)
    stuck.go.set()
    while not stuck.engine.alive:
        time.sleep(0.005)
    before = stuck.engine.stats()["total_tokens"]
    assert len(answers_to(stuck.engine, [[5, 6, 7]], FEW)[0].token_ids) == 3
    assert stuck.engine.stats()["total_tokens"] == before + 3
    stuck.engine.stop()


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


def test_stopping_waits_for_a_step_but_not_for_long(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "STOP_PATIENCE", 0.2)
    stuck = Stuck(model)
    stuck.engine._watchdog.limit = 600.0
    stuck.ask(2)
    while stuck.engine.stats()["active_tasks"] == 0:
        time.sleep(0.005)
    began = time.monotonic()
    stuck.engine.stop()
    assert time.monotonic() - began < 5
    assert {output.error for output in stuck.answered(2)} == {"the engine was stopped"}
    stuck.go.set()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_rows": 0}, "max_rows is 0; it must be a whole number of at least 1"),
        ({"max_queue": 0}, "max_queue is 0; it must be a whole number of at least 1"),
        ({"max_context": -5}, "max_context is -5; it must be a whole number of at least 1"),
        ({"version": None}, "version is None; it must be a whole number of at least 0"),
    ],
)
def test_settings_under_which_nothing_would_be_answered_are_refused(
    model: LoadedModel, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Engine(model.config, model.params, model.tokenizer, **options)
    with pytest.raises(ConfigError, match="version is 'a'; it must be a whole number of at least 0"):
        Engine(model.config, model.params, model.tokenizer).set_weights(model.params, "a")  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [0, -1.0, float("inf"), float("nan")])
def test_a_limit_that_is_none_is_refused(model: LoadedModel, limit: float) -> None:
    with pytest.raises(ConfigError, match=f"step_timeout is {limit}; it must be a positive number of seconds"):
        Engine(model.config, model.params, model.tokenizer, step_timeout=limit)
