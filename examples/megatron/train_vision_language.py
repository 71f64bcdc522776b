"""Train Megatron Core's LLaVAModel, cut by modality, with a plan for each step.

torchrun --nproc-per-node 2 examples/megatron/train_vision_language.py

Every rank has layers of the encoder and of the language model, and a microbatch has up to six images. ``--theirs`` runs
Megatron's 1F1B, with the whole encoder on the first rank and all sequences padded. Both print the same losses. The
lines marked (*) differ.
"""

import random
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from loop import begin, options, settings, train
from torch import Tensor
from train_text import loss

COLORS, IMAGE, WIDTH, LAYERS, SIDE, PATCH, LONGEST = 16, -200, 64, 4, 32, 8, 192
"""`IMAGE` stands for an image in the text; Megatron takes this number by default."""
CONTEXT = (SIDE // PATCH) ** 2 + 1
"""Tokens of an image in the language model: its patches, and one for the whole."""


def albums(seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Yield images of one color each, with text that names their colors. Some microbatches have no image."""
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    while True:
        colors = [rng.randrange(COLORS) for _ in range(rng.choice([0, 1, 2, 6]))]
        text = [0, 1, 2, *(token for color in colors for token in (IMAGE, color, color))]
        tokens = torch.tensor(text)[None]
        labels = tokens.roll(-1, 1)
        images = torch.randn(len(colors), 3, SIDE, SIDE, generator=noise) * 0.1
        images += torch.tensor(colors).view(-1, 1, 1, 1) / COLORS
        mask = torch.ones(tokens.shape)
        mask[0, -1] = 0.0
        yield {"tokens": tokens, "labels": labels.clamp(min=0), "loss_mask": mask, "images": images}


def forward_step(padded: bool, iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Run the model on a microbatch, as `pretrain_vlm.py` of Megatron-LM does."""
    batch = next(iterator)
    tokens, images = batch["tokens"], batch["images"]
    length = LONGEST if padded else tokens.shape[1] + len(images) * (CONTEXT - 1)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    places = torch.arange(tokens.shape[1])[None]
    output, loss_mask = model(images, tokens, places, mask, batch["labels"], batch["loss_mask"])
    return output, partial(loss, loss_mask)


def model_provider(
    pre_process: bool, post_process: bool, add_encoder: bool, add_decoder: bool, vp_stage: int | None = None
) -> Any:
    """Build a model or a part of it, as the function of this name in Megatron-LM's examples does."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLPSubmodules

    language = TransformerConfig(**settings(LAYERS, WIDTH, None))
    # The encoder and the projector are built as for one pipeline rank.
    encoder, projector = (
        TransformerConfig(**settings(layers, WIDTH, None, pipeline_model_parallel_size=1)) for layers in (LAYERS, 1)
    )
    encoder.vision_model_type = "internvit"
    vision_layers = get_vit_layer_with_local_spec()
    vision_layers.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    model = LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=get_gpt_layer_local_spec(),
        language_vocab_size=COLORS,
        language_max_sequence_length=LONGEST,
        vision_transformer_config=encoder,
        vision_transformer_layer_spec=vision_layers,
        drop_vision_class_token=False,
        vision_projection_config=projector,
        vision_projection_layer_spec=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        language_position_embedding_type="rope",
        pre_process=pre_process,
        post_process=post_process,
        add_encoder=add_encoder,
        add_decoder=add_decoder,
        img_h=SIDE,
        img_w=SIDE,
        patch_dim=PATCH,
        vp_stage=vp_stage,
    )
    # The same weights however the model is cut.
    rank = parallel_state.get_pipeline_model_parallel_rank()
    for name, parameter in model.named_parameters():
        torch.manual_seed(zlib.crc32(f"{name} {rank if 'decoder' in name and 'language' in name else ''}".encode()))
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    return model


def model_chunks(theirs: bool) -> list[Any]:
    """Return the model chunks of this rank."""
    if not theirs:
        from pipeloom.integrations.megatron import vision_language_chunks

        return vision_language_chunks(model_provider, most_images=2)  # (*)

    from megatron.core import parallel_state
    from megatron.core.enums import ModelType

    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = model_provider(first, last, add_encoder=first, add_decoder=True)
    model.model_type = ModelType.encoder_or_decoder
    return [model]


def main(theirs: bool, steps: int) -> None:
    if not theirs:
        import pipeloom.integrations.megatron.auto  # noqa: F401 - (*)

    # Chunks of the encoder and of the language model.
    begin(None if theirs else 2)
    train(model_chunks(theirs), albums, partial(forward_step, theirs), theirs, steps, LONGEST)


if __name__ == "__main__":
    given = options(__doc__).parse_args()
    main(given.theirs, given.steps)
