"""A tokenizer of words and bytes like that of Llama 2."""

import tokenizers
from tokenizers import decoders, models, normalizers


def sentencepiece(*special_tokens: str) -> tokenizers.Tokenizer:
    """An underscore marks words, unknown characters are bytes; special tokens are 1, 2, ..."""
    words = ["<unk>", *special_tokens, *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    vocab = {word: index for index, word in enumerate(words)}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    inner = tokenizers.Tokenizer(model)
    inner.add_special_tokens(["<unk>", *special_tokens])
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    inner.normalizer = normalizers.Sequence(spaces)
    strip = decoders.Strip(content=" ", left=1, right=0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    inner.decoder = decoders.Sequence(steps)
    return inner
