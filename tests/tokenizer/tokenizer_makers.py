"""Small tokenizers for tests."""

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Core

from upweight.tokenizer import Tokenizer
from upweight.tokenizer.parts import TokenizerParts


def byte_fallback_tokenizer() -> Tokenizer:
    """Like the SentencePiece models: ▁ for spaces, byte tokens, the first space dropped when decoding."""
    tokens = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    core = Core(models.BPE(vocab, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(parts)
    core.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:3]])
    return Tokenizer(TokenizerParts(core=core, eos_ids=(1,), pad_id=1, named_tokens={"bos_token": "<s>"}))
