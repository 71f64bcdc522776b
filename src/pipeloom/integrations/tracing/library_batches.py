"""Sizes of the samples of a batch for a library's model: token ids, images or patches, and their grids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.spec.architecture import Architecture, ModuleArchitecture
from pipeloom.spec.batch import Sample

_READ = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
_KEPT = ("labels", "position_ids", "mm_token_type_ids", "token_type_ids", "use_cache", "return_dict")
"""Inputs that do not change sizes."""


def library_samples(model: Any, architecture: Architecture, batch: Any, number: int) -> tuple[Sample, ...] | None:
    """Return the samples of a user's batch with this number; None if it has more than text and images.

    The rows of ``input_ids`` are the samples, without padding. Without a mask, a row is divided where its
    ``position_ids`` do not continue: the library's attention does not cross these places. Texts need only the shapes of
    their tensors: a mask or positions on the meta device change nothing. Each image has as many tokens as the
    architecture makes of its patches, and belongs to the row that has the places for it.
    """
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or any(name not in _READ + _KEPT for name in given):
        return None
    mask = given.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        return None
    patches = _patches(architecture, given)
    if patches is None:
        return None
    if given.get("pixel_values") is None:
        lengths = _documents(given, ids)
        if mask is not None and not mask.is_meta:
            lengths = [int(row) for row in (mask.cpu() != 0).sum(dim=1)]
        return tuple(Sample(f"{number}.{place}", length) for place, length in enumerate(lengths))
    kept = None if mask is None else _numbers("attention_mask", mask) != 0
    numbers = _numbers("input_ids", ids)
    if kept is None:
        rows = list(numbers.flatten().split_with_sizes(_documents(given, ids)))
    else:
        rows = [row[kept[place]] for place, row in enumerate(numbers)]
    images = [(count, module.outputs(count)) for module, count in patches]
    token = getattr(model.config, "image_token_id", None)
    out: list[Sample] = []
    for place, row in enumerate(rows):
        places, mine = int((row == token).sum()) if images and token is not None else 0, list[tuple[int, int]]()
        while images and sum(tokens for _, tokens in mine) < places:
            mine.append(images.pop(0))
        if sum(tokens for _, tokens in mine) != places:
            return None
        known = tuple(count for count, _ in mine) or None
        out.append(Sample(f"{number}.{place}", len(row) - places, tuple(n for _, n in mine), known))
    return None if images else tuple(out)


def _documents(given: Mapping[str, Any], ids: Tensor) -> list[int]:
    """Return the lengths of the documents in all rows. With a mask, each row is one."""
    places, mask = given.get("position_ids"), given.get("attention_mask")
    if mask is not None or not isinstance(places, Tensor) or places.shape != ids.shape or places.is_meta:
        return [ids.shape[1]] * ids.shape[0]
    first = places.cpu().diff(dim=1, prepend=places[:, :1].cpu() - 2) != 1
    starts = first.flatten().nonzero().flatten().tolist()
    return [end - start for start, end in zip(starts, [*starts[1:], ids.numel()], strict=True)]


def _patches(architecture: Architecture, given: Mapping[str, Any]) -> list[tuple[ModuleArchitecture, int]] | None:
    """Return the encoder and the patches of every image; None if they are not known."""
    pixels, grid = given.get("pixel_values"), given.get("image_grid_thw")
    if pixels is None:
        return []
    module = next((each for each in architecture.modules if each.reads == "images"), None)
    if module is None or not isinstance(pixels, Tensor):
        return None
    if isinstance(grid, Tensor):
        return [(module, int(count)) for count in _numbers("image_grid_thw", grid).prod(dim=1)]
    if module.fixed_rows is None or pixels.dim() != 4:
        return None
    return [(module, module.fixed_rows)] * pixels.shape[0]


def _numbers(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a batch on the CPU. Raise `InputError` if it is on the meta device, and has no numbers."""
    if tensor.is_meta:
        problem = "is on the meta device, but images belong to samples by its numbers"
        raise InputError(f"batch.{name}", problem, 'create it with device="cpu"')
    return tensor.cpu()
