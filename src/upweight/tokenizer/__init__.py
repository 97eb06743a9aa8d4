"""Text ↔ tokens, chat templates."""

from upweight.tokenizer.stream import TextStream
from upweight.tokenizer.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer"]
