"""Build whole models by model type from the parts of their configs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeloom.spec.architecture import (
    ActivationStep,
    AdapterLayer,
    AverageStep,
    JoinStep,
    LinearStep,
    ModuleArchitecture,
    NormStep,
    Step,
    VectorsStep,
)
from tests.integrations.hand_counted.decoders import DECODERS, language_model, num_blocks
from tests.integrations.hand_counted.fields import Config, Fields
from tests.integrations.hand_counted.towers import (
    TOWERS,
    Tower,
    internvl,
    omni_audio,
    picked_blocks,
    qwen2_5_vision,
    qwen2_vision,
    qwen3_vision,
    siglip,
)

Modules = tuple[ModuleArchitecture, ...]


@dataclass(frozen=True)
class Family:
    """The library's class of a model type, and the function that reads its modules."""

    architecture: str
    read: Callable[[Config], Modules]


def _text_alone(kind: str) -> Callable[[Config], Modules]:
    def read(config: Config) -> Modules:
        fields = Fields(config, kind)
        # The library never ties the weights of Nemotron-H.
        tied = fields.flag("tie_word_embeddings") and kind != "nemotron_h"
        return (ModuleArchitecture("lm", "sequence", language_model(fields, tied=tied)),)

    return read


def _vision(tower: Tower, *adapter: Step) -> ModuleArchitecture:
    layers = (*tower.layers, AdapterLayer(tower.width, adapter)) if adapter else tower.layers
    return ModuleArchitecture("vision", "images", layers, unused=tower.unused)


def _two_layers(width: int, *, bias: bool = True) -> tuple[Step, ...]:
    return LinearStep(width, bias), ActivationStep(), LinearStep(width, bias)


# ------------------------------------------------------------------ Qwen


def _qwen2_vl(kind: str, tower: Callable[[Fields], Tower]) -> Callable[[Config], Modules]:
    def read(config: Config) -> Modules:
        whole = Fields(config, kind)
        # Old configs have the text fields at the top.
        text = whole.part("text_config", f"{kind}_text") if "text_config" in whole else Fields(config, f"{kind}_text")
        tied = whole.flag("tie_word_embeddings") or text.flag("tie_word_embeddings")
        return _vision(tower(whole.part("vision_config", f"{kind}_vision"))), _lm(text, tied=tied)

    return read


def _qwen3_vl(kind: str) -> Callable[[Config], Modules]:
    def read(config: Config) -> Modules:
        whole = Fields(config, kind)
        text = whole.part("text_config", f"{kind}_text")
        tower, streams = qwen3_vision(whole.part("vision_config", f"{kind}_vision"), num_blocks(text))
        layers = language_model(text, tied=whole.flag("tie_word_embeddings"), taken=streams)
        return _vision(tower), ModuleArchitecture("lm", "sequence", layers, ("vision",))

    return read


def _omni(config: Config) -> Modules:
    whole = Fields(config, "qwen2_5_omni_thinker")
    text = whole.part("text_config", "qwen2_5_omni_text")
    tower = omni_audio(whole.part("audio_config", "qwen2_5_omni_audio_encoder"))
    audio = ModuleArchitecture("audio", "audio", tower.layers, unused=tower.unused)
    vision = _vision(qwen2_5_vision(whole.part("vision_config", "qwen2_5_omni_vision_encoder")))
    layers = language_model(text, tied=whole.flag("tie_word_embeddings"))
    return vision, audio, ModuleArchitecture("lm", "sequence", layers, ("vision", "audio"))


# ------------------------------------------------------------------ any combination of tower, adapter and decoder


def _picked_tower(whole: Fields, kind: str) -> Tower:
    vision = whole.part("vision_config", kind, known=TOWERS)
    return TOWERS[vision.kind](vision, picked_blocks(whole, vision))


def _lm(text: Fields, *, tied: bool) -> ModuleArchitecture:
    return ModuleArchitecture("lm", "sequence", language_model(text, tied=tied), ("vision",))


def _llava(config: Config) -> Modules:
    whole = Fields(config, "llava")
    text = whole.part("text_config", "llama", known=DECODERS)
    adapter = _two_layers(text.size("hidden_size"), bias=whole.flag("multimodal_projector_bias"))
    tied = whole.flag("tie_word_embeddings") or text.flag("tie_word_embeddings")
    return _vision(_picked_tower(whole, "clip_vision_model"), *adapter), _lm(text, tied=tied)


