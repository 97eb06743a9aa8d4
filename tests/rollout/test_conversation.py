"""Samples of many turns hold exactly what was sampled, over several families of chat templates."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion

from tests.conftest import SMOLLM2
from upweight.api_client import TokenFactory
from upweight.rollout import RolloutContext
from upweight.rollout.conversation import KEPT_BRIDGES, Answer, Conversation, answer_of
from upweight.tokenizer import Tokenizer

from . import helpers
from .chat_templates import CHATML, PLAIN, QWEN_LIKE, STRICT_TOOLS, TEMPLATES, TRIMMING, LocalRender

TOKENIZER = Tokenizer.from_folder(SMOLLM2)
END = TOKENIZER.encode("<|im_end|>")[0]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "x" * 50, "parameters": {}}}]
USER = {"role": "user", "content": "How many?"}


def make_context() -> RolloutContext:
    return RolloutContext(helpers.config(), TokenFactory("http://127.0.0.1:1", "key"))


CONTEXT = make_context()
RENDERS = {name: LocalRender(TOKENIZER, template) for name, template in TEMPLATES.items()}


def spoken(text: str, ends: bool = True, start: float = -0.5) -> Answer:
    """An answer as an engine samples it: `text` need not be encoded in the usual way."""
    ids = [i for word in text.split(" ") for i in TOKENIZER.encode(" " + word, special=False)] or [77]
    ids += [END] if ends else []
    return Answer(
        text=TOKENIZER.decode(ids),
        token_ids=ids,
        logprobs=[start - 0.25 * i for i in range(len(ids))],
        finish_reason="stop" if ends else "length",
        inference_versions=[3] * len(ids),
    )


TEXT = st.text("ab 7.)\n\té中😀<:{", max_size=12)  # all of it survives the tokenizer
ANSWER = st.builds(
    lambda thought, text, ends: (f"<think>{thought}</think>" if thought else "") + text + ("" if ends else " "),
    st.sampled_from(["", "", "hm"]),
    TEXT,
    st.booleans(),
)
TURNS = st.lists(
    st.tuples(
        ANSWER,
        st.booleans(),
        st.lists(st.tuples(st.sampled_from(["tool", "user"]), TEXT), min_size=1, max_size=2),
    ),
    min_size=1,
    max_size=4,
)


def play(conversation: Conversation, turns: list[Any]) -> tuple[list[list[int]], list[Answer]]:
    """Tool results come first and answer a call each, as every template accepts."""
    prompts, answers = [], []
    for text, ends, new in turns:
        prompts.append(conversation.prompt_ids)
        answers.append(conversation.take(spoken(text, ends)))
        new = sorted(new)
        if new[0][0] == "tool":
            call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            conversation.describe_answer({**conversation.messages[-1], "tool_calls": [call]})
        conversation.add(*({"role": role, "content": content} for role, content in new))
    prompts.append(conversation.prompt_ids)
    return prompts, answers


@pytest.mark.parametrize("history", ["verbatim", "template"])
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(turns=TURNS)
def test_what_was_sampled_is_kept_and_nothing_else_is_trained(name: str, history: Any, turns: list[Any]) -> None:
    """Reports T1, T6, T9, T11, M7: turns are merged by exact prefix, and only where that fails there is another sample."""
    render = RENDERS[name]
    conversation = Conversation(CONTEXT, [USER], render=render, history=history)
    prompts, answers = play(conversation, turns)
    samples = conversation.samples(1.0)
    trained = [[(t, p) for t, p, m in zip(s.token_ids, s.logprobs, s.mask, strict=True) if m == 1] for s in samples]
    spoken_tokens = [pair for a in answers for pair in zip(a.token_ids, a.logprobs, strict=True)]
    assert [pair for one in trained for pair in one] == spoken_tokens
    assert all(p == 0.0 for s in samples for p, m in zip(s.logprobs, s.mask, strict=True) if m == 0)
    # Each answer stands after the very prompt that it was sampled from, in runs of mask 1 that do not touch.
    runs = sum(a < b for s in samples for a, b in zip([0, *s.mask], s.mask, strict=False))
    assert runs == len(answers)
    wholes = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=False)]
    assert all(any(s.token_ids[: len(whole)] == whole for s in samples) for whole in wholes)
    assert conversation.forks == sum(a != b[: len(a)] for a, b in zip(wholes, prompts[1:], strict=True))


@pytest.mark.parametrize("name", ["chatml", "llama3-like", "strict-tools"])
@settings(max_examples=40, deadline=None)
@given(turns=TURNS)
def test_a_template_that_keeps_history_is_followed_to_the_letter(name: str, turns: list[Any]) -> None:
    """Reports T6, T9. The prompt reads as the template writes the whole conversation, though only bridges were rendered."""
    render = RENDERS[name]
    conversation = Conversation(CONTEXT, [USER], render=render)
    if name == "strict-tools":
        turns = [(text, ends, [("user", content) for _, content in new]) for text, ends, new in turns]
    prompts, _ = play(conversation, turns)
    assert conversation.forks == 0
    expected = render.tokenizer.render(conversation.messages)
    assert render.tokenizer.decode(prompts[-1], skip_special_tokens=False) == expected


@settings(max_examples=25, deadline=None)
@given(turns=TURNS)
def test_template_history_is_the_templates_own_prompt_at_every_turn(turns: list[Any]) -> None:
    render = RENDERS["qwen-like"]
    conversation = Conversation(CONTEXT, [USER], render=render, history="template")
    for text, ends, new in turns:
        assert conversation.prompt_ids == render.tokenizer.encode_chat(conversation.messages)
        conversation.take(spoken(text, ends))
        conversation.add(*({"role": role, "content": content} for role, content in new))


def test_the_seam_of_plain_text_is_found() -> None:
    render = LocalRender(TOKENIZER, PLAIN)
    conversation = Conversation(make_context(), [USER], render=render)
    conversation.prompt_ids  # noqa: B018
    conversation.take(spoken("Four.", ends=False))
    conversation.add({"role": "user", "content": "Sure?"})
    bridge = conversation.prompt_ids[len(conversation.samples(0.0)[0].token_ids) :]
    assert TOKENIZER.decode(bridge) == "\n\nuser: Sure?\n\nassistant:"
    assert conversation.forks == 0


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (QWEN_LIKE, "drops <think> parts of earlier answers"),
        (TRIMMING, "strips white space from earlier answers"),
        (TEMPLATES["repeating"], "writes one answer 2 times"),
        (PLAIN, "writes a prompt differently once its answer follows"),  # "assistant:" and then " " before the answer
    ],
)
def test_a_template_that_rewrites_history_is_told_once_with_the_consequence(
    template: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Report T4."""
    context, render = make_context(), LocalRender(TOKENIZER, template)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert Conversation(context, [USER], render=render).prompt_ids
    told = [r.getMessage() for r in caplog.records if "chat template" in r.getMessage()]
    assert len(told) == 1
    assert said in told[0]
    assert "history='template'" in told[0]


