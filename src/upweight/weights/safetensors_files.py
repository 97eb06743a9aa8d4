"""Hugging Face model folders: reads their tensors, writes new ones.

Invariants
- What is written reads back bit-equal, in the dtype it had.
- A folder appears whole or not at all: it is written beside its place, flushed to disk and renamed. When it replaces
  another, a kill between two renames can leave the place empty, with both folders whole beside it.
- A folder that is no model folder is never replaced.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - gives numpy the dtype bfloat16
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from upweight.errors import ModelError, ModelNotFound, UnsupportedModel
from upweight.tokenizer import Tokenizer
from upweight.tokenizer.folder_tokenizer import read_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")
_GIB = 1 << 30

NamedTensor = tuple[str, np.ndarray]


def read_tensors(folder: str | Path) -> Iterator[NamedTensor]:
    """(name, array in its stored dtype) of every tensor of a single or sharded folder, one in memory at a time.

    Raises `ModelNotFound` without safetensors, `ModelError` for a missing shard or tensor or a cut-off file, and
    `UnsupportedModel` for dtypes other than float32, float16 and bfloat16.
    """
    for file, names in _files(Path(folder)).items():
        yield from _read_file(file, names)


def write_folder(
    folder: str | Path,
    config: dict[str, Any],
    tensors: Iterable[NamedTensor],
    tokenizer: Tokenizer | None,
    *,
    max_shard_bytes: int = 4 * _GIB,
) -> None:
    """Writes a model folder: config, weights and, when given, the tokenizer. At most one shard is in memory.

    An existing model folder at this place is replaced; any other folder with something in it is a `ModelError`.
    """
    target = Path(folder).absolute()
    if target.exists() and not _replaceable(target):
        raise ModelError(f"{target} exists and is no model folder: choose another place")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        dtypes = _write_weights(partial, tensors, max_shard_bytes)
        _write_json(partial / "config.json", _with_dtype(config, dtypes))
        _write_json(partial / "generation_config.json", _generation_config(config, tokenizer))
        if tokenizer is not None:
            tokenizer.save(partial)
        partial.chmod(0o777 & ~_umask())
        for file in partial.iterdir():  # safetensors makes its files private
            file.chmod(0o666 & ~_umask())
        _flush_to_disk(partial)
        _put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """Each file with the names to read from it, None for all."""
    if (folder / _INDEX).is_file():
        return _indexed(folder)
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: None}
    raise ModelNotFound(f"{folder} has neither {_SINGLE} nor {_INDEX}")


def _indexed(folder: Path) -> dict[Path, list[str] | None]:
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{folder / _INDEX} has no weight_map")
    names: dict[Path, list[str] | None] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise ModelError(f"{_INDEX} names {shard}, which is not in {folder}: fetch it again")
        names[folder / shard] = [name for name, place in weight_map.items() if place == shard]
    return names


def _read_file(file: Path, names: list[str] | None) -> Iterator[NamedTensor]:
    try:
        with safe_open(file, framework="numpy") as opened:
            present = set(opened.keys())
            for name in sorted(present) if names is None else names:
                if name not in present:
                    raise ModelError(f"{file} has no tensor {name}, which the index places there")
                dtype = opened.get_slice(name).get_dtype()
                if dtype not in _DTYPES:
                    raise UnsupportedModel(f"{name} in {file} is {dtype}: {', '.join(_DTYPES)} can be read")
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged or cut off ({error}): fetch it again") from error


def _write_weights(folder: Path, tensors: Iterable[NamedTensor], max_bytes: int) -> set[str]:
    """Shards get their final names at the end, when their number is known. Returns the dtypes that were written."""
    shards: list[list[str]] = []
    dtypes: set[str] = set()
    total = 0
    for shard in _shards(tensors, max_bytes):
        save_file(shard, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(shard))
        dtypes |= {array.dtype.name for array in shard.values()}
        total += sum(array.nbytes for array in shard.values())
    files = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    if len(files) == 1:
        files = [_SINGLE]
    for number, file in enumerate(files):
        (folder / f"{number}.part").rename(folder / file)
    if len(files) != 1:
        weight_map = {name: file for names, file in zip(shards, files, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / _INDEX, index)
    return dtypes


def _shards(tensors: Iterable[NamedTensor], max_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    """Tensors in their order, as many as fit; a larger one gets a shard of its own."""
    seen: set[str] = set()
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, given in tensors:
        array = np.ascontiguousarray(given).reshape(given.shape)
        if name in seen:
            raise ModelError(f"tensor {name} was given twice")
        if array.dtype.name not in ("float32", "float16", "bfloat16"):
            raise ModelError(f"tensor {name} is {array.dtype.name}: float32, float16 and bfloat16 can be written")
        if shard and size + array.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        seen.add(name)
        shard[name] = array
        size += array.nbytes
    if not shard:
        raise ModelError("a model folder without tensors cannot be written")
    yield shard


def _with_dtype(config: dict[str, Any], dtypes: set[str]) -> dict[str, Any]:
    """Readers load weights in the dtype that the config names, so it must be the one that was written."""
    if len(dtypes) != 1:
        return config
    key = "dtype" if "dtype" in config else "torch_dtype"
    return {**config, key: next(iter(dtypes))}


def _generation_config(config: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    entries = {key: config[key] for key in keys if config.get(key) is not None}
    if tokenizer is not None and tokenizer.eos_ids:
        ids = tokenizer.eos_ids
        entries["eos_token_id"] = ids[0] if len(ids) == 1 else list(ids)
        entries["pad_token_id"] = tokenizer.pad_id
    return entries


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _replaceable(target: Path) -> bool:
    return target.is_dir() and ((target / "config.json").is_file() or not any(target.iterdir()))


def _put_in_place(partial: Path, target: Path) -> None:
    """Renames `partial` to `target`. An old folder is set aside first: a rename cannot replace a filled one."""
    aside = None
    if target.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent)) / "model"
        target.rename(aside)
    partial.rename(target)
    _sync(target.parent)
    if aside is not None:
        shutil.rmtree(aside.parent)


def _flush_to_disk(folder: Path) -> None:
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
