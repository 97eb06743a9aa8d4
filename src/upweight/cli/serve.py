"""`upweight serve`: the job server in the foreground, with what to do next once it listens."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upweight.server.process import Ready


def run_serve(options: dict[str, Any]) -> None:
    """Serves until told to stop. Options that are None are left to environment and defaults."""
    from upweight.server import load_settings, run
    from upweight.server.process import tell

    def announce(ready: Ready) -> None:
        tell(ready)
        print("\n".join(next_steps(ready)), flush=True)

    settings = load_settings(**{name: value for name, value in options.items() if value is not None})
    run(settings, on_ready=announce)


def next_steps(ready: Ready) -> list[str]:
    """The page, and commands for another terminal; they name the home folder where they would not find it themselves."""
    from upweight.cli.checks import home as found
    from upweight.weights.source import usable_models

    model = next(iter(usable_models()), "FOLDER")
    default = Path("~/.upweight").expanduser()
    home = ready.home
    prefix = "" if home == found().absolute() == default else f"UPWEIGHT_HOME={shlex.quote(str(home))} "
    return [
        f"  watch jobs:    {ready.url}/ (the page asks for the key in {ready.key_file})",
        f"  create a job:  {prefix}upweight jobs create --model {model} --batch-size 64",
        f"  see its state: {prefix}upweight jobs list",
        "  stop:          Ctrl-C" if os.isatty(0) else f"  stop:          kill {os.getpid()}",
    ]
