"""Errors of documents name the entry of a table that is wrong."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from pipeloom.bounds import Count
from pipeloom.conversion import convert
from pipeloom.errors import InputError


class Place(msgspec.Struct, forbid_unknown_fields=True):
    layers: Count
    kind: Literal["block", "head"] = "block"


GOOD = {"layers": 1}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"layers": "x"}, "modules.lm.layers: 'x' is not an integer"),
        ({"layers": -1}, "modules.lm.layers: -1 is below 1"),
        ({"layers": 1, "kind": "haed"}, "modules.lm.kind: 'haed' is not one of 'block', 'head'"),
        ({"layers": 1, "layer": 2}, "modules.lm.layer: is not a known field; did you mean layers?"),
        ({}, "modules.lm.layers: is missing"),
        (3, "modules.lm: 3 is not an object"),
    ],
)
def test_errors_name_the_entry_of_a_table(value: Any, message: str) -> None:
    document = {"modules": {"vision": GOOD, "lm": value, "audio": 5}}
    with pytest.raises(InputError) as caught:
        convert(document, dict[str, dict[str, Place]], "train.toml")
    assert str(caught.value) == f"train.toml: {message}"
