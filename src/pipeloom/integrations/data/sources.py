"""Sources of examples: WebDataset shards, Parquet files and folders of the `datasets` library."""

from __future__ import annotations

import copy
import glob
import os
import tarfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipeloom.errors import InputError
from pipeloom.integrations.data.blobs import Blob
from pipeloom.io import SAMPLE_SUFFIXES, read_samples
from pipeloom.io.webdataset import split_member
from pipeloom.spec import Sample

Paths = str | Path | Sequence[str | Path]


class Source(Protocol):
    """A sequence of examples. An example maps field names to values; large values are a `Blob`."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Mapping[str, Any]: ...

    def name(self, i: int) -> str:
        """Return the name of an example in error messages and metadata."""
        ...

    @property
    def fields(self) -> Sequence[str]:
        """Names of all fields that occur."""
        ...

    @property
    def title(self) -> str:
        """Name of the source in error messages."""
        ...


def find_files(given: Paths, what: str) -> list[Path]:
    """Return files by name, pattern (``*``, ``?``, ``**``) or range in braces (``{000..009}``), in order.

    A name or a pattern without a file is an `InputError`.
    """
    found: list[Path] = []
    for each in [given] if isinstance(given, (str, Path)) else given:
        for pattern in _without_braces(str(each)):
            files = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
            here = [Path(file) for file in files if Path(file).is_file()]
            if not here:
                raise InputError(f"{what} = {str(each)!r}", f"no such file: {pattern}", "name files that are there")
            found += here
    if not found:
        raise InputError(what, "names no file", "name at least one")
    return found


def names_samples(data: str) -> bool:
    """Return whether a word names files of sample metadata, not a data set of the zoo."""
    return data.endswith(SAMPLE_SUFFIXES) or Path(data).is_dir()


def read_all_samples(data: str) -> tuple[Sample, ...]:
    """Read the sample metadata of a file, a pattern, a range of shards, or all files of a folder, in order."""
    if Path(data).is_dir():
        found = sorted(file for file in Path(data).iterdir() if file.name.endswith(SAMPLE_SUFFIXES))
        if not found:
            raise InputError(data, "has no file of samples", f"they end in {', '.join(SAMPLE_SUFFIXES)}")
    elif glob.has_magic(data) or "{" in data:
        found = find_files(data, "--data")
    else:
        found = [Path(data)]
    return tuple(sample for file in found for sample in read_samples(file))


def _without_braces(pattern: str) -> list[str]:
    if "{" not in pattern:
        return [pattern]
    try:
        from webdataset.shardlists import expand_urls
    except ImportError as error:
        raise InputError(pattern, "has braces", "pip install 'pipeloom[webdataset]', or use *") from error
    try:
        return list(expand_urls(pattern))
    except ValueError as error:  # braces that do not close
        raise InputError(pattern, f"has invalid braces ({error})", "write them as in a-{000..099}.tar") from error


class Shards:
    """Samples in WebDataset tar files. Files with equal names up to the first dot are one sample; see `split_member`.

    The `webdataset` library streams shards sequentially. Here each rank needs random access to different samples, so
    headers are read once, and contents on demand.
    """

    def __init__(self, files: Paths) -> None:
        self._shards = [path.absolute() for path in find_files(files, "webdataset")]
        self.title = str(files) if isinstance(files, (str, Path)) else f"{files[0]} ..."
        self._shard_names = [path.name for path in self._shards]
        if len(set(self._shard_names)) < len(self._shards):
            common = os.path.commonpath([path.parent for path in self._shards])
            self._shard_names = [str(path.relative_to(common)) for path in self._shards]
        self._names: list[str] = []
        extensions: dict[str, int] = {}
        shard: list[int] = []
        first: list[int] = []
        extension: list[int] = []
        places: list[tuple[int, int]] = []
        for number, path in enumerate(self._shards):
            last = None
            for member in _headers(path):
                split = split_member(member.name)
                if split is None:
                    continue
                name, kind = split
                if name != last:
                    self._names.append(name)
                    shard.append(number)
                    first.append(len(places))
                    last = name
                extension.append(extensions.setdefault(kind.lower(), len(extensions)))
                places.append((member.offset_data, member.size))
        if not places:
            raise InputError(self.title, "has no samples", "give shards with files in them")
        self.fields = tuple(extensions)
        """All file extensions."""
        # Arrays, because there may be millions of files, and all ranks receive them.
        self._shard = np.array(shard, np.int32)
        self._first = np.array([*first, len(places)], np.int64)
        self._extension = np.array(extension, np.int32)
        self._place = np.array(places, np.int64)

    def __len__(self) -> int:
        return len(self._names)

    def name(self, i: int) -> str:
        """Return the names of the shard and the sample. If shards have equal names, their folders are part of it."""
        return f"{self._shard_names[self._shard[i]]}/{self._names[i]}"

    def __getitem__(self, i: int) -> dict[str, Blob]:
        path, where = self._shards[self._shard[i]], self.name(i)
        found = {}
        for at in range(int(self._first[i]), int(self._first[i + 1])):
            kind = self.fields[self._extension[at]]
            begin, size = map(int, self._place[at])
            found[kind] = Blob(f"{where}.{kind}", path, begin, size)
        return found


_HEADER_BYTES, _MAGIC_AT = 512, 257
_COMPRESSED = {"gzip": b"\x1f\x8b", "bzip2": b"BZh", "xz": b"\xfd7zXZ", "zstd": b"\x28\xb5\x2f\xfd"}


def _headers(path: Path) -> list[tarfile.TarInfo]:
    try:
        with tarfile.open(path, "r:") as shard:
            found = [member for member in shard if member.isfile()]
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        with path.open("rb") as file:
            begin = file.read(_HEADER_BYTES)
        packed = next((name for name, magic in _COMPRESSED.items() if begin.startswith(magic)), None)
        if packed is not None:
            raise InputError(str(path), f"is compressed ({packed})", "unpack it: give plain tar files") from error
        if begin[_MAGIC_AT:].startswith(b"ustar"):
            problem = f"is damaged: {error}, in a file of {path.stat().st_size} bytes"
            raise InputError(str(path), problem, "copy or write it again") from error
        raise InputError(str(path), f"is no tar file ({error})", "give a WebDataset shard") from error
    return found


class Table:
    """Rows of Parquet files, or of a folder of the `datasets` library (``save_to_disk``).

    Parquet is slow for random access, because row groups are decompressed as a whole. So the `datasets` library
    converts Parquet files once to Arrow files in its cache, which are memory-mapped.

    Parameters
    ----------
    kind : "parquet" or "datasets"
        Format of the files.
    files : path, pattern or sequence of these
        For ``"datasets"``, a folder or a split in it.
    """

    def __init__(self, kind: str, files: Paths) -> None:
        if kind == "parquet":
            self._files = [str(path.absolute()) for path in find_files(files, kind)]
        else:
            self._files = [str(Path(str(files)).absolute())]
        self.title = str(files) if isinstance(files, (str, Path)) else f"{files[0]} ..."
        self._kind = kind
        if not len(self._table):
            raise InputError(self.title, "has no rows", "give at least one")

    @cached_property
    def _table(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise InputError(self.title, "needs the datasets library", "pip install 'pipeloom[datasets]'") from error
        try:
            if self._kind == "parquet":
                bars = datasets.are_progress_bars_disabled()
                datasets.disable_progress_bars()
                try:
                    table = datasets.Dataset.from_parquet(self._files)
                finally:
                    if not bars:
                        datasets.enable_progress_bars()
            else:
                table = datasets.load_from_disk(self._files[0])
        except Exception as error:
            # The library's own message has no details. Its cause does.
            error = error.__cause__ if isinstance(error.__cause__, Exception) else error
            what = "Parquet files with rows" if self._kind == "parquet" else "a folder that save_to_disk wrote"
            raise InputError(self.title, f"cannot be read ({error})".replace("\n", " "), f"give {what}") from error
        if isinstance(table, datasets.DatasetDict):
            splits = ", ".join(table)
            raise InputError(self.title, f"has splits {splits}", f"name one, as {self._files[0]}/{next(iter(table))}")
        # Columns of images and sounds return bytes, because decoding happens later.
        for name, feature in copy.deepcopy(table.features).items():
            table = table.cast_column(name, feature) if _undecoded(feature) else table
        return table

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the table, which each process maps itself."""
        return {name: value for name, value in vars(self).items() if name != "_table"}

    def __len__(self) -> int:
        return len(self._table)

    def name(self, i: int) -> str:
        """Return the file and the number of the row."""
        return f"{Path(self._files[0]).name}[{i}]" if len(self._files) == 1 else f"{self.title}[{i}]"

    @property
    def fields(self) -> tuple[str, ...]:
        """All columns."""
        return tuple(self._table.column_names)

    def __getitem__(self, i: int) -> dict[str, Any]:
        where = self.name(i)
        return {name: _blobs(value, f"{where}.{name}") for name, value in self._table[i].items()}


def _undecoded(feature: Any) -> bool:
    """Set a feature of images or sounds to return bytes. Return whether it is one."""
    inner = getattr(feature, "feature", feature)
    if isinstance(inner, list):
        inner = inner[0]
    # `Json` is text that the library parses, and has the attribute too.
    if hasattr(inner, "decode") and type(inner).__name__ != "Json":
        inner.decode = False
        return True
    return False


def _blobs(value: Any, name: str) -> Any:
    """Convert bytes, and the library's pairs of bytes and path, to blobs."""
    if isinstance(value, bytes):
        return Blob(name, data=value)
    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        return Blob(name, Path(value["path"]) if value["path"] else None, data=value["bytes"])
    if isinstance(value, list):
        return [_blobs(each, f"{name}[{i}]") for i, each in enumerate(value)]
    return value
