"""Prints the numbers of the bundled pair's cards: `python models/measure.py`."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import load
from specdec_jax.training.data import batch, encode, standard_library
from specdec_jax.training.distill import continue_rows, score

MODELS = Path(__file__).parent


def main() -> None:
    """Scores the draft against the target on held-out files and on its own texts."""
    target, draft = (
        load(MODELS / name, tiled=False) for name in ("pystd-5m", "pystd-draft")
    )
    for loaded in (target, draft):
        size = sum(leaf.size for leaf in jax.tree.leaves(loaded.params))
        print(f"{loaded.path.name}: {size:,} parameters")
    pair = (target.model.config, target.params["params"])
    pair += (draft.model.config, draft.params["params"])
    bos, (eos,) = target.bos_token_id, target.eos_token_ids
    files = standard_library(held_out=True)
    tokens = encode(target.tokenizer.backend_tokenizer, files, eos)
    windows = len(tokens) // 256 - 1
    rows = batch(tokens, 0, batch_size=windows, length=256, bos=bos)
    print(f"held-out files ({rows[:, 1:].size:,} tokens): {score(*pair, rows)}")
    lines = (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    heads = np.array([target.tokenizer(text)["input_ids"][:32] for text in texts])
    prompts = jnp.asarray(heads, jnp.int32)
    for temperature in (0.0, 1.0):
        scale = jnp.full(len(texts), temperature, jnp.float32)
        key = jax.random.key(0)
        texts_ = continue_rows(target.model, target.params, prompts, key, 160, scale)
        scores = score(*pair, np.asarray(texts_), skip=31)
        print(f"own text at temperature {temperature}: {scores}")


if __name__ == "__main__":
    main()
