"""What does an unused part of the cache cost?

Decodes 64 tokens after a prompt of 64 with room for 256 slots and for 4,096, in turns
in one process, and prints how many times slower the large one is. The bar is 1.3.

    python experiments/capacity.py            SmolLM2-135M (random weights if missing)
    python experiments/capacity.py --smoke    a tiny random model, seconds
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import benchmark, decode
from specdec_jax.acceptance import Rejection
from specdec_jax.benchmark.programs import decode_rounds
from specdec_jax.checkpoints import load
from specdec_jax.cli.environment import environment
from specdec_jax.compilation import enable_compilation_cache
from specdec_jax.drafters import NoDrafter
from specdec_jax.networks import Decoder, DecoderConfig, Rotary

CAPACITIES = (256, 4096)
PROMPT = NEW = 64
BAR = 1.3
RESULT = Path(__file__).parent / "results" / "capacity.json"


def random_model(smoke):
    """Returns a decoder of SmolLM2-135M's shape, or a tiny one, with random weights."""
    head_dim = 8 if smoke else 64
    config = DecoderConfig(
        vocab_size=256 if smoke else 49152,
        width=32 if smoke else 576,
        num_layers=2 if smoke else 30,
        num_heads=3 if smoke else 9,
        num_kv_heads=1 if smoke else 3,
        head_dim=head_dim,
        mlp_width=64 if smoke else 1536,
        max_positions=8192,
        rotary=Rotary(tuple(1e5 ** (-i / head_dim) for i in range(0, head_dim, 2))),
        tied=True,
    )
    model = Decoder(config, jnp.dtype("float32"))
    tokens = jnp.zeros((1, 1), jnp.int32)
    return model, model.init(jax.random.key(0), tokens, model.init_cache(1, 1))


def target(smoke):
    """Returns a name, the model and its variables."""
    if not smoke:
        try:
            loaded = load("smollm2-135m")
        except (FileNotFoundError, ImportError) as error:
            print(f"random weights instead: {error}")
        else:
            return loaded.name, loaded.model, loaded.params
    return "random", *random_model(smoke)


def arm(model, variables, capacity):
    """Returns what decodes once from a prefilled state and gives the seconds."""
    parts = {"target": model, "drafter": NoDrafter()}
    params = decode.Params(variables)
    prompt = np.random.default_rng(0).integers(0, model.vocab_size, (1, PROMPT))
    state = decode.init(
        params,
        jax.random.key(0),
        jnp.asarray(prompt, jnp.int32),
        jnp.array([PROMPT]),
        max_new_tokens=NEW,
        capacity=capacity,
        **parts,
    )
    state = jax.jit(lambda state: decode.prefill(params, state, **parts))(state)

    def run():
        copy = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        seconds, (tally, _) = benchmark.timed(
            lambda: decode_rounds(
                params, copy, np.int32(NEW), np.bool_(False), rule=Rejection(), **parts
            )
        )
        assert int(tally.rounds) == NEW
        return seconds

    return run


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny model, seconds")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help=f"default: results/{RESULT.name}")
    arguments = parser.parse_args(argv)
    enable_compilation_cache()
    name, model, variables = target(arguments.smoke)
    repeats = 3 if arguments.smoke else arguments.repeats
    small, large = CAPACITIES
    seconds = benchmark.alternate(
        {str(capacity): arm(model, variables, capacity) for capacity in CAPACITIES},
        repeats,
    )
    median = {name: float(np.median(times)) for name, times in seconds.items()}
    pairs = np.array(seconds[str(large)]) / np.array(seconds[str(small)])
    result = {
        "question": f"seconds with capacity {large} over seconds with {small}",
        "ratio": median[str(large)] / median[str(small)],
        "ratio_low": float(pairs.min()),
        "ratio_high": float(pairs.max()),
        "bar": BAR,
        "milliseconds_a_token": {
            name: 1e3 * time / NEW for name, time in median.items()
        },
        "seconds": seconds,
        "config": {
            "target": name,
            "prompt_tokens": PROMPT,
            "new_tokens": NEW,
            "batch_size": 1,
            "dtype": "float32",
            "repeats": repeats,
            "smoke": arguments.smoke,
        },
        "environment": environment(),
    }
    print(
        f"{name}: capacity {large} takes {result['ratio']:.2f} times as long as "
        f"{small} ({result['ratio_low']:.2f} to {result['ratio_high']:.2f}; "
        f"bar {BAR}); {result['milliseconds_a_token'][str(small)]:.1f} ms a token"
    )
    output = arguments.output or (None if arguments.smoke else RESULT)
    if output:
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
