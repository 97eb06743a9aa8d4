"""Reads a tokenizer from a Hugging Face model folder."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from upweight.errors import ModelError, ModelNotFound, UnsupportedModel
from upweight.tokenizer.parts import TokenizerParts, unique_ids

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def load_folder(path: str | Path) -> TokenizerParts:
    """The tokenizer of the folder at `path`; `UnsupportedModel` when it has no tokenizer.json."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelNotFound(f"no model folder at {folder}")
    core = _core(folder / "tokenizer.json")
    config = read_json(folder / "tokenizer_config.json")
    named = {name: text for name in _NAMED if (text := _token_text(config.get(name))) is not None}
    eos_ids = _eos_ids(core, named, folder)
    pad = core.token_to_id(named["pad_token"]) if "pad_token" in named else None
    template, tool_template = _templates(folder, config.pop("chat_template", None))
    return TokenizerParts(
        core=core,
        eos_ids=eos_ids,
        pad_id=next(iter(unique_ids((pad, *eos_ids))), 0),
        chat_template=template,
        tool_template=tool_template,
        named_tokens=named,
        config={key: value for key, value in config.items() if key not in _NAMED},
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file at `path`, empty when there is no such file; `ModelError` when it is damaged."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, it holds {type(value).__name__}")
    return value


def _core(path: Path) -> Tokenizer:
    if not path.is_file():
        raise UnsupportedModel(
            f"{path.parent} has no tokenizer.json: save the model's fast tokenizer next to its weights"
        )
    text = path.read_text(encoding="utf-8")
    try:
        core = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise UnsupportedModel(f"{path} cannot be read as a tokenizer ({error})") from error
    # A file may carry the cutting and filling of the run that trained the model; ids here are never cut or filled.
    core.no_truncation()
    core.no_padding()
    return core


def _token_text(value: Any) -> str | None:
    """A named token is written as text or as a record with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _eos_ids(core: Tokenizer, named: dict[str, str], folder: Path) -> tuple[int, ...]:
    """End ids of generation_config.json, config.json and the tokenizer, in this order."""
    model = read_json(folder / "config.json")
    sources = (read_json(folder / "generation_config.json"), model, model.get("text_config") or {})
    listed = [token_id for source in sources for token_id in _as_list(source.get("eos_token_id"))]
    wrong = next((i for i in listed if i is not None and (isinstance(i, bool) or not isinstance(i, int))), None)
    if wrong is not None:
        raise ModelError(f"{folder}: eos_token_id holds {wrong!r}, which is no token id: fetch the configs again")
    own = core.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return unique_ids((*listed, own))


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _templates(folder: Path, configured: Any) -> tuple[str | None, str | None]:
    """(usual template, template for conversations with tools): a file of its own goes before tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8"), None
    if isinstance(configured, list):
        named = {entry["name"]: entry["template"] for entry in configured}
        return named.get("default"), named.get("tool_use")
    return configured, None
