"""What the pages say is compared with the code: commands, paths, names, defaults, messages."""

from __future__ import annotations

import importlib
import json
import re
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tests.docs.pages import PAGES, ROOT, CommandLine, bare, blocks, command_lines, inline_codes, prose, table
from upweight.cli.main import app
from upweight.rollout import RolloutConfig
from upweight.server.file_methods import Dpo, Supervised
from upweight.server.methods import OFFERED, Critic, Lora, Reinforcement, parse_method
from upweight.server.settings import Settings
from upweight.server.store import versions

README = ROOT / "README.md"


DEMO = "pip install -q uv && uv run --extra demo upweight demo"
TESTS = "pip install -q uv && uv run --extra local --group tests pytest"


def test_the_two_commands_are_there_to_the_letter() -> None:
    assert {f"{DEMO}\n", f"{TESTS}\n"} <= {block.text for block in blocks(README) if block.language == "sh"}


COMMAND_LINES = [line for page in PAGES for line in command_lines(page)]


@pytest.mark.parametrize("line", COMMAND_LINES, ids=lambda line: f"{line.page}: {' '.join(line.words)[:50]}")
def test_every_command_line_parses(line: CommandLine) -> None:
    command: Any = typer.main.get_command(app)
    name, words = "upweight", list(line.words)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        command = command.commands[name]
    try:
        command.make_context(name, words)
    except Exception as error:
        if line.whole or type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
            raise AssertionError(f"{line}: {error}") from error


def test_command_lines_are_found() -> None:
    """The pattern still finds what the pages hold, in blocks and in sentences."""
    found = {" ".join(line.words[:2]) for line in COMMAND_LINES}
    assert {"demo", "serve", "doctor", "jobs create", "jobs list", "jobs watch", "jobs cancel", "chat ID"} <= found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_exists(page: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", prose(page))]
    missing = [link for link in links if not (page.parent / link).exists()]
    paths = [code for code in inline_codes(page) if re.match(r"(src|docs|tests|scripts|\.ci)/\S+$", code)]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def look_up(path: str, dotted: str) -> Any:
    """`Class.method` of the module whose file below src/ is `path`."""
    found: Any = importlib.import_module(path.removeprefix("src/").removesuffix(".py").replace("/", "."))
    for name in dotted.split("."):
        found = getattr(found, name)
    return found


def test_named_functions_are_where_the_pages_say() -> None:
    said = [pair for page in PAGES for pair in re.findall(r"`([\w.]+)`\s+in\s+`(src/[\w/]+\.py)`", prose(page))]
    assert len(said) >= 8
    for dotted, path in said:
        assert callable(look_up(path, dotted)), (dotted, path)


def test_the_journey_goes_through_modules_that_exist() -> None:
    page = ROOT / "docs" / "architecture.md"
    rows = table(page, "hop")
    assert [row[0] for row in rows if row[0].isdigit()] == [str(hop) for hop in range(1, 10)]
    for hop, _, where, _ in rows:
        told = re.search(r"\[([\w/.]+)\]\(\.\./(src/[\w/]+\.py)\) `([\w.]+)`", where)
        assert told is not None, hop
        shown, path, dotted = told.groups()
        assert path == f"src/upweight/{shown}"
        assert callable(look_up(path, dotted)), hop


def defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Field → default as plain data; "required" without one."""
    plain = {}
    for name, field in model.model_fields.items():
        value = field.default
        if isinstance(value, BaseModel):
            value = value.model_dump()
        elif isinstance(value, Enum):
            value = value.value
        plain[name] = "required" if value is PydanticUndefined else value
    return plain


def test_the_method_table_is_the_model() -> None:
    rows = table(ROOT / "docs" / "jobs.md", "key")
    told = {bare(row[0]): bare(row[1]) if bare(row[1]) == "required" else json.loads(bare(row[1])) for row in rows}
    assert told == defaults(Reinforcement)
    assert list(told) == list(Reinforcement.model_fields)
    assert json.dumps(Lora().model_dump()).replace("32.0", "32") in prose(ROOT / "docs" / "jobs.md")
    assert json.dumps(Critic().model_dump()) in prose(ROOT / "docs" / "jobs.md")


def test_the_tables_of_algorithms_corrections_and_fates_are_complete() -> None:
    page = ROOT / "docs" / "jobs.md"
    fields = Reinforcement.model_fields
    assert {bare(row[0]) for row in table(page, "algorithm")} == set(get_args(fields["algorithm"].annotation))
    assert {bare(row[0]) for row in table(page, "correction")} == set(get_args(fields["correction"].annotation))
    assert [bare(row[0]) for row in table(page, "fate")] == [*versions.FATES, "not_yet_trained"]
    for row in table(page, "algorithm"):
        for advantage in re.findall(r"`(\w+)`", row[1]):
            method = {"batch_size": 2, "algorithm": bare(row[0]), "advantage": advantage}
            assert parse_method({"type": "reinforcement", "reinforcement": method}).advantage == advantage


def test_the_tables_of_file_jobs_are_their_models() -> None:
    page = ROOT / "docs" / "jobs.md"
    supervised = {bare(row[0]): json.loads(bare(row[1])) for row in table(page, "hyperparameter")}
    assert supervised == defaults(Supervised)
    dpo = {bare(row[0]): json.loads(bare(row[1])) for row in table(page, "option")}
    assert {name: defaults(Dpo)[name] for name in dpo} == dpo
    assert {
        name: value for name, value in defaults(Reinforcement).items() if name in set(defaults(Dpo)) - set(dpo)
    } == {name: value for name, value in defaults(Dpo).items() if name not in dpo}


def test_what_is_offered_is_told() -> None:
    rows = table(ROOT / "docs" / "jobs.md", "what")
    assert {bare(what): tuple(re.findall(r"`(\w+)`", offered)) for what, offered in rows} == OFFERED


def test_the_table_of_rollout_settings_is_the_config() -> None:
    rows = table(ROOT / "docs" / "rollouts.md", "setting")
    told = {bare(row[0]): bare(row[1]) for row in rows}
    expected = {
        name: "required" if value == "required" else json.dumps(value) if isinstance(value, str) else str(value)
        for name, value in defaults(RolloutConfig).items()
    }
    assert told == expected


def test_numbers_in_sentences() -> None:
    settings = {name: field.default for name, field in Settings.model_fields.items()}
    text = " ".join(README.read_text().split())
    assert f"may grow to {settings['disk_budget_gb']:g} GB" in text
    assert f"newest `keep_checkpoints` ({Reinforcement.model_fields['keep_checkpoints'].default})" in text
    assert f"`UPWEIGHT_HOME`, else `{settings['home']}`" in text
    inference = (ROOT / "docs" / "inference.md").read_text()
    assert f"`UPWEIGHT_INFERENCE_TIMEOUT` ({settings['inference_timeout']:g} s)" in inference
    troubles = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert f"port {settings['port']}" in troubles


def test_quoted_messages_are_those_of_the_code() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    bullets = re.findall(r"^- (`.+?) – ", prose(ROOT / "docs" / "troubleshooting.md"), re.M)
    quotes = [quote for bullet in bullets for quote in re.findall(r"`([^`]+)`", bullet)]
    assert len(quotes) > 20
    unknown = [quote for quote in quotes for piece in quote.split(" … ") if piece not in source]
    assert unknown == []
