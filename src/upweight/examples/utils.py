"""What rollout functions need again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, TypeVar, cast

from upweight.rollout.models import Sample

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

T = TypeVar("T")

TOKEN_PREFIX = "token_id:"


def parse_completion(completion: ChatCompletion) -> tuple[list[int], list[float], list[int]]:
    """Token ids, logprobs and mask of prompt and first choice; the prompt has logprob 0.0 and mask 0.

    Raises:
        ValueError: naming the request option that is missing.
    """
    prompt = (completion.model_extra or {}).get("prompt_token_ids")
    if prompt is None:
        raise ValueError("The completion has no prompt_token_ids: request it with return_token_ids=True")
    logprobs = completion.choices[0].logprobs
    if logprobs is None or logprobs.content is None:
        raise ValueError("The completion has no logprobs: request it with logprobs=True")
    tokens = [_token_id(entry.token) for entry in logprobs.content]
    values = [entry.logprob for entry in logprobs.content]
    n_prompt = len(prompt)
    return [*prompt, *tokens], [0.0] * n_prompt + values, [0] * n_prompt + [1] * len(tokens)


def _token_id(token: str) -> int:
    try:
        return int(token.removeprefix(TOKEN_PREFIX)) if token.startswith(TOKEN_PREFIX) else int("no prefix")
    except ValueError:
        raise ValueError(
            f"Token {token!r} is not of the form '{TOKEN_PREFIX}N': request it with return_token_ids=True"
        ) from None


def scored_sample(
    completion: ChatCompletion, parsed: tuple[list[int], list[float], list[int]], reward: float, advantage: float
) -> Sample:
    """The sample of a completion, from what `parse_completion` gave; raw reward and versions go into `debug_info`."""
    token_ids, logprobs, mask = parsed
    return Sample(
        token_ids=token_ids,
        logprobs=logprobs,
        mask=mask,
        normalized_reward=advantage,
        debug_info={"reward": reward, **version_info(completion)},
    )


def version_info(completion: ChatCompletion) -> dict[str, Any]:
    """The versions that the completion reports, for `Sample.debug_info`; the runner stamps the sample by them."""
    info = {"inference_version": (completion.model_extra or {}).get("inference_version")}
    choice = completion.choices[0].model_extra or {}
    info["token_inference_versions"] = choice.get("token_inference_versions")
    return {name: value for name, value in info.items() if value is not None}


def call_concurrently(function: Callable[[], T], n: int) -> list[T]:
    """Results of `n` calls made at the same time; the first error is raised after all have ended.

    The threads are daemons (those of `concurrent.futures` are not), so that a hanging request never keeps the
    interpreter from exiting.
    """
    outcomes: list[tuple[T | None, BaseException | None]] = [(None, None)] * n

    def call(index: int) -> None:
        try:
            outcomes[index] = (function(), None)
        except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
            outcomes[index] = (None, error)

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, error in outcomes:
        if error is not None:
            raise error
    return [cast(T, result) for result, _ in outcomes]


def group_advantages(rewards_G: Sequence[float]) -> list[float]:
    """`(r − mean) / (population standard deviation + 1e-6)` within a group."""
    mean, deviation = fmean(rewards_G), pstdev(rewards_G)
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards_G]
