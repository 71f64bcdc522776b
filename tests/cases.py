"""Random models, layouts, batches and costs, shared by the tests of several packages."""

from __future__ import annotations

import random

from pipeloom.cost import StrategyCost, slowness_of
from pipeloom.layout import ModulePlacement, separate
from pipeloom.packing import Packing, PackingSpec, pack
from pipeloom.spec import Batch, Chunk, LayerSpec, Layout, ModelSpec, ModuleSpec, Sample, TensorShape, Workload


class ToyCosts:
    """Costs in whole milliseconds that anybody can work out by hand: tokens times layers."""

    slowness: tuple[float, ...] = ()

    def __init__(
        self, model: ModelSpec, transfer_s: float = 0.0, split: bool = False, slowness: tuple[float, ...] = ()
    ) -> None:
        self.model, self._transfer_s, self.split, self.slowness = model, transfer_s, split, slowness

    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        forward = workload.num_tokens * chunk.num_layers * 1e-3 * slowness_of(self, chunk.rank)
        halves = (forward, forward) if self.split else (None, None)
        return (StrategyCost("keep", forward, 2 * forward, 10 * workload.num_tokens * chunk.num_layers, *halves),)

    def stream_bytes(self, stream: str, workload: Workload) -> int:
        raise NotImplementedError

    def boundary_bytes(self, chunk: Chunk, workload: Workload) -> int:
        return self.model.module(chunk.module).flat_layers[chunk.layers[1]].output.num_bytes(workload)

    def link_between(self, first: int, second: int) -> int:
        return 0

    def transfer_s(self, num_bytes: int, link: int = 0) -> float:
        return self._transfer_s if num_bytes else 0.0

    def static_bytes(self, chunk: Chunk) -> int:
        return 1000 * chunk.num_layers


def vlm_spec(vision_layers: int = 4, lm_layers: int = 8, vision_frozen: bool = False) -> ModelSpec:
    """A vision encoder before a language model."""
    hidden = TensorShape(("instances", 4, 8))
    merged = TensorShape(("instances", 2, 8))
    tokens = TensorShape(("tokens", 8))
    vision = [LayerSpec("block", hidden, vision_layers - 1)] if vision_layers > 1 else []
    return ModelSpec(
        "vlm",
        (
            ModuleSpec("vision", "images", (*vision, LayerSpec("merge", merged)), frozen=vision_frozen),
            ModuleSpec("lm", "sequence", (LayerSpec("block", tokens, lm_layers),), after=("vision",)),
        ),
    )


def random_batch(seed: int, num_samples: int = 8, text_only: float = 0.3, max_images: int = 6) -> Batch:
    """Documents with images, some of them text only."""
    rng = random.Random(seed)
    samples = []
    for i in range(num_samples):
        images = 0 if rng.random() < text_only else rng.randint(1, max_images)
        samples.append(
            Sample(f"s{i}", rng.randint(1, 20), (2,) * images, tuple(rng.randint(2, 6) for _ in range(images)))
        )
    return Batch(tuple(samples), iteration=seed)


def random_case(seed: int) -> tuple[ModelSpec, Layout, Packing]:
    """A vision-language model laid out on one to four ranks, and a packed random batch."""
    rng = random.Random(seed)
    ranks, vision_segments, lm_segments = rng.randint(1, 4), rng.randint(1, 2), rng.randint(1, 2)
    model = vlm_spec(
        ranks * vision_segments + rng.randint(0, 3),
        ranks * lm_segments + rng.randint(0, 3),
        vision_frozen=rng.random() < 0.2,
    )
    placements = {
        "vision": ModulePlacement(vision_segments, rng.choice([None, 1, 2, 5])),
        "lm": ModulePlacement(lm_segments, None),
    }
    layout = separate(model, ranks, placements, lambda module, layer: 1.0)
    batch = random_batch(seed, rng.randint(1, 10))
    return model, layout, pack(batch, model, layout, PackingSpec(rng.randint(32, 64)))
