"""Models of the zoo with fewer layers: as many kinds of them, in a fraction of the time."""

from __future__ import annotations

import msgspec

from pipeloom.compare.model_on_cluster import ModelOnCluster, put_on_cluster
from pipeloom.spec.architecture import Architecture, ResidualLayer
from pipeloom.spec.catalog import load_architecture
from pipeloom.spec.parallelism import Degrees


def shallow(model: str, **counts: int) -> Architecture:
    """A model of the zoo with so many blocks in each module named."""
    known = load_architecture(model)
    modules = []
    for module in known.modules:
        layers = tuple(
            msgspec.structs.replace(layer, count=counts[module.name]) if isinstance(layer, ResidualLayer) else layer
            for layer in module.layers
        )
        modules.append(msgspec.structs.replace(module, layers=layers))
    return msgspec.structs.replace(known, modules=tuple(modules), published_parameters=None)


def vlm_on_h800(degrees: Degrees, vision: int, lm: int) -> ModelOnCluster:
    """ViT 2B and LM 5B with so many blocks."""
    return put_on_cluster(shallow("vlm-7b", vision=vision, lm=lm), "dip-h800-64", degrees)
