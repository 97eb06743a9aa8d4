"""Loading and saving: end ids, templates, errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizer_makers import byte_fallback_tokenizer

from upweight.errors import ModelError, ModelNotFound, UnsupportedModel
from upweight.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "smollm2" / name, tmp_path / name)
    return tmp_path


def change_config(folder: Path, **entries: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_save_and_load_give_the_same(tokenizer: Tokenizer, strings: list[dict[str, Any]], tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    loaded = Tokenizer.from_folder(tmp_path)
    for row in strings:
        assert loaded.encode(row["text"]) == row["ids"]
        assert loaded.encode(row["text"], special=False) == row["ids_no_special"]
    for name in ("eos_ids", "pad_id", "vocab_size", "special_ids", "chat_template"):
        assert getattr(loaded, name) == getattr(tokenizer, name), name


def test_saved_files_are_in_hugging_face_form(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    reference = json.loads((DATA / "smollm2" / "tokenizer_config.json").read_text())
    assert config == reference
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    expected = json.loads((DATA / "smollm2" / "tokenizer.json").read_text())
    for part in ("pre_tokenizer", "normalizer", "added_tokens", "post_processor"):
        assert saved[part] == expected[part], part
    assert saved["model"]["vocab"] == expected["model"]["vocab"]
    assert saved["model"]["merges"] == expected["model"]["merges"]


def test_two_templates_survive(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    change_config(folder, chat_template=[{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}])
    target = tmp_path_factory.mktemp("saved")
    Tokenizer.from_folder(folder).save(target)
    loaded = Tokenizer.from_folder(target)
    assert loaded.render([]) == "d"
    assert loaded.render([], tools=[{"name": "f"}]) == "t"


def test_a_template_file_goes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_folder(folder).render([]) == "from the file"


@pytest.mark.parametrize(
    ("generation", "model", "eos_ids"),
    [
        ({"eos_token_id": [5, 2, 0]}, {}, (5, 2, 0)),
        ({"eos_token_id": 0}, {"eos_token_id": 3}, (0, 3, 2)),
        ({}, {"text_config": {"eos_token_id": [7]}}, (7, 2)),
        ({"eos_token_id": None}, {}, (2,)),
    ],
)
def test_end_ids_of_all_files(folder: Path, generation: Any, model: Any, eos_ids: tuple[int, ...]) -> None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(model))
    assert Tokenizer.from_folder(folder).eos_ids == eos_ids


def test_named_tokens_may_be_records(folder: Path) -> None:
    change_config(folder, eos_token={"content": "<|endoftext|>", "special": True}, pad_token=None)
    loaded = Tokenizer.from_folder(folder)
    assert (loaded.eos_ids, loaded.pad_id) == ((0,), 0)


def test_nothing_is_added_nor_cut(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    tokenizer["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(tokenizer))
    loaded = Tokenizer.from_folder(folder)
    assert loaded.encode("hello world ") == [28120, 905, 216]
    assert loaded.encode("hello world ", special=False) == [28120, 905, 216]


def test_byte_fallback_round_trip(tmp_path: Path) -> None:
    byte_fallback_tokenizer().save(tmp_path)
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded.decode(loaded.encode("a é ab")) == "a é ab"


def test_missing_and_damaged_files(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model folder"):
        Tokenizer.from_folder(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path / "empty")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="cannot be read as a tokenizer"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("given", ["</s>", [2, "x"], 1.5, [True]])
def test_end_ids_that_are_none_are_named(folder: Path, given: Any) -> None:
    """Among stop ids they would break a step of the engine."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    with pytest.raises(ModelError, match=r"eos_token_id holds .*, which is no token id"):
        Tokenizer.from_folder(folder)
