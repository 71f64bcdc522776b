"""Read specs in TOML or JSON: models, clusters, profiles, planning problems."""

from __future__ import annotations

import tomllib
from typing import Any, TypeVar

from pipeloom.errors import InputError
from pipeloom.io.document import convert, read_document
from pipeloom.io.files import PathLike, printable, read_text

T = TypeVar("T")


def read_spec(path: PathLike, kind: type[T]) -> T:
    """Read one spec: TOML if the name ends in ``.toml`` or ``.toml.gz``, else JSON.

    Parameters
    ----------
    kind : type
        A msgspec struct, for example `pipeloom.spec.ModelSpec`.

    Raises
    ------
    InputError
        One line with the file, the path inside, the value and the bound.
    """
    where = printable(str(path))
    if not str(path).removesuffix(".gz").endswith(".toml"):
        return convert(read_document(path), kind, where)
    text = read_text(path)
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = printable(str(error))
        raise InputError(where, f"is not valid TOML: {message[:1].lower()}{message[1:]}") from error
    except RecursionError as error:
        raise InputError(where, "is nested too deeply to be a spec") from error
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(where, "has a number with too many digits") from error
    return convert(document, kind, where)
