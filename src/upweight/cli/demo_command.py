"""`upweight demo`: options in, `upweight.demo` does the rest."""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    model: Annotated[
        str, typer.Option(help="Demo model, folder, .gguf file or hub id in the local cache.")
    ] = "SmolLM2-135M-Instruct",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Batches to train; default: as many as fit the time, by measurement.")
    ] = None,
    lora: Annotated[bool, typer.Option("--lora/--full", help="Train a LoRA adapter, or all parameters.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of task split, order and adapter.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="3 batches: checks the machinery, claims no learning.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Finish the interrupted run of this home folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object; the rest goes to stderr.")] = False,
) -> None:
    """Fine-tune a real language model here, through the real server, in a few minutes.

    Exit code 0 when the held-out score rose significantly, 1 when not, 130 when stopped (go on with --resume).
    """
    import psutil  # noqa: F401 - a light install is told at once what is missing

    from upweight.cli.checks import home
    from upweight.demo.entry import run_demo
    from upweight.demo.record import DemoOptions

    options = DemoOptions(model=model, steps=steps, lora=lora, seed=seed, quick=quick)
    raise typer.Exit(run_demo(options, home(), resume=resume, as_json=as_json))
