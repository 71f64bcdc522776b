"""Every image-text and multimodal class of the library: one step on two ranks, compared with the library's own.

``make test-models`` runs it, or ``python -m tests.integrations.transformers.every_model``. Each class is built from its
default configuration, which the product makes smaller. One process finds its layers; two more run one random plan over
gloo.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from transformers.models.auto import modeling_auto as auto

from pipeloom.errors import InputError
from pipeloom.integrations.transformers import build, check, generic
from pipeloom.integrations.transformers.assembly import Anatomy
from pipeloom.integrations.transformers.description import Family
from pipeloom.integrations.transformers.discovery import run, samples_of, text_samples, video_samples
from pipeloom.integrations.transformers.found import AGAIN
from pipeloom.integrations.transformers.reference import double, library_gradients
from pipeloom.integrations.transformers.smaller import _random, line
from pipeloom.runtime import Executor, batch_of
from pipeloom.runtime.launch.transport import TorchTransport

TOLERANCE = 1e-9
LIMIT_S = 60
"""Processor time of a process for a class, in seconds."""
MAPPINGS = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")
TEXT = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",)


def _half_rotary(config: Any) -> None:
    rope = config.get_text_config().rope_parameters
    rope["partial_rotary_factor"] = 0.5


def _half_rotary_of_128(config: Any) -> None:
    _half_rotary(config)
    config.get_text_config().head_dim = 128


def _with(part: str, **fields: Any) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        for name, value in fields.items():
            setattr(getattr(config, part) if part else config, name, value)

    return change


def _rope_by_layer(config: Any) -> None:
    text = config.get_text_config()
    text.rope_parameters = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in set(text.layer_types)}


def _layers_of_experts(config: Any) -> None:
    text = config.get_text_config()
    text.mlp_layer_types = ["dense"] + ["sparse"] * (text.num_hidden_layers - 1)
    text.num_experts_per_tok = 6
    encoder = config.vision_config.encoder_config
    encoder.hidden_size, encoder.num_attention_heads, encoder.num_key_value_heads = 896, 14, 2


def _four_axes(config: Any) -> None:
    text = config.get_text_config()
    text.head_dim = 128
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [16] * 4}


_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
CORRECTED: dict[str, tuple[str, Callable[[Any], None]]] = {
    "AyaVisionForConditionalGeneration": (
        "num_attention_heads 16 and image_size 364 of the encoder",
        _with("vision_config", num_attention_heads=16, image_size=364),
    ),
    "CohereCompassForConditionalGeneration": ("rope_parameters for each kind of layer", _rope_by_layer),
    "CohereCompassForCausalLM": ("rope_parameters for each kind of layer", _rope_by_layer),
    "DeepseekV2ForCausalLM": ("num_experts_per_tok 6", _with("", num_experts_per_tok=6)),
    "Dots1ForCausalLM": (
        "numbers of experts",
        _with("", n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=4),
    ),
    "HunYuanDenseV1ForCausalLM": ("head_dim 128", _with("", head_dim=128)),
    "HunYuanMoEV1ForCausalLM": ("head_dim 128", _with("", head_dim=128)),
    "MinistralForCausalLM": ("head_dim 128", _with("", head_dim=128)),
    "NemotronForCausalLM": ("num_key_value_heads 8 and head_dim 128", _with("", num_key_value_heads=8, head_dim=128)),
    "Qwen4ExpForCausalLM": ("fields of the indexer", _with("", **_INDEXER)),
    "Lfm2MoeForCausalLM": ("layer_types", _with("", layer_types=["conv", "full_attention"] * 16)),
    "DeepseekOcr2ForConditionalGeneration": (
        "experts of a token and of a layer, and widths of the encoder",
        _layers_of_experts,
    ),
    "HunYuanVLForConditionalGeneration": ("head_dim 128 and mrope_section", _four_axes),
    "Qwen3ASRForConditionalGeneration": ("output_dim 2048 of the encoder", _with("audio_config", output_dim=2048)),
    "Qwen4ExpForConditionalGeneration": ("fields of the indexer", _with("text_config", **_INDEXER)),
    "AriaForConditionalGeneration": (
        "image_size 490 and patch_size 14 of the encoder",
        _with("vision_config", image_size=490, patch_size=14),
    ),
    "Llama4ForConditionalGeneration": (
        "hidden_size 1408 and vision_output_dim 4096 of the encoder",
        _with("vision_config", hidden_size=1408, vision_output_dim=4096),
    ),
    "Glm4vForConditionalGeneration": ("partial_rotary_factor 0.5", _half_rotary),
    "Glm46VForConditionalGeneration": ("partial_rotary_factor 0.5", _half_rotary),
    "Glm4vMoeForConditionalGeneration": ("partial_rotary_factor 0.5 and head_dim 128", _half_rotary_of_128),
    "Gemma3ForConditionalGeneration": (
        "image_size 896 and patch_size 14 of the encoder",
        _with("vision_config", image_size=896, patch_size=14),
    ),
    "Qwen2VLForConditionalGeneration": ("hidden_size 8192 of the encoder", _with("vision_config", hidden_size=8192)),
    "JanusForConditionalGeneration": (
        "projection_dim 4096 of the encoder",
        _with("vision_config", projection_dim=4096),
    ),
    "Molmo2ForConditionalGeneration": (
        "text_hidden_size 4096 of the adapter",
        _with("adapter_config", text_hidden_size=4096),
    ),
    "Ovis2ForConditionalGeneration": ("hidden_size 4096", _with("", hidden_size=4096)),
    "NemotronH_Omni_Reasoning_V3": ("image_token_id and audio_token_id", _with("", image_token_id=5, audio_token_id=6)),
    "GraniteSpeechForConditionalGeneration": (
        "encoder_hidden_size 1024 of the projector",
        _with("projector_config", encoder_hidden_size=1024),
    ),
    "GraniteSpeechPlusForConditionalGeneration": (
        "encoder_hidden_size 1024 of the projector",
        _with("projector_config", encoder_hidden_size=1024),
    ),
    "Step3p7ForConditionalGeneration": ("sliding_window 512", _with("text_config", sliding_window=512)),
    "MiniCPMV4_6ForConditionalGeneration": ("image_token_id", _with("", image_token_id=5)),
    "MiniCPMV4_7ForConditionalGeneration": ("image_token_id", _with("", image_token_id=5)),
    "MiniCPMOcrForConditionalGeneration": ("image_token_id", _with("", image_token_id=5)),
    "Blip2ForConditionalGeneration": ("image_token_id", _with("", image_token_index=5)),
    "InstructBlipForConditionalGeneration": ("image_token_id", _with("", image_token_index=5)),
    "VoxtralForConditionalGeneration": ("audio_token_id", _with("", audio_token_id=5)),
}
"""Fields without which the library's own default configuration cannot run, by class."""


