"""What an engine counts and times. Written by the engine's thread, read by any."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from upweight.inference.types import GenerationOutput

RECENT = 128
RECENT_STEPS = 4096


@dataclass(kw_only=True)
class RequestTimes:
    """`time.monotonic()` of a request's stations."""

    submitted: float
    first_token: float | None = None


@dataclass(kw_only=True)
class EngineMetrics:
    """Totals since the start, and the last finished requests one by one."""

    requests: int = 0
    finished: int = 0
    tokens: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens_by_version: dict[int, int] = field(default_factory=dict)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT))
    # Of steps that rows with tokens already waited for: places for rows, whether they prefilled too, seconds.
    decode_steps: deque[tuple[int, bool, float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def token(self, version: int, times: RequestTimes) -> None:
        self.tokens += 1
        self.tokens_by_version[version] = self.tokens_by_version.get(version, 0) + 1
        if times.first_token is None:
            times.first_token = time.monotonic()

    def done(self, request_id: int, output: GenerationOutput, times: RequestTimes) -> None:
        self.finished += 1
        self.cached_tokens += output.cached_tokens
        now, first = time.monotonic(), times.first_token
        made = len(output.token_ids)
        self.recent.append(
            {
                "id": request_id,
                "prompt_tokens": output.prompt_len,
                "cached_tokens": output.cached_tokens,
                "output_tokens": made,
                "finish_reason": str(output.finish_reason),
                "ttft_ms": None if first is None else 1e3 * (first - times.submitted),
                "decode_tps": (made - 1) / (now - first) if first is not None and made > 1 and now > first else None,
                "e2e_latency_ms": 1e3 * (now - times.submitted),
            }
        )

    def summary(self) -> dict[str, Any]:
        """Counts, averages over the recent requests, and these themselves."""
        recent = list(self.recent)
        return {
            "total_tasks": self.requests,
            "total_tokens": self.tokens,
            "finished_tasks": self.finished,
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "prefix_hit_rate": self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
            "tokens_by_version": dict(self.tokens_by_version),
            **_step_times(self.decode_steps.copy()),  # a copy is made at once, while steps go on
            "avg_ttft_ms": _mean([task["ttft_ms"] for task in recent]),
            "avg_decode_tps": _mean([task["decode_tps"] for task in recent]),
            "avg_e2e_latency_ms": _mean([task["e2e_latency_ms"] for task in recent]),
            "recent_tasks": recent,
        }


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def _step_times(steps: Iterable[tuple[int, bool, float]]) -> dict[str, Any]:
    """Milliseconds of the last steps without and with prefill, and the latter in median steps of as many rows without."""
    alone: dict[int, list[float]] = {}
    beside: list[tuple[int, float]] = []
    for size, prefills, seconds in steps:
        if prefills:
            beside.append((size, 1e3 * seconds))
        else:
            alone.setdefault(size, []).append(1e3 * seconds)
    usual = {size: median(times) for size, times in alone.items()}
    return {
        "step_ms": {
            "decode": _spread([time for times in alone.values() for time in times]),
            "decode_and_prefill": _spread([time for _, time in beside]),
        },
        "prefill_steps_in_steps": _spread([time / usual[size] for size, time in beside if size in usual]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    """Nothing before there was one."""
    found = sorted(values)
    if not found:
        return {}
    last = len(found) - 1
    places = {"p50": last // 2, "p99": -(-99 * last // 100), "max": last}
    return {"count": float(len(found))} | {name: found[at] for name, at in places.items()}
