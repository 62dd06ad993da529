"""Distils the bundled draft: `python models/pystd-draft/recipe.py WORK_FOLDER`."""

import sys
from pathlib import Path

from specdec_jax.checkpoints import load
from specdec_jax.networks import DecoderConfig, Rotary
from specdec_jax.training.data import encode, standard_library
from specdec_jax.training.export import export
from specdec_jax.training.stages import Stage, train_draft

work = Path(sys.argv[1])
target = load(Path(__file__).parent.parent / "pystd-5m", tiled=False)
tokenizer = target.tokenizer.backend_tokenizer
rotary = Rotary(tuple(10_000.0 ** (-i / 8) for i in range(8)))
shape = DecoderConfig(
    4096, 112, 2, 8, 4, 16, 192, 1024, norm_eps=1e-5, rotary=rotary, tied=True
)
stage = Stage(15500, length=256, batch_size=4, peak=3e-3, greedy=0.2)
params = train_draft(
    work,
    shape,
    target.model,
    target.params["params"],
    encode(tokenizer, standard_library(held_out=False), eos=1),
    stage._replace(steps=3000, peak=4e-3, greedy=0.0),
    [
        stage,
        stage._replace(steps=1800, peak=2e-3, decay=1800, variation=0.4, greedy=0.3),
    ],
    rounds=70,
)
export(work / "pystd-draft", shape, params, tokenizer, rope_theta=10_000.0)