def classes(text: bool) -> list[str]:
    """Names of the classes."""
    names = [getattr(auto, each) for each in (TEXT if text else MAPPINGS)]
    found = [
        each for mapping in names for one in mapping.values() for each in ((one,) if isinstance(one, str) else one)
    ]
    return [name for name in dict.fromkeys(found) if hasattr(hf, name)]


def config_of(kind: Any) -> Any:
    config = kind.config_class()
    if kind.__name__ in CORRECTED:
        CORRECTED[kind.__name__][1](config)
    return config


def find(kind: Any) -> tuple[str, str, Any]:
    """Result, reason, and what the ranks need."""
    try:
        config = config_of(kind)
        with torch.device("meta"):
            kind._from_config(config)
    except Exception as error:
        return "makes no model", line(error), None
    made: list[Any] = []
    smaller = generic.smaller

    def kept(*args: Any) -> Any:
        made[:] = smaller(*args)
        return tuple(made)

    generic.smaller = kept  # type: ignore[assignment]
    try:
        family = build.family_of(kind, config)
    except InputError as error:
        return "refused", error.problem.partition("cannot be used: ")[2] or error.problem, None
    except Exception as error:
        return "raw error", line(error), None
    return "accepted", "", (made[0].config, family)


def way_of(family: Family) -> str:
    """How the layers of a model are called."""
    text = "packed" if family.packs else "sample by sample"
    if family.eager:
        text = "packed, own attention"
    encoders = ", ".join(f"{each.name} {'packed' if each.packs else 'one by one'}" for each in family.encoders)
    videos = "videos" if any(each.video_function for each in family.encoders) else ""
    return "; ".join(filter(None, (text, encoders, videos)))


