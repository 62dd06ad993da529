"""Retrains the bundled target: `python models/pystd-5m/recipe.py WORK_FOLDER`."""

import sys
from pathlib import Path

from specdec_jax.networks import DecoderConfig, Rotary
from specdec_jax.training.data import encode, standard_library
from specdec_jax.training.export import export
from specdec_jax.training.stages import Stage, train_target
from specdec_jax.training.tokenizer import train_tokenizer

work = Path(sys.argv[1])
files = standard_library(held_out=False)
tokenizer = train_tokenizer([file.text for file in files], 4096)
rotary = Rotary(tuple(10_000.0 ** (-i / 12) for i in range(12)))
shape = DecoderConfig(
    4096, 192, 10, 8, 4, 24, 512, 1024, norm_eps=1e-5, rotary=rotary, tied=True
)
stages = [
    Stage(1500, num_layers=5),
    Stage(1100),
    Stage(450, length=320, batch_size=4, decay=430),
]
params = train_target(work, shape, encode(tokenizer, files, eos=1), stages)
export(work / "pystd-5m", shape, params, tokenizer, rope_theta=10_000.0)
