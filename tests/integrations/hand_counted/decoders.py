"""Language models: the blocks of each model type."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec

from pipeloom.spec.architecture import (
    AttentionMixer,
    ExpertsMixer,
    LanguageHeadLayer,
    LatentAttentionMixer,
    Layer,
    Mamba2Mixer,
    Mixer,
    MLPMixer,
    ResidualLayer,
    TokenEmbeddingLayer,
)
from tests.integrations.hand_counted.fields import Fields

Blocks = Callable[[Fields], list[ResidualLayer]]
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_OLD_NAMES = {"attention": _FULL, "mamba": _LINEAR}


def language_model(fields: Fields, *, tied: bool, taken: Sequence[str] = ()) -> tuple[Layer, ...]:
    """Return embedding, blocks and head. Each of the first blocks takes one of the streams ``taken``."""
    hidden, words = fields.size("hidden_size"), fields.size("vocab_size")
    blocks = DECODERS[fields.kind](fields)
    for number, stream in enumerate(taken):
        blocks[number] = msgspec.structs.replace(blocks[number], takes=stream)
    return (TokenEmbeddingLayer(words, hidden), *counted(blocks), LanguageHeadLayer(hidden, words, tied))


def counted(blocks: Sequence[ResidualLayer]) -> tuple[ResidualLayer, ...]:
    """Merge equal consecutive layers into one entry with a count."""
    runs = [(layer, len(list(run))) for layer, run in itertools.groupby(blocks)]
    return tuple(msgspec.structs.replace(layer, count=count) for layer, count in runs)


def num_blocks(fields: Fields) -> int:
    """Return the number of blocks of a language model."""
    return fields.blocks("num_hidden_layers")


def _attention(
    fields: Fields,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    own_width: bool = True,
    norm_heads: bool = False,
    window: int | None = None,
) -> AttentionMixer:
    if own_width and fields.says("head_dim"):
        heads, width = fields.size("num_attention_heads"), fields.size("head_dim")
    else:
        heads, width = fields.heads("num_attention_heads", fields.size("hidden_size"))
    kv_heads = fields.size("num_key_value_heads", otherwise=heads)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    return AttentionMixer(
        heads=heads,
        kv_heads=kv_heads,
        head_width=width,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        norm_heads=norm_heads,
        window=window,
    )


def _biased(fields: Fields, *, norm_heads: bool = False, window: int | None = None) -> AttentionMixer:
    """Return attention whose four projections all have biases, or all have none."""
    bias = fields.flag("attention_bias")
    return _attention(fields, qkv_bias=bias, output_bias=bias, norm_heads=norm_heads, window=window)


def _mlp(fields: Fields, *, bias: bool = False) -> MLPMixer:
    return MLPMixer(fields.size("intermediate_size"), bias=bias)


def _window(fields: Fields) -> int | None:
    return None if fields.get("sliding_window") is None else fields.size("sliding_window")


def _windows(fields: Fields, default: Callable[[int], bool], *, switch: bool = True) -> list[int | None]:
    """Return the window of each block, from the config's ``layer_types`` or else from ``default``.

    If ``switch``, the config must enable windows by ``use_sliding_window``.
    """
    count = num_blocks(fields)
    window = None if switch and not fields.flag("use_sliding_window") else _window(fields)
    kinds = fields.words("layer_types", known=(_FULL, _SLIDING, *_OLD_NAMES), count=count)
    slides = [default(i) for i in range(count)] if kinds is None else [kind == _SLIDING for kind in kinds]
    return [window if each else None for each in slides]


def _layers(fields: Fields, mixers: Sequence[tuple[Mixer, ...]], *, post_norm: bool = False) -> list[ResidualLayer]:
    hidden = fields.size("hidden_size")
    return [ResidualLayer(hidden, each, post_norm=post_norm) for each in mixers]


def _llama(fields: Fields) -> list[ResidualLayer]:
    mixers = (_biased(fields), _mlp(fields, bias=fields.flag("mlp_bias")))
    return _layers(fields, [mixers] * num_blocks(fields))


def _mistral(fields: Fields) -> list[ResidualLayer]:
    return _layers(fields, [(_attention(fields, window=_window(fields)), _mlp(fields))] * num_blocks(fields))


def _last_windows(fields: Fields) -> list[int | None]:
    """Return Qwen's windows, which only the last blocks have."""
    first = fields.size("max_window_layers", least=0)
    return _windows(fields, lambda i: i >= first)


