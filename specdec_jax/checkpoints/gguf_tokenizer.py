"""The tokenizer that a GGUF file describes, as a transformers tokenizer.

A GGUF file holds the vocabulary, the merges and the names of the rules for splitting
text, not the `tokenizer.json` they came from. Two kinds are rebuilt here with the
package `tokenizers`, without torch (transformers' own GGUF reader needs it):

    gpt2    byte-level BPE; `tokenizer.ggml.pre` names how text is split before it
    llama   sentencepiece BPE with byte fallback: a piece's score is its merge rank

A rule that is not known is refused by name: text split by another rule than the
model was trained with still decodes, and quietly costs quality.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece writes spaces so

# The splits that the families were trained with, as their tokenizer.json files state
# them. They differ in how many digits stay together: one, or up to three.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _SPLIT % "{1,3}", _SPLIT % ""
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    isolated = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([isolated, _BYTES])


_PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _GPT2]),
    "llama-bpe": _split(_LLAMA3),
    "llama-v3": _split(_LLAMA3),
    "llama3": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "deepseek-r1-qwen": _split(_QWEN2),
}
_LLAMA3_NAMES = ("llama-bpe", "llama-v3", "llama3")
_NFC_NAMES = ("qwen2", "deepseek-r1-qwen")


def build_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer that a GGUF file describes, or None where it has none.

    Encoding adds the BOS and EOS tokens that the file asks for, and none with
    `add_special_tokens=False`. The chat template is the file's.

    Args:
      metadata: The keys under `tokenizer.` are read.

    Raises:
      ValueError: The kind of tokenizer or its way of splitting text is not supported,
        or its parts contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ValueError(
            f"the GGUF file has a tokenizer of kind {kind!r}; supported: 'gpt2' "
            "(byte-level BPE) and 'llama' (sentencepiece BPE)"
        )
    _add_special(tokenizer, metadata)
    return _wrap(tokenizer, metadata)


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Returns token -> id, without the rows that only pad the embedding."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = _token_types(metadata)
    return {
        token: i
        for i, token in enumerate(tokens)
        if not (kinds[i] == _UNUSED and token == f"[PAD{i}]")
    }


def _token_types(metadata: Mapping[str, Any]) -> list[int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise ValueError(
            f"the GGUF file has {len(tokens)} tokens and {len(kinds)} token types; "
            "convert the model again"
        )
    return kinds


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds byte-level BPE."""
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"the GGUF file splits text by the rule {pre!r} (tokenizer.ggml.pre); "
            f"supported: {', '.join(sorted(_PRE_TOKENIZERS))}; files without a rule "
            "are old, convert the model again"
        )
    lines = metadata.get("tokenizer.ggml.merges", [])
    merges = [(line[: (i := line.index(" ", 1))], line[i + 1 :]) for line in lines]
    # Llama 3 takes a word that is in the vocabulary whole, whatever the merges say.
    model = models.BPE(
        vocab=_vocabulary(metadata), merges=merges, ignore_merges=pre in _LLAMA3_NAMES
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _NFC_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds sentencepiece BPE: the merge with the best-scored result goes first."""
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise ValueError(
                f"the GGUF file's tokenizer rewrites text (tokenizer.ggml.{key}), "
                "which is not supported; give the directory of the original tokenizer"
            )
    vocab, scores = _vocabulary(metadata), metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(metadata["tokenizer.ggml.tokens"]):
        raise ValueError(
            "the GGUF file's sentencepiece tokenizer needs one score for each token "
            "(tokenizer.ggml.scores); convert the model again"
        )
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab=vocab,
        merges=_merges_by_score(metadata, vocab, scores),
        unk_token=metadata["tokenizer.ggml.tokens"][unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces: normalizers.Normalizer = normalizers.Replace(" ", _SPACE)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback()]
    steps.append(decoders.Fuse())
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    """Returns all pairs of pieces that join to a piece, best piece first.

    Pieces that text cannot merge to (control, unknown, whole user-defined ones) take
    no part. Equal scores go by the piece's id, as the trainer made them.
    """
    kinds = _token_types(metadata)
    whole = (_CONTROL, _UNKNOWN, _USER_DEFINED)

    def pairs(piece: str) -> Iterator[tuple[str, str]]:
        for cut in range(1, len(piece)):
            if piece[:cut] in vocab and piece[cut:] in vocab:
                yield piece[:cut], piece[cut:]

    pieces = [p for p, i in vocab.items() if kinds[i] not in whole]
    pieces.sort(key=lambda piece: (-scores[vocab[piece]], vocab[piece]))
    return [pair for piece in pieces for pair in pairs(piece)]


def _add_special(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Marks the tokens that are matched whole, before text is split."""
    tokens = metadata["tokenizer.ggml.tokens"]
    typed = list(zip(tokens, _token_types(metadata), strict=True))
    special = [token for token, kind in typed if kind in (_CONTROL, _UNKNOWN)]
    plain = [token for token, kind in typed if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in plain])


def _wrap(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Names the special tokens and hands the whole to transformers."""
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {}
    for name, key in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ):
        i = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if i is not None and i < len(tokens):
            names[name] = tokens[i]
    is_llama3 = metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    add_bos = metadata.get(
        "tokenizer.ggml.add_bos_token", is_llama3 or is_sentencepiece
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=metadata.get("tokenizer.chat_template"),
        add_bos_token=add_bos,
        add_eos_token=metadata.get("tokenizer.ggml.add_eos_token", False),
        **names,
    )
