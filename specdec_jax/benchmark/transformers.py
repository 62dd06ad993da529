"""The same weights and prompts decoded by transformers (torch), greedily.

Its own `generate` runs as it comes: default attention, default threads, one prompt at a
time (assisted generation takes no more). Decoding is timed from the end of the first
pass, which reads the prompt, to the last token: a callback notes when each pass ended.

torch is imported when something is loaded, not before.
"""

import contextlib
import importlib.util
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specdec_jax.audit import Difference, explain_difference
from specdec_jax.benchmark.report import Report, Rival, Run, Unit
from specdec_jax.checkpoints.locate import open_checkpoint
from specdec_jax.checkpoints.source import Source
from specdec_jax.text.running import Engine

PLAIN, ASSISTED = "transformers_plain", "transformers_assisted"
"""Names of the two arms in `Report`."""

_COMPARED = ("speculative", PLAIN, ASSISTED)


def load_rivals(
    target: str | Path,
    draft: str | Path,
    num_draft_tokens: int,
    *,
    draft_num_layers: int | None = None,
    dtype: str = "float32",
) -> dict[str, Rival]:
    """Loads checkpoints into transformers and returns its two ways to decode.

    Assisted is `prompt_lookup_num_tokens` for the draft "ngram", else
    `assistant_model`, both with `num_draft_tokens` tokens a round; everything else is
    transformers' default.

    Args:
      target: Name, folder or file, as for `checkpoints.load`.
      draft: The same, or "ngram".
      num_draft_tokens: K.
      draft_num_layers: Keeps that many layers of the draft.
      dtype: Of weights and arithmetic.

    Raises:
      ValueError: torch is not installed, or a checkpoint is damaged.
      FileNotFoundError: There is no such checkpoint.
    """
    if importlib.util.find_spec("torch") is None:
        raise ValueError(
            "comparing with transformers needs torch, which is not installed: "
            "pip install torch"
        )
    model = _load(target, dtype)
    assist: dict[str, Any] = {"prompt_lookup_num_tokens": num_draft_tokens}
    if draft != "ngram":
        assistant = _load(draft, dtype, draft_num_layers)
        assistant.generation_config.num_assistant_tokens = num_draft_tokens
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assist = {"assistant_model": assistant}
    return {PLAIN: _Rival(model, {}), ASSISTED: _Rival(model, assist)}


class _Rival:
    """transformers' `generate` with some settings; satisfies `report.Rival`."""

    def __init__(self, model: Any, settings: dict[str, Any]):
        self.model, self.settings = model, settings

    def __call__(
        self, token_ids: list[int], max_new_tokens: int, eos: tuple[int, ...]
    ) -> Run:
        import torch

        prompt = torch.tensor([token_ids])
        passes: list[tuple[float, int]] = []

        def note(tokens, scores, **_):
            passes.append((time.perf_counter(), tokens.shape[1]))
            return torch.zeros(len(tokens), dtype=torch.bool)

        with torch.inference_mode(), _quiet():
            tokens = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=list(eos) or None,
                pad_token_id=eos[0] if eos else 0,
                stopping_criteria=[note],
                **self.settings,
            )
        (start, first), (end, last) = passes[0], passes[-1]
        new = tokens[0, len(token_ids) :].tolist()
        return Run(end - start, last - first, [new], rounds=len(passes))


def _load(name: str | Path, dtype: str, num_layers: int | None = None) -> Any:
    """Returns transformers' model of a checkpoint of any kind."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        source = open_checkpoint(name)
        folder = source.path
        if not folder.is_dir():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            export(source, folder)
        config = AutoConfig.from_pretrained(folder)
        if num_layers is not None:
            config.num_hidden_layers = num_layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:num_layers]
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=getattr(torch, dtype)
        )
    # Greedy without penalties, whatever the checkpoint recommends.
    model.generation_config = GenerationConfig()
    return model.eval()


def export(source: Source, folder: Path) -> None:
    """Writes a checkpoint as the folder that transformers opens; no tokenizer."""
    from safetensors.numpy import save_file

    tensors = {
        name: np.ascontiguousarray(tensor.read())
        for name, tensor in source.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(dict(source.config))
    (folder / "config.json").write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers: cut layers and unused settings are meant."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bar = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def summary(report: Report, engine: Engine) -> dict[str, Any]:
    """Returns what the two arms came to, as plain values for JSON.

    Speedups are ratios of tokens a second with ours above. Tokens are compared with
    plain decoding here; a first difference between two tokens that the target holds to
    be equally likely is a near-tie, which rounding decides.
    """
    from importlib import metadata

    rates = {
        name: report.costs(arm).tokens_per_second()
        for name, arm in [
            ("plain", "plain"),
            ("speculative", "speculative"),
            ("transformers_plain", PLAIN),
            ("transformers_assisted", ASSISTED),
        ]
    }
    best = max(rates["transformers_plain"], rates["transformers_assisted"])
    pairs = itertools.product(report.units, _COMPARED)
    compared = [difference(unit, arm, engine) for unit, arm in pairs]
    found = [one for one in compared if one is not None]
    return {
        "plain_tokens_per_second": rates["transformers_plain"],
        "assisted_tokens_per_second": rates["transformers_assisted"],
        "plain_over_plain": _ratio(rates["plain"], rates["transformers_plain"]),
        "speculative_over_plain": _ratio(
            rates["speculative"], rates["transformers_plain"]
        ),
        "speculative_over_assisted": _ratio(
            rates["speculative"], rates["transformers_assisted"]
        ),
        "speculative_over_best": _ratio(rates["speculative"], best),
        "texts_compared": len(compared),
        "texts_equal": len(compared) - len(found),
        "near_ties": sum(one.near_tie for one in found),
        "texts_different": sum(not one.near_tie for one in found),
        "versions": {
            name: metadata.version(name) for name in ("torch", "transformers")
        },
    }


def difference(unit: Unit, arm: str, engine: Engine) -> Difference | None:
    """Explains where an arm's text first differs from plain's; None if equal."""
    [plain], [other] = unit.runs["plain"][0].token_ids, unit.runs[arm][0].token_ids
    return explain_difference(
        engine.target, engine.params.target, unit.prompts[0], plain, other
    )


def _ratio(ours: float, theirs: float) -> float | None:
    return ours / theirs if theirs else None
