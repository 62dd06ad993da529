"""Training: what it learns, that it resumes, and that its exports open elsewhere."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.networks import Decoder, DecoderConfig, Rotary
from specdec_jax.training import data, distill, export, stages, train
from specdec_jax.training.forward import forward
from specdec_jax.training.tokenizer import train_tokenizer

THETA = 10_000.0
CONFIG = DecoderConfig(
    vocab_size=272,
    width=16,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    mlp_width=24,
    max_positions=64,
    norm_eps=1e-5,
    rotary=Rotary((1.0, THETA**-0.5)),
    tied=True,
)
STUDENT = replace(CONFIG, num_layers=1, width=8)
TEXT = "def f(self, x):\n    return self.x + x\n\n\n" * 20


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT], CONFIG.vocab_size)


@pytest.fixture(scope="module")
def tokens(tokenizer):
    return data.encode(tokenizer, [data.Source("a.py", TEXT)], eos=1)


@pytest.fixture(scope="module")
def fresh():
    return train.init_params(CONFIG, seed=0)


@pytest.fixture(scope="module")
def student():
    return train.init_params(STUDENT, seed=3)


@pytest.fixture(scope="module")
def params(fresh):
    """Parameters in which no matrix is zero."""
    leaves, structure = jax.tree.flatten(fresh)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [
        leaf + 0.3 * jax.random.normal(k, leaf.shape)
        for leaf, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, noisy)


def rows(tokens, step, batch_size=4, length=16):
    return data.batch(tokens, step, batch_size=batch_size, length=length, bos=0)


LOSS = partial(train.language_model_loss, CONFIG)
OPTIMISER = train.adamw(train.schedule(1e-2, steps=6, warmup=1, decay=2))


def fit(params, tokens, steps, checkpoint=None, report=lambda line: None):
    return train.fit(
        LOSS,
        params,
        lambda step: rows(tokens, step),
        optimiser=OPTIMISER,
        steps=steps,
        checkpoint=checkpoint,
        report=report,
    )


def assert_same(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_training_forward_gives_the_decoders_logits(params, tokens):
    batch = jnp.asarray(rows(tokens, 0))
    model = Decoder(CONFIG)
    output, _ = model.apply({"params": params}, batch, model.init_cache(4, 32))
    np.testing.assert_allclose(
        forward(CONFIG, params, batch), output.logits, atol=2e-5, rtol=2e-5
    )


def test_training_forward_refuses_what_it_does_not_cover():
    with pytest.raises(ValueError, match="Llama layer only"):
        train.init_params(replace(CONFIG, norm="layer"), seed=0)


def test_two_steps_lower_the_loss(fresh, tokens):
    batch, loss = jnp.asarray(rows(tokens, 0)), jax.jit(LOSS)
    # The first step of the warm-up has rate 0.
    after = fit(fresh, tokens, 3)
    assert loss(after, batch) < loss(fresh, batch) - 0.01


def test_resumed_run_is_bitwise_the_uninterrupted_one(fresh, tokens, tmp_path):
    lines = []
    fit(fresh, tokens, 3, tmp_path / "state.npz")
    resumed = fit(fresh, tokens, 6, tmp_path / "state.npz", lines.append)
    assert lines[0] == "resumed at step 3"
    assert_same(resumed, fit(fresh, tokens, 6))


def test_checkpoint_of_another_shape_is_refused(tmp_path):
    train.save(tmp_path / "state.npz", {"a": np.ones(3)})
    with pytest.raises(ValueError, match="another model"):
        train.restore(tmp_path / "state.npz", {"a": np.ones(4)})


def test_stacked_decoder_repeats_its_layers(params):
    grown = train.stack(params, 2)
    model, tokens = Decoder(replace(CONFIG, num_layers=4)), jnp.zeros((1, 1), jnp.int32)
    wanted = jax.eval_shape(
        model.init, jax.random.key(0), tokens, model.init_cache(1, 1)
    )
    assert jax.tree.structure(grown) == jax.tree.structure(wanted["params"])
    assert_same(grown["layers_3"], params["layers_1"])


def test_split_is_by_whole_files_and_stable():
    trained = {source.name for source in data.standard_library(held_out=False)}
    held_out = {source.name for source in data.standard_library(held_out=True)}
    assert not trained & held_out
    assert "typing.py" in trained and "pkgutil.py" in held_out
    assert not any(name.startswith(("test/", "encodings/")) for name in trained)


def test_epoch_reads_every_window_once(tokens):
    stream = np.arange(1 + 4 * 10 * 3, dtype=np.int32)
    read = np.concatenate(
        [
            data.batch(stream, step, batch_size=3, length=4, bos=-1)[:, 1:].ravel()
            for step in range(9)
        ]
    )
    assert len(np.unique(read)) == len(read) == 9 * 3 * 4


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match="use more text"):
        data.batch(np.zeros(9, np.int32), 0, batch_size=4, length=4, bos=0)


def test_tokenizer_gives_any_text_back(tokenizer):
    text = "\tif x == 10:\r\n  # naïve ☃ 漢字 🎉\x00"
    ids = tokenizer.encode(text).ids
    assert ids[0] == tokenizer.token_to_id("<|bos|>") == 0
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == CONFIG.vocab_size


def test_export_opens_in_our_loader_with_the_same_parameters(
    params, tokenizer, tmp_path
):
    from specdec_jax.checkpoints import load

    export.export(
        tmp_path, CONFIG, params, tokenizer, rope_theta=THETA, dtype="float32"
    )
    loaded = load(tmp_path)
    assert_same(loaded.params["params"], params)
    np.testing.assert_allclose(
        loaded.model.config.rotary.frequencies, CONFIG.rotary.frequencies, rtol=1e-6
    )
    assert loaded.eos_token_ids == (1,) and loaded.bos_token_id == 0
    assert loaded.tokenizer(TEXT)["input_ids"] == tokenizer.encode(TEXT).ids


def test_export_gives_transformers_the_same_logits(params, tokenizer, tokens, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    export.export(tmp_path, CONFIG, params, tokenizer, rope_theta=THETA)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    batch = rows(tokens, 0)
    with torch.no_grad():
        expected = theirs(torch.tensor(batch, dtype=torch.long)).logits.numpy()
    stored = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params
    )
    ours = forward(CONFIG, stored, jnp.asarray(batch))
    np.testing.assert_allclose(ours, expected, atol=1e-3)


def student_loss(lesson, params):
    return distill.distillation_loss(STUDENT, 0.0, 0.0, params, lesson)


def test_distillation_lowers_the_divergence(params, student, tokens):
    lesson = distill.teach(CONFIG, params, jnp.asarray(rows(tokens, 0)))
    after = train.fit(
        partial(distill.distillation_loss, STUDENT, 0.2, 0.1),
        student,
        lambda step: lesson,
        optimiser=train.adamw(train.schedule(1e-2, steps=20, warmup=0, decay=1)),
        steps=5,
        report=lambda line: None,
    )
    assert student_loss(lesson, after) < student_loss(lesson, student) - 0.01


def test_losses_of_the_teacher_itself_are_zero(params, tokens):
    lesson = distill.teach(CONFIG, params, jnp.asarray(rows(tokens, 0)))
    loss = partial(distill.distillation_loss, CONFIG)
    assert abs(loss(0.0, 0.0, params, lesson)) < 1e-5
    assert abs(loss(1.0, 0.0, params, lesson)) < 1e-5


def test_scores_of_the_target_against_itself_are_one(params, tokens):
    scores = distill.score(
        CONFIG, params, CONFIG, params, rows(tokens, 0), batch_size=2
    )
    assert scores.greedy_agreement == 1
    assert scores.overlap == pytest.approx(1, abs=1e-5)
    assert scores.target_loss == scores.draft_loss > 0


def test_scores_are_those_of_numpy(params, student, tokens):
    batch = rows(tokens, 0)
    scores = distill.score(CONFIG, params, STUDENT, student, batch, batch_size=4)
    p, q = (
        np.asarray(jax.nn.softmax(forward(config, leaves, jnp.asarray(batch[:, :-1]))))
        for config, leaves in ((CONFIG, params), (STUDENT, student))
    )
    agree = (p.argmax(-1) == q.argmax(-1)).mean()
    assert scores.greedy_agreement == pytest.approx(agree, abs=1e-6)
    assert scores.overlap == pytest.approx(np.minimum(p, q).sum(-1).mean(), abs=1e-5)


def test_greedy_samples_are_the_uncached_argmaxes(params, tokens):
    prompts = jnp.asarray(rows(tokens, 0, batch_size=2, length=5))
    texts = distill.continue_rows(
        Decoder(CONFIG), {"params": params}, prompts, jax.random.key(0), 7, jnp.zeros(2)
    )
    logits = forward(CONFIG, params, texts[:, :-1])
    np.testing.assert_array_equal(texts[:, :6], prompts)
    np.testing.assert_array_equal(texts[:, 6:], logits[:, 5:].argmax(-1))


def test_mixed_batches_end_in_samples(tokens):
    samples = np.full((3, 30), 7, np.int32)
    batches = distill.mixed(lambda step: rows(tokens, step), samples, share=0.5)
    assert (batches(0)[2:] == 7).all()
    np.testing.assert_array_equal(batches(0)[:2], rows(tokens, 0)[:2])


def test_stopped_stages_go_on_where_they_were(params, tmp_path):
    """A second run of a finished recipe trains nothing and returns the same."""
    stream = np.random.default_rng(0).integers(2, 270, 400).astype(np.int32)
    stage = stages.Stage(2, length=16, batch_size=2)
    lines = []

    def run():
        target = stages.train_target(
            tmp_path,
            CONFIG,
            stream,
            [stage._replace(num_layers=1), stage._replace(decay=1)],
            report=lines.append,
        )
        return target, stages.train_draft(
            tmp_path,
            STUDENT,
            Decoder(CONFIG),
            params,
            np.tile(stream, 8),
            stage,
            [stage._replace(variation=0.5, greedy=0.1)],
            rounds=1,
            report=lines.append,
        )

    first = run()
    assert len(first[0]) == 4 and not any("resumed" in line for line in lines)
    lines.clear()
    assert_same(run(), first)
    assert lines == ["resumed at step 2"] * 4