@pytest.mark.parametrize("name", ["chatml", "llama3-like", "strict-tools"])
def test_a_template_that_keeps_history_is_not_accused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert Conversation(make_context(), [USER], render=LocalRender(TOKENIZER, TEMPLATES[name])).prompt_ids
    assert caplog.records == []


def test_a_result_that_needs_its_call_is_bridged_after_the_call() -> None:
    conversation = Conversation(make_context(), [USER], render=LocalRender(TOKENIZER, STRICT_TOOLS))
    before = conversation.prompt_ids
    answer = conversation.take(spoken("<call>{}</call>"))
    conversation.add({"role": "tool", "content": "four", "tool_call_id": "c1"})
    added = conversation.prompt_ids[len(before) + len(answer.token_ids) :]
    assert TOKENIZER.decode(added, skip_special_tokens=False) == (
        "\n<|im_start|>tool\nfour<|im_end|>\n<|im_start|>assistant\n"
    )
    assert conversation.forks == 0


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", ["chatml", "llama3-like", "qwen-like"])
def test_a_turn_costs_its_new_tokens_only(name: str, tools: Any) -> None:
    """Report T10: tokens rendered per turn are the same at turn 60 as at turn 2, with thousands behind them."""
    render = LocalRender(TOKENIZER, TEMPLATES[name])
    conversation = Conversation(make_context(), [USER], render=render, tools=tools)
    costs = []
    for _ in range(60):
        prompt = conversation.prompt_ids
        conversation.take(spoken("word " * 30))
        before = render.n_tokens, render.n_calls
        conversation.add({"role": "user", "content": "again"})
        conversation.prompt_ids  # noqa: B018
        costs.append((render.n_tokens - before[0], render.n_calls - before[1]))
    assert len(prompt) > 2000
    assert set(costs[1:]) == {costs[1]}
    assert costs[1][0] < 60
    assert costs[1][1] == 1
    opening = render.n_calls - 60
    assert opening < 15  # examining the template, once


