"""Read sample metadata from a WebDataset shard: a tar file in which the files of one sample share a name.

Only the ``.json`` member of each sample is read. Images, videos and texts are skipped, so a shard of many gigabytes is
read at the speed of the disk and with little memory.
"""

from __future__ import annotations

import re
import tarfile
from typing import Any

from pipeloom.errors import InputError
from pipeloom.io.document import parse_document
from pipeloom.io.files import PathLike, printable

SUFFIXES = (".tar", ".tar.gz", ".tgz")
_MAX_JSON_BYTES = 16 * 1024 * 1024


def read_shard(path: PathLike) -> list[tuple[str, dict[str, Any]]]:
    """Return name and metadata object of every sample, in the order of the shard.

    ``0001.json`` belongs to sample ``0001``, as do ``0001.jpg`` and ``0001.caption.txt``. Files that belong to no
    sample are skipped, see `split_member`. The object has the fields of the sample metadata format. If it has no
    ``id``, the name is the id. Raise `InputError` with the shard and the sample if the file is not a tar file, or a
    sample has no ``.json`` member or one that is not an object.
    """
    where = printable(str(path))
    found: dict[str, dict[str, Any] | None] = {}
    try:
        with tarfile.open(path) as shard:
            for member in shard:
                split = split_member(member.name) if member.isfile() else None
                if split is None:
                    continue
                name, extension = split
                found.setdefault(name, None)
                if extension == "json":
                    found[name] = _object(shard, member, name, f"{where}: {printable(member.name)}")
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(where, f"cannot be read as a tar file: {error}", "give a WebDataset shard") from error
    for name, row in found.items():
        if row is None:
            raise InputError(
                f"{where}: sample {printable(name)}",
                "has no .json member",
                "write its sizes into one, see docs/formats.md",
            )
    return [(name, row) for name, row in found.items() if row is not None]


_META = re.compile(r"__[^/]*__($|/)")
"""Metadata of a shard, at the beginning of a member's name."""


def split_member(member: str) -> tuple[str, str] | None:
    """Split the name of a member into the sample's name and the extension, which begins at the first dot.

    Return None if the member belongs to no sample. As in the `webdataset` library, these are hidden files, files
    without an extension, and ``__meta__``.
    """
    folder, _, base = member.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not stem or not dot or _META.match(member):
        return None
    return (f"{folder}/{stem}" if folder else stem), extension


def _object(shard: tarfile.TarFile, member: tarfile.TarInfo, name: str, where: str) -> dict[str, Any]:
    if member.size > _MAX_JSON_BYTES:
        raise InputError(where, f"has {member.size} bytes, more than {_MAX_JSON_BYTES}")
    file = shard.extractfile(member)
    assert file is not None
    try:
        text = file.read().decode()
    except UnicodeDecodeError as error:
        raise InputError(where, f"is not UTF-8 text (byte {error.start})") from error
    row = parse_document(text, where)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        if "id" not in row:
            raise InputError(
                where, "has a name that is not UTF-8, which cannot be an id", "give an id in it"
            ) from error
    return {"id": name} | row
