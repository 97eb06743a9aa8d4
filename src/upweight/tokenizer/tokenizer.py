"""`Tokenizer`: text ↔ ids and messages → ids for one model.

Invariants
- Nothing is added to what was asked for: no BOS or EOS by itself. A chat template that writes BOS is the only source.
- `encode` is the same from every thread: no setting of the shared core changes after it was built.
- End ids are the ones that the model's files name, not all special tokens.
"""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from upweight.errors import RequestError
from upweight.tokenizer.chat import ChatTemplate, Message
from upweight.tokenizer.folder_tokenizer import load_folder
from upweight.tokenizer.gguf_tokenizer import load_gguf
from upweight.tokenizer.parts import TokenizerParts
from upweight.tokenizer.token_bytes import bytes_of, spelling_of
from upweight.tokenizer.tool_calls import ToolStyle, style_of

LONG_TEXT = (
    20_000  # characters; encoded in the library's own threads, as a single `encode` holds the interpreter all the while
)


class Tokenizer:
    """The tokenizer and chat template of one model. Immutable, safe to use from several threads."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._core = parts.core
        self.spelling = spelling_of(parts.core)
        self.eos_ids = parts.eos_ids
        self.pad_id = parts.pad_id
        self.chat_template = parts.chat_template
        added = parts.core.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # Ids may have gaps, so the size is one more than the largest id.
        self.vocab_size = 1 + max(parts.core.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """From a Hugging Face folder: tokenizer.json, tokenizer_config.json and what else names end ids."""
        return cls(load_folder(path))

    @classmethod
    def from_gguf(cls, path: str | Path) -> "Tokenizer":
        """From the metadata of a GGUF file."""
        return cls(load_gguf(path))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of `text`. With `special=False` the text of a special token is plain characters: for untrusted text.

        Raises `RequestError` for text that no UTF-8 can hold: JSON can smuggle in half of a surrogate pair.
        """
        core = self._core if special else self._plain_core
        try:
            if len(text) > LONG_TEXT:
                return core.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return core.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise RequestError(_why_no_text(text)) from None

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids without a token add nothing, bytes that are no UTF-8 become U+FFFD."""
        return self._core.decode([int(token_id) for token_id in ids], skip_special_tokens=skip_special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        keep_calls: bool = False,
    ) -> str:
        """`messages` as the model's chat template writes them; `RequestError` (field "messages") when it cannot.

        `keep_calls`: see `ChatTemplate.render`.
        """
        template = self._tool_template if tools else self._template
        return template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, keep_calls=keep_calls
        )

    @functools.cached_property
    def tool_style(self) -> ToolStyle:
        """How this model writes its tool calls."""
        return style_of(self._parts.tool_template or self.chat_template)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        keep_calls: bool = False,
    ) -> list[int]:
        """Ids of `render(…)`. Special tokens that a message spells out are special here too, as in transformers."""
        text = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, keep_calls=keep_calls)
        try:
            return self.encode(text)
        except RequestError as error:
            raise RequestError(f"messages: {error}", field="messages") from None

    def token_text(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, None when the id has none."""
        return self._core.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that this token adds to a text; none for an id without a token."""
        token = self.token_text(token_id)
        return b"" if token is None else bytes_of(token, self.spelling)

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json as Hugging Face libraries read them."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        self._core.save(str(target / "tokenizer.json"))
        text = json.dumps(self._saved_config(), indent=2, ensure_ascii=False)
        (target / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def _saved_config(self) -> dict[str, Any]:
        parts = self._parts
        # Under a model's own class name some versions of transformers build the pre-tokenizer anew and get it wrong.
        config = {**parts.config, **parts.named_tokens, "tokenizer_class": "PreTrainedTokenizerFast"}
        config.setdefault("clean_up_tokenization_spaces", False)
        if parts.chat_template is not None and parts.tool_template is not None:
            pairs = {"default": parts.chat_template, "tool_use": parts.tool_template}
            config["chat_template"] = [{"name": name, "template": text} for name, text in pairs.items()]
        elif parts.chat_template is not None:
            config["chat_template"] = parts.chat_template
        return config

    @functools.cached_property
    def _plain_core(self) -> tokenizers.Tokenizer:
        """A second core that sees no special tokens in text, made on first use."""
        core = tokenizers.Tokenizer.from_str(self._core.to_str())
        core.encode_special_tokens = True
        return core

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise RequestError("messages: this model has no chat template; send a prompt instead", field="messages")
        return ChatTemplate(self.chat_template, self._parts.named_tokens)

    @functools.cached_property
    def _tool_template(self) -> ChatTemplate:
        if self._parts.tool_template is None:
            return self._template
        return ChatTemplate(self._parts.tool_template, self._parts.named_tokens)


def _why_no_text(value: Any) -> str:
    if not isinstance(value, str):
        return f"text must be a string, it is {type(value).__name__}"
    half = next(char for char in value if "\ud800" <= char <= "\udfff")
    return f"text holds {half!r}, half of a surrogate pair, at character {value.index(half)}: send whole characters"
