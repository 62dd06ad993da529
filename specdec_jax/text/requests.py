"""What a user asks for, checked on the host before anything is traced.

Messages say what came, what was needed and the remedy.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Prompt = str | Sequence[int]
"""Text, or token ids that are taken as they are."""


def as_prompts(prompts: Any) -> list[Prompt]:
    """Returns a list of prompts; a single prompt becomes a list of one.

    Raises:
      ValueError: It is neither text, nor token ids, nor a sequence of such.

    Example:
      >>> as_prompts("one"), as_prompts(["one", [2, 3]]), as_prompts([2, 3])
      (['one'], ['one', [2, 3]], [[2, 3]])
    """
    if isinstance(prompts, str):
        return [prompts]
    try:
        prompts = list(prompts)
    except TypeError:
        raise ValueError(
            f"prompts is {prompts!r}; give text, token ids, or a list of such"
        ) from None
    if prompts and all(_is_whole(token) for token in prompts):
        return [[int(token) for token in prompts]]
    return [p if isinstance(p, str) else as_token_ids(p) for p in prompts]


def as_token_ids(prompt: Any) -> list[int]:
    """Returns token ids as Python ints.

    Raises:
      ValueError: It is not a sequence of whole numbers.

    Example:
      >>> as_token_ids(np.array([1, 2]))
      [1, 2]
    """
    try:
        tokens = list(prompt)
    except TypeError:
        tokens = [None]
    if not all(_is_whole(token) for token in tokens):
        raise ValueError(
            f"a prompt is {prompt!r}; it must be text or a sequence of token ids"
        )
    return [int(token) for token in tokens]


def encode(prompt: Prompt, tokenizer: Any, bos_token_id: int | None) -> list[int]:
    """Returns the tokens of a prompt, with the BOS that the tokenizer adds, once.

    Args:
      prompt: Text, or token ids, which are taken as they are.
      tokenizer: A transformers tokenizer; None takes token ids only.
      bos_token_id: What an empty prompt becomes, if there is one.

    Raises:
      ValueError: Text without a tokenizer, or an empty prompt without a BOS.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                "the checkpoint has no tokenizer, so a prompt must be token ids, "
                f"got {prompt!r}; put its tokenizer.json beside the weights"
            )
        tokens = list(tokenizer(prompt).input_ids)
        twice = bos_token_id is not None and tokens[:2] == [bos_token_id] * 2
        # Text that begins with the BOS, as templates make it: it is there already.
        tokens = tokens[1:] if twice else tokens
    else:
        tokens = as_token_ids(prompt)
    if not tokens and bos_token_id is not None:
        tokens = [bos_token_id]
    if not tokens:
        raise ValueError(
            "a prompt is empty and the checkpoint has no BOS token to begin with; "
            "give at least one token"
        )
    return tokens


def chat_tokens(
    messages: str | Sequence[Mapping[str, str]], tokenizer: Any
) -> list[int]:
    """Returns the tokens of a conversation; the template writes every special one.

    Raises:
      ValueError: There is no chat template.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "the checkpoint has no chat template; give plain text, or a checkpoint "
            "made for chat, such as smollm2-135m"
        )
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def check_fits(
    tokens: Sequence[int],
    max_new_tokens: int,
    vocab_size: int,
    max_positions: int | None,
) -> None:
    """Refuses a request that the model cannot hold.

    Raises:
      ValueError: An id is not in the vocabulary, or positions run out.

    Example:
      >>> check_fits([5] * 60, 10, 100, 64)
      Traceback (most recent call last):
      ...
      ValueError: a prompt of 60 tokens with max_new_tokens 10 needs 70 positions, but \
the model has 64; shorten the prompt or lower max_new_tokens
    """
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"a prompt has the token {token}, but the ids of this model are 0 to "
                f"{vocab_size - 1}"
            )
    needed = len(tokens) + max_new_tokens
    if max_positions is not None and needed > max_positions:
        raise ValueError(
            f"a prompt of {len(tokens)} tokens with max_new_tokens {max_new_tokens} "
            f"needs {needed} positions, but the model has {max_positions}; shorten "
            "the prompt or lower max_new_tokens"
        )


def per_prompt(name: str, value: Any, size: int, least: int, most: int) -> list[int]:
    """Returns one whole number for each prompt.

    Raises:
      ValueError: A value is of another kind or out of range, or their number differs.

    Example:
      >>> per_prompt("max_new_tokens", 5, 2, 1, 9), per_prompt("seed", [3, 4], 2, 0, 9)
      ([5, 5], [3, 4])
    """
    values = list(value) if is_per_prompt(value) else None
    for one in [value] if values is None else values:
        if not _is_whole(one) or not least <= one <= most:
            raise ValueError(
                f"{name} is {one!r}; it must be a whole number from {least} to {most}"
            )
    if values is None:
        return [int(value)] * size
    if len(values) != size:
        raise ValueError(
            f"{name} has {len(values)} values for {size} prompts; give one for all or "
            "one for each"
        )
    return [int(one) for one in values]


def is_per_prompt(value: Any) -> bool:
    """Returns whether a value is one for each prompt, not one for all.

    Example:
      >>> is_per_prompt(3), is_per_prompt([3]), is_per_prompt(np.array([3]))
      (False, True, True)
    """
    return isinstance(value, list | tuple) or np.ndim(value) == 1


def eos_ids(value: Any, default: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that end a text: None is the checkpoint's, () none at all.

    Raises:
      ValueError: An id is not in the vocabulary.

    Example:
      >>> eos_ids(None, (2,), 9), eos_ids(3, (2,), 9), eos_ids((), (2,), 9)
      ((2,), (3,), ())
    """
    if value is None:
        return tuple(default)
    value = value.tolist() if hasattr(value, "tolist") else value
    ids = (value,) if not isinstance(value, list | tuple | set | frozenset) else value
    for token in ids:
        if not _is_whole(token) or not 0 <= token < vocab_size:
            raise ValueError(
                f"eos_token_id has {token!r}, but the ids of this model are 0 to "
                f"{vocab_size - 1}; use () for none"
            )
    return tuple(sorted(int(token) for token in ids))


def stop_strings(stop: Any, tokenizer: Any) -> tuple[str, ...]:
    """Returns the stop strings; a single one becomes a tuple of one.

    Raises:
      ValueError: One is not text or empty, can never occur, or there is no tokenizer.

    Example:
      >>> stop_strings((), None)
      ()
    """
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    for one in strings:
        if not isinstance(one, str) or not one:
            raise ValueError(f"stop has {one!r}; a stop string must be text, not empty")
        if one in special:
            raise ValueError(
                f"stop has {one!r}, a special token, which is no part of the text; "
                f"use eos_token_id={tokenizer.convert_tokens_to_ids(one)}"
            )
        if tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer, and the checkpoint has none"
            )
    return strings


def _is_whole(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) or (
        hasattr(value, "dtype") and np.ndim(value) == 0 and value.dtype.kind in "iu"
    )
    return bool(whole) and not isinstance(value, bool)
