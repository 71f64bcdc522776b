"""Hand-counted models against the library: parameters to the last one, and operations."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch.utils.flop_counter import FlopCounterMode

from pipeloom.emulator import count_parameters
from pipeloom.emulator.build import layer_module
from pipeloom.emulator.tape import Context, Tape
from pipeloom.spec import Workload
from tests.integrations.hand_counted import architecture_of
from tests.integrations.hand_counted.families import FAMILIES
from tests.integrations.published import PUBLISHED

from . import tiny


def shape_of(config: Any) -> Any:
    """The library's model of a config, its weights nowhere."""
    kind = config["model_type"] if isinstance(config, dict) else config.model_type
    model = getattr(hf, FAMILIES[kind].architecture)
    with torch.device("meta"):
        return model(model.config_class.from_dict(config) if isinstance(config, dict) else config)


def num_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def counted(config: dict[str, Any]) -> int:
    return count_parameters(architecture_of(config, ""))


@pytest.mark.parametrize("name", tiny.CASES)
def test_tiny_models(name):
    with torch.device("meta"):
        model = tiny.CASES[name][0]()
    assert counted(json.loads(model.config.to_json_string())) == num_parameters(model)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    config, number = PUBLISHED[name]
    model = shape_of(config)
    assert num_parameters(model) == number
    # As the library writes it, too.
    assert counted(json.loads(model.config.to_json_string())) == number


# ------------------------------------------------------------------ operations


def library_operations(call: Callable[[], Any]) -> tuple[int, int]:
    """Operations of linear layers and convolutions, and of the products of attention."""
    with FlopCounterMode(display=False) as counter:
        call()
    found = {str(name): number for name, number in counter.get_flop_counts()["Global"].items()}
    return sum(found.get(f"aten.{name}", 0) for name in ("mm", "addmm", "convolution")), found.get("aten.bmm", 0)


def own_operations(config: Any, module: str, *lengths: int) -> tuple[float, float]:
    """The same by the emulator."""
    model, work = architecture_of(json.loads(config.to_json_string()), ""), Workload(lengths)
    linear = attention = 0.0
    for layer in model.module(module).flat_layers:
        built, width = layer_module(layer)
        tape = Tape(Context())
        built(tape.input(width))
        for record in tape.records:
            operations = record.forward.flops.of(work)
            linear += operations if "matmul" in record.forward.kind else 0.0
            attention += operations if "attention" in record.forward.kind else 0.0
    return linear, attention


def eager(model: Any) -> Any:
    """The model with attention, and experts, as plain products."""
    model.set_attn_implementation("eager")
    for config in (model.config, model.config.get_text_config()):
        config._experts_implementation = "eager"
    return model


def dense_deepseek() -> Any:
    """Latent attention alone: what its experts get depends on numbers."""
    model = tiny.deepseek_v3()
    model.config.first_k_dense_replace = model.config.num_hidden_layers
    return hf.DeepseekV3ForCausalLM(model.config)


@pytest.mark.parametrize("build", [tiny.llama, tiny.qwen2, tiny.qwen3, tiny.gemma3_text, tiny.mistral, dense_deepseek])
def test_operations_of_language_models(build):
    with torch.device("meta"):
        model, length = eager(build()), 60
        linear, attention = library_operations(lambda: model(input_ids=torch.zeros(1, length, dtype=torch.long)))
    config = model.config
    # The library masks what is not seen and computes it all the same.
    config.sliding_window = None
    own, seen = own_operations(config, "lm", length)
    assert linear == own
    assert attention == pytest.approx(seen * 2 * length / (length + 1), rel=0.01)


@pytest.mark.parametrize("build", [tiny.mixtral, tiny.qwen3_moe, tiny.bamba, tiny.nemotron_h])
def test_operations_of_experts_and_of_projections_to_state_spaces(build):
    torch.manual_seed(0)
    model, length = eager(build()), 12
    ids = torch.randint(0, 40, (1, length))
    with torch.no_grad():
        counted_linear = library_operations(lambda: model(input_ids=ids, use_cache=False))[0]
    own, _ = own_operations(model.config, "lm", length)
    mixers = [m for m in model.modules() if isinstance(m, torch.nn.Conv1d)]
    # Convolutions of state spaces run over padding, and are no products of matrices to the emulator.
    padded = sum(2 * m.in_channels * m.kernel_size[0] * (length + m.kernel_size[0] - 1) for m in mixers)
    assert counted_linear - padded == own


def pixels(*sides: int) -> torch.Tensor:
    return torch.randn(1, 3, *sides)


ENCODED: dict[str, tuple[str, Callable[[Any], Any], tuple[int, ...]]] = {
    # Images of whole windows: 4 x 4 patches.
    "qwen2_5_vl": (
        "vision",
        lambda m: m.model.visual(torch.randn(96, 24), torch.tensor([[1, 8, 8], [1, 4, 8]])),
        (64, 32),
    ),
    "qwen2_vl": ("vision", lambda m: m.model.visual(torch.randn(64, 24), torch.tensor([[1, 8, 8]])), (64,)),
    "qwen3_vl": ("vision", lambda m: m.model.visual(torch.randn(64, 24), torch.tensor([[1, 8, 8]])), (64,)),
    "gemma3": ("vision", lambda m: m.model.get_image_features(pixels(16, 16)), (16,)),
    "mistral3": (
        "vision",
        lambda m: m.model.get_image_features(pixels(16, 16), image_sizes=torch.tensor([[16, 16]])),
        (64,),
    ),
    "qwen2_5_omni": (
        "audio",
        lambda m: m.get_audio_features(
            torch.randn(1, 4, 16), feature_attention_mask=torch.ones(1, 16, dtype=torch.long)
        ),
        (8,),
    ),
}
"""Of some families: an encoder, a call of it with what stands behind it, and lengths of what it is called on."""


@pytest.mark.parametrize("name", ENCODED)
def test_operations_of_encoders(name):
    module, call, lengths = ENCODED[name]
    model = eager(tiny.CASES[name][0]())
    with torch.no_grad():
        linear, attention = library_operations(lambda: call(model))
    own, pairs = own_operations(model.config, module, *lengths)
    assert linear == own
    assert attention == pytest.approx(pairs, rel=0.01)
