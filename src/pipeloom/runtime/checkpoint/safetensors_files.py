"""Safetensors files: a single file, or shards with an index, as in folders of Hugging Face's libraries."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.outputs import writing

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_AT_ONCE_BYTES = 32 * 2**20
SHARD_BYTES = 5 * 10**9
"""Largest size in bytes of one file that is written."""


@dataclass(frozen=True)
class StoredTensor:
    """Location of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    """Offset of its first byte in the file."""


class TensorFiles:
    """The tensors of a folder. Only headers are read until a tensor is requested.

    The files are ``STEM.safetensors``, or ``STEM.safetensors.index.json`` and those that it lists. Raises `InputError`
    if there are none, a listed one is missing, or one is damaged.
    """

    def __init__(self, folder: Path, stem: str = "model") -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
        if single.is_file():
            self._add(single)
            return
        if not index.is_file():
            other = next((each.name for each in sorted(folder.glob("*.bin"))), "")
            problem = f"has no {single.name} and no {index.name}" + (f", but {other}" if other else "")
            raise InputError(str(folder), problem, "save the model there as safetensors")
        named = _names(index)
        for name in sorted(set(named.values())):
            if not (folder / name).is_file():
                raise InputError(str(folder / name), f"is missing, {index.name} names it", "fetch the folder again")
            self._add(folder / name)
        for key, name in named.items():
            if key not in self.tensors:
                raise InputError(f"{folder / name}: {key}", f"is missing, {index.name} names it", "fetch it again")

    @staticmethod
    def are_in(folder: Path, stem: str = "model") -> bool:
        """Return whether a folder has such files."""
        return any((folder / f"{stem}.safetensors{end}").is_file() for end in ("", ".index.json"))

    def _add(self, file: Path) -> None:
        for key, entry, begin in _head(file):
            kind = entry["dtype"]
            if kind not in _DTYPES:
                raise InputError(f"{file}: {key}", f"is of dtype {kind}", "quantised weights cannot be trained")
            if key in self.tensors:
                raise InputError(f"{file}: {key}", f"is in {self.tensors[key].file.name} too", "remove one of them")
            self.tensors[key] = StoredTensor(file, tuple(entry["shape"]), _DTYPES[kind], begin)

    def read(self, key: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor in new memory, in the file's dtype or another one."""
        stored = self.tensors[key]
        tensor = torch.empty(stored.shape, dtype=dtype or stored.dtype)
        self.read_into(key, tensor)
        return tensor

    def read_into(self, key: str, target: Tensor) -> None:
        """Read a tensor into one of the same shape, a few rows at a time. Dtype and device may differ."""
        stored = self.tensors[key]
        try:
            # Plain reads. Mapped pages count as this process's memory, and the library's slices read all rows.
            with stored.file.open("rb", buffering=0) as file, torch.no_grad():
                file.seek(stored.begin)
                if target.dtype == stored.dtype and target.device.type == "cpu" and target.is_contiguous():
                    _read(file, target, stored.file)
                    return
                for rows in _runs(stored):
                    part = torch.empty_like(target[rows], dtype=stored.dtype, device="cpu").contiguous()
                    _read(file, part, stored.file)
                    target[rows].copy_(part)
        except OSError as error:
            where = f"{stored.file}: {key}"
            raise InputError(where, f"cannot be read ({error.strerror})", "fetch the file again") from error


def _read(file: IO[bytes], target: Tensor, name: Path) -> None:
    raw: Any = target.detach().reshape(-1).view(torch.uint8).numpy()
    left = memoryview(raw)
    while len(left):
        count = file.readinto(left)  # type: ignore[attr-defined]
        if not count:
            raise InputError(str(name), "ends too early", "fetch it again")
        left = left[count:]


def _runs(stored: StoredTensor) -> Iterable[Any]:
    """Return the runs of rows that are read at once."""
    if not stored.shape:
        return (...,)
    row_bytes = stored.dtype.itemsize * math.prod(stored.shape[1:])
    step = max(1, _AT_ONCE_BYTES // max(1, row_bytes))
    return [slice(begin, min(begin + step, stored.shape[0])) for begin in range(0, stored.shape[0], step)]


def _head(file: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield key, entry and file offset of each tensor from a file's header."""
    import safetensors  # an extra

    try:
        # The library checks that the header is complete and that tensors cover the file without overlap.
        with safetensors.safe_open(str(file), framework="pt"):
            pass
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = json.loads(opened.read(size))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise InputError(str(file), f"is damaged ({error})", "fetch it again") from error
    for key, entry in header.items():
        if key != "__metadata__":
            yield key, entry, 8 + size + int(entry["data_offsets"][0])


def _names(index: Path) -> dict[str, str]:
    try:
        named: dict[str, str] = json.loads(index.read_text())["weight_map"]
        # Nothing outside the folder.
        if any(Path(name).name != name or len(name) > 250 for name in named.values()):
            raise ValueError("it names files in other folders")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(str(index), f"is not an index of shards ({error})", "fetch the folder again") from error
    return named


@dataclass(frozen=True)
class Shard:
    """A file written under a temporary name until the number of files is known."""

    name: str
    stem: str
    keys: tuple[str, ...]
    num_bytes: dict[torch.dtype, int]
    """Bytes by dtype."""


@dataclass
class ShardWriter:
    """Writes tensors into files of at most ``most_bytes``. A tensor is released once its file is written.

    ``tag`` differs from those of other processes that write there.
    """

    folder: Path
    tag: str
    most_bytes: int = SHARD_BYTES
    shards: list[Shard] = field(default_factory=list)
    _waiting: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def add(self, stem: str, key: str, tensor: Tensor) -> None:
        """Add a tensor to the files of a stem."""
        waiting = self._waiting.setdefault(stem, {})
        if waiting and sum(each.nbytes for each in waiting.values()) + tensor.nbytes > self.most_bytes:
            self._write(stem)
        self._waiting.setdefault(stem, {})[key] = tensor

    def close(self) -> list[Shard]:
        """Write the remaining tensors, and return all files."""
        for stem in list(self._waiting):
            self._write(stem)
        return self.shards

    def _write(self, stem: str) -> None:
        import safetensors.torch  # an extra

        tensors = {key: tensor.detach().contiguous() for key, tensor in self._waiting.pop(stem).items()}
        name = f"{stem}.{self.tag}-{len(self.shards)}.part"
        with writing(self.folder):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                safetensors.torch.save_file(tensors, str(self.folder / name), metadata={"format": "pt"})
            except safetensors.SafetensorError as error:
                # The library reports the number of the system's error only in its message.
                number = re.search(r"os error (\d+)", str(error))
                raise OSError(number and int(number[1]), str(error)) from error
        sizes: Counter[torch.dtype] = Counter()
        for tensor in tensors.values():
            sizes[tensor.dtype] += tensor.nbytes
        self.shards.append(Shard(name, stem, tuple(tensors), dict(sizes)))


def finish_shards(folder: Path, shards: Sequence[Shard]) -> None:
    """Rename files to their final names, and write an index for each stem with several files."""
    by_stem: dict[str, list[Shard]] = {}
    for shard in shards:
        by_stem.setdefault(shard.stem, []).append(shard)
    for stem, parts in by_stem.items():
        names = [f"{stem}-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
        if len(parts) == 1:
            names = [f"{stem}.safetensors"]
        for part, name in zip(parts, names, strict=True):
            with writing(folder / name, "with several hosts, name a folder that all of them share"):
                (folder / part.name).rename(folder / name)
        if len(parts) > 1:
            files = {key: Path(name).name for part, name in zip(parts, names, strict=True) for key in part.keys}
            total = sum(sum(part.num_bytes.values()) for part in parts)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
            (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def most_common_dtypes(shards: Sequence[Shard]) -> dict[str, torch.dtype]:
    """Return the floating-point dtype with the most bytes, by stem."""
    sizes: dict[str, Counter[torch.dtype]] = {}
    for shard in shards:
        sizes.setdefault(shard.stem, Counter()).update(shard.num_bytes)
    return {
        stem: next((dtype for dtype, _ in each.most_common() if dtype.is_floating_point), torch.float32)
        for stem, each in sizes.items()
    }
