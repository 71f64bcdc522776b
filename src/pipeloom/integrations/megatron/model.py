"""Read the architecture of a GPT model, or of a hybrid one, from Megatron's arguments.

A hybrid model has Mamba and attention layers. Its pattern has one letter per layer: ``M`` Mamba-2, ``*`` attention,
``-`` an MLP, ``E`` experts. ``|`` separates stages, and a part behind ``/`` is a multi-token prediction layer (Megatron
Core, ``hybrid_layer_allocation.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec

from pipeloom.errors import InputError
from pipeloom.integrations.megatron.arguments import Arguments
from pipeloom.spec.architecture import (
    AdapterLayer,
    Architecture,
    AttentionMixer,
    CrossAttentionMixer,
    ExpertsMixer,
    LanguageHeadLayer,
    LatentAttentionMixer,
    Layer,
    LinearStep,
    Mamba2Mixer,
    Mixer,
    MLPMixer,
    Norm,
    PredictionLayer,
    ResidualLayer,
    RoutedExperts,
    TokenEmbeddingLayer,
    TracedLayer,
    layer_mixers,
    num_experts,
    routed_experts,
)
from pipeloom.spec.model import MOST_LAYERS
from pipeloom.spec.traced import ProductOperator

VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary of each tensor-parallel device to a multiple of it."""
_MAMBA_CHUNK = 128
"""Tokens of a chunk of the scan (Megatron Core 0.16.1, ``MambaMixer``)."""
PATTERN = "hybrid-layer-pattern"
OLD_PATTERN = "hybrid-override-pattern"
"""Until Megatron Core 0.16; it separates no stages."""
_LETTER_OF: dict[type, str] = {Mamba2Mixer: "M", AttentionMixer: "*", MLPMixer: "-", ExpertsMixer: "E"}
_LETTERS = "".join(_LETTER_OF.values())
_STACKS = ("hybrid_stack_spec", "mamba_stack_spec")
"""Megatron's own stacks of hybrid layers, as ``--spec`` names them."""


@dataclass(frozen=True)
class Block:
    """One decoder layer. Its halves, which mix tokens or not, can be recomputed separately."""

    whole: ResidualLayer | TracedLayer

    @property
    def attention(self) -> ResidualLayer | None:
        """The half that mixes tokens, by attention or a state space; None without one, and if it was traced."""
        return self._half(mixes=True)

    @property
    def feed_forward(self) -> ResidualLayer | None:
        """The other half; None without one, and if it was traced."""
        return self._half(mixes=False)

    def _half(self, *, mixes: bool) -> ResidualLayer | None:
        if not isinstance(self.whole, ResidualLayer):
            return None
        found = tuple(each for each in self.whole.mixers if mixes != isinstance(each, MLPMixer | ExpertsMixer))
        return msgspec.structs.replace(self.whole, mixers=found) if found else None

    @property
    def routed(self) -> bool:
        """Whether the layer has experts."""
        return self.experts is not None

    @property
    def experts(self) -> RoutedExperts | None:
        """Its routed experts; None: it has none."""
        return routed_experts(self.whole)

    @property
    def latent(self) -> bool:
        """Whether its attention is multi-latent."""
        return any(isinstance(each, LatentAttentionMixer) for each in layer_mixers(self.whole))


