"""Byte-level BPE for source code.

Numbers are split into digits and runs of blanks keep their last blank for the word
after them, so that indentation is one token and `    return` is two. Every byte has a
token: no text is out of the vocabulary, and decoding gives back the very text.
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

BOS = "<|bos|>"
EOS = "<|eos|>"

_PIECES = r" ?[A-Za-z_]+|\p{N}| ?[^\s\p{N}A-Za-z_]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns the merges and returns the tokenizer; it puts BOS before every text.

    Args:
      texts: What to learn from.
      vocab_size: Tokens in all, special ones included; BOS is 0 and EOS 1.

    Example:
      >>> tokenizer = train_tokenizer(["def f(x): return x"] * 9, 270)
      >>> tokenizer.decode(tokenizer.encode("return 10 ☃").ids)
      'return 10 ☃'
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer
