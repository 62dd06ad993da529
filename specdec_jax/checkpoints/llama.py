"""Llama and the families that differ from it by options: Mistral, Qwen2, Qwen3.

SmolLM2 and the other Llama-shaped checkpoints name themselves `llama`.
"""

from specdec_jax.checkpoints.family import Family, Row
from specdec_jax.checkpoints.rope import rotary
from specdec_jax.checkpoints.settings import Settings
from specdec_jax.networks import DecoderConfig

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def _layer(theirs: str, ours: str) -> tuple[Row, Row]:
    """Rows of one linear map of a layer: weight and bias."""
    theirs, ours = f"model.layers.{{i}}.{theirs}", f"layers_{{i}}/{ours}"
    return (
        Row(f"{theirs}.weight", (f"{ours}/kernel",), transpose=True),
        Row(f"{theirs}.bias", (f"{ours}/bias",)),
    )


def _norm(theirs: str, ours: str) -> Row:
    return Row(f"model.layers.{{i}}.{theirs}.weight", (f"layers_{{i}}/{ours}/scale",))


ROWS = (
    Row("model.embed_tokens.weight", ("embed_tokens/embedding",)),
    _norm("input_layernorm", "input_norm"),
    *_layer("self_attn.q_proj", "self_attn/q_proj"),
    *_layer("self_attn.k_proj", "self_attn/k_proj"),
    *_layer("self_attn.v_proj", "self_attn/v_proj"),
    *_layer("self_attn.o_proj", "self_attn/o_proj"),
    _norm("self_attn.q_norm", "self_attn/q_norm"),
    _norm("self_attn.k_norm", "self_attn/k_norm"),
    _norm("post_attention_layernorm", "post_attention_norm"),
    *_layer("mlp.gate_proj", "mlp/gate_proj"),
    *_layer("mlp.up_proj", "mlp/up_proj"),
    *_layer("mlp.down_proj", "mlp/down_proj"),
    Row("model.norm.weight", ("norm/scale",)),
    Row("lm_head.weight", ("lm_head/kernel",), transpose=True),
)

IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
"""Old exporters stored the rotary frequencies, which follow from the config."""


def _config(
    settings: Settings, tied: bool, context_length: int | None, **options: object
) -> DecoderConfig:
    """Reads what all of them share; `options` are the family's own."""
    width, heads = settings.need("hidden_size"), settings.need("num_attention_heads")
    head_dim = settings.take("head_dim", width // heads)
    max_positions = settings.need("max_position_embeddings")
    rope, limit = rotary(settings, head_dim, max_positions, context_length)
    settings.fixed("rope_interleaved", False)
    settings.fixed("use_mrope", False)
    shared = dict(
        vocab_size=settings.need("vocab_size"),
        width=width,
        num_layers=settings.need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=settings.take("num_key_value_heads", heads),
        head_dim=head_dim,
        mlp_width=settings.need("intermediate_size"),
        max_positions=limit,
        activation=settings.choice("hidden_act", ACTIVATIONS, "silu"),
        norm_eps=float(settings.take("rms_norm_eps", 1e-6)),
        rotary=rope,
        tied=tied,
    )
    return DecoderConfig(**(shared | options))  # type: ignore[arg-type]


def _llama(settings: Settings, tied: bool, context: int | None) -> DecoderConfig:
    bias = settings.take("attention_bias", False)
    return _config(
        settings,
        tied,
        context,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=settings.take("mlp_bias", False),
    )


def _mistral(settings: Settings, tied: bool, context: int | None) -> DecoderConfig:
    # Null means no window; its class has a default for a config that says nothing.
    window = settings.nullable("sliding_window", 4096)
    layers = settings.need("num_hidden_layers")
    return _config(settings, tied, context, windows=(window,) * layers)


def _qwen2(settings: Settings, tied: bool, context: int | None) -> DecoderConfig:
    windows = _qwen_windows(settings)
    return _config(settings, tied, context, qkv_bias=True, windows=windows)


def _qwen3(settings: Settings, tied: bool, context: int | None) -> DecoderConfig:
    bias = settings.take("attention_bias", False)
    return _config(
        settings,
        tied,
        context,
        # Its class has a default of 128 that the config may leave unsaid.
        head_dim=settings.take("head_dim", 128),
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        windows=_qwen_windows(settings),
    )


def _qwen_windows(settings: Settings) -> tuple[int | None, ...]:
    """A window counts only if it is switched on, and then from a layer on.

    Newer configs also list the kind of each layer; the list then decides.
    """
    size = settings.nullable("sliding_window", 4096)
    size = size if settings.take("use_sliding_window", False) else None
    first = settings.take("max_window_layers", 28)
    layers = settings.need("num_hidden_layers")
    kinds = settings.take("layer_types")
    if kinds is None:
        return tuple(size if i >= first else None for i in range(layers))
    known = {"full_attention": None, "sliding_attention": size}
    unknown = set(kinds) - set(known)
    if unknown or len(kinds) != layers:
        raise ValueError(
            f"{settings.name}: layer_types must list full_attention or "
            f"sliding_attention for each of {layers} layers; it has {kinds}"
        )
    if "sliding_attention" in kinds and size is None:
        raise ValueError(
            f"{settings.name}: layer_types has sliding_attention, but no "
            "sliding_window is switched on"
        )
    return tuple(known[kind] for kind in kinds)


LLAMA = Family(_llama, ROWS, ignored=IGNORED)
MISTRAL = Family(_mistral, ROWS, ignored=IGNORED)
QWEN2 = Family(_qwen2, ROWS, ignored=IGNORED)
QWEN3 = Family(_qwen3, ROWS, ignored=IGNORED)
