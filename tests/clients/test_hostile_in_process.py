"""A live engine under bad requests and cancellations from many threads of its own process; and one that has nothing to do."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.clients.harness import Served
from upweight.errors import RequestError
from upweight.inference import InferenceScheduler
from upweight.inference.engine import Engine, EngineBusy
from upweight.inference.types import FinishReason, GenerationOutput, SamplingParams, TextPiece

VICTIMS = [[5, 6, 7, 8], list(range(100, 160)), [9, 10, 11]]
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
ENDS = {FinishReason.STOP, FinishReason.LENGTH, FinishReason.REJECTED, FinishReason.ABORTED, FinishReason.ERROR}


class Broken:
    """A constraint whose code fails at one of its calls."""

    def __init__(self, fails_at: int) -> None:
        self._left = fails_at

    def allowed(self) -> bytes | None:
        self._count()
        return None

    def accept(self, token_id: int) -> None:
        self._count()

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ZeroDivisionError("a failing constraint")


@dataclass(frozen=True)
class Attack:
    prompt: list[int]
    sampling: dict[str, Any]
    constraint_fails_at: int | None = None
    callback_fails: bool = False
    cancels: tuple[float, ...] = ()  # seconds after the start
    timeout: float | None = None


@dataclass
class Ends:
    """What came back for one attack."""

    refused: bool = False
    outputs: list[GenerationOutput] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.sampled_from([0, 1, 5, 30, 100, None, -1]),
        "temperature": st.sampled_from([0.0, 0.7, 100.0, -1.0, float("nan"), float("inf")]),
        "top_p": st.sampled_from([0.0, 0.5, 2.0]),
        "top_k": st.sampled_from([0, 3, 2**40, -3]),
        "min_p": st.sampled_from([0.3, -1.0]),
        "seed": st.sampled_from([0, -1, 2**70]),
        "stop": st.sampled_from([("e",), ("a", "b"), ("",)]),
        "stop_ids": st.sampled_from([frozenset({5}), frozenset({10**9})]),
        "min_tokens": st.sampled_from([3, 500, -1]),
        "frequency_penalty": st.sampled_from([2.0, float("nan")]),
        "logit_bias": st.sampled_from([((5, 100.0),), ((10**9, 1.0),), ((-1, 1.0),)]),
        "top_logprobs": st.sampled_from([2, 10**6]),
        "prompt_logprobs": st.booleans(),
    },
)
ATTACKS = st.builds(
    Attack,
    st.sampled_from([[5], [5, 6, 7, 8], [], [-1], [10**9], [7] * 400, [7] * 511, [7] * 512, [7] * 9000]),
    SAMPLING,
    st.sampled_from([None, None, 0, 1, 4]),
    st.booleans(),
    st.sampled_from([(), (), (0.0,), (0.005,), (0.0, 0.02, 0.03)]),
    st.sampled_from([None, None, 0.0, 0.01]),
)


def strike(engine: Engine, attack: Attack) -> Ends:
    """Runs one attack to its end, in the calling thread."""
    ends = Ends()

    def told(item: Any) -> None:
        if isinstance(item, GenerationOutput):
            ends.outputs.append(item)
            ends.done.set()
        if attack.callback_fails:
            raise ZeroDivisionError("a failing callback")

    sampling, fails_at = {"max_tokens": 20, **attack.sampling}, attack.constraint_fails_at
    if fails_at is not None:
        sampling["constraint"] = lambda: Broken(fails_at)
    try:
        request = engine.submit(attack.prompt, SamplingParams(**sampling), told, on_text=told, timeout=attack.timeout)
    except (RequestError, EngineBusy):
        ends.refused = True
        return ends
    for pause in attack.cancels:
        time.sleep(pause)
        engine.cancel(request)
    assert ends.done.wait(60)
    return ends


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(attacks=st.lists(ATTACKS, max_size=6))
def test_nobody_else_notices_in_process(served: Served, attacks: list[Attack]) -> None:
    engine, scheduler = served.core.engine, InferenceScheduler.on_engine(served.core.engine)
    served.quiet()
    calm = scheduler.run_batch(VICTIMS, **GREEDY)
    with ThreadPoolExecutor(8) as pool:
        strikes = [pool.submit(strike, engine, attack) for attack in attacks]
        answers = pool.submit(scheduler.run_batch, VICTIMS, **GREEDY)
        ended = [future.result(60) for future in strikes]
        assert answers.result(60) == calm
    for one in ended:
        assert len(one.outputs) == (0 if one.refused else 1)  # answered exactly once
        for output in one.outputs:
            assert output.finish_reason in ENDS
            assert len(output.token_ids) == len(output.logprobs) == len(output.raw_logprobs)
    served.quiet()
    assert engine.alive


def cpu_seconds(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clock of single threads here")
def test_an_idle_engine_uses_no_cpu(served: Served) -> None:
    served.quiet()
    thread = served.core.engine._thread
    assert thread is not None
    for refused in (1, 0):
        if refused:  # a prompt that can never fit is answered at once, not tried for ever
            assert served.post("completions", prompt=[7] * 600).status_code == 400
            assert served.core.engine.stats()["waiting_queue"] == 0
        before = cpu_seconds(thread)
        time.sleep(0.3)
        assert cpu_seconds(thread) - before < 0.003


def test_a_row_is_free_one_step_after_it_was_cancelled(served: Served) -> None:
    """Counted in tokens: a thread that cancels with its second piece gets no more than the step under way."""
    served.quiet()
    engine = served.core.engine
    ends, pieces = Ends(), []

    def told(piece: TextPiece) -> None:
        pieces.append(piece)
        if len(pieces) == 2:
            engine.cancel(request)

    def done(output: GenerationOutput) -> None:
        ends.outputs.append(output)
        ends.done.set()

    request = 0
    with engine._wake:  # the engine takes the order when this thread knows its number
        request = engine.submit([5, 6, 7], SamplingParams(max_tokens=400, ignore_eos=True, seed=1), done, on_text=told)
    assert ends.done.wait(30)
    (output,) = ends.outputs
    assert output.finish_reason is FinishReason.ABORTED
    assert len(output.token_ids) <= sum(len(piece.token_ids) for piece in pieces[:2]) + 1