@dataclass(frozen=True, slots=True)
class HybridPattern:
    """Layers of a hybrid model, as an ``argument`` gives them.

    ``stages`` has the letters of each stage; one if the pattern does not separate any. ``prediction`` has those of each
    of the ``predictions`` multi-token prediction layers.
    """

    argument: str
    stages: tuple[str, ...]
    prediction: str = ""
    predictions: int = 0

    @property
    def layers(self) -> str:
        """Letters of all layers, without those of multi-token prediction."""
        return "".join(self.stages)

    def divided(self, sizes: Sequence[int]) -> str:
        """Return the pattern with stages of these numbers of layers."""
        ends = accumulate(sizes)
        stages = [self.layers[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        return "|".join(stages) + f"/{self.prediction}" * self.predictions


@dataclass(frozen=True)
class GptModel:
    """Parts of a GPT model; ``predictors`` are the blocks of the multi-token prediction layers.

    ``encoder`` has the blocks of an encoder to whose output all ``blocks`` attend, as in T5; empty: there is none.
    ``towers`` describes a model whose modules before the last one, such as an encoder of images, feed the embedding;
    None: there are none. ``pattern`` has the kinds of the blocks of a hybrid model; None for other models.
    """

    embedding: TokenEmbeddingLayer
    blocks: tuple[Block, ...]
    predictors: tuple[Block, ...]
    head: LanguageHeadLayer
    encoder: tuple[Block, ...] = ()
    towers: Architecture | None = None
    pattern: HybridPattern | None = None

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer; 0: no layer has experts."""
        return max(num_experts(block.whole) for block in self.blocks)

    def with_encoder(self, layers: int, tokens: int) -> GptModel:
        """Return the model with an encoder of the same sizes, which reads ``tokens`` of each sample."""
        blocks = []
        for block in self.blocks:
            own, *rest = layer_mixers(block.whole)
            assert isinstance(own, AttentionMixer)
            across = CrossAttentionMixer(own.heads, own.head_width, tokens, self.head.hidden, own.qkv_bias)
            blocks.append(Block(msgspec.structs.replace(block.whole, mixers=(own, across, *rest))))
        return replace(self, blocks=tuple(blocks), encoder=(_bidirectional(self.blocks[0]),) * layers)

    def bidirectional(self) -> GptModel:
        """Return the model with attention to all tokens, as an encoder has it."""
        return replace(self, blocks=tuple(map(_bidirectional, self.blocks)))


def _bidirectional(block: Block) -> Block:
    mixers = tuple(
        msgspec.structs.replace(mixer, causal=False) if isinstance(mixer, AttentionMixer) else mixer
        for mixer in layer_mixers(block.whole)
    )
    return Block(msgspec.structs.replace(block.whole, mixers=mixers))


def described_model(architecture: Architecture, tensor: int, predictors: tuple[Block, ...] = ()) -> GptModel:
    """Return the model of a description whose last module is a language model, without its layers of prediction.

    The vocabulary is padded to a multiple of the degree of ``tensor`` parallelism. Raises `InputError` if the last
    module has no embedding of tokens, no blocks or no loss.
    """
    last = architecture.modules[-1]
    embedding, *layers, head = last.flat_layers
    blocks = [Block(each) for each in layers if isinstance(each, ResidualLayer | TracedLayer)]
    others = [each for each in layers if not isinstance(each, ResidualLayer | TracedLayer | PredictionLayer)]
    if (
        not isinstance(embedding, TokenEmbeddingLayer)
        or not isinstance(head, LanguageHeadLayer)
        or others
        or not blocks
    ):
        raise InputError(
            f"model {architecture.name!r}", f"module {last.name!r} is no language model", "let it be the last one"
        )
    words = _padded(head.vocabulary, VOCABULARY_MULTIPLE * tensor)
    embedding = msgspec.structs.replace(embedding, vocabulary=words)
    head = msgspec.structs.replace(head, vocabulary=words, predictions=len(predictors))
    towers = architecture if len(architecture.modules) > 1 else None
    return GptModel(embedding, tuple(blocks), predictors, head, towers=towers)


def gpt_model(arguments: Arguments, tensor: int) -> GptModel:
    """Read a GPT model or a hybrid one.

    The vocabulary is padded to a multiple of the degree of ``tensor`` parallelism. Raises `InputError` if a size is
    missing or impossible.
    """
    pattern = _read_pattern(arguments)
    hidden = arguments.size("hidden-size")
    normalization = arguments.text("normalization") or "LayerNorm"
    if normalization not in ("LayerNorm", "RMSNorm"):
        raise arguments.refuse("normalization", f"{normalization!r} is neither LayerNorm nor RMSNorm")
    norm: Norm = "rms" if normalization == "RMSNorm" else "layer"
    blocks, predictors = (
        _usual_blocks(arguments, hidden, norm)
        if pattern is None
        else _hybrid_blocks(arguments, pattern, ResidualLayer(hidden, (), norm=norm), tensor)
    )
    tied = not arguments.flag("untie-embeddings-and-output-weights")
    words = _vocabulary(arguments, tensor)
    position = _position(arguments)
    positions = 0
    if position == "learned_absolute":
        # A recipe has no field for it: Megatron Bridge takes the length of its sequences.
        length = arguments.count("seq-length") if arguments.is_recipe else None
        positions = arguments.size("max-position-embeddings", length)
    return GptModel(
        TokenEmbeddingLayer(words, hidden, positions),
        blocks,
        predictors,
        LanguageHeadLayer(hidden, words, tied, norm, len(predictors)),
        pattern=pattern,
    )


def _usual_blocks(arguments: Arguments, hidden: int, norm: Norm) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Return the blocks of a GPT model, each with attention and an MLP or experts, and those of its predictions."""
    layers = arguments.size("num-layers")
    windows = _windows(arguments, layers)
    experts = _experts_mixer(arguments)
    routed = experts and arguments.pattern("moe-layer-freq", layers)
    attention, dense = _attention(arguments, hidden), _mlp(arguments, hidden)
    blocks = []
    for window, is_routed in zip(windows, routed or (True,) * layers, strict=True):
        mixer = attention
        if window is not None and isinstance(mixer, AttentionMixer):
            mixer = msgspec.structs.replace(mixer, window=window)
        feed_forward = experts if experts is not None and is_routed else dense
        blocks.append(Block(ResidualLayer(hidden, (mixer, feed_forward), norm=norm)))
    predictors = arguments.count("mtp-num-layers", 0, least=0) or 0
    return tuple(blocks), (blocks[-1],) * predictors


def _hybrid_blocks(
    arguments: Arguments, pattern: HybridPattern, bare: ResidualLayer, tensor: int
) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Return the blocks of a hybrid model and those of its predictions: ``bare`` with one mixer, or with several."""
    hidden = bare.hidden
    letters = set(pattern.layers + pattern.prediction)
    mixers: dict[str, Mixer] = {}
    if "M" in letters:
        mixers["M"] = _mamba(arguments, hidden, tensor)
    if "*" in letters:
        mixers["*"] = _attention(arguments, hidden)
    if "-" in letters:
        mixers["-"] = _mlp(arguments, hidden)
    if "E" in letters:
        routed = _experts_mixer(arguments)
        if routed is None:
            arguments.missing("num-experts", "add it, or leave E out of the pattern")
        mixers["E"] = routed
    known = {letter: Block(msgspec.structs.replace(bare, mixers=(mixer,))) for letter, mixer in mixers.items()}
    predicting = tuple(mixers[letter] for letter in pattern.prediction)
    predictor = Block(msgspec.structs.replace(bare, mixers=predicting))
    return tuple(known[letter] for letter in pattern.layers), (predictor,) * pattern.predictions


def _mamba(arguments: Arguments, hidden: int, tensor: int) -> Mamba2Mixer:
    """Return the Mamba mixer. Heads and groups are checked as by Megatron Core's ``MambaMixer``."""
    width = arguments.size("mamba-head-dim", 64)
    heads = arguments.count("mamba-num-heads")
    if heads is None and 2 * hidden % width:
        raise arguments.refuse("mamba-head-dim", f"{width} does not divide twice --hidden-size {hidden}")
    heads, groups = heads or 2 * hidden // width, arguments.size("mamba-num-groups", 8)
    context = arguments.size("context-parallel-size", 1)
    if heads % groups:
        raise arguments.refuse("mamba-num-groups", f"{groups} does not divide {heads} Mamba heads")
    if groups % tensor:
        raise arguments.refuse("mamba-num-groups", f"{groups} is not a multiple of tensor parallelism {tensor}")
    own = groups // tensor
    if heads // tensor % context or (own % context and context % own):
        problem = f"{context} does not suit {heads // tensor} Mamba heads in {own} groups a tensor rank"
        raise arguments.refuse("context-parallel-size", problem, "lower it")
    return Mamba2Mixer(
        heads=heads,
        head_width=width,
        state=arguments.size("mamba-state-dim", 128),
        groups=groups,
        chunk=arguments.size("mamba-chunk-size", _MAMBA_CHUNK),
        bias=not arguments.flag("disable-bias-linear"),
    )


def pattern_of(layers: Sequence[Layer]) -> HybridPattern | None:
    """Return the pattern of a module's layers; None unless each of its blocks is one of those of a hybrid model."""
    blocks = [layer for layer in layers if isinstance(layer, ResidualLayer | TracedLayer)]
    letters = [_letters(block) for block in blocks]
    if not letters or any(len(each) != 1 for each in letters):
        return None
    predictions = [layer for layer in layers if isinstance(layer, PredictionLayer)]
    depth = sum(layer.depth for layer in predictions)
    return HybridPattern(PATTERN, ("".join(letters),), _letters(predictions[0]) if predictions else "", depth)


def _letters(block: ResidualLayer | TracedLayer | PredictionLayer) -> str:
    """Return the letters of a block's mixers; empty if one of them has none."""
    found = [_LETTER_OF.get(type(mixer), "") for mixer in layer_mixers(block)]
    return "".join(found) if all(found) else ""


def _read_pattern(arguments: Arguments) -> HybridPattern | None:
    """Read the pattern of a hybrid model; None for other models.

    Raises `InputError` if it is missing, contradicts another argument, or has a letter that is not known.
    """
    name = PATTERN if PATTERN in arguments.given else OLD_PATTERN
    text, is_hybrid = arguments.text(name), arguments.flag("is-hybrid-model")
    if name == PATTERN and OLD_PATTERN in arguments.given:
        raise arguments.refuse(OLD_PATTERN, f"contradicts --{PATTERN}", "leave it out")
    spec = arguments.words("spec")
    if spec and (text is None or not spec[0].startswith("megatron.") or spec[-1] not in _STACKS):
        raise arguments.refuse(
            "spec", "cannot be planned", "it replaces Megatron's own layers, so their sizes are unknown"
        )
    if text is None:
        if is_hybrid:
            raise arguments.refuse("is-hybrid-model", "has no pattern of layers", f"add --{PATTERN}")
        return None
    layers, *predictions = text.split("/")
    pattern = HybridPattern(name, tuple(layers.split("|")), predictions[0] if predictions else "", len(predictions))
    if not pattern.layers:
        raise arguments.refuse(name, "has no layers")
    if max(len(pattern.layers), len(predictions)) > MOST_LAYERS:
        raise arguments.refuse(name, f"has more than {MOST_LAYERS} layers", "give a smaller model")
    for letter in pattern.layers + "".join(predictions):
        if letter not in _LETTERS:
            raise arguments.refuse(name, f"has a layer {letter!r}", f"only {', '.join(_LETTERS)} are emulated")
    if set(predictions) - {pattern.prediction} or (predictions and not pattern.prediction):
        raise arguments.refuse(name, "has unlike parts behind /", "write the same layers for each prediction")
    for other, count in (("num-layers", len(pattern.layers)), ("mtp-num-layers", len(predictions))):
        given = arguments.count(other, least=0)
        if given is not None and given != count:
            raise arguments.refuse(
                other, f"is {given}, and the pattern of the hybrid model has {count}", "leave it out"
            )
    return pattern


def products(block: Block) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the widths of a dense block's linear layers, in and out, as a framework without fused ones has them.

    Layers that read the same input are together: queries, keys and values; their projection; gate and inner layer; the
    layer back. Latent attention has none, and experts have none.
    """
    found: list[tuple[tuple[int, int], ...]] = []
    if isinstance(block.whole, TracedLayer):
        by_input: dict[int, tuple[tuple[int, int], ...]] = {}
        for each in block.whole.operators:
            if isinstance(each, ProductOperator) and not each.plain:
                by_input[each.reads] = (*by_input.get(each.reads, ()), (each.in_width, each.out_width))
        return tuple(by_input.values())
    hidden = block.whole.hidden
    for mixer in block.whole.mixers:
        if isinstance(mixer, AttentionMixer):
            queries, keys = mixer.heads * mixer.head_width, mixer.kv_heads * mixer.head_width
            found += [((hidden, queries), (hidden, keys), (hidden, keys)), ((queries, hidden),)]
        elif isinstance(mixer, MLPMixer):
            found += [((hidden, mixer.inner),) * (2 if mixer.gated else 1), ((mixer.inner, hidden),)]
        elif isinstance(mixer, Mamba2Mixer):
            inner = mixer.heads * mixer.head_width
            found += [((hidden, 2 * inner + 2 * mixer.groups * mixer.state + mixer.heads),), ((inner, hidden),)]
    return tuple(found)


def adapter_layers(block: Block, rank: int) -> list[AdapterLayer]:
    """Return low-rank adapters of a block's linear layers, one for layers with the same input."""
    layers = []
    for group in products(block):
        width, out = group[0][0], sum(each[1] for each in group)
        layers.append(AdapterLayer(width, (LinearStep(rank, bias=False), LinearStep(out, bias=False))))
    return layers


def _position(arguments: Arguments) -> str:
    if arguments.flag("use-rotary-position-embeddings"):
        return "rope"
    known = ("learned_absolute", "rope", "yarn", "mrope", "none")
    found = arguments.text("position-embedding-type") or "learned_absolute"
    if found not in known:
        raise arguments.refuse("position-embedding-type", f"{found!r} is not one of {', '.join(known)}")
    # It switches off the learned embedding alone.
    switched_off = arguments.flag("no-position-embedding")
    return "none" if switched_off and found == "learned_absolute" else found


def _attention(arguments: Arguments, hidden: int) -> AttentionMixer | LatentAttentionMixer:
    heads = arguments.size("num-attention-heads")
    width = arguments.count("kv-channels")
    if width is None and hidden % heads:
        raise arguments.refuse("num-attention-heads", f"{heads} does not divide --hidden-size {hidden}")
    biased = not arguments.flag("disable-bias-linear")
    if arguments.flag("multi-latent-attention"):
        return LatentAttentionMixer(
            heads=heads,
            kv_rank=arguments.size("kv-lora-rank", 32),
            nope_width=arguments.size("qk-head-dim", 128),
            rope_width=arguments.size("qk-pos-emb-head-dim", 64),
            value_width=arguments.size("v-head-dim", 128),
            query_rank=arguments.count("q-lora-rank"),
            bias=biased,
        )
    groups = arguments.size("num-query-groups", 1) if arguments.flag("group-query-attention") else heads
    if heads % groups:
        raise arguments.refuse("num-query-groups", f"{groups} does not divide {heads} attention heads")
    return AttentionMixer(
        heads=heads,
        kv_heads=groups,
        head_width=width or hidden // heads,
        qkv_bias=biased or arguments.flag("add-qkv-bias"),
        output_bias=biased,
        rotary=_position(arguments) not in ("learned_absolute", "none"),
        norm_heads=arguments.flag("qk-layernorm"),
        output_gate=arguments.flag("attention-output-gate"),
        rotary_scaled=_position(arguments) == "yarn",
    )


def _inner(arguments: Arguments, hidden: int) -> int:
    # A gated MLP has three matrices. Megatron-LM makes it narrower, so that it has the weights of two; Megatron Core,
    # whose configuration a recipe of Megatron Bridge is, does not.
    narrow = arguments.flag("swiglu") and not arguments.is_recipe
    default = int(4 * hidden * 2 / 3 / 64) * 64 if narrow else 4 * hidden
    return arguments.size("ffn-hidden-size", default)


def _gated(arguments: Arguments) -> bool:
    return arguments.flag("swiglu") or arguments.flag("quick-geglu")


def _mlp(arguments: Arguments, hidden: int) -> MLPMixer:
    biased = not arguments.flag("disable-bias-linear")
    return MLPMixer(_inner(arguments, hidden), gated=_gated(arguments), bias=biased)


def _experts_mixer(arguments: Arguments) -> ExpertsMixer | None:
    """Return the experts of a layer; None if the model has none."""
    number = arguments.count("num-experts", 0, least=0)
    if not number:
        return None
    chosen = arguments.size("moe-router-topk", 2)
    if chosen > number:
        raise arguments.refuse("moe-router-topk", f"{chosen} is more than {number} experts")
    return ExpertsMixer(
        inner=arguments.size("moe-ffn-hidden-size", _inner(arguments, arguments.size("hidden-size"))),
        experts=number,
        chosen=chosen,
        shared_inner=arguments.count("moe-shared-expert-intermediate-size", 0, least=0) or 0,
        gated=_gated(arguments),
        latent=arguments.count("moe-latent-size"),
        shared_gate=arguments.flag("moe-shared-expert-gate"),
        expert_bias=not arguments.flag("disable-bias-linear"),
        clamped=arguments.values("activation-func-clamp-value") is not None,
        groups=arguments.count("moe-router-num-groups", 1) or 1,
        chosen_groups=arguments.count("moe-router-group-topk", 1) or 1,
    )


def _windows(arguments: Arguments, layers: int) -> list[int | None]:
    """Return the window of every layer, in keys, with the query's own; None: all earlier keys."""
    text = arguments.text("window-size")
    if text is None:
        return [None] * layers
    try:
        left = int(text.strip("()[] ").split(",")[0])
    except ValueError:
        raise arguments.refuse("window-size", f"{text!r} is not a pair of numbers such as (127,0)") from None
    if left < 0:
        return [None] * layers
    freq = arguments.pattern("window-attn-skip-freq", layers)
    if freq is None:
        return [left + 1] * layers
    # A number N gives every N-th layer full attention; in a list, 1 stands for a window.
    skips = arguments.text("window-attn-skip-freq") or ""
    slides = [(i + 1) % int(skips) != 0 for i in range(layers)] if skips.isdigit() else list(freq)
    return [left + 1 if each else None for each in slides]


def _vocabulary(arguments: Arguments, tensor: int) -> int:
    padded = arguments.count("padded-vocab-size")
    if padded is not None:
        return padded
    words = arguments.count("vocab-size")
    if words is None:
        arguments.missing("vocab-size", "add it; its value is the size of the tokenizer's vocabulary")
    if arguments.flag("no-pad-vocab-size") or arguments.flag("disable-pad-vocab-size"):
        return words
    return _padded(words, arguments.size("make-vocab-size-divisible-by", VOCABULARY_MULTIPLE) * tensor)


def _padded(words: int, multiple: int) -> int:
    return -(-words // multiple) * multiple
