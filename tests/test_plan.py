"""The TPU plan: traffic of known programs, and what is refused without compiling."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest

from specdec_jax.checkpoints.load import model_from_config
from specdec_jax.cli import main
from specdec_jax.networks import Decoder
from specdec_jax.plan import _summary, plan
from specdec_jax.plan.chips import CHIPS, find_chip
from specdec_jax.plan.hlo import arrays, parse
from specdec_jax.plan.traffic import Walk

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

PROGRAM = """HloModule hand_written, is_scheduled=true

%fused_slice (p0: bf16[64,128], p1: s32[]) -> bf16[1,128] {
  %p0 = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %slice.1 = bf16[1,128]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,128}
}

%fused_update (p0.1: bf16[64,128], p1.1: bf16[1,128], p2: s32[]) -> bf16[64,128] {
  %p0.1 = bf16[64,128]{1,0} parameter(0)
  %p1.1 = bf16[1,128]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %put = bf16[64,128]{1,0} dynamic-update-slice(%p0.1, %p1.1, %p2, %zero.1)
  ROOT %same = bf16[64,128]{1,0} bitcast(%put)
}

%body (arg: (s32[], bf16[64,128], bf16[1,128])) -> (s32[], bf16[64,128], bf16[1,128]) {
  %arg = (s32[], bf16[64,128]{1,0}, bf16[1,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %buffer = bf16[64,128]{1,0} get-tuple-element(%arg), index=1
  %row = bf16[1,128]{1,0} get-tuple-element(%arg), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %read = bf16[1,128]{1,0} fusion(%buffer, %i), kind=kLoop, calls=%fused_slice
  %written = bf16[64,128]{1,0} fusion(%buffer, %read, %i), kind=kLoop, calls=%fused_update
  ROOT %out = (s32[], bf16[64,128]{1,0}, bf16[1,128]{1,0}) tuple(%next, %written, %row)
}

%condition (arg.1: (s32[], bf16[64,128], bf16[1,128])) -> pred[] {
  %arg.1 = (s32[], bf16[64,128]{1,0}, bf16[1,128]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %limit = s32[] constant(10)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (x: bf16[64,128], y: bf16[64,128]) -> bf16[64,128] {
  %x = bf16[64,128]{1,0} parameter(0)
  %y = bf16[64,128]{0,1} parameter(1)
  %turned = bf16[64,128]{1,0} copy(%y)
  %fetched = (bf16[64,128]{1,0:S(1)}, bf16[64,128]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %there = bf16[64,128]{1,0:S(1)} copy-done(%fetched)
  %sum = bf16[64,128]{1,0} add(%there, %turned)
  %all = bf16[64,128]{1,0} all-reduce(%sum), replica_groups={{0,1}}, to_apply=%add
  %row.1 = bf16[1,128]{1,0} slice(%all), slice={[0:1], [0:128]}
  %start = s32[] constant(0)
  %carry = (s32[], bf16[64,128]{1,0}, bf16[1,128]{1,0}) tuple(%start, %all, %row.1)
  %loop = (s32[], bf16[64,128]{1,0}, bf16[1,128]{1,0}) while(%carry), condition=%condition, body=%body, metadata={op_name="jit(f)/cached/while"}
  ROOT %result = bf16[64,128]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501
MATRIX, ROW, SCALAR = 64 * 128 * 2, 128 * 2, 4


def test_traffic_of_a_hand_written_program():
    module = parse(PROGRAM)
    walk = Walk(module)
    # add(i, 1); a row read and given; a row read and put, with the index each time.
    body = 3 * SCALAR + (ROW + SCALAR + ROW) + (ROW + SCALAR + ROW)
    assert walk.computation("body").num_bytes == body
    total = walk.computation(module.entry)
    copy, fetch, add, reduce = 2 * MATRIX, MATRIX, 2 * MATRIX, 2 * MATRIX
    assert total.num_bytes == copy + fetch + add + reduce + 2 * ROW + 10 * body
    assert dict(total.collectives) == {"all-reduce": MATRIX}
    assert dict(total.moved) == {"copy bf16[64,128]": MATRIX}
    lines = module.computations[module.entry].values()
    [loop] = [one for one in lines if one.opcode == "while"]
    assert walk.trips(loop) == 10
    longer = Walk(module, lambda one: 25 if "cached" in one.op_name else None)
    found = longer.computation(module.entry).num_bytes
    assert found == total.num_bytes + 15 * body


def test_tiles_pad_arrays():
    [one] = arrays("bf16[3,64]{1,0:T(8,128)(2,1)}")
    assert (one.size, one.padded, one.num_bytes) == (192, 1024, 2048)
    [turned] = arrays("bf16[3,64]{0,1:T(8,128)(2,1)}")
    assert turned.padded == 64 * 128
    assert not arrays("f32[8]{0:T(128)S(1)}")[0].in_memory
    with pytest.raises(ValueError, match="no compiled program"):
        parse("def f():\n    pass\n")


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: x @ w, [(64, 256), (256, 128)]),
        (lambda x, w: jnp.tanh(x * 2 + w), [(512, 256), (512, 256)]),
        (lambda x: (x - x.mean(axis=1, keepdims=True)).sum(axis=0), [(256, 512)]),
        (lambda x: jax.lax.dynamic_slice(x, (x[0, 0].astype(int), 0), (4, 256)).T * 2,
         [(512, 256)]),
    ],
)  # fmt: skip
def test_traffic_agrees_with_the_compiler_where_there_is_no_loop(function, shapes):
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(function).lower(*inputs).compile()
    module = parse(compiled.as_text())
    found = Walk(module).computation(module.entry).num_bytes
    theirs = compiled.cost_analysis()["bytes accessed"]
    assert found == pytest.approx(theirs, rel=0.1)


def test_predictions_follow_from_the_counts():
    pass_ = {"bytes_accessed": 819e6, "collectives": {}, "moved": {}}
    wide = {"bytes_accessed": 819e6 * 1.2, "collectives": {"all-reduce": 2e8}}
    draft = {"bytes_accessed": 819e5 * 4, "collectives": {}, "moved": {}}
    found = {
        "weights": 6e8,
        "draft_weights": 5e7,
        "cache": 1e8,
        "draft_cache": 1e7,
        "logits": 1e6,
        "undivided": [],
        "programs": {
            "rounds": {"arguments": 8e8, "outputs": 0, "temporaries": 4e7, "code": 0},
            "prefill": {
                "arguments": 7e8,
                "outputs": 1e8,
                "temporaries": 9e7,
                "code": 0,
            },
        },
        "round": {
            "round": {"bytes_accessed": 2e9, "collectives": {"all-reduce": 5}}
            | {"moved": {}},
            "pass_1": pass_,
            "pass_5": wide | {"moved": {}},
            "drafting": draft,
        },
    }
    request = {
        "num_draft_tokens": 4,
        "batch_size": 8,
        "context_length": 1024,
        "dtype": "bfloat16",
    }
    told = _summary(found, request, CHIPS["v5e"], alpha=0.8)
    assert told["fits"] and told["hbm_bytes"]["hungriest_program"] == "prefill"
    assert told["hbm_bytes"]["total"] == 8.9e8
    assert told["largest"]["batch_size"] == int((16e9 - 6.5e8) // (2.4e8 / 8))
    ideal = 6e8 + 1e8 + 5 * 1e6 + 4 * (5e7 + 1e7 + 1e6)
    assert told["round"]["bytes_ratio"] == pytest.approx(2e9 / ideal)
    assert told["round"]["collective_bytes"] == 5
    guess = told["predicted"]
    assert guess["cost_ratio"] == pytest.approx(10)
    assert guess["verify_factor"] == pytest.approx(1.2 + 1)  # 1 ms over the links
    tight = CHIPS["v5e"]._replace(hbm_bytes=7e8)
    assert not _summary(found, request, tight, alpha=0.8)["fits"]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_a_config_alone_makes_a_model(config):
    model = model_from_config(config, "bfloat16")
    assert isinstance(model, Decoder) and not model.config.tied
    assert model.vocab_size == 1024


def test_what_cannot_be_planned_is_refused(config, tmp_path, capsys, monkeypatch):
    ask = ["plan", "--target-config", str(config), "--topology", "v5e:2x4"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cases = [
        (ask, "pip install 'specdec-jax[tpu-plan]'"),
        ([*ask, "--batch", "0"], "batch_size is 0"),
        ([*ask, "--alpha", "1.5"], "alpha is 1.5"),
        ([*ask[:-1], "v9:2x4"], "there are no figures for 'v9'"),
        ([*ask, "--draft-config", str(tmp_path / "none.json")], "no config file"),
    ]
    for arguments, message in cases:
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    config.write_text("[1, 2")
    assert main(ask) == 2 and "is not JSON" in capsys.readouterr().err
    config.write_text('{"model_type": "mamba"}')
    assert main(ask) == 2 and "'mamba'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="known are v5e, v5p, v6e"):
        find_chip("h100")


needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


@needs_compiler
def test_a_plan_for_a_slice(config):
    # Too large to stay on the chips as a whole.
    width, mlp, vocab = 2048, 8192, 32_768
    wide = {"hidden_size": width, "intermediate_size": mlp, "vocab_size": vocab}
    config.write_text(json.dumps(CONFIG | wide))
    found = plan(
        config, config, topology="v5e:2x2", mesh="data=2,model=2", batch_size=4,
        context_length=512,
    )  # fmt: skip
    assert found["fits"] and found["undivided"] == []
    size = 2 * (vocab * width * 2 + 2 * (width * width * 3 + width * mlp * 3)) // 2
    assert found["hbm_bytes"]["weights"] == pytest.approx(2 * size, rel=0.02)
    round_ = found["round"]
    assert round_["collectives"]["all-reduce"] > 0
    # A table of embeddings is not read, and 128 MiB may stay on a chip: five forwards.
    unread = 5 * (vocab * width + 2**27)
    assert round_["ideal_bytes"] - unread < round_["bytes_accessed"]
    assert round_["bytes_ratio"] < 4
    # Nothing of a weight's or a buffer's size is only copied, in rounds or before them.
    smallest = 2 * width * 2 * (width // 4) // 2
    assert all(size < smallest / 4 for size in round_["moved"].values())
    held = found["hbm_bytes"]["weights"] + found["hbm_bytes"]["cache"]
    for program in found["programs"].values():
        assert program["temporaries"] <= 0.1 * held
    assert found["predicted"]["verify_factor"] >= 1


@needs_compiler
@pytest.mark.parametrize(
    ("topology", "mesh", "message"),
    [
        ("v5e:3x3", "model=1", "does not exist"),
        ("v5e:2y4", "model=1", "does not exist"),
        ("v5e:2x4", "model=16", "needs 16 devices"),
        ("v5e:2x2", "data=3", "needs 3 devices and there are 4"),
        ("v5e:4x4", "data=16", "cannot be split over data=16"),
    ],
)
def test_slices_and_meshes_that_cannot_be(config, topology, mesh, message):
    with pytest.raises(ValueError, match=message):
        plan(config, topology=topology, mesh=mesh, batch_size=8)
