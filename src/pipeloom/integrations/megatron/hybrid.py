"""Read the pattern of a hybrid model, with Mamba and attention layers, from Megatron's arguments.

The pattern has one letter per layer: ``M`` Mamba-2, ``*`` attention, ``-`` an MLP, ``E`` experts. ``|`` separates
stages, and a part behind ``/`` is a multi-token prediction layer (Megatron Core, ``hybrid_layer_allocation.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipeloom.integrations.megatron.arguments import Arguments
from pipeloom.spec.architecture import (
    AttentionMixer,
    ExpertsMixer,
    Layer,
    Mamba2Mixer,
    MLPMixer,
    PredictionLayer,
    ResidualLayer,
    TracedLayer,
    layer_mixers,
)
from pipeloom.spec.model import MOST_LAYERS

PATTERN = "hybrid-layer-pattern"
OLD_PATTERN = "hybrid-override-pattern"
"""Until Megatron Core 0.16; it separates no stages."""
_LETTER_OF: dict[type, str] = {Mamba2Mixer: "M", AttentionMixer: "*", MLPMixer: "-", ExpertsMixer: "E"}
LETTERS = "".join(_LETTER_OF.values())
_STACKS = ("hybrid_stack_spec", "mamba_stack_spec")
"""Megatron's own stacks of hybrid layers, as ``--spec`` names them."""


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


def read_pattern(arguments: Arguments) -> HybridPattern | None:
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
        if letter not in LETTERS:
            raise arguments.refuse(name, f"has a layer {letter!r}", f"only {', '.join(LETTERS)} are emulated")
    if set(predictions) - {pattern.prediction} or (predictions and not pattern.prediction):
        raise arguments.refuse(name, "has unlike parts behind /", "write the same layers for each prediction")
    for other, count in (("num-layers", len(pattern.layers)), ("mtp-num-layers", len(predictions))):
        given = arguments.count(other, least=0)
        if given is not None and given != count:
            raise arguments.refuse(
                other, f"is {given}, and the pattern of the hybrid model has {count}", "leave it out"
            )
    return pattern
