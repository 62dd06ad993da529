"""Writes the tiny checkpoints of this folder and the logits transformers gives them.

Run once, with torch installed: `PYTHONPATH=tests python tests/data/make.py`.
"""

from pathlib import Path

import numpy as np


def main() -> None:
    from test_checkpoints import build

    here = Path(__file__).parent
    for variant, name in {"llama": "tiny_llama", "gpt2": "tiny_gpt2"}.items():
        np.savez_compressed(here / f"{name}.npz", logits=build(variant, here / name))


if __name__ == "__main__":
    main()
