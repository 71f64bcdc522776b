"""Checkpoint files: digests stored beside them, and metadata that is read without executing the file.

Imported only where a checkpoint is written or read, because `torch.distributed.checkpoint` is slow to import.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter  # type: ignore[attr-defined]
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pipeloom.errors import InputError, PipeloomError
from pipeloom.files import open_regular, sync_folder, write_pieces

METADATA = ".metadata"
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
# Everything that the metadata of tensors consists of. Not BytesStorageMetadata, whose content torch would unpickle.
_ALLOWED = {
    *(
        (_METADATA_MODULE, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
_MAX_DIGESTS_BYTES = 64 << 20
"""Largest digest file that is read. An entry takes about 150 bytes."""
_REMEDY = "remove this checkpoint to resume from an older one, or name another one"


class DigestingWriter(FileSystemWriter):
    """Writes tensors like torch, with a digest of every file, before the metadata complete the checkpoint."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Remove the metadata of an earlier checkpoint, in one process, before any of its files is overwritten."""
        (Path(self.path) / METADATA).unlink(missing_ok=True)
        sync_folder(Path(self.path))
        prepared: list[SavePlan] = super().prepare_global_plan(plans)
        return prepared

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's tensors and the digests of its files."""
        written: Future[list[WriteResult]] = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.value()}
        if names:
            write_digests(Path(self.path), plan.storage_data.prefix.strip("_"), names)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, in one process."""
        super().finish(metadata, results)
        write_digests(Path(self.path), "metadata", [METADATA])


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles only the classes of metadata, so that reading a file executes nothing from it."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or a dtype."""
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint of tensors needs")


class PlainReader(FileSystemReader):
    """Reads tensors like torch, but metadata without executing the file."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read and check the metadata.

        Raises `InputError` if the file is damaged, or contains anything other than metadata of tensors.
        """
        file = Path(self.path) / METADATA
        check_digests(Path(self.path), [METADATA])
        try:
            with file.open("rb") as stream:
                metadata = _of_tensors(_PlainUnpickler(stream).load())
        # A damaged pickle may raise anything.
        except Exception as error:
            raise InputError(str(file), f"is not the metadata of a checkpoint: {_reason(error)}", _REMEDY) from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors, one file after the other.

        Raises `InputError`, which names the file, if one contains anything other than tensors.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        done: Future[None] = Future()
        done.set_result(None)
        for name, items in by_file.items():
            file = Path(self.path) / name
            try:
                done = super().read_data(replace(plan, items=items), planner)
            except PipeloomError:
                raise
            except pickle.UnpicklingError as error:
                # Omit torch's message, which advises to execute the file.
                raise InputError(str(file), "contains data other than tensors", _REMEDY) from error
            # A damaged file may raise anything.
            except Exception as error:
                raise InputError(str(file), f"cannot be read ({_reason(error)})", _REMEDY) from error
        return done


def _of_tensors(metadata: Any) -> Metadata:
    """Raise `ValueError` for metadata of anything other than tensors, or of files outside the checkpoint's folder."""
    if not isinstance(metadata, Metadata):
        raise ValueError(f"it holds a {type(metadata).__name__}")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name} is a {type(entry).__name__}, not a tensor")
    for info in metadata.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"{info.relative_path} is not in its folder")
    return metadata


def write_digests(folder: Path, writer: str, names: Iterable[str]) -> None:
    """Write the digests of some files of a checkpoint as one small file, ``digests-WRITER.json``."""
    digests = {name: _digest(folder / name) for name in sorted(names)}
    write_pieces(folder / f"digests-{writer}.json", [msgspec.json.format(msgspec.json.encode(digests), indent=1)])


def known_digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a checkpoint by name. Empty if there are none.

    Raises `InputError`, which names the digest file, if it cannot be read or names a file outside the folder.
    """
    digests: dict[str, str] = {}
    for file in sorted(folder.glob("digests-*.json")):
        try:
            with open_regular(file) as stream:
                content = stream.read(_MAX_DIGESTS_BYTES + 1)
            if len(content) > _MAX_DIGESTS_BYTES:
                raise ValueError(f"it is larger than {_MAX_DIGESTS_BYTES} bytes")
            entries = msgspec.json.decode(content, type=dict[str, str])
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(str(file), f"cannot be read ({_reason(error)})", _REMEDY) from error
        outside = next((name for name in entries if not _is_inside(name)), None)
        if outside is not None:
            raise InputError(str(file), f"names {ascii(outside)[:80]}, which is not a file in its folder", _REMEDY)
        digests |= entries
    return digests


def check_digests(folder: Path, names: Iterable[str]) -> None:
    """Raise `InputError` for a file of a checkpoint that differs from its digest or is not a regular file.

    A checkpoint without digests, of an older version or made by other tools, is not compared.
    """
    known = known_digests(folder)
    for name in sorted(names):
        problem = _problem(folder / name, known.get(name)) if known else _irregular(folder / name)
        if problem:
            raise InputError(str(folder / name), problem, _REMEDY)


def find_damage(folder: Path, needed: Iterable[str], share: Callable[[Sequence[str]], Sequence[str]]) -> dict[str, str]:
    """Return the missing or changed files of a complete checkpoint, with a description of the damage.

    The files ``needed`` must exist beside the tensors. ``share`` selects those to check if several processes check a
    checkpoint.
    """
    try:
        known = known_digests(folder)
        # Files that differ from their digests are found below.
        stored = PlainReader(str(folder)).read_metadata().storage_data.values() if METADATA in known else ()
    except InputError as error:
        return {Path(error.entity).name: error.problem}
    names = sorted({METADATA, *needed, *known, *(info.relative_path for info in stored)})
    return {name: problem for name in share(names) if (problem := _problem(folder / name, known.get(name)))}


def _is_inside(name: str) -> bool:
    """Return whether a name is that of a file in a folder or its subfolders."""
    path = PurePosixPath(name)
    return name == str(path) and name.isprintable() and not path.is_absolute() and ".." not in path.parts


def _irregular(file: Path) -> str:
    """Return why a file cannot be read. Empty if it can."""
    try:
        open_regular(file).close()
    except OSError as error:
        return f"cannot be read ({_reason(error)})"
    return ""


def _problem(file: Path, written: str | None) -> str:
    """Return the damage of a file with a digest. Empty if there is none."""
    try:
        digest = _digest(file)
    except OSError as error:
        return f"cannot be read ({_reason(error)})"
    if written is None:
        return "has no digest beside it"
    return "" if digest == written else "is damaged: it does not match its digest"


def _digest(file: Path) -> str:
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.partition("\n")[0] or type(error).__name__
