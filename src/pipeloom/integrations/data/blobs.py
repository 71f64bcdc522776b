"""`Blob`: bytes that are read on demand."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


@dataclass(frozen=True, slots=True)
class Blob:
    """A file, a section of a file, or bytes in memory.

    Attributes
    ----------
    name : str
        Name in error messages.
    path : Path or None
        The file. If ``data`` is given: the original file of these bytes, used only for its name.
    begin, size : int
        Section of the file in bytes. A size of -1 extends to the end.
    data : bytes or None
        The bytes in memory. None for a file.
    """

    name: str
    path: Path | None = None
    begin: int = 0
    size: int = -1
    data: bytes | None = None

    def read(self) -> bytes:
        """Return all bytes."""
        with self.open() as file:
            return file.read()

    def open(self) -> BinaryIO:
        """Open as a file."""
        if self.data is not None:
            return io.BytesIO(self.data)
        assert self.path is not None
        if self.begin == 0 and self.size < 0:
            return self.path.open("rb")
        return io.BufferedReader(_Piece(self.path, self.begin, self.size))


class _Piece(io.RawIOBase):
    """A section of a file as a file object."""

    def __init__(self, path: Path, begin: int, size: int) -> None:
        super().__init__()
        self._file = path.open("rb", buffering=0)
        self._begin, self._size, self._at = begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._begin + self._at)
        done = self._file.readinto(memoryview(buffer)[:count]) or 0
        self._at += done
        return done

    def close(self) -> None:
        self._file.close()
        super().close()
