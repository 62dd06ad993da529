"""GPT-2: learned positions, layer norms, biases, weights stored [in, out]."""

from specdec_jax.checkpoints.family import Family, Row
from specdec_jax.checkpoints.llama import ACTIVATIONS
from specdec_jax.checkpoints.settings import Settings
from specdec_jax.networks import DecoderConfig


def _layer(theirs: str, *ours: str) -> tuple[Row, Row]:
    """Rows of one (possibly fused) linear map of a layer: weight and bias."""
    theirs = f"transformer.h.{{i}}.{theirs}"
    paths = tuple(f"layers_{{i}}/{path}" for path in ours)
    return (
        Row(f"{theirs}.weight", tuple(f"{path}/kernel" for path in paths)),
        Row(f"{theirs}.bias", tuple(f"{path}/bias" for path in paths)),
    )


def _norm(theirs: str, ours: str) -> tuple[Row, Row]:
    theirs = f"transformer.{theirs}"
    return (
        Row(f"{theirs}.weight", (f"{ours}/scale",)),
        Row(f"{theirs}.bias", (f"{ours}/bias",)),
    )


ROWS = (
    Row("transformer.wte.weight", ("embed_tokens/embedding",)),
    Row("transformer.wpe.weight", ("embed_positions/embedding",)),
    *_norm("h.{i}.ln_1", "layers_{i}/input_norm"),
    *_layer("attn.c_attn", "self_attn/q_proj", "self_attn/k_proj", "self_attn/v_proj"),
    *_layer("attn.c_proj", "self_attn/o_proj"),
    *_norm("h.{i}.ln_2", "layers_{i}/post_attention_norm"),
    *_layer("mlp.c_fc", "mlp/up_proj"),
    *_layer("mlp.c_proj", "mlp/down_proj"),
    *_norm("ln_f", "norm"),
    Row("lm_head.weight", ("lm_head/kernel",), transpose=True),
)


def _config(settings: Settings, tied: bool, context: int | None) -> DecoderConfig:
    width, heads = settings.need("n_embd"), settings.need("n_head")
    settings.fixed("scale_attn_weights", True)
    settings.fixed("scale_attn_by_inverse_layer_idx", False)
    settings.fixed("add_cross_attention", False)
    return DecoderConfig(
        vocab_size=settings.need("vocab_size"),
        width=width,
        num_layers=settings.need("n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        mlp_width=settings.take("n_inner", 4 * width),
        max_positions=settings.need("n_positions"),
        activation=settings.choice("activation_function", ACTIVATIONS, "gelu_new"),
        gated=False,
        norm="layer",
        norm_eps=float(settings.take("layer_norm_epsilon", 1e-5)),
        tied=tied,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


GPT2 = Family(
    _config,
    ROWS,
    # The order of the products only, and heads of classifiers.
    harmless=frozenset(
        """
        reorder_and_upcast_attn summary_activation summary_first_dropout
        summary_proj_to_labels summary_type summary_use_proj
        """.split()
    ),
    prefix="transformer.",
    tied=True,
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
)
