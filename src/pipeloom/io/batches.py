"""`pipeloom.batches/1`: which samples pass through the model together, and their total sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from pipeloom.bounds import Number, NumBytes
from pipeloom.conversion import check_fields
from pipeloom.errors import InputError
from pipeloom.io.document import convert_format, dump, read_document, to_document
from pipeloom.io.files import PathLike, printable, write_text
from pipeloom.io.samples import batch_totals
from pipeloom.packing import Packing

FORMAT = "pipeloom.batches/1"


class PackedMicrobatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ids of the samples of one microbatch, in order, and the sums of their sizes."""

    samples: tuple[str, ...]
    num_samples: Number
    text_tokens: NumBytes = 0
    num_images: Number = 0
    image_tokens: NumBytes = 0
    """Tokens of the images in the language model."""
    image_patches: NumBytes = 0
    """Patches of the images in the encoder."""

    def __post_init__(self) -> None:
        """Raise `InputError` if the totals cannot belong to the samples."""
        if self.num_samples != len(self.samples):
            raise InputError("num_samples", f"{self.num_samples}, but samples has {len(self.samples)} ids")
        check_fields(self)


class PackedBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The microbatches of one iteration."""

    iteration: Number
    microbatches: tuple[PackedMicrobatch, ...]


class PackedBatches(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Packed batches and the name of the packing policy."""

    policy: str
    batches: tuple[PackedBatch, ...]
    format: Literal["pipeloom.batches/1"] = "pipeloom.batches/1"

    def __post_init__(self) -> None:
        """Raise `InputError` if a sample occurs twice in a batch, because it would be trained on twice."""
        for i, batch in enumerate(self.batches):
            seen: set[str] = set()
            for j, microbatch in enumerate(batch.microbatches):
                for k, name in enumerate(microbatch.samples):
                    if name in seen:
                        entity = f"batches[{i}].microbatches[{j}].samples[{k}]"
                        raise InputError(entity, f"{name!r} occurs twice in the batch")
                    seen.add(name)


_ALWAYS_WRITTEN: dict[type, tuple[str, ...]] = {
    PackedBatches: ("format", "policy", "batches"),
    PackedBatch: ("iteration", "microbatches"),
    PackedMicrobatch: ("samples", "num_samples", "text_tokens", "num_images", "image_tokens", "image_patches"),
}
"""Fields that are always written. A field that was added later is omitted at its default (`docs/formats.md`)."""


def packed_batches(packings: Sequence[Packing], policy: str) -> PackedBatches:
    """Convert packings to ids and totals."""
    return PackedBatches(policy, tuple(_packed(packing) for packing in packings))


def _packed(packing: Packing) -> PackedBatch:
    microbatches = []
    for microbatch in packing.microbatches:
        samples = [packing.batch.samples[i] for i in microbatch.samples]
        ids = tuple(sample.id for sample in samples)
        microbatches.append(PackedMicrobatch(samples=ids, **batch_totals(samples)))
    return PackedBatch(packing.batch.iteration, tuple(microbatches))


def read_batches(path: PathLike) -> PackedBatches:
    """Read packed batches. An `InputError` names the file, the path inside, the value and the bound."""
    return batches_from_document(read_document(path), printable(str(path)))


def batches_from_document(document: dict[str, Any], where: str = "batches") -> PackedBatches:
    """Validate a parsed document as packed batches."""
    return convert_format(document, PackedBatches, FORMAT, where)


def write_batches(path: PathLike, batches: PackedBatches) -> None:
    """Write packed batches."""
    write_text(path, dump(to_document(batches, _ALWAYS_WRITTEN)))
