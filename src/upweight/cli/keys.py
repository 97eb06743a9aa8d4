"""`upweight keys …`: API keys of the server in a home folder, whether it runs or not."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from upweight.errors import ConfigError

app = typer.Typer(
    help="Create, list and revoke API keys of the server in UPWEIGHT_HOME.", no_args_is_help=True, rich_markup_mode=None
)

HomeFolder = Annotated[
    Path | None, typer.Option("--home", help="The server's home; else UPWEIGHT_HOME, else ~/.upweight.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


@app.command()
def create(
    project: Annotated[str, typer.Option(help="Jobs are seen by the keys of their project alone.")] = "default",
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Make a key that opens a project, and print it: it is shown this once."""
    from upweight.cli.screen import print_json
    from upweight.server.home import new_key
    from upweight.server.store import keys

    if not PROJECT.match(project):
        raise ConfigError(f"project {project!r}: letters, digits, '.', '_' and '-', at most 64, are needed")
    key = new_key()
    _in_store(home, lambda c: keys.add_key(c, key, project))
    if as_json:
        print_json({"id": keys.key_id(key), "project": project, "key": key})
    else:
        print(key)


@app.command("list")
def list_(home: HomeFolder = None, as_json: Json = False) -> None:
    """Ids, projects and ages of all keys; the keys themselves are stored nowhere."""
    from upweight.cli.columns import age, table
    from upweight.cli.screen import print_json, print_lines
    from upweight.server.store import keys

    found = _in_store(home, keys.list_keys)
    if as_json:
        print_json([{"id": one.id, "project": one.project, "created_at": one.created_at} for one in found])
        return
    now = time.time()
    print_lines(table(("KEY", "PROJECT", "AGE"), [(one.id, one.project, age(now - one.created_at)) for one in found]))


@app.command()
def revoke(
    id: Annotated[str, typer.Argument(metavar="ID", help="As `upweight keys list` shows it.")], home: HomeFolder = None
) -> None:
    """Close a key. A running server refuses it within seconds."""
    from upweight.server.home import Home
    from upweight.server.store import keys

    if not _in_store(home, lambda c: keys.revoke_key(c, id)):
        raise ConfigError(f"no key {id!r} in this store: `upweight keys list` shows them")
    file = Home(_folder(home)).key_file
    if file.exists() and keys.key_id(file.read_text().strip()) == id:
        file.unlink()  # else the next start would open it again
        print(f"{id} was the key of {file}; the next start of the server makes a new one")


def _folder(given: Path | None) -> Path:
    from upweight.cli.checks import home

    return (given or home()).expanduser().absolute()


def _in_store(given: Path | None, operation: Callable[[Any], Any]) -> Any:
    from upweight.server import load_settings
    from upweight.server.home import Home
    from upweight.server.store.database import Database

    settings = load_settings(home=_folder(given))
    database = Database(settings.store or Home(settings.home).store)
    try:
        return database.submit(operation).result()
    finally:
        database.close()
