"""Chat templates of several families, rendered locally by the protocol of the server's render route."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from upweight.rollout.turn_bridge import Message, Rendered
from upweight.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\nHelp.<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Headers on lines of their own, nothing between the end of a turn and the next one.
LLAMA3_LIKE = (
    "{{ '<|endoftext|>' }}{% if tools %}{{ 'Tools: ' + tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
# Drops the thoughts of all answers but those after the last user message.
QWEN_LIKE = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + ('user' if m['role'] == 'tool' else m['role']) + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Shows the last answer once more before the next prompt.
REPEATING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'You said: ' + m['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Plain text between the turns: the seam is no special token.
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
# Accepts a tool result only after an answer with calls.
STRICT_TOOLS = (
    "{% for m in messages %}{% if m['role'] == 'tool' and not messages[loop.index0 - 1].get('tool_calls') "
    "and messages[loop.index0 - 1]['role'] != 'tool' %}{{ raise_exception('a result without a call') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% for c in m.get('tool_calls', []) %}"
    "{{ '<call>' + c['function']['arguments'] | tojson + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEMPLATES = {
    "chatml": CHATML,
    "llama3-like": LLAMA3_LIKE,
    "qwen-like": QWEN_LIKE,
    "trimming": TRIMMING,
    "repeating": REPEATING,
    "plain": PLAIN,
    "strict-tools": STRICT_TOOLS,
}


@cache
def _with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return Tokenizer(replace(tokenizer._parts, chat_template=template, tool_template=None))


class LocalRender:
    """Counts what it renders."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self.tokenizer = _with_template(tokenizer, template)
        self.n_tokens = self.n_calls = 0

    def __call__(
        self, messages: Sequence[Message], *, tools: Sequence[Message] | None, add_generation_prompt: bool
    ) -> Rendered:
        text = self.tokenizer.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        token_ids = self.tokenizer.encode(text)
        self.n_tokens += len(token_ids)
        self.n_calls += 1
        return Rendered(token_ids, text)
