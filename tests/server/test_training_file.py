"""What a training file may hold, and how it is told what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from upweight.server.refusals import Refusal
from upweight.server.training_file import MOST_PROBLEMS, LineError, check_file, read_rows

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
GOOD = {"messages": [USER, ASSISTANT]}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


def written(folder: Path, content: bytes | str | list[Any]) -> Path:
    path = folder / "training.jsonl"
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def problems(path: Path, kind: str = "supervised") -> list[str]:
    with pytest.raises(Refusal) as refused:
        check_file(path, kind)
    assert refused.value.status == 422
    assert isinstance(refused.value.detail, list)
    return [item["msg"] for item in refused.value.detail]


def messages(*changed: Any) -> dict[str, Any]:
    return {"messages": list(changed)}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "the training file is empty; it needs one JSON object per line"),
        (b"\n  \n", "the training file holds no rows, only 2 blank lines"),
        ([GOOD, [1]], "line 2: the line must be a JSON object, it is list"),
        (b'{"messages": [}\n', "line 1: not JSON: Expecting value at position 15"),
        (b'{"messages": NaN}', "line 1: not JSON: NaN is no JSON"),
        (b"[" * 100_000, "line 1: not JSON: "),
        (json.dumps(GOOD).encode("utf-16"), "line 1: not UTF-8: byte 0xff at position 1; save it as UTF-8"),
        (b'{"messages": "\xe4"}', "line 1: not UTF-8: byte 0xe4 at position 15"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "line 1: holds half of a surrogate pair"),
        ([{"message": []}], "line 1: message: unknown key 'message'; did you mean 'messages'?"),
        ([{"text": "x"}], "line 1: messages: is missing; the line holds 'text'"),
        ([{"messages": "x"}], "line 1: messages: must be a list of messages, it is str"),
        ([messages()], "line 1: messages: holds no message"),
        ([GOOD, messages(USER, {"role": "bot", "content": "x"})], "line 2: messages[1]: role is 'bot', it must be one of"),
        ([messages(USER, {"role": "assistant"})], "line 1: messages[1]: content must be text or a list of text parts"),
        ([messages(USER, {**ASSISTANT, "weight": 2})], "line 1: messages[1].weight: is 2; it may be 0 or 1"),
        ([messages(USER, {**ASSISTANT, "weight": True})], "line 1: messages[1].weight: is True"),
        ([messages(USER, {**ASSISTANT, "wieght": 0})], "line 1: messages[1].wieght: unknown key 'wieght'; did you mean 'weight'?"),
        ([messages({**USER, "weight": 1}, ASSISTANT)], "line 1: messages[0].weight: is 1 on a message of role 'user'"),
        ([messages(USER)], "line 1: messages: no assistant message is trained: there is none, or weight is 0"),
        ([messages(USER, {**ASSISTANT, "weight": 0})], "line 1: messages: no assistant message is trained"),
        ([messages(ASSISTANT)], "line 1: messages[0]: a trained assistant message needs a message before it"),
        ([{**GOOD, "tools": {}}], "line 1: tools: must be a list of objects"),
    ],
)  # fmt: skip
def test_a_supervised_file_is_refused_by_line_and_field(tmp_path: Path, content: Any, told: str) -> None:
    found = problems(written(tmp_path, content))
    assert found[0].startswith(told)
    assert "\n" not in found[0]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "a", "chosen": "b"}, "line 1: rejected: is missing; the line holds 'prompt', 'chosen'"),
        ({"chosen": "b", "rejected": "c"}, "line 1: prompt: is missing"),
        ({}, "line 1: input: is missing; the line holds nothing"),
        ({"input": [USER], "preferred_output": [ASSISTANT], "non_preferred_output": "c"}, "line 1: input: must be an object"),
        ({"input": {"messages": []}, "preferred_output": "b", "non_preferred_output": "c"}, "line 1: input.messages: holds no message"),
        ({"input": messages(USER), "preferred_output": [], "non_preferred_output": "c"}, "line 1: preferred_output: holds no message"),
        ({"input": messages(USER), "preferred_output": [USER], "non_preferred_output": "c"},
         "line 1: preferred_output[0].role: is 'user'; an answer begins with a message of the assistant"),
        ({**PAIR, "chosen": [{**ASSISTANT, "weight": 0}]}, "line 1: chosen: no assistant message is trained"),
        ({**PAIR, "rejected": "b"}, "line 1: rejected: is the same as chosen: there is nothing to prefer"),
        ({**PAIR, "chosen": 3}, "line 1: chosen: must be a list of messages, it is int"),
        ({"prompt": "a", "choosen": "b", "rejected": "c"}, "line 1: choosen: unknown key 'choosen'; did you mean 'chosen'?"),
    ],
)  # fmt: skip
def test_a_dpo_file_is_refused_by_line_and_field(tmp_path: Path, row: Any, told: str) -> None:
    assert problems(written(tmp_path, [row]), "dpo")[0].startswith(told)


def test_the_first_problems_are_listed_with_their_places(tmp_path: Path) -> None:
    path = written(tmp_path, [messages(USER)] * 30)
    with pytest.raises(Refusal) as refused:
        check_file(path, "supervised")
    assert len(refused.value.detail) == MOST_PROBLEMS == 20
    last = refused.value.detail[-1]
    assert isinstance(last, dict)
    assert last["loc"] == ["body", "training_file", "line", 20, "messages"]


def test_a_line_without_end_is_not_read_whole(tmp_path: Path) -> None:
    (only,) = problems(written(tmp_path, b"x" * 40_000_000))
    assert only.startswith("line 1: longer than 16 MB")


def test_what_changes_nothing_is_told_and_read(tmp_path: Path) -> None:
    line = json.dumps(GOOD).encode()
    path = written(tmp_path, b"\xef\xbb\xbf" + line + b"\r\n\r\n" + line)
    checked = check_file(path, "supervised")
    assert checked.rows == 2
    assert [note.split("; ")[0] for note in checked.notes] == [
        "the training file begins with a byte order mark",
        "lines of the training file end with CRLF",
        "the training file has 1 blank lines, the first is line 2",
    ]
    assert [row.line for row in read_rows(path, "supervised")] == [1, 3]


def test_rows_hold_messages_without_weights_and_say_which_are_trained(tmp_path: Path) -> None:
    row = {
        "messages": [USER, {**ASSISTANT, "weight": 0}, USER, {**ASSISTANT, "weight": 1}],
        "tools": [{"type": "function"}],
    }
    ((only,),) = [one.conversations for one in read_rows(written(tmp_path, [row]), "supervised")]
    assert list(only.messages) == [USER, ASSISTANT, USER, ASSISTANT]
    assert list(only.trained) == [False, False, False, True]
    assert only.tools == [{"type": "function"}]


def test_both_forms_of_a_pair_are_the_same(tmp_path: Path) -> None:
    whole = {
        "input": {"messages": [USER]},
        "preferred_output": [{"role": "assistant", "content": "b"}],
        "non_preferred_output": [{"role": "assistant", "content": "c"}],
    }
    lists = {"prompt": [USER], "chosen": whole["preferred_output"], "rejected": whole["non_preferred_output"]}
    one, two, three = (row.conversations for row in read_rows(written(tmp_path, [whole, PAIR, lists]), "dpo"))
    assert one == two == three
    assert [list(part.trained) for part in one] == [[False, True]] * 2


def test_a_file_that_was_changed_since_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(LineError, match="line 1: messages: is missing"):
        list(read_rows(written(tmp_path, [{"x": 1}]), "supervised"))
