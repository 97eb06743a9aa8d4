"""What readers of requests are given in tests: SmolLM2's tokenizer, 512 tokens of context, 7 tokens when none are asked for."""

from __future__ import annotations

from pathlib import Path

from upweight.inference.constraints import Grammars
from upweight.inference.types import FinishReason, GenerationOutput
from upweight.server.worker.asked import Serving, longest_text
from upweight.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(Path(__file__).parents[1] / "data" / "smollm2")
SERVING = Serving(
    tokenizer=TOKENIZER,
    vocab_size=TOKENIZER.vocab_size,
    max_context=512,
    default_tokens=7,
    longest_text=longest_text(TOKENIZER, 512),
    grammars=Grammars(TOKENIZER, TOKENIZER.vocab_size),
)
MESSAGES = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]


def said(text: str, **more: object) -> GenerationOutput:
    """A finished answer of `text` and the end token, as the engine gives it."""
    ids = [*TOKENIZER.encode(text), 2]
    return GenerationOutput(
        **{
            "token_ids": ids,
            "logprobs": [-0.1 * i for i in range(len(ids))],
            "raw_logprobs": [-0.5] * len(ids),
            "token_versions": [4] * len(ids),
            "finish_reason": FinishReason.STOP,
            "text": text,
            "prompt_len": 2,
            **more,
        }
    )
