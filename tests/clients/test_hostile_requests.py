"""A live engine under bad requests and cancellations, over real HTTP: it answers them all, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.clients.harness import Served

MESSAGES = [{"role": "user", "content": "Tell me more"}]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "array", "items": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
VICTIMS: list[dict[str, Any]] = [
    {"prompt": "One two three four", "max_tokens": 10, "temperature": 0},
    {"prompt": list(range(100, 160)), "max_tokens": 6, "temperature": 0},
    {"prompt": "One two three five", "max_tokens": 8, "temperature": 1, "seed": 4},
]
WANTED: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0, 0.7, 1e-9, -1, float("nan"), None, "hot"]),
    "top_p": st.sampled_from([0, 0.5, 1, 2]),
    "top_k": st.sampled_from([-1, 0, 3, 2**40]),
    "min_p": st.sampled_from([0, 0.3, 1, -1]),
    "n": st.sampled_from([1, 3, 0, 1000]),
    "max_tokens": st.sampled_from([0, 1, 5, 30, -1, 10**9, None]),
    "min_tokens": st.sampled_from([0, 3, 40]),
    "stop": st.sampled_from([None, "e", ["a", "b"], ""]),
    "logit_bias": st.sampled_from([{}, {"5": 100}, {"2": 100}, {"2": -100}, {"-5": 1}, {"49152": 1}]),
    "repetition_penalty": st.sampled_from([1, 1.5, 0]),
    "presence_penalty": st.sampled_from([0, 2, -2, 9]),
    "seed": st.sampled_from([None, 0, -1, 2**70]),
    "logprobs": st.sampled_from([None, True, 3, 99]),
    "top_logprobs": st.sampled_from([None, 2, 21]),
    "response_format": st.sampled_from([None, SCHEMA, {"type": "json_object"}, {"type": "x"}]),
    "tools": st.sampled_from([None, TOOLS, [{}]]),
    "tool_choice": st.sampled_from([None, "required", "none", "x"]),
    "timeout": st.sampled_from([None, 0.001, 0.02, -1]),
    "messages": st.sampled_from([MESSAGES, [], None, [{"role": "x"}], [{"role": "user", "content": "a " * 600}]]),
    "prompt": st.sampled_from(["Go on", "", [], [[]], [7] * 400, [7] * 600, [10**9], [-1], None, ["a", "b"]]),
    "stream": st.booleans(),
    "surprise": st.just(1),
}


@dataclass(frozen=True)
class Attack:
    path: str
    body: bytes
    leave_after: float | None  # seconds, or None: waits for the answer


def bodies(needed: str) -> st.SearchStrategy[bytes]:
    optional = {name: values for name, values in WANTED.items() if name != needed}
    filled = st.fixed_dictionaries({needed: WANTED[needed]}, optional=optional)
    sane: st.SearchStrategy[dict[str, Any]] = st.just({needed: MESSAGES if needed == "messages" else "Go on"})
    picked = st.tuples(sane, st.dictionaries(st.sampled_from(sorted(optional)), st.integers(), max_size=2)).flatmap(
        lambda base: st.fixed_dictionaries({name: WANTED[name] for name in base[1]}).map(lambda more: base[0] | more)
    )
    return (filled | picked).map(lambda body: json.dumps(body).encode())


ATTACKS = st.one_of(
    st.builds(Attack, st.just("chat/completions"), bodies("messages"), st.sampled_from([None, None, 0.0, 0.01, 0.05])),
    st.builds(Attack, st.just("completions"), bodies("prompt"), st.sampled_from([None, None, 0.0, 0.01, 0.05])),
    st.builds(Attack, st.just("messages"), bodies("messages"), st.sampled_from([None, 0.01])),
    st.builds(Attack, st.sampled_from(["completions", "messages"]), st.binary(max_size=9), st.none()),
)


async def strike(client: httpx.AsyncClient, attack: Attack) -> int | None:
    """The status of the answer; None for a request that was left."""
    call = client.post(attack.path, content=attack.body)
    if attack.leave_after is None:
        return (await call).status_code
    with contextlib.suppress(TimeoutError):
        return (await asyncio.wait_for(call, attack.leave_after)).status_code
    return None


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> list[int]:
    answer = await client.post("completions", json=body)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


async def battle(
    url: str, attacks: list[Attack], headers: Mapping[str, str] | None = None, prefix: str = "/openai/v1"
) -> tuple[list[int | None], list[list[int]]]:
    """Attacks and victims at the same time: the statuses of the ones, the tokens of the others."""
    async with httpx.AsyncClient(base_url=url + prefix, headers=headers, timeout=60) as client:
        strikes = [strike(client, attack) for attack in attacks]
        asked = [ask(client, body) for body in VICTIMS]
        statuses, answers = await asyncio.gather(asyncio.gather(*strikes), asyncio.gather(*asked))
    return list(statuses), list(answers)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(attacks=st.lists(ATTACKS, max_size=6))
def test_nobody_else_notices(served: Served, attacks: list[Attack]) -> None:
    served.quiet()
    calm = asyncio.run(battle(served.url, []))[1]
    statuses, answers = asyncio.run(battle(served.url, attacks))
    assert answers == calm
    # 504: the attack's own time limit. Nothing is a failure of ours.
    assert set(statuses) <= {200, 400, 404, 429, 504, None}
    served.quiet()
    assert served.core.engine.alive
