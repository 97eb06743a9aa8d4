"""`upweight jobs …`: options here, the work in job_method, job_calls, job_screens and job_watch."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

app = typer.Typer(
    help="Create training jobs on a running server, look at them, watch them, end them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id, as `upweight jobs list` shows it.")]
Url = Annotated[
    str | None,
    typer.Option(help="The server's address; else TOKENFACTORY_BASE_URL, else the server running in UPWEIGHT_HOME."),
]
Key = Annotated[
    str | None, typer.Option(help="The API key; else TOKENFACTORY_API_KEY, else the key of that running server.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command()
def create(
    model: Annotated[str, typer.Option(help="Start model: a folder, a .gguf file, or a name the server knows.")],
    training_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|ID", help="JSON lines to train on: a file, which is uploaded, or an uploaded one's id."
        ),
    ] = None,
    type: Annotated[
        str | None, typer.Option(help="reinforcement, supervised or dpo; supervised for a job with a training file.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples, lines or pairs per batch; one version is trained per batch.")
    ] = None,
    num_batches: Annotated[
        int | None, typer.Option(help="Batches after which the job ends; else until cancelled.")
    ] = None,
    algorithm: Annotated[str | None, typer.Option(help="grpo, dapo, gspo, rloo, reinforce_pp, ppo, …")] = None,
    advantage: Annotated[str | None, typer.Option(help="given: rewards come normalized; group, reward: raw.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Step size of the optimizer.")] = None,
    lr_schedule: Annotated[str | None, typer.Option(help="constant, linear or cosine.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Updates until the full learning rate.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over each batch, or over the file.")] = None,
    minibatch_size: Annotated[int | None, typer.Option(help="Samples per update; else the whole batch.")] = None,
    beta: Annotated[float | None, typer.Option(help="Weight of the KL term against the start model.")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Train a LoRA adapter of this rank; else all weights.")] = None,
    lora_alpha: Annotated[float | None, typer.Option(help="Scale of the LoRA adapter.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer whose request names no limit.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Batches between two checkpoints.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the job.")] = None,
    method: Annotated[
        str | None, typer.Option(metavar="FILE|JSON", help="The method object; single options above beat it.")
    ] = None,
    from_checkpoint: Annotated[
        str | None,
        typer.Option(metavar="CHECKPOINT", help="Start from the weights of an earlier job's checkpoint of this model."),
    ] = None,
    integration: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACKER",
            help="Where metrics go, once a tracker: wandb:PROJECT, mlflow:URL, or JSON (in a file) with the rest.",
        ),
    ] = None,
    suffix: Annotated[str | None, typer.Option(help="A short text that names the job.")] = None,
    show_key: Annotated[bool, typer.Option("--show-key", help="Print the API key itself, not where it is.")] = False,
    url: Url = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Create a job; prints its id and, for a reinforcement job, the environment of a rollout script, ready for `eval`."""
    from upweight.cli.connection import JOB_VARIABLE, KEY_VARIABLE, URL_VARIABLE, session
    from upweight.cli.job_calls import create_job, training_file_id
    from upweight.cli.job_integrations import integrations
    from upweight.cli.job_method import method_object
    from upweight.cli.job_screens import created_lines
    from upweight.cli.screen import print_json, print_lines

    settings = {
        "batch_size": batch_size,
        "num_batches": num_batches,
        "algorithm": algorithm,
        "advantage": advantage,
        "learning_rate": learning_rate,
        "lr_schedule": lr_schedule,
        "warmup_steps": warmup_steps,
        "epochs": epochs,
        "minibatch_size": minibatch_size,
        "beta": beta,
        "lora_rank": lora_rank,
        "lora_alpha": lora_alpha,
        "max_tokens": max_tokens,
        "checkpoint_every": checkpoint_every,
        "seed": seed,
    }
    made = method_object(method, settings, kind=type, has_file=training_file is not None)
    body = {"model": _model_for_server(model), "training_file": "", "method": made}
    body |= {"suffix": suffix} if suffix else {}
    body |= {"integrations": integrations(integration)} if integration else {}
    body |= {"from_checkpoint": {"type": "ft", "checkpoint_id": from_checkpoint}} if from_checkpoint else {}
    with session(url, key) as (client, place):
        if training_file is not None:
            body["training_file"] = training_file_id(client, training_file)
        job = create_job(client, body)
    if not as_json:
        print_lines(created_lines(job, place, show_key=show_key))
        return
    environment = {URL_VARIABLE: place.url, JOB_VARIABLE: job["id"]} | ({KEY_VARIABLE: place.key} if show_key else {})
    print_json({**job, "environment": environment, "api_key_file": place.key_file})


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option(min=1, help="How many jobs, newest first.")] = 20,
    url: Url = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    from upweight.cli.connection import session
    from upweight.cli.job_calls import list_jobs
    from upweight.cli.job_screens import list_lines
    from upweight.cli.screen import print_json, print_lines, terminal_width

    with session(url, key) as (client, _):
        found, has_more = list_jobs(client, limit)
    if as_json:
        print_json({"object": "list", "data": found, "has_more": has_more})
        return
    if found:
        print_lines(list_lines(found, time.time(), width=terminal_width()))
    else:
        print("no jobs yet; create one with: upweight jobs create --model MODEL --batch-size 64", file=sys.stderr)
    if has_more:
        print(f"there are more than {limit}: --limit {10 * limit} shows more", file=sys.stderr)


