"""From tokens to text, one token at a time, never splitting a character.

A token of a byte-level vocabulary may end in the middle of a character; decoded alone
it ends in U+FFFD. Such a tail is held back until the bytes that follow complete it.
Everything here is a function of the tokens alone, not of how they arrive, so streamed
text, stop strings and whole results agree for every size of block.
"""

from collections.abc import Iterable, Sequence
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_WINDOW, _CONTEXT = 48, 16
"""Tokens decoded again with each new one, and how many of them are kept as context."""


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Returns the text of some tokens without special ones, spaces as they are.

    Args:
      tokenizer: A transformers tokenizer; None decodes everything to "".
      token_ids: The tokens.
    """
    if tokenizer is None or not token_ids:
        return ""
    return tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


class TextFollower:
    """Decodes one request's new tokens as they come and looks for stop strings.

    Args:
      tokenizer: A transformers tokenizer, or None.
      stop: Strings that end the text. They are looked for in the text of new tokens
        only, wherever a block ends.

    Attributes:
      text: The text so far, without characters that are still incomplete; once a stop
        string was found, what precedes it.
      stopped: Whether a stop string was found.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text that are part of `text`
        self._taken = 0  # characters of `text` handed out by `take`

    def push(self, token: int) -> bool:
        """Adds one token; returns whether it completes a stop string."""
        self._window.append(token)
        decoded = decode(self._tokenizer, self._window)
        whole = decoded.rstrip(_REPLACEMENT)
        before = len(self.text)
        self.text += whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if len(whole) == len(decoded) and len(self._window) >= _WINDOW:
            self._window = self._window[-_CONTEXT:]
            self._shown = len(decode(self._tokenizer, self._window))
        start = find_stop(self.text, self._stop, before)
        if start is not None:
            self.text, self.stopped = self.text[:start], True
        return self.stopped

    def take(self) -> str:
        """Returns the text that is certain by now and was not returned before.

        What may be the beginning of a stop string is not certain yet.
        """
        held = 0 if self.stopped else longest_beginning(self.text, self._stop)
        end = max(len(self.text) - held, self._taken)
        text, self._taken = self.text[self._taken : end], end
        return text

    def finish(self) -> str:
        """Ends the text; returns what `take` held back, incomplete bytes as U+FFFD."""
        if not self.stopped:
            self.text += decode(self._tokenizer, self._window)[self._shown :]
            self._stop = ()
        return self.take()


def find_stop(text: str, stop: Iterable[str], before: int) -> int | None:
    """Returns where the first stop string begins that ends after `before` characters.

    Example:
      >>> find_stop("one, two", [", ", "two"], before=4)
      3
      >>> find_stop("one, two", ["one"], before=5) is None
      True
    """
    starts = [text.find(s, max(before - len(s) + 1, 0)) for s in stop]
    return min((start for start in starts if start >= 0), default=None)


def longest_beginning(text: str, stop: Iterable[str]) -> int:
    r"""Returns how many of the last characters may be the beginning of a stop string.

    Example:
      >>> longest_beginning("a\n", ["\n\n", "END"]), longest_beginning("a", ["b"])
      (1, 0)
    """
    sizes = [
        size
        for s in stop
        for size in range(1, min(len(s), len(text) + 1))
        if s.startswith(text[len(text) - size :])
    ]
    return max(sizes, default=0)
