"""Every accepted form of a batch, and what is said of the others."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from upweight.online import RolloutGenerator
from upweight.online.prompts import read_prompts
from upweight.tokenizer import Tokenizer
from upweight.tokenizer.parts import TokenizerParts
from upweight.weights.loading import LoadedModel

CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
T, F = True, False


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"input_ids": np.array([[0, 5, 0, 6], [2, 2, 7, 8]])}, [[0, 5, 0, 6], [7, 8]]),
        ({"prompts": jnp.asarray([[5, 6, 2], [2, 7, 2]])}, [[5, 6], [7]]),
        ({"input_ids": [[0, 5], [6, 2]], "attention_mask": [[1, 1], [0, 1]]}, [[0, 5], [2]]),
        ({"input_ids": [[5], [6, 7]]}, [[5], [6, 7]]),
        ({"input_ids": jnp.asarray([[5.0, 6.0]])}, [[5, 6]]),
        ({"input_ids": [[5, 6]], "prompts": [[7, 8]]}, [[5, 6]]),
        ({"input_ids": None, "prompts": [[7, 2, 8]]}, [[7, 2, 8]]),
        ({"input_ids": [[5, 9, 6]], "attention_mask": jnp.asarray([[True, False, True]])}, [[5, 6]]),
    ],
)
def test_only_masks_and_edges_tell_padding(model: LoadedModel, batch: dict, expected: list) -> None:
    assert read_prompts(batch, model.tokenizer).ids == expected


@pytest.mark.parametrize(
    ("batch", "padded", "mask"),
    [
        # Left-padded or unpadded: unchanged, down to what stands in the padding and a column that no row needs.
        ({"input_ids": [[9, 9, 5], [9, 6, 7]], "attention_mask": [[0, 0, 1], [0, 1, 1]]}, None, [[F, F, T], [F, T, T]]),
        ({"input_ids": [[2, 2, 5], [2, 6, 7]]}, None, [[F, F, T], [F, T, T]]),
        ({"prompts": np.array([[5, 2, 6]])}, None, [[T, T, T]]),
        # Padding elsewhere moves to the left.
        ({"input_ids": [[5, 6, 2], [7, 2, 2]]}, [[5, 6], [2, 7]], [[T, T], [F, T]]),
        ({"input_ids": [[5, 0], [6, 7]], "attention_mask": [[1, 0], [1, 1]]}, [[2, 5], [6, 7]], [[F, T], [T, T]]),
        ({"input_ids": [[5], [6, 7]]}, [[2, 5], [6, 7]], [[F, T], [T, T]]),
    ],
)
def test_the_result_is_padded_on_the_left(model: LoadedModel, batch: dict, padded: Any, mask: list) -> None:
    found = read_prompts(batch, model.tokenizer)
    given = batch.get("input_ids", batch.get("prompts"))
    assert found.padded.tolist() == (np.asarray(given).tolist() if padded is None else padded)
    assert found.mask.tolist() == mask


def test_templated_batches(model: LoadedModel) -> None:
    tokenizer = model.tokenizer
    expected = tokenizer.encode_chat(CHAT)
    found = read_prompts({"messages": [CHAT, CHAT[1:]], "input_ids": [[5]]}, tokenizer)
    assert found.ids == [expected, tokenizer.encode_chat(CHAT[1:])]
    assert found.texts[0] == tokenizer.render(CHAT)
    columns = {"instruction": ["S", ""], "input": ["Q", "Q"], "output": ["", "A"]}
    prompts = read_prompts(columns, tokenizer)
    assert prompts.ids[0] == expected
    assert "assistant\nA" in prompts.texts[1]
    assert read_prompts({"instruction": ["S"]}, tokenizer).ids == [tokenizer.encode_chat(CHAT[:1])]


class Foreign:
    """A tokenizer with the methods of Hugging Face's; `batched` says whether it takes several conversations at once."""

    bos_token_id = 1

    def __init__(self, batched: bool) -> None:
        self.batched, self.calls = batched, 0

    def apply_chat_template(self, conversations: Any, tokenize: bool, add_generation_prompt: bool) -> Any:
        assert not tokenize
        assert add_generation_prompt
        self.calls += 1
        if isinstance(conversations[0], dict):
            return "<s>" + conversations[0]["content"]
        if not self.batched:
            raise AttributeError("'list' object has no attribute 'role'")
        return ["<s>" + conversation[0]["content"] for conversation in conversations]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [1] * text.count("<s>") + [5 + len(text)]
        return [1, *ids] if add_special_tokens else ids

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return str(list(ids))