def _qwen2(fields: Fields, *, own_width: bool = True) -> list[ResidualLayer]:
    each = [_attention(fields, qkv_bias=True, own_width=own_width, window=window) for window in _last_windows(fields)]
    return _layers(fields, [(attention, _mlp(fields)) for attention in each])


def _qwen2_vl(fields: Fields) -> list[ResidualLayer]:
    return _qwen2(fields, own_width=False)


def _qwen3(fields: Fields) -> list[ResidualLayer]:
    each = [_biased(fields, norm_heads=True, window=window) for window in _last_windows(fields)]
    return _layers(fields, [(attention, _mlp(fields)) for attention in each])


def _qwen3_vl(fields: Fields) -> list[ResidualLayer]:
    return _layers(fields, [(_biased(fields, norm_heads=True), _mlp(fields))] * num_blocks(fields))


def _gemma(fields: Fields, *, norm_heads: bool, pattern: int) -> list[ResidualLayer]:
    if fields.flag("use_bidirectional_attention"):
        raise fields.refuse("use_bidirectional_attention", "is true", "only causal language models are read")
    windows = _windows(fields, lambda i: (i + 1) % pattern != 0, switch=False)
    each = [_biased(fields, norm_heads=norm_heads, window=window) for window in windows]
    return _layers(fields, [(attention, _mlp(fields)) for attention in each], post_norm=True)


def _gemma2(fields: Fields) -> list[ResidualLayer]:
    return _gemma(fields, norm_heads=False, pattern=2)


def _gemma3(fields: Fields) -> list[ResidualLayer]:
    pattern = fields.size("sliding_window_pattern", otherwise=6)
    return _gemma(fields, norm_heads=True, pattern=pattern)


def _mixtral(fields: Fields) -> list[ResidualLayer]:
    experts = ExpertsMixer(
        inner=fields.size("intermediate_size"),
        experts=fields.size("num_local_experts", "num_experts"),
        chosen=fields.size("num_experts_per_tok"),
    )
    return _layers(fields, [(_attention(fields, window=_window(fields)), experts)] * num_blocks(fields))


def _sparse(fields: Fields, *, shared: int = 0) -> list[Mixer]:
    """Return Qwen's MLP of each block: some are dense, some have experts."""
    experts = fields.size("num_experts", "num_local_experts", least=0)
    dense, step = fields.numbers("mlp_only_layers"), fields.size("decoder_sparse_step")
    out: list[Mixer] = []
    for i in range(num_blocks(fields)):
        if i in dense or not experts or (i + 1) % step:
            out.append(_mlp(fields))
            continue
        chosen, inner = fields.size("num_experts_per_tok"), fields.size("moe_intermediate_size")
        out.append(ExpertsMixer(inner, experts, chosen, shared_inner=shared, shared_gate=bool(shared)))
    return out


def _qwen2_moe(fields: Fields) -> list[ResidualLayer]:
    last = fields.size("max_window_layers", least=0)
    windows = _windows(fields, lambda i: (i + 1) % 2 != 0 and i < last)
    bias, shared = fields.flag("qkv_bias"), fields.size("shared_expert_intermediate_size")
    each = [_attention(fields, qkv_bias=bias, window=window) for window in windows]
    return _layers(fields, list(zip(each, _sparse(fields, shared=shared), strict=True)))


def _qwen3_moe(fields: Fields) -> list[ResidualLayer]:
    window = _window(fields) if fields.flag("use_sliding_window") else None
    attention = _biased(fields, norm_heads=True, window=window)
    return _layers(fields, [(attention, feed) for feed in _sparse(fields)])


def _qwen3_vl_moe(fields: Fields) -> list[ResidualLayer]:
    return _layers(fields, [(_biased(fields, norm_heads=True), feed) for feed in _sparse(fields)])


def _deepseek_v3(fields: Fields) -> list[ResidualLayer]:
    latent = LatentAttentionMixer(
        heads=fields.size("num_attention_heads"),
        kv_rank=fields.size("kv_lora_rank"),
        nope_width=fields.size("qk_nope_head_dim"),
        rope_width=fields.size("qk_rope_head_dim"),
        value_width=fields.size("v_head_dim"),
        query_rank=None if fields.get("q_lora_rank") is None else fields.size("q_lora_rank"),
        bias=fields.flag("attention_bias"),
    )
    inner = fields.size("moe_intermediate_size")
    experts = ExpertsMixer(
        inner=inner,
        experts=fields.size("n_routed_experts", "num_local_experts"),
        chosen=fields.size("num_experts_per_tok"),
        shared_inner=fields.size("n_shared_experts", least=0) * inner,
    )
    dense, count = fields.size("first_k_dense_replace", least=0), num_blocks(fields)
    return _layers(fields, [(latent, _mlp(fields) if i < dense else experts) for i in range(count)])