def _llava_onevision(config: Config) -> Modules:
    whole = Fields(config, "llava_onevision")
    text = whole.part("text_config", "qwen2", known=DECODERS)
    adapter = _two_layers(text.size("hidden_size"), bias=whole.flag("multimodal_projector_bias"))
    tied = whole.flag("tie_word_embeddings") or text.flag("tie_word_embeddings")
    # The vector at the end of each row of patches.
    return _vision(_picked_tower(whole, "siglip_vision_model"), *adapter, VectorsStep()), _lm(text, tied=tied)


_PER_IMAGE = "mm_tokens_per_image"


def _gemma3(config: Config) -> Modules:
    whole = Fields(config, "gemma3")
    text = whole.part("text_config", "gemma3_text")
    vision = whole.part("vision_config", "siglip_vision_model", known=("siglip_vision_model",))
    tower = siglip(vision, vision.blocks("num_hidden_layers"), normed=True)
    tokens, (size, _), (patch, _) = whole.size(_PER_IMAGE), vision.pair("image_size"), vision.pair("patch_size")
    side = size // patch // int(tokens**0.5)
    if side < 1:
        raise whole.refuse(_PER_IMAGE, f"{tokens} is more than an image's {(size // patch) ** 2} patches")
    adapter = AverageStep(side**2), NormStep("rms"), LinearStep(text.size("hidden_size"), bias=False)
    return _vision(tower, *adapter), _lm(text, tied=whole.flag("tie_word_embeddings"))


def _internvl(config: Config) -> Modules:
    whole = Fields(config, "internvl")
    text = whole.part("text_config", "qwen2", known=DECODERS)
    vision = whole.part("vision_config", "internvl_vision")
    tower = internvl(vision, picked_blocks(whole, vision), last=whole.get("vision_feature_layer") == -1)
    factor = int(1 / whole.number("downsample_ratio")) ** 2
    adapter = JoinStep(factor), NormStep(), *_two_layers(text.size("hidden_size"))
    return _vision(tower, *adapter), _lm(text, tied=whole.flag("tie_word_embeddings"))


def _mistral3(config: Config) -> Modules:
    whole = Fields(config, "mistral3")
    text = whole.part("text_config", "mistral", known=DECODERS)
    tower = _picked_tower(whole, "pixtral")
    adapter = (
        NormStep("rms"),
        JoinStep(whole.size("spatial_merge_size") ** 2),
        LinearStep(tower.width, bias=False),
        *_two_layers(text.size("hidden_size"), bias=whole.flag("multimodal_projector_bias")),
    )
    return _vision(tower, *adapter), _lm(text, tied=whole.flag("tie_word_embeddings"))


_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "deepseek_v3": "DeepseekV3",
    "bamba": "Bamba",
    "nemotron_h": "NemotronH",
}
FAMILIES: dict[str, Family] = {
    **{kind: Family(f"{name}ForCausalLM", _text_alone(kind)) for kind, name in _CLASSES.items() if kind in DECODERS},
    "qwen2_vl": Family("Qwen2VLForConditionalGeneration", _qwen2_vl("qwen2_vl", qwen2_vision)),
    "qwen2_5_vl": Family("Qwen2_5_VLForConditionalGeneration", _qwen2_vl("qwen2_5_vl", qwen2_5_vision)),
    "qwen3_vl": Family("Qwen3VLForConditionalGeneration", _qwen3_vl("qwen3_vl")),
    "qwen3_vl_moe": Family("Qwen3VLMoeForConditionalGeneration", _qwen3_vl("qwen3_vl_moe")),
    "qwen2_5_omni_thinker": Family("Qwen2_5OmniThinkerForConditionalGeneration", _omni),
    "llava": Family("LlavaForConditionalGeneration", _llava),
    "llava_onevision": Family("LlavaOnevisionForConditionalGeneration", _llava_onevision),
    "gemma3": Family("Gemma3ForConditionalGeneration", _gemma3),
    "internvl": Family("InternVLForConditionalGeneration", _internvl),
    "mistral3": Family("Mistral3ForConditionalGeneration", _mistral3),
}
"""Families by model type."""
