"""The code that the documents show runs as it stands."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import toy

from specdec_jax import Coupled, NoDrafter, Params, decode

ROOT = Path(__file__).parent.parent


def blocks(name: str) -> list[str]:
    text = (ROOT / name).read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_skeleton_drafter_is_exact(key):
    (skeleton,) = blocks("CONTRIBUTING.md")
    names = {"__name__": "skeleton"}
    exec(skeleton, names)
    model, table = toy.TableModel(5), toy.table(key, 5)
    run = jax.jit(
        partial(decode.generate, target=model, rule=Coupled(), max_new_tokens=20),
        static_argnames="drafter",
    )
    texts = [
        run(
            Params(table), key, jnp.array([[1, 2]]), jnp.array([2]), drafter=drafter
        ).tokens[0, :22]
        for drafter in (NoDrafter(), names["RepeatLast"]())
    ]
    np.testing.assert_array_equal(*texts)


def test_the_readme_loop_runs(capsys):
    (loop,) = [block for block in blocks("README.md") if "decode.step" in block]
    checkpoint = str(ROOT / "tests" / "data" / "tiny_llama")
    for path in ("path/to/target", "path/to/draft"):
        loop = loop.replace(path, checkpoint)
    names: dict = {}
    exec(loop, names)
    assert (names["state"].length == jnp.array([35, 33])).all()
    assert "[" in capsys.readouterr().out
