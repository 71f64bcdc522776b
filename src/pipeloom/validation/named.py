"""Models of runs whose columns do not describe them: hybrids, and models that read images."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipeloom.integrations.megatron.model import Block, GptModel, described_model
from pipeloom.spec.architecture import (
    Architecture,
    ExpertsMixer,
    Layer,
    MLPMixer,
    ModuleArchitecture,
    ResidualLayer,
    TracedLayer,
    has_scan,
    layer_mixers,
    num_mixers,
)
from pipeloom.validation.recipes import recipe_of
from pipeloom.validation.runs import PublishedRun
from pipeloom.validation.sizes import described


def named_model(published: PublishedRun) -> GptModel | None:
    """Return the public model that a run names; None if the columns describe the model, or the name is not known."""
    architecture = None if published.arch else described(published.model)
    if architecture is None:
        return None
    if "encoder" in published.frozen:
        architecture = with_frozen_encoders(architecture, adapters="adapter" in published.frozen)
    recipe = recipe_of(published)
    if recipe is not None and recipe.padding != 1:
        architecture = _padded(architecture, recipe.padding)
    predictors: tuple[Block, ...] = ()
    if published.mtp:
        predictors = (predictor(architecture.modules[-1]),) * published.mtp
    return described_model(architecture, published.tp or 1, predictors)


def with_frozen_encoders(architecture: Architecture, *, adapters: bool = False) -> Architecture:
    """Return a model whose encoders are not trained. Their adapters to the language model are, unless ``adapters``.

    An adapter is what follows the last block. It becomes a module of its own.
    """
    *encoders, last = architecture.modules
    modules: list[ModuleArchitecture] = []
    for module in encoders:
        end = 1 + max((i for i, layer in enumerate(module.layers) if num_mixers(layer)), default=-1)
        frozen, rest = module.layers[:end], module.layers[end:]
        if adapters or not frozen or not rest:
            modules.append(msgspec.structs.replace(module, frozen=adapters or not rest))
            continue
        modules.append(msgspec.structs.replace(module, layers=frozen, frozen=True))
        name = f"{module.name} adapter"
        modules.append(ModuleArchitecture(name, module.reads, rest, (module.name,), unused=module.unused))
    after = tuple(each.name for each in modules)
    return msgspec.structs.replace(architecture, modules=(*modules, msgspec.structs.replace(last, after=after)))


def predictor(module: ModuleArchitecture) -> Block:
    """Return the block of a layer of multi-token prediction: the model's last one with attention.

    If the model has attention and experts or perceptrons in layers of their own, it has one of each.
    """
    blocks = [layer for layer in module.flat_layers if isinstance(layer, ResidualLayer | TracedLayer)]
    whole = [layer for layer in blocks if num_mixers(layer) > 1 and not has_scan(layer)]
    if whole:
        return Block(whole[-1])
    attention = _last(blocks, inner=False)
    inner = _last(blocks, inner=True)
    if not isinstance(attention, ResidualLayer) or not isinstance(inner, ResidualLayer):
        return Block(blocks[-1])
    return Block(msgspec.structs.replace(attention, mixers=attention.mixers + inner.mixers, count=1))


def _last(blocks: Sequence[Layer], *, inner: bool) -> Layer | None:
    """Return the last layer with attention, or with experts or a perceptron."""
    fits = (
        layer
        for layer in reversed(blocks)
        if not has_scan(layer)
        and any(isinstance(each, MLPMixer | ExpertsMixer) == inner for each in layer_mixers(layer))
    )
    return next(fits, None)


def _padded(architecture: Architecture, padding: float) -> Architecture:
    """Return a model with more rows for each expert of the language model than are chosen."""
    *others, last = architecture.modules
    layers = tuple(
        msgspec.structs.replace(
            layer,
            mixers=tuple(
                msgspec.structs.replace(each, imbalance=padding) if isinstance(each, ExpertsMixer) else each
                for each in layer.mixers
            ),
        )
        if isinstance(layer, ResidualLayer)
        else layer
        for layer in last.layers
    )
    return msgspec.structs.replace(architecture, modules=(*others, msgspec.structs.replace(last, layers=layers)))