def test_a_fork_is_counted_and_the_longer_part_is_the_sample() -> None:
    """Reports T2, E9: a prefix that cannot be kept starts a new sample."""
    conversation = Conversation(CONTEXT, [USER], render=RENDERS["qwen-like"], history="template")
    for text in ["<think>a</think>one two", "four"]:
        conversation.prompt_ids  # noqa: B018
        conversation.take(spoken(text))
        conversation.add(USER)
    sample = conversation.sample(0.5, reward=2.0)
    assert conversation.forks == 1
    assert sample.debug_info == {
        "turns": 1,
        "forks": 1,
        "reward": 2.0,
        "left_out_tokens": 2,
        "inference_version": 3,
    }
    assert sample.token_ids[-1] == END
    assert TOKENIZER.decode(sample.token_ids).endswith("</think>one two")
    assert [s.debug_info["conversation"] for s in conversation.samples(0.5)] != ["", ""]
    assert len({s.debug_info["conversation"] for s in conversation.samples(0.5)}) == 1


def test_misuse_is_one_clear_line() -> None:
    conversation = Conversation(make_context(), [USER], render=LocalRender(TOKENIZER, CHATML))
    with pytest.raises(ValueError, match="Nothing was sampled yet"):
        conversation.sample(1.0)
    conversation.prompt_ids  # noqa: B018
    conversation.take(spoken("four"))
    with pytest.raises(ValueError, match=r"call add\(...\) before ask"):
        conversation.ask()
    conversation.add(USER)
    with pytest.raises(ValueError, match="describe_answer must follow an answer"):
        conversation.describe_answer(USER)
    with pytest.raises(ValueError, match="as many logprobs as token_ids"):
        conversation.take(Answer("x", [1], [], "stop"))
    with pytest.raises(ValueError, match="history is 'no'"):
        Conversation(make_context(), [USER], history="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("history", ["verbatim", "template"])
def test_what_is_added_after_a_prompt_was_made_is_in_the_next_one(history: Any) -> None:
    """As after an ask() that failed: the prompt is made again, with nothing twice and nothing left out."""

    def after(peeks: bool) -> tuple[list[int], int]:
        talk = Conversation(make_context(), [USER], render=RENDERS["chatml"], history=history)
        for _ in range(2):
            if peeks:
                assert talk.prompt_ids == talk.prompt_ids
            talk.add({"role": "user", "content": "Be brief."})
            if peeks:
                assert talk.prompt_ids
            talk.add({"role": "user", "content": "Please."})
            talk.prompt_ids  # noqa: B018
            talk.take(spoken("So be it."))
            talk.add(USER)
        ids = talk.prompt_ids
        assert TOKENIZER.decode(ids).count("Be brief.") == 2
        return ids, talk.forks

    assert after(peeks=True) == after(peeks=False)


def test_an_answer_without_a_log_prob_of_each_token_is_refused() -> None:
    told = {"tokens": ["token_id:5", "token_id:6"], "token_logprobs": [-0.1, -0.2], "text_offset": [0, 1]}
    choice = {"index": 0, "text": "a", "finish_reason": "stop", "logprobs": {**told, "top_logprobs": None}}
    made = Completion.model_validate(
        {"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    )
    made.choices[0].logprobs.token_logprobs[1] = None  # type: ignore[union-attr, index, call-overload]
    with pytest.raises(ValueError, match="no log-prob of its token 1, 'token_id:6'"):
        answer_of(made)


def test_tools_of_each_task_leave_nothing_behind_and_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Report O1: what a template is examined for was kept for ever, and what it rewrites was said again, for each list of tools."""
    context = make_context()
    render = RENDERS["trimming"]
    for number in range(KEPT_BRIDGES + 20):
        tools = [{"type": "function", "function": {"name": f"look{number % 80}", "parameters": {}}}]
        talk = Conversation(context, [USER], tools=tools, render=render)
        talk.prompt_ids  # noqa: B018 (made on first use)
    assert len(context.shared["bridges"]._bridges) == KEPT_BRIDGES
    assert len([r for r in caplog.records if "The chat template of" in r.message]) == 1
    last = Conversation(context, [USER], tools=tools, render=render)
    assert last._bridge is talk._bridge
