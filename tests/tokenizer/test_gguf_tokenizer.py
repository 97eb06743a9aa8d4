from pathlib import Path

import pytest
from gguf_makers import tokenizer_entries, write_gguf

from upweight.errors import ModelError, ModelNotFound, UnsupportedModel
from upweight.tokenizer import Tokenizer
from upweight.tokenizer.gguf_header import read_header


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["ab", "123", "Ġa"]),
        ("llama-bpe", ["ab", "123", "Ġa"]),
        ("smollm", ["ab", "1", "2", "3", "Ġa"]),
        ("qwen2", ["ab", "1", "2", "3", "Ġa"]),
    ],
)
def test_pre_tokenizers_split_digits_differently(tmp_path: Path, pre: str, tokens: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", tokenizer_entries(pre)))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("ab123 a")] == tokens


def test_end_and_special_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", tokenizer_entries("gpt-2")))
    assert tokenizer.eos_ids == (0, 1)
    assert tokenizer.pad_id == 0
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.encode("<|end|><user>") == [0, 2]
    assert tokenizer.chat_template is None


def test_unknown_pre_tokenizer_names_the_known(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tokenizer_entries("viking"))
    with pytest.raises(UnsupportedModel, match=r"'viking'.*gpt-2, llama-bpe, qwen2, smollm"):
        Tokenizer.from_gguf(path)


def test_other_kinds_of_tokenizer(tmp_path: Path) -> None:
    entries = tokenizer_entries("gpt-2") | {"tokenizer.ggml.model": "bert"}
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.model is 'bert'"):
        Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", entries))
    entries = tokenizer_entries("gpt-2") | {"tokenizer.ggml.eos_token_id": 99}
    with pytest.raises(ModelError, match=r"eos_token_id is 99"):
        Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", entries))
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.model is None"):
        Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}))


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        Tokenizer.from_gguf(tmp_path / "none.gguf")
    whole = write_gguf(tmp_path / "m.gguf", tokenizer_entries("gpt-2")).read_bytes()
    short = tmp_path / "short.gguf"
    for length in range(len(whole)):
        short.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            read_header(short)
    short.write_bytes(b"PK\x03\x04" + whole)
    with pytest.raises(ModelError, match="does not begin with GGUF"):
        read_header(short)


def test_the_header_of_the_real_file(smollm_gguf: Path) -> None:
    header = read_header(smollm_gguf)
    assert len(header.metadata) == 33
    assert len(header.tensors) == 272
    assert header.metadata["llama.rope.freq_base"] == 100000.0
    assert header.metadata["general.languages"] == ["en"]
    place = next(tensor for tensor in header.tensors if tensor.name == "token_embd.weight")
    assert (place.dims, place.ggml_type) == ((576, 49152), 8)
