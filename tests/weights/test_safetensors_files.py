import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from upweight.errors import ModelError, ModelNotFound, UnsupportedModel
from upweight.tokenizer import Tokenizer
from upweight.weights.config import read_config, read_tokenizer
from upweight.weights.safetensors_files import read_tensors, write_folder
from upweight.weights.source import resolve

MODELS = Path(__file__).parents[1] / "data" / "models"
SHARDED = "llama-gqa-tied-sharded"
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    """Bit by bit: NaN equals itself, 0.0 is not -0.0."""
    return left.keys() == right.keys() and all(
        a.dtype == right[name].dtype and a.shape == right[name].shape and a.tobytes() == right[name].tobytes()
        for name, a in left.items()
    )


def test_shards_hold_the_same_as_one_file() -> None:
    single = dict(read_tensors(MODELS / "llama-gqa-tied"))
    assert len(single) == 29
    assert same(dict(read_tensors(MODELS / SHARDED)), single)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_shard_bytes", [1, 40_000, 1 << 30])
def test_round_trip(tmp_path: Path, dtype: type, max_shard_bytes: int) -> None:
    given = {name: array.astype(dtype) for name, array in read_tensors(MODELS / "qwen3")}
    config = read_config(resolve(str(MODELS / "qwen3")))
    write_folder(tmp_path / "m", config, given.items(), None, max_shard_bytes=max_shard_bytes)
    assert same(dict(read_tensors(tmp_path / "m")), given)
    written = read_config(resolve(str(tmp_path / "m")))
    assert written == config | {"dtype": np.dtype(dtype).name}
    files = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    expected = {1: len(given), 40_000: 6 if dtype is np.float32 else 3, 1 << 30: 1}[max_shard_bytes]
    assert len(files) == expected
    assert files[0] == ("model.safetensors" if expected == 1 else f"model-00001-of-{expected:05}.safetensors")


@settings(max_examples=30, deadline=None)
@given(bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=8), dtype=st.sampled_from(DTYPES[1:]))
def test_every_bit_pattern_survives(tmp_path_factory: pytest.TempPathFactory, bits: list[int], dtype: type) -> None:
    array = np.array(bits, dtype=np.uint16).view(dtype)
    folder = tmp_path_factory.mktemp("bits") / "m"
    write_folder(folder, {"model_type": "llama"}, [("w", array)], None)
    assert dict(read_tensors(folder))["w"].tobytes() == array.tobytes()


def test_order_in_memory_does_not_matter(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_folder(tmp_path / "m", {}, [("t", array.T), ("scalar", np.float32(3).reshape(()))], None)
    read = dict(read_tensors(tmp_path / "m"))
    assert read["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert read["scalar"].shape == ()


def test_a_whole_model_with_its_tokenizer(tmp_path: Path) -> None:
    source = resolve("smollm2")
    tokenizer = read_tokenizer(source)
    write_folder(tmp_path / "m", read_config(source), [("w", np.zeros(2, np.float32))], tokenizer)
    loaded = Tokenizer.from_folder(tmp_path / "m")
    assert loaded.encode_chat([{"role": "user", "content": "hi"}]) == tokenizer.encode_chat(
        [{"role": "user", "content": "hi"}]
    )
    assert loaded.eos_ids == (2,)
    generation = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["m"], "no partial folder is left"


def test_a_failed_write_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "m"
    write_folder(target, {"model_type": "llama"}, [("w", np.ones(2, np.float32))], None)

    def broken() -> Iterator[tuple[str, np.ndarray]]:
        yield "w", np.zeros(2, np.float32)
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write_folder(target, {}, broken(), None, max_shard_bytes=1)
    assert dict(read_tensors(target))["w"].tolist() == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    write_folder(target, {"model_type": "llama"}, [("w", np.full(2, 5, np.float32))], None)
    assert dict(read_tensors(target))["w"].tolist() == [5, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_other_folders_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ModelError, match="no model folder"):
        write_folder(tmp_path, {}, [("w", np.ones(2, np.float32))], None)
    assert (tmp_path / "precious").read_text() == "x"


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ([], "without tensors"),
        ([("w", np.ones(2))], "w is float64"),
        ([("w", np.ones(2, np.float32)), ("w", np.ones(2, np.float32))], "given twice"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, tensors: list[tuple[str, np.ndarray]], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        write_folder(tmp_path / "m", {}, tensors, None)
    assert not list(tmp_path.iterdir())


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="neither"):
        list(read_tensors(tmp_path))
    folder = shutil.copytree(MODELS / SHARDED, tmp_path / "m")
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ModelError, match="cut off"):
        list(read_tensors(folder))
    shutil.copy(folder / "model-00001-of-00002.safetensors", shard)
    with pytest.raises(ModelError, match="has no tensor"):
        list(read_tensors(folder))
    shard.unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        list(read_tensors(folder))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../m/model.safetensors"}}')
    with pytest.raises(ModelError, match="which is not in"):
        list(read_tensors(folder))


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    save_file({"w": np.ones(2, np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="I8"):
        list(read_tensors(tmp_path))


def test_weights_are_as_readable_as_the_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder(folder, {"model_type": "llama"}, [("w", np.ones(3, np.float32))], None)
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert len(set(modes.values())) == 1, modes