@app.command()
def show(
    job_id: JobId,
    all_versions: Annotated[bool, typer.Option("--all", help="All versions, not only the newest 20.")] = False,
    url: Url = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Show how a job stands: state, reason, versions, samples, weights."""
    from upweight.cli.connection import session
    from upweight.cli.job_calls import get_job, get_progress
    from upweight.cli.job_screens import VERSIONS_SHOWN, show_lines
    from upweight.cli.screen import print_json, print_lines, terminal_width

    with session(url, key) as (client, _):
        job, progress = get_job(client, job_id), get_progress(client, job_id)
    if as_json:
        print_json({**job, "progress": progress})
        return
    most = None if all_versions else VERSIONS_SHOWN
    print_lines(show_lines(job, progress, time.time(), width=terminal_width(), most_versions=most))


@app.command()
def watch(job_id: JobId, url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Watch a job to its end. Exit code 0 when it succeeded, 1 when not. Ctrl-C ends the watch only."""
    from upweight.cli.job_watch import watch as follow

    try:
        code = follow(job_id, url, key, as_json=as_json)
    except KeyboardInterrupt:
        print(f"the job goes on; look again with: upweight jobs watch {job_id}", file=sys.stderr)
        code = 130
    raise typer.Exit(code)


@app.command()
def cancel(job_id: JobId, url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """End a job; what it has trained so far stays on the disk."""
    from upweight.cli.connection import session
    from upweight.cli.job_calls import order_job
    from upweight.cli.screen import print_json, print_lines

    with session(url, key) as (client, _):
        job = order_job(client, job_id, "cancel")
    if as_json:
        print_json(job)
        return
    ended = job["status"] == "cancelled"
    print_lines([f"{job_id} cancelled" if ended else f"{job_id} was over already: {job['status']}"])


@app.command()
def pause(job_id: JobId, url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Stop a job's worker and free its place; samples are still taken, and nothing is lost."""
    _order(job_id, "pause", url, key, as_json)


@app.command()
def resume(job_id: JobId, url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Let a paused job go on, as soon as it has a place."""
    _order(job_id, "resume", url, key, as_json)


@app.command()
def checkpoints(job_id: JobId, url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Checkpoints of a job, newest first."""
    from upweight.cli.columns import age, number, table
    from upweight.cli.connection import session
    from upweight.cli.job_calls import list_checkpoints
    from upweight.cli.screen import print_json, print_lines

    with session(url, key) as (client, _):
        found = list_checkpoints(client, job_id)
    if as_json:
        print_json(found)
        return
    rows = [
        (
            one["id"],
            str(one["step_number"]),
            number(one["metrics"].get("train_loss"), ".4g"),
            age(time.time() - one["created_at"]),
        )
        for one in found
    ]
    print_lines(table(("CHECKPOINT", "VERSION", "LOSS", "AGE"), rows, right=("VERSION", "LOSS", "AGE")))


@app.command()
def promote(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="As `upweight jobs checkpoints ID` shows it.")
    ],
    name: Annotated[
        str | None, typer.Option(help="What to call the model; else the job's suffix or id and the version.")
    ] = None,
    url: Url = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Make a model of a checkpoint: served by its name, and a start model of new jobs."""
    from upweight.cli.connection import session
    from upweight.cli.job_calls import promote_checkpoint
    from upweight.cli.screen import print_json, print_lines

    with session(url, key) as (client, _):
        model = promote_checkpoint(client, checkpoint, name)
    if as_json:
        print_json(model)
    else:
        print_lines([f"{model['name']}  {model['id']}  {model['path']}"])


def _order(job_id: str, order: Literal["pause", "resume"], url: str | None, key: str | None, as_json: bool) -> None:
    from upweight.cli.connection import session
    from upweight.cli.job_calls import order_job
    from upweight.cli.screen import print_json, print_lines

    with session(url, key) as (client, _):
        job = order_job(client, job_id, order)
    if as_json:
        print_json(job)
    else:
        print_lines([f"{job_id} {job['job_status']}: {job['reason']}"])


def _model_for_server(model: str) -> Any:
    """A path is sent whole: the server runs in a folder of its own. Names are the server's to find."""
    from upweight.errors import ModelError
    from upweight.weights.source import resolve

    if not model.strip():
        return model
    path = Path(model).expanduser()
    try:
        found = Path(resolve(model).path)
    except ModelError:
        return str(path.absolute()) if path.exists() else model  # the server says what is wrong with it
    is_path = path.exists() and found.is_relative_to(path.absolute())
    return str(path.absolute()) if is_path else model
