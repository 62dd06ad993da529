"""Drafts of the target itself or of a text, and what may be asked of any draft.

Options behind a draft's name (`text.makers` reads them):

    early_exit:layers=4             the target's first layers
    ngram_counts:size=3             what followed the last tokens earlier in the text
    bigram:corpus=FILE, unigram:... tables counted on a text file
    NAME:vocab=8192,corpus=FILE     a draft that scores its 8192 most frequent ids alone
    NAME:tokenizer=shared           a draft with another tokenizer
    ...:below=0.4, ...:entropy=2    when a row ends its draft (`drafters.Stop`)
    ...:adaptive=5                  lengths that follow acceptance (`drafters.Adaptive`)
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec_jax.base import Drafter, Variables
from specdec_jax.drafters import (
    Adaptive,
    EarlyExit,
    LookupTable,
    ModelDrafter,
    NgramCounts,
    Stop,
    first_layers,
    fit_bigram,
    fit_unigram,
    frequent_ids,
)
from specdec_jax.networks import remap, trim
from specdec_jax.text.vocabulary import shared_tokens

if TYPE_CHECKING:
    from specdec_jax.text.makers import Ask

LENGTH = ("adaptive",)
"""Options of every draft."""

STOP = ("below", "entropy")
"""Options of every draft that has a law."""

MODEL = ("vocab", "corpus", "tokenizer")
"""Further options of a checkpoint."""


def early_exit(ask: "Ask") -> tuple[Drafter, Variables]:
    """Makes a draft of the target's first layers, half of them by default."""
    target = ask.target.model
    layers = whole(ask.name, ask.options, "layers")
    if layers is None:
        layers = max(getattr(getattr(target, "config", None), "num_layers", 0) // 2, 1)
    model = first_layers(target, layers)
    return length(ask, EarlyExit(model, ask.num_draft_tokens, stop(ask))), None


def ngram_counts(ask: "Ask") -> tuple[Drafter, Variables]:
    """Makes a draft of the counts of n-grams in the text itself."""
    size = whole(ask.name, ask.options, "size")
    sizes = {} if size is None else {"max_ngram": size}
    model: Any = NgramCounts(ask.target.model.vocab_size, **sizes)
    drafter = ModelDrafter(model, ask.num_draft_tokens, stop=stop(ask))
    return length(ask, drafter), None


def bigram(ask: "Ask") -> tuple[Drafter, Variables]:
    """Makes a draft of a bigram table."""
    vocab_size = ask.target.model.vocab_size
    return _table(ask, fit_bigram(_corpus(ask), vocab_size))


def unigram(ask: "Ask") -> tuple[Drafter, Variables]:
    """Makes a draft of one law for all places."""
    vocab_size = ask.target.model.vocab_size
    return _table(ask, fit_unigram(_corpus(ask), vocab_size))


def _table(ask: "Ask", variables: Variables) -> tuple[Drafter, Variables]:
    model: Any = LookupTable(ask.target.model.vocab_size)
    drafter = ModelDrafter(model, ask.num_draft_tokens, stop=stop(ask))
    return length(ask, drafter), variables


def checkpoint(ask: "Ask") -> tuple[Drafter, Variables]:
    """Makes a draft of a checkpoint, over the vocabulary asked for.

    Raises:
      ValueError: An option is out of range, or the vocabularies do not fit.
    """
    shared = _wants_shared(ask)
    small = ask.load(ask.name, whole(ask.name, ask.options, "layers"), not shared)
    model, variables = small.model, small.params
    if shared:
        model, variables = _translate(ask, small)
    number = whole(ask.name, ask.options, "vocab")
    if number is not None:
        ids = _kept(ask, number, model, variables)
        model, variables = trim(model, variables, ids, ask.target.model.vocab_size)
    elif "corpus" in ask.options:
        raise ValueError(
            f"draft {ask.name!r}: corpus goes with vocab, the number of ids to keep"
        )
    drafter = ModelDrafter(
        model, ask.num_draft_tokens, ask.target.model.vocab_size, stop=stop(ask)
    )
    return length(ask, drafter), variables


def length(ask: "Ask", drafter: Drafter) -> Drafter:
    """Lets a draft's length follow acceptance, if it was asked for."""
    start = whole(ask.name, ask.options, "adaptive")
    return drafter if start is None else Adaptive(drafter, start)


def stop(ask: "Ask") -> Stop | None:
    """Returns when rows end their draft, if it was asked for."""
    below = _number(ask.name, ask.options, "below")
    entropy = _number(ask.name, ask.options, "entropy")
    return None if below is None and entropy is None else Stop(below, entropy)


def whole(name: str, options: Mapping[str, str], option: str) -> int | None:
    """Returns a draft's option as a whole number; None if it was not written.

    Raises:
      ValueError: It is not a whole number.
    """
    value = options.get(option)
    if value is None:
        return None
    if not value.isdecimal():
        raise ValueError(
            f"draft {name!r}: {option} is {value!r}; it must be a whole number"
        )
    return int(value)


def _number(name: str, options: Mapping[str, str], option: str) -> float | None:
    value = options.get(option)
    if value is None:
        return None
    try:
        return float(value)
    except ValueError:
        raise ValueError(
            f"draft {name!r}: {option} is {value!r}; it must be a number"
        ) from None


def _corpus(ask: "Ask") -> np.ndarray:
    """Returns the token ids of the text file that a draft is counted on."""
    name = ask.options.get("corpus")
    if name is None:
        raise ValueError(
            f"draft {ask.name!r} is counted on a text; say which, as "
            f"{ask.name}:corpus=FILE"
        )
    path = Path(name)
    if not path.is_file():
        raise FileNotFoundError(f"draft {ask.name!r}: there is no corpus {name}")
    if ask.target.tokenizer is None:
        raise ValueError(
            f"draft {ask.name!r}: the target has no tokenizer to read {name} with"
        )
    text = path.read_text(encoding="utf-8", errors="replace")
    found = ask.target.tokenizer(text, add_special_tokens=False, verbose=False)
    return np.asarray(found["input_ids"], np.int64)


def _wants_shared(ask: "Ask") -> bool:
    value = ask.options.get("tokenizer")
    if value not in (None, "shared"):
        raise ValueError(
            f"draft {ask.name!r}: tokenizer is {value!r}; offered is shared, for a "
            "draft with another tokenizer than the target's"
        )
    return value is not None


def _translate(ask: "Ask", small: Any) -> tuple[Any, Variables]:
    """Lets a draft read and score the target's ids by the tokens they share."""
    ours, theirs = ask.target.tokenizer, small.tokenizer
    if ours is None or theirs is None:
        raise ValueError(
            f"draft {ask.name!r}: without both tokenizers nothing says which tokens "
            "are shared"
        )
    sizes = ask.target.model.vocab_size, small.model.vocab_size
    found = shared_tokens(ours, theirs, *sizes)
    warnings.warn(
        f"draft {ask.name!r} has another tokenizer: it drafts {found.share:.0%} of the "
        "target's tokens, and no others",
        stacklevel=2,
    )
    return remap(small.model, small.params, found.read, found.column)


def _kept(ask: "Ask", number: int, model: Any, variables: Variables) -> np.ndarray:
    """Returns the ids that a trimmed draft keeps, the ends of a text among them."""
    vocab_size = ask.target.model.vocab_size
    if not 1 <= number <= vocab_size:
        raise ValueError(
            f"draft {ask.name!r}: vocab is {number}; it must be between 1 and the "
            f"target's {vocab_size}"
        )
    scored = np.arange(min(vocab_size, model.vocab_size))
    if "map" in variables:
        column = np.asarray(variables["map"]["column"])
        scored = np.flatnonzero(column < model.model.vocab_size)
    counted = _corpus(ask) if "corpus" in ask.options else np.zeros(0, np.int64)
    ids = frequent_ids(counted, vocab_size, number, scored)
    return np.union1d(ids, np.asarray(ask.target.eos_token_ids, np.int64))
