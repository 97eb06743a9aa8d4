from pathlib import Path

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
        ('{"type": "dpo"}', "type is 'dpo'"),
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
