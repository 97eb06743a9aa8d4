"""The command `upweight`.

Invariants
- `upweight --help` imports neither JAX nor openai nor FastAPI: each command imports what it needs when it runs.
- An error of ours is one line on stderr, `error: …`, and exit code 1; a wrong option is exit code 2. A traceback means a
  bug, or UPWEIGHT_TRACEBACK=1.
"""

import errno
import io
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from upweight import __version__
from upweight.cli import jobs, keys
from upweight.cli.checks import home
from upweight.cli.demo_command import demo
from upweight.errors import UpweightError

app = typer.Typer(
    name="upweight",
    help="Reinforcement fine-tuning: serve models, run training jobs, try them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(jobs.app, name="jobs")
app.add_typer(keys.app, name="keys")

_FULL_OR_FORBIDDEN = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}

# Packages of the extra `local`: the light install does not have them.
_LOCAL_PACKAGES = {"jax", "flax", "optax", "orbax", "numpy", "ml_dtypes", "safetensors", "gguf", "tokenizers", "jinja2"}
_LOCAL_PACKAGES |= {"fastapi", "starlette", "uvicorn", "sqlalchemy", "psutil"}


def main() -> None:
    """Entry point of the command; ends the process with its exit code."""
    _mend_streams()
    try:
        app()
    except UpweightError as error:
        _fail(error, str(error))
    except OSError as error:
        if error.errno not in _FULL_OR_FORBIDDEN:
            raise
        place = error.filename or home()
        _fail(error, f"{place} cannot be written ({error.strerror}): free or allow it, or set UPWEIGHT_HOME")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _LOCAL_PACKAGES:
            raise
        _fail(error, f"{error.name} is not installed: pip install 'upweight[local]'")


def _mend_streams() -> None:
    """A closed stream swallows what is printed, and one that is not UTF-8 gets '?' for what it cannot hold."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the rest of the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _fail(error: Exception, message: str) -> NoReturn:
    if os.environ.get("UPWEIGHT_TRACEBACK") == "1":
        raise error
    print("error:", " ".join(message.split()), file=sys.stderr)
    raise SystemExit(1) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Check this machine and say what to do about what is missing. Exit code 1 when something needed is missing."""
    from upweight.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(as_json=as_json))


@app.command()
def serve(
    home: Annotated[
        Path | None, typer.Option(help="Folder of store, jobs, logs and key; else UPWEIGHT_HOME, else ~/.upweight.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; else 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 = any free one; else 8000.")] = None,
    max_running: Annotated[
        int | None, typer.Option(help="Jobs that run at the same time, others queue; else 1.")
    ] = None,
    disk_budget_gb: Annotated[float | None, typer.Option(help="What the home folder may grow to; else 50.")] = None,
) -> None:
    """Serve the job API on this machine, until Ctrl-C. Other settings: UPWEIGHT_ variables."""
    from upweight.cli.serve import run_serve

    options = {"home": home, "host": host, "port": port, "max_running": max_running, "disk_budget_gb": disk_budget_gb}
    run_serve(options)


@app.command()
def chat(
    target: Annotated[str, typer.Argument(help="A job's id, a model folder, a .gguf file, or the name of a model.")],
    prompt: Annotated[str | None, typer.Option(help="Answer this and end; prints the answer alone.")] = None,
    system: Annotated[str | None, typer.Option(help="Instructions before the first question.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = always the likeliest token.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
    url: jobs.Url = None,
    key: jobs.Key = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --prompt: one JSON object about the answer.")] = False,
) -> None:
    """Talk to a job's model as it is now, or to saved weights. Without a terminal standard input is the prompt."""
    from upweight.cli.chat import run_chat
    from upweight.cli.chat_voices import Sampling

    if as_json and prompt is None:
        raise typer.BadParameter("it needs --prompt", param_hint="--json")
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens, seed=seed)
    run_chat(target, prompt=prompt, system=system, sampling=sampling, as_json=as_json, url=url, key=key)


@app.command()
def backup(
    folder: Annotated[Path, typer.Argument(help="Where the copy goes; must not exist.")],
    home: Annotated[Path | None, typer.Option(help="What is copied; else UPWEIGHT_HOME, else ~/.upweight.")] = None,
) -> None:
    """Copy store, checkpoints and weights, also while the server runs. `upweight serve --home FOLDER` runs on the copy."""
    from upweight.cli.checks import home as found
    from upweight.server.backup import back_up

    made = back_up((home or found()).expanduser(), folder.expanduser())
    print(f"{made.folder}: {made.jobs} jobs, {made.samples} samples, {made.bytes / 1e6:.0f} MB")


app.command()(demo)
