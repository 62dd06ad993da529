"""Which tokens two tokenizers share, by the bytes that they stand for."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

LEAST_SHARED = 0.1
"""Share of the smaller vocabulary below which a draft is refused."""


class Shared(NamedTuple):
    """How a draft reads and scores the target's ids; see `networks.vocabulary`."""

    read: Int[np.ndarray, " V"]
    column: Int[np.ndarray, " V"]
    """-1 where the draft has no such token."""
    share: float
    """Of the target's tokens, those that the draft has."""


def shared_tokens(
    target: Any, draft: Any, vocab_size: int, draft_vocab_size: int
) -> Shared:
    """Maps the target's ids to the draft's by the bytes of their tokens.

    The ends of a text are mapped by their part, whatever they are called. A token that
    the draft lacks is read as the last piece of its own text in the draft's tokenizer:
    the draft then still knows how the text ends, and one token remains one token.

    Args:
      target: The target's tokenizer.
      draft: The draft's.
      vocab_size: The target's.
      draft_vocab_size: The draft's.

    Raises:
      ValueError: They share too few tokens for drafts to be worth their time.
    """
    ours, theirs = token_bytes(target), token_bytes(draft)
    theirs = {i: word for i, word in theirs.items() if i < draft_vocab_size}
    ours = {i: word for i, word in ours.items() if i < vocab_size}
    by_word = {word: i for i, word in sorted(theirs.items(), reverse=True)}
    column = np.full(vocab_size, -1)
    for i, word in ours.items():
        column[i] = by_word.get(word, -1)
    for part in ("bos_token_id", "eos_token_id"):
        one, other = getattr(target, part, None), getattr(draft, part, None)
        if one is not None and other is not None and column[one] < 0:
            column[one] = other
    found = int((column >= 0).sum())
    smaller = min(len(ours), len(theirs))
    if found < LEAST_SHARED * smaller:
        raise ValueError(
            f"target and draft share {found} tokens of {len(ours)} and {len(theirs)}, "
            f"under {LEAST_SHARED:.0%} of the smaller vocabulary; nearly everything "
            "drafted would be rejected. Use a draft of the target's family, or 'ngram'"
        )
    missing = [i for i in range(vocab_size) if column[i] < 0]
    read = column.copy()
    read[missing] = _last_pieces(draft, [ours.get(i, (False, b""))[1] for i in missing])
    return Shared(np.clip(read, 0, draft_vocab_size - 1), column, found / len(ours))


def token_bytes(tokenizer: Any) -> dict[int, tuple[bool, bytes]]:
    """Returns what each id stands for: whether it is special, and its bytes.

    Byte-level vocabularies write bytes in an alphabet of their own, others a space as
    one sign and lone bytes as <0x0A>.
    """
    vocab = tokenizer.get_vocab()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {i for i, token in added.items() if token.special}
    byte_level = any(token.startswith("Ġ") for token in vocab)
    found = {}
    for token, i in vocab.items():
        if i in special:
            found[i] = True, token.encode()
        elif i in added:
            found[i] = False, token.encode()
        elif byte_level:
            found[i] = False, _from_byte_level(token)
        else:
            found[i] = False, _from_pieces(token)
    return found


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's alphabet: a printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    moved = {chr(256 + n): byte for n, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | moved


_ALPHABET = _byte_alphabet()


def _from_byte_level(token: str) -> bytes:
    if all(sign in _ALPHABET for sign in token):
        return bytes(_ALPHABET[sign] for sign in token)
    return token.encode()


def _from_pieces(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _last_pieces(tokenizer: Any, words: list[bytes]) -> np.ndarray:
    """Returns the last id of each text; an id of no meaning where there is none."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    filler = unknown if unknown is not None else tokenizer.eos_token_id
    filler = 0 if filler is None else filler
    texts = [word.decode("utf-8", errors="replace") for word in words]
    if not texts:
        return np.zeros(0, np.int64)
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return np.array([ids[-1] if ids else filler for ids in encoded], np.int64)
