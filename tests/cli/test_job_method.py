import json
from pathlib import Path
from typing import Any

import pytest

from upweight.cli.job_method import method_object
from upweight.errors import ConfigError


def test_options_become_the_settings_and_unset_ones_are_left_to_the_server() -> None:
    options = {"batch_size": 8, "learning_rate": None, "lora_rank": 4, "max_tokens": 32}
    expected = {"batch_size": 8, "lora": {"rank": 4}, "sampling": {"max_tokens": 32}}
    assert method_object(None, options) == {"type": "reinforcement", "reinforcement": expected}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("in_file", [True, False])
def test_options_beat_the_method_object(tmp_path: Path, whole: bool, in_file: bool) -> None:
    text = '{"batch_size": 8, "seed": 3, "lora": {"rank": 4, "alpha": 8}}'
    text = f'{{"type": "reinforcement", "reinforcement": {text}}}' if whole else text
    if in_file:
        (tmp_path / "method.json").write_text(text)
        text = str(tmp_path / "method.json")
    method = method_object(text, {"batch_size": 16, "lora_rank": 2, "seed": None})
    assert method == {
        "type": "reinforcement",
        "reinforcement": {"batch_size": 16, "seed": 3, "lora": {"rank": 2, "alpha": 8}},
    }


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("{", "not JSON"),
        ("/nowhere.json", "No such file"),
        ('{"type": "spec-draft"}', "type is 'spec-draft'"),
        ('{"type": "dpo"}', "a dpo job trains on a file: give --training-file"),
        ("{}", "--batch-size"),
        (None, "--batch-size"),
    ],
)
def test_what_cannot_be_used_is_named(given: str | None, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        method_object(given, {})


def test_a_file_with_another_kind_of_json(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="it holds list"):
        method_object(str(tmp_path / "list.json"), {"batch_size": 1})


def test_a_job_with_a_file_is_supervised_unless_another_type_is_asked_for() -> None:
    made = method_object(None, {"epochs": 2, "lora_rank": 8, "lora_alpha": 16.0}, has_file=True)
    hyperparameters = {"n_epochs": 2, "lora": True, "lora_r": 8, "lora_alpha": 16}
    assert made == {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    made = method_object('{"beta": 0.2}', {"beta": 0.3, "lora_rank": 8, "seed": 1}, kind="dpo", has_file=True)
    assert made == {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.3, "lora": {"rank": 8}, "seed": 1}}}
    whole = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}}
    assert method_object(json.dumps(whole), {}, has_file=True) == whole


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("supervised", {"max_tokens": 8}, "--max-tokens is not an option of a supervised job"),
        ("sft", {}, "--type sft is unknown; known: reinforcement, supervised, dpo"),
    ],
)
def test_options_that_a_kind_has_not_are_named(kind: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        method_object(None, options, kind=kind, has_file=True)


def test_two_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="--type is dpo, the type in --method is 'supervised'"):
        method_object('{"type": "supervised"}', {}, kind="dpo", has_file=True)
