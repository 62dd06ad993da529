"""Text in, text out: checked on a scripted model worked out by hand, and on a Llama."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from tiny import (
    BOS,
    EOS,
    VOCAB_SIZE,
    ScriptModel,
    make_tokenizer,
    save_checkpoint,
    script,
)

import specdec_jax
from specdec_jax import (
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    NonFiniteLogitsError,
    Params,
    Sampling,
    SpeculativeDecoder,
)
from specdec_jax.text import packing, running
from specdec_jax.text.detokenize import TextFollower

PROMPT = [20, 21, 22]
DRAWN = Sampling(temperature=0.9)


def tokens_of(text):
    return make_tokenizer()(text).input_ids


def scripted(new, drafted=None, num_draft_tokens=4, **parts):
    """A decoder that says `new` after PROMPT, and whose draft says `drafted`."""
    drafted = new if drafted is None else drafted
    model = ScriptModel()
    return SpeculativeDecoder(
        model,
        Params(script(new, len(PROMPT)), script(drafted, len(PROMPT))),
        make_tokenizer(),
        ModelDrafter(model, num_draft_tokens),
        eos_token_ids=(EOS,),
        **parts,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "target")


@pytest.fixture(scope="module")
def decoders(folder):
    """Plain decoding, prompt lookup and a layer-cut draft of one target."""
    make = SpeculativeDecoder.from_pretrained
    return {
        "none": make(folder),
        "ngram": make(folder, "ngram"),
        "cut": make(folder, folder, draft_num_layers=1, num_draft_tokens=3),
    }


def look_at(decoder, plan, rounds_per_look):
    """Runs a plan with that many rounds between looks; one result a request."""
    found = list(decoder.run(plan, rounds_per_look=rounds_per_look))
    results = {piece.index: piece.result for piece in found if piece.result}
    for index, result in results.items():
        pieces = [piece.text for piece in found if piece.index == index]
        assert "".join(pieces) == result.text or rounds_per_look is None
    return [results[index] for index in sorted(results)]


# Decoding


def test_importing_the_library_brings_in_neither_transformers_nor_torch():
    import subprocess
    import sys

    code = (
        "import sys, specdec_jax; print({'torch', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
    )
    assert run.stdout.strip() == "set()", run.stderr


PROMPTS = ["the cat sat", "日本 🤖", [5, 6, 7, 5, 6], "a"]
BUDGETS = [20, 12, 17, 1]


@pytest.mark.parametrize("name", ["ngram", "cut"])
def test_greedy_text_is_plain_greedy_text_for_every_draft(decoders, name):
    plain = decoders["none"].generate(PROMPTS, max_new_tokens=BUDGETS)
    found = decoders[name].generate(PROMPTS, max_new_tokens=BUDGETS)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert [r.text for r in found] == [r.text for r in plain]
    for ours, theirs in zip(found, plain, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    assert sum(r.num_drafted for r in found) > 0
    assert sum(r.num_accepted for r in found) > 0 or name == "ngram"


def test_plain_greedy_is_the_argmax_of_an_uncached_pass(decoders, folder):
    loaded = specdec_jax.load(folder)
    [result] = decoders["none"].generate(
        "the cat sat", max_new_tokens=8, eos_token_id=()
    )
    tokens = jnp.asarray([result.prompt_token_ids + result.token_ids], jnp.int32)
    cache = loaded.model.init_cache(1, tokens.shape[1])
    output, _ = jax.jit(loaded.model.apply)(loaded.params, tokens, cache)
    start = len(result.prompt_token_ids) - 1
    rows = jax.nn.log_softmax(output.logits[0, start:-1])
    assert jnp.argmax(rows, -1).tolist() == result.token_ids
    np.testing.assert_allclose(rows.max(-1), result.logprobs, atol=1e-4)
    assert result.policy_logprobs == [0.0] * 8  # greedy is certain


def test_counts_add_up_and_results_say_what_was_read(decoders):
    for name, decoder in decoders.items():
        for r, prompt in zip(
            decoder.generate(PROMPTS, max_new_tokens=BUDGETS), PROMPTS, strict=True
        ):
            ends_accepted = r.origins[-1] == "accepted"
            assert r.num_tokens == r.num_accepted + r.rounds - ends_accepted
            assert sum(r.acceptance_histogram) == r.rounds
            assert r.num_accepted == r.origins.count("accepted") <= r.num_drafted
            assert r.num_accepted == np.dot(
                r.acceptance_histogram, range(len(r.acceptance_histogram))
            )
            assert len(r.logprobs) == len(r.policy_logprobs) == r.num_tokens
            assert r.mean_acceptance_length == r.num_tokens / r.rounds
            assert r.prompt_token_ids == (
                tokens_of(prompt) if isinstance(prompt, str) else prompt
            )
            assert r.finish_reason in ("eos", "length")
            if name == "none":
                assert r.rounds == r.num_tokens and r.draft_acceptance_rate == 0


def test_no_prompts_give_no_results(decoders):
    assert decoders["none"].generate([]) == []


def test_one_text_or_one_list_of_ids_is_one_prompt(decoders):
    for prompt in ("a", tokens_of("a"), tuple(tokens_of("a"))):
        [request] = decoders["none"].plan(prompt).requests
        assert request.token_ids == tokens_of("a") and request.text == "a"


# Seeds, on a table model whose every number is exact

TABLE = toy.TableModel(13)
LAW = toy.table(jax.random.key(1), 13)
NEAR = toy.mix(LAW, toy.table(jax.random.key(2), 13), 0.7)
IDS = [[3], [4, 5, 6], [7, 8], [9, 9, 9, 9, 9]]


def tabled(drafter=None, rule="rejection"):
    drafter = ModelDrafter(TABLE, 3) if drafter is None else drafter
    return SpeculativeDecoder(TABLE, Params(LAW, NEAR), None, drafter, rule=rule)


def ids_of(results):
    return [result.token_ids for result in results]


def test_a_request_uses_the_key_folded_with_its_place():
    decoder = tabled()
    plan = decoder.plan(IDS, seed=3, sampling=DRAWN)
    batch = packing.pack(plan, range(4))
    state = running.start_batch(
        decoder.engine.params, batch, target=TABLE, drafter=decoder.drafter
    )
    for i, key in enumerate(state.key):
        assert key == jax.random.fold_in(jax.random.key(3), i)
    found = decoder.generate([[5, 6, 7]] * 4, seed=3, sampling=DRAWN)
    assert len({tuple(ids) for ids in ids_of(found)}) == 4


def test_a_seeded_prompt_gives_one_text_alone_and_in_any_batch():
    temperatures, seeds = [0.9, 0.0, 0.9, 1.3], [11, 12, 2**32 - 1, 0]
    ask = tabled().generate
    together = ask(
        IDS, max_new_tokens=12, seed=seeds, sampling=Sampling(temperature=temperatures)
    )
    backwards = ask(
        IDS[::-1],
        max_new_tokens=12,
        seed=seeds[::-1],
        sampling=Sampling(temperature=temperatures[::-1]),
    )
    assert ids_of(together) == ids_of(backwards)[::-1]
    for i in (0, 2, 3):
        sampling = Sampling(temperature=temperatures[i])
        alone = ask(IDS[i], max_new_tokens=12, seed=seeds[i], sampling=sampling)
        assert ids_of(alone) == [together[i].token_ids]


def test_batches_and_places_do_not_change_a_request():
    options = {"max_new_tokens": 6, "seed": 5, "sampling": DRAWN}
    whole = tabled().generate(IDS, **options)
    plan = tabled().plan(IDS[1:], indices=[1, 2, 3], **options)
    for rounds_per_look, batch_size in ((None, 1), (2, 3)):
        pieces = tabled().run(
            plan, batch_size=batch_size, rounds_per_look=rounds_per_look
        )
        results = {piece.index: piece.result for piece in pieces if piece.result}
        assert [results[i] for i in (1, 2, 3)] == whole[1:]


def test_the_drafts_own_settings_change_acceptance_and_never_a_coupled_text():
    plain = tabled(NoDrafter()).generate(IDS, sampling=DRAWN)
    same, other = (
        tabled(rule="coupled").generate(IDS, sampling=DRAWN, draft_sampling=own)
        for own in (DRAWN, Sampling(temperature=9.0))
    )
    assert ids_of(plain) == ids_of(same) == ids_of(other)
    assert sum(r.num_accepted for r in other) < sum(r.num_accepted for r in same)


# Ends

TEXT = "the cat sat on the mat"


@pytest.mark.parametrize("rounds_per_look", [1, 2, 5, 64])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (" sat", "the cat"),
        ("e c", "th"),  # ends inside a token
        ("at s", "the c"),  # over tokens and over two blocks of three
        (["xyz", "mat", " m"], "the cat sat on the"),
        (["he cat sat", "cat"], "the "),  # the one that is complete first
        (["zthe"], TEXT + "."),  # prompt and new text do not join
    ],
)
def test_stop_strings_are_found_wherever_a_block_ends(stop, text, rounds_per_look):
    # Drafts are wrong at every third token, and the prompt ends in "z".
    new = [*tokens_of(TEXT + "."), EOS]
    drafted = [7 if i % 3 == 2 else token for i, token in enumerate(new)]
    decoder = scripted(new, drafted)
    prompt = [20, 21, *tokens_of("z")]
    plan = decoder.plan([prompt, [1, 2, 3]], stop=stop)
    result, other = look_at(decoder, plan, rounds_per_look)
    assert result.text == other.text == text
    if text == TEXT + ".":
        assert result.finish_reason == "eos" and result.token_ids == new
        return
    strings = [stop] if isinstance(stop, str) else stop
    whole = [make_tokenizer().decode(new[:n]) for n in range(len(new))]
    first = min(n for n, t in enumerate(whole) if any(s in t for s in strings))
    assert result.finish_reason == "stop"
    assert result.token_ids == new[:first]
    # Rounds take three tokens: two accepted, one corrected.
    full, left = divmod(first, 3)
    assert result.rounds == full + (left > 0)
    assert result.num_accepted == 2 * full + left
    assert result.num_drafted == 4 * result.rounds
    assert result.acceptance_histogram[2] == full + (left == 2)
    assert result.origins == (["accepted"] * 2 + ["corrected"]) * full + (
        ["accepted"] * left
    )


def test_counts_of_whole_texts_are_the_same_with_and_without_looks():
    new = [*tokens_of(TEXT), EOS]
    decoder = scripted(new, [7 if i % 3 == 2 else t for i, t in enumerate(new)])
    plan = decoder.plan([PROMPT], max_new_tokens=30)
    whole = look_at(decoder, plan, None)
    for rounds_per_look in (1, 2, 64):
        assert look_at(decoder, plan, rounds_per_look) == whole


def test_the_order_of_ends_at_one_token_is_eos_stop_length():
    new = tokens_of("the cat")
    decoder = scripted(new)
    budget = {"max_new_tokens": len(new)}
    [result] = decoder.generate([PROMPT], **budget)
    assert (result.finish_reason, result.text) == ("length", "the cat")
    [result] = decoder.generate([PROMPT], stop="t", **budget)
    assert (result.finish_reason, result.text) == ("stop", "")
    [result] = decoder.generate([PROMPT], stop="cat", **budget)
    assert (result.finish_reason, result.token_ids) == ("stop", new)
    [result] = decoder.generate([PROMPT], stop="cat", eos_token_id=new[-1], **budget)
    assert (result.finish_reason, result.token_ids) == ("eos", new)
    assert result.text == make_tokenizer().decode(new[:-1])


def test_eos_ids_are_the_checkpoints_unless_a_call_says_otherwise():
    new = [30, EOS, 31, 32, 33]
    decoder = scripted(new)
    ends = {
        None: new[:2],
        31: new[:3],
        (33, 31): new[:3],
        (): new,
        (EOS, 30): new[:1],
    }
    for eos_token_id, tokens in ends.items():
        [result] = decoder.generate(
            [PROMPT], eos_token_id=eos_token_id, max_new_tokens=len(new)
        )
        assert result.token_ids == tokens
        assert (result.finish_reason == "eos") == (tokens != new)


def test_no_eos_comes_before_min_new_tokens():
    decoder = scripted([30, EOS, 31, EOS, 33])
    [early] = decoder.generate([PROMPT], min_new_tokens=1)
    assert early.token_ids == [30, EOS]
    [late] = decoder.generate([PROMPT], min_new_tokens=3)
    assert late.num_tokens == 4 and late.token_ids[-1] == EOS
    assert late.token_ids[1] != EOS


def test_numbers_that_are_not_finite_end_one_row_and_come_with_all_results():
    new = [30, 31, 32, -1, 33, EOS]
    decoder = scripted(new)
    with pytest.raises(FloatingPointError, match=r"prompt 1 at position 6") as caught:
        # Row 0 is done before that place, row 1 is not.
        decoder.generate([PROMPT, PROMPT], max_new_tokens=[3, 20])
    fine, broken = caught.value.results
    assert isinstance(caught.value, NonFiniteLogitsError)
    assert (fine.finish_reason, fine.token_ids) == ("length", new[:3])
    assert (broken.finish_reason, broken.token_ids) == ("error", new[:3])
    assert broken.error_position == 6 and fine.error_position is None
    with pytest.raises(FloatingPointError):
        list(decoder.stream(PROMPT))
    [result] = decoder.generate([PROMPT], stop=make_tokenizer().decode([31]))
    assert result.finish_reason == "stop"


# Characters

HARD = "né 日本語テキスト 🤖👩‍🚀 ½ tail"


@pytest.mark.parametrize("rounds_per_look", [1, 2, 64])
def test_streamed_pieces_are_whole_characters_and_join_to_the_text(rounds_per_look):
    new = [*tokens_of(HARD), EOS]
    decoder = scripted(new, num_draft_tokens=1)
    [result] = decoder.generate([PROMPT])
    assert result.text == HARD
    pieces = list(decoder.stream(PROMPT, rounds_per_look=rounds_per_look))
    assert "".join(pieces) == HARD
    assert len(pieces) > 10 and all(pieces)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_that_stays_incomplete_is_shown_at_the_end():
    new = tokens_of("ok 🤖")[:-1]
    decoder = scripted(new, num_draft_tokens=1)
    pieces = list(decoder.stream(PROMPT, max_new_tokens=len(new)))
    [result] = decoder.generate([PROMPT], max_new_tokens=len(new))
    assert "".join(pieces) == result.text == "ok \N{REPLACEMENT CHARACTER}"
    assert "".join(pieces[:-1]) == "ok "


def test_a_stop_string_may_be_any_character_and_is_never_shown_in_part():
    new = [*tokens_of("say 日本語 now"), EOS]
    decoder = scripted(new, num_draft_tokens=1)
    for rounds_per_look in (1, 3):
        pieces = list(
            decoder.stream(PROMPT, stop=["語 n"], rounds_per_look=rounds_per_look)
        )
        assert "".join(pieces) == "say 日本"


def test_following_long_texts_agrees_with_decoding_them_whole():
    text = HARD * 12
    follower = TextFollower(make_tokenizer())
    pieces = []
    for token in tokens_of(text):
        follower.push(token)
        pieces.append(follower.take())
    assert "".join(pieces) + follower.finish() == text == follower.text


# Chat


def test_a_chat_has_one_bos_whatever_the_tokenizer_adds():
    messages = [{"role": "user", "content": "hi"}]
    for add_bos in (False, True):
        decoder = SpeculativeDecoder(
            ScriptModel(),
            Params(script([EOS], 0)),
            make_tokenizer(add_bos),
            bos_token_id=BOS,
        )
        for chat in ("hi", messages):
            tokens = decoder.chat_prompt(chat)
            assert tokens.count(BOS) == 1 and tokens[0] == BOS
            text = make_tokenizer().decode(tokens, skip_special_tokens=True)
            assert text == "[user] hi\n[assistant] "
        assert decoder.encode("<s>hi") == decoder.encode([BOS, *tokens_of("hi")])
        assert decoder.encode("") == [BOS]
    assert decoder.encode("hi")[0] == BOS


# Programs


@pytest.fixture
def compiled():
    """Counts programs as they are compiled."""
    count = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            count.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield count
    jax.monitoring.unregister_event_duration_listener(listen)


def test_twenty_lengths_and_settings_compile_once_a_bucket(compiled):
    model = ScriptModel(vocab_size=VOCAB_SIZE + 1)  # nobody else's program
    decoder = SpeculativeDecoder(
        model, Params(script([30] * 400, 0)), None, NgramDrafter(2)
    )

    def ask(i, length):
        decoder.generate(
            [[9] * length] * (3 + i % 2),
            max_new_tokens=[3 + i] * (3 + i % 2),
            sampling=Sampling(temperature=0.5 + i / 40, min_p=0.1 + i / 100),
            seed=i,
            eos_token_id=tuple(range(40, 40 + i % 4)),
        )

    ask(0, 10)
    compiled.clear()
    for i in range(20):
        ask(i, 1 + 5 * i)
    assert compiled == []
    ask(1, 200)
    assert len(compiled) == 2  # reading prompts and running rounds
    for i in range(3):
        ask(i, 130 + 31 * i)
    assert len(compiled) == 2


def test_compiling_ahead_leaves_nothing_to_compile(compiled):
    model = ScriptModel(vocab_size=VOCAB_SIZE + 2)
    decoder = SpeculativeDecoder(model, Params(script([30] * 9, 0)), None)
    plan = decoder.plan([[9], [9, 9], [8] * 200], max_new_tokens=5)
    decoder.compile(plan, batch_size=2)
    assert len(compiled) >= 4
    compiled.clear()
    assert len(list(decoder.run(plan, batch_size=2, rounds_per_look=None))) == 3
    assert compiled == []


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens is 0; .* from 1"),
        ({"max_new_tokens": [1, 2]}, r"2 values for 1 prompts"),
        ({"min_new_tokens": -1}, r"min_new_tokens is -1"),
        ({"seed": -1}, r"seed is -1"),
        ({"seed": 2**32}, r"seed is 4294967296"),
        ({"eos_token_id": VOCAB_SIZE}, r"ids of this model are 0 to 319"),
        ({"stop": ""}, r"stop has ''"),
        ({"stop": ["a", ""]}, r"stop has ''"),
        ({"stop": "</s>"}, r"special token.*eos_token_id=1"),
        ({"max_new_tokens": 510}, r"3 tokens .* 510 needs 513 .* model has 512"),
        ({"prompts": [[5, VOCAB_SIZE]]}, r"token 320.*0 to 319"),
        ({"prompts": [[-1]]}, r"token -1"),
        ({"prompts": [""]}, r"empty .* no BOS"),
        ({"prompts": [[]]}, r"empty .* no BOS"),
        ({"sampling": Sampling(temperature=[1.0, 1.0])}, r"temperature has 2 values"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(options, message):
    decoder = scripted([30], max_positions=512)
    options = {"prompts": [PROMPT]} | options
    with pytest.raises(ValueError, match=message):
        decoder.generate(**options)


def test_a_misspelt_option_is_an_error():
    with pytest.raises(TypeError, match="temprature"):
        scripted([30]).generate([PROMPT], temprature=1.0)


TWO = {"draft": ["pystd-draft", "ngram"], "compose": "staged"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": -1}, r"num_draft_tokens is -1"),
        ({"rule": "rejecton"}, r"did you mean 'rejection'"),
        ({"mesh": "rows=2"}, r"'rows' = '2' is no axis"),
        ({"draft": ["ngram", "ngram"]}, r"2 drafts were given; say how"),
        ({"draft": []}, r"0 drafts were given"),
        ({"draft": ["ngram", "none"], "compose": "staged"}, r"'none' is among"),
        ({"draft": "ngram", "compose": "staged"}, r"takes at least 2"),
        ({"draft": "ngram", "compose": "stagd"}, r"did you mean 'staged'"),
        (TWO | {"num_draft_tokens": 1}, r"num_draft_tokens is 1 for 2 staged"),
        (TWO | {"num_draft_tokens": [2, 1, 1]}, r"3 numbers for 2 drafts"),
        (TWO | {"num_draft_tokens": [2, 0]}, r"num_draft_tokens is 0"),
        (TWO | {"draft_num_layers": 2}, r"as pystd-draft:layers=2"),
        ({"draft": "ngram:layers=2"}, r"'ngram' has no option 'layers'"),
        ({"draft": "pystd-draft:depth=2"}, r"no option 'depth'; it takes layers"),
        ({"draft": "ngram", "draft_num_layers": 1}, r"draft_num_layers is 1"),
        ({"draft": 7}, r"draft is 7"),
    ],
)
def test_a_decoder_that_cannot_be_is_refused_before_loading(options, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder.from_pretrained("no-such-checkpoint", **options)


def test_a_missing_checkpoint_is_named():
    with pytest.raises(FileNotFoundError, match="no-such-checkpoint"):
        SpeculativeDecoder.from_pretrained("no-such-checkpoint")


def test_a_draft_whose_ids_mean_other_text_is_refused(folder, tmp_path):
    other = save_checkpoint(
        tmp_path / "other", num_layers=1, tokenizer=make_tokenizer(swapped=True)
    )
    with pytest.raises(ValueError, match=r"id \d+ is '[ab]' in the draft and '[ab]'"):
        SpeculativeDecoder.from_pretrained(folder, other)


def test_what_drafts_follows_from_the_arguments(folder):
    make = SpeculativeDecoder.from_pretrained
    assert make(folder).drafter == make(folder, "none").drafter == NoDrafter()
    assert make(folder, "ngram", num_draft_tokens=0).drafter == NoDrafter()
    assert make(folder, "ngram", num_draft_tokens=2).drafter == NgramDrafter(2)
    own = NgramDrafter(3, max_ngram=2)
    assert make(folder, own, rule="coupled").drafter is own
    itself = make(folder, folder)
    assert itself.engine.params.draft is itself.engine.params.target
    assert make(folder, folder, draft_num_layers=1).drafter.model.config.num_layers == 1