def videos_of(anatomy: Anatomy, small: Any) -> list[Any]:
    """Samples with videos, in the first form that the library runs; none if the model was found to take none."""
    if not any(each.video_function for each in anatomy.family.encoders):
        return []
    for apart in (True, False):
        samples = video_samples(anatomy, apart=apart)
        try:
            for each in samples:
                run(small, each)
        except Exception:
            continue
        return samples
    raise AssertionError("the library runs no form of videos")


def step(kind: Any, given: Any, rank: int, file: str) -> tuple[str, str]:
    """One step as a rank. Rank 0 compares the gradients."""
    config, family = given
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    with double():
        small = _random(kind, config)
        if family.first:
            samples: Any = text_samples(small)
        else:
            samples = samples_of(Anatomy(small, family), always=False)
            try:
                run(small, samples[2])
            except Exception:
                samples = samples_of(Anatomy(small, family), always=True)
            samples += videos_of(Anatomy(small, family), small)
        for number, sample in enumerate(samples):
            sample["id"] = str(number)
        ours = build._assemble(_random(kind, config), family)
        drawn = check._draw(random.Random("every"), ours, batch_of(samples, ours.describe), 2)
        executor = Executor(ours, drawn.layout, rank, TorchTransport(), sum_tied=lambda *_: None)
        result = executor.run(drawn.plan, drawn.packing, samples)
        names, mine, seen = ours.library_names(), {}, set()
        for name, parameter in executor.named_parameters():
            if parameter.grad is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                mine[names[name]] = mine.get(names[name], 0) + parameter.grad
        every: Any = [None, None]
        dist.all_gather_object(every, (result.loss_sum / result.normalizer, mine))
        if rank:
            return "", ""
        sums: dict[str, Any] = {}
        for _, gradients in every:
            for name, gradient in gradients.items():
                sums[name] = sums.get(name, 0) + gradient
        loss, wanted = library_gradients(small, samples, ours.per_token, ours.num_targets)
        found = check._compare(ours, sum(each for each, _ in every), sums, loss, wanted)
    return ("exact", way_of(family)) if found.worst < TOLERANCE else ("wrong", f"differs by {found.worst:.1e}")


def in_process(work: Callable[[], Any], limit_s: int) -> tuple[int, int]:
    """Fork a process; returns its id and the end of a pipe with the pickled result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        result = work()
    except Exception as error:
        if os.environ.get("TRACEBACK"):
            traceback.print_exc()
        result = ("raw error", line(error), None)
    with os.fdopen(writer, "wb") as stream:
        pickle.dump(result, stream)
    os._exit(0)


def result_of(process: tuple[int, int]) -> Any:
    with os.fdopen(process[1], "rb") as stream:
        data = stream.read()
    os.waitpid(process[0], 0)
    return pickle.loads(data) if data else ("refused", f"takes longer than {LIMIT_S} s to test", None)


def row(name: str) -> tuple[str, str]:
    """Result and reason of a class."""
    kind = getattr(hf, name)
    result, reason, given = result_of(in_process(lambda: find(kind), LIMIT_S))
    if given is not None:
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/store"
            ranks = [in_process(lambda rank=rank: step(kind, given, rank, file), LIMIT_S) for rank in range(2)]
            (result, reason, *_), *_ = [result_of(each) for each in ranks]
    return result, reason


def table(rows: Iterable[tuple[str, str, str]]) -> str:
    """The rows as Markdown."""
    lines = ["| class | result | |", "|---|---|---|"]
    for name, result, reason in rows:
        note = f"; default corrected: {CORRECTED[name][0]}" if name in CORRECTED else ""
        lines.append(f"| `{name}` | {result} | {reason.replace('|', '/')[:160]}{note} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Try the classes, and write the table."""
    parser = argparse.ArgumentParser()
    os.environ[AGAIN] = "1"
    parser.add_argument("classes", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--text", action="store_true", help="language models")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hf.utils.logging.set_verbosity_error()
    rows = []
    # What stands before the table stays.
    head = options.out.read_text().partition("| class")[0] if options.out and options.out.exists() else ""
    for name in options.classes or classes(options.text):
        begin = time.monotonic()
        rows.append((name, *row(name)))
        print(*rows[-1], f"{time.monotonic() - begin:.0f} s", sep=" | ", flush=True)
        if options.out:
            options.out.write_text(head + table(rows))
    counts = Counter(result for _, result, _ in rows)
    print(counts)
    return 1 if counts["wrong"] or counts["raw error"] else 0


if __name__ == "__main__":
    sys.exit(main())