@pytest.mark.parametrize(("batched", "calls"), [(True, 1), (False, 3)])
def test_templates_are_tried_together_first(batched: bool, calls: int) -> None:
    tokenizer = Foreign(batched)
    conversations = [[{"role": "user", "content": text}] for text in ("a", "bc")]
    found = read_prompts({"messages": conversations}, tokenizer)
    assert found.texts == ["<s>a", "<s>bc"]
    assert found.ids == [[1, 9], [1, 10]]  # one BOS each
    assert found.padded.tolist() == [[1, 9], [1, 10]]
    assert tokenizer.calls == calls
    assert read_prompts({"input_ids": [[0, 5, 0, 6, 0]]}, tokenizer).ids == [[5, 0, 6]]  # no pad id: 0


def test_one_bos_beside_a_post_processor() -> None:
    core = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "h": 1, "i": 2}, []))
    core.add_special_tokens(["<s>"])
    core.decoder = tokenizers.decoders.ByteLevel()
    core.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert core.encode("hi").ids == [0, 1, 2]
    template = "{{ bos_token }}{{ messages[0].content }}"
    parts = TokenizerParts(core=core, eos_ids=(), pad_id=0, named_tokens={"bos_token": "<s>"}, chat_template=template)
    prompts = read_prompts({"messages": [[{"role": "user", "content": "hi"}]]}, Tokenizer(parts))
    assert prompts.ids == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            {"text": ["a"]},
            r"must contain either 'messages' or 'instruction', or 'input_ids'/'prompts'; it has \['text'\]",
        ),
        ({"input_ids": []}, "empty batch"),
        ({"messages": []}, "empty batch"),
        ({"prompts": np.zeros((0, 4), int)}, "empty batch"),
        ({"input_ids": [[5], []]}, "prompt 1 of the batch is empty"),
        ({"input_ids": [[5, 6]], "attention_mask": [[0, 0]]}, "prompt 0 of the batch is empty"),
        ({"instruction": ["S", ""], "input": ["", ""]}, "prompt 1 of the batch is empty"),
        ({"input_ids": [[5]], "metadata": [{}, {}]}, "metadata has 2 entries for 1 prompts"),
        ({"input_ids": [[5, 6]], "attention_mask": [[1]]}, "differ in shape"),
        ({"input_ids": [5, 6, 7]}, r"input_ids\[0\] must be a prompt, a list of token ids; it is one token id"),
        ({"prompts": np.array([5, 6, 7])}, r"prompts\[0\] must be a prompt"),
        ({"input_ids": [[[5, 6]]]}, r"input_ids\[0\] must be a prompt.*an array of shape \(1, 2\)"),
        ({"input_ids": [[5, 6], [1.7, 2]]}, r"input_ids\[1\]\[0\] is 1.7; a token id is a whole number"),
        ({"messages": CHAT}, "messages must be a list of conversations"),
        ({"instruction": "S"}, "instruction must be a list of texts"),
        ({"instruction": ["S"], "input": ["a", "b"]}, "input has 2 entries for 1 instructions"),
        ({"messages": [[{"role": "boss", "content": "x"}]]}, r"messages\[0\]: role is 'boss'"),
    ],
)
def test_unusable_batches_are_named(generator: RolloutGenerator, batch: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        generator.generate(batch)


def test_metadata_may_be_left_out(model: LoadedModel) -> None:
    assert read_prompts({"input_ids": [[5]], "metadata": []}, model.tokenizer).metadata == [{}]