def _bamba(fields: Fields) -> list[ResidualLayer]:
    hidden, heads = fields.size("hidden_size"), fields.size("mamba_n_heads")
    width = fields.size("mamba_expand") * hidden // heads
    mamba = Mamba2Mixer(
        heads=heads,
        head_width=width if fields.get("mamba_d_head") == "auto" else fields.size("mamba_d_head"),
        state=fields.size("mamba_d_state"),
        groups=fields.size("mamba_n_groups"),
        kernel=fields.size("mamba_d_conv"),
        chunk=fields.size("mamba_chunk_size"),
        bias=fields.flag("mamba_proj_bias"),
        kernel_bias=fields.flag("mamba_conv_bias"),
    )
    if mamba.heads * mamba.head_width != fields.size("mamba_expand") * hidden:
        raise fields.refuse("mamba_d_head", f"{mamba.head_width} x {heads} heads are not mamba_expand x hidden_size")
    attending = fields.numbers("attn_layer_indices")
    feed = _mlp(fields, bias=fields.flag("mlp_bias"))
    count = num_blocks(fields)
    return _layers(fields, [(_biased(fields) if i in attending else mamba, feed) for i in range(count)])


_PATTERN = {"M": _LINEAR, "E": "moe", "*": _FULL, "-": "mlp"}


def _nemotron_kinds(fields: Fields) -> list[str]:
    kinds = fields.words("layers_block_type", "layer_types", known=(_LINEAR, _FULL, "moe", "mlp", *_OLD_NAMES))
    if kinds is not None:
        return [_OLD_NAMES.get(kind, kind) for kind in kinds]
    pattern = fields.get("hybrid_override_pattern") if "hybrid_override_pattern" in fields else "ME*-"
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_PATTERN):
        raise fields.refuse("hybrid_override_pattern", f"{pattern!r} is not of {' '.join(_PATTERN)}")
    return [_PATTERN[letter] for letter in pattern]


def _nemotron_h(fields: Fields) -> list[ResidualLayer]:
    bias = fields.flag("mlp_bias")
    own = "mamba_conv_bias" if "mamba_conv_bias" in fields else "use_conv_bias"
    mixers: dict[str, Callable[[], Mixer]] = {
        _LINEAR: lambda: Mamba2Mixer(
            heads=fields.size("mamba_num_heads"),
            head_width=fields.size("mamba_head_dim"),
            state=fields.size("ssm_state_size"),
            groups=fields.size("mamba_n_groups", "n_groups"),
            kernel=fields.size("mamba_d_conv", "conv_kernel"),
            chunk=fields.size("mamba_chunk_size", "chunk_size"),
            bias=fields.flag("use_bias"),
            kernel_bias=fields.flag(own),
        ),
        _FULL: lambda: msgspec.structs.replace(_attention(fields), rotary=False),
        "mlp": lambda: MLPMixer(fields.size("intermediate_size"), gated=False, bias=bias),
        "moe": lambda: ExpertsMixer(
            inner=fields.size("moe_intermediate_size"),
            experts=fields.size("n_routed_experts", "num_local_experts"),
            chosen=fields.size("num_experts_per_tok"),
            shared_inner=fields.size("moe_shared_expert_intermediate_size"),
            gated=False,
            latent=None if fields.get("moe_latent_size") is None else fields.size("moe_latent_size"),
            bias=bias,
        ),
    }
    return _layers(fields, [(mixers[kind](),) for kind in _nemotron_kinds(fields)])


DECODERS: dict[str, Blocks] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "bamba": _bamba,
    "nemotron_h": _nemotron_h,
    "qwen2_vl_text": _qwen2_vl,
    "qwen2_5_vl_text": _qwen2_vl,
    "qwen2_5_omni_text": _qwen2,
    "qwen3_vl_text": _qwen3_vl,
    "qwen3_vl_moe_text": _qwen3_vl_moe,
}
"""Functions that return the blocks, by model type."""
