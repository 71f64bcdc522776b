"""Whatever a reader is given, it takes it rightly or refuses it in one line: no internal error, crash, hang or bomb."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from pipeloom.errors import PipeloomError, PlanError

from .readers import READERS

ROOM_BYTES = 2 << 30
"""That a reader of inputs of some kilobytes may take."""
LONGEST = 2000
"""Letters of a message."""


@pytest.fixture
def room() -> Iterator[None]:
    """A bound of this process's memory: whoever believes a damaged length gets none."""
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(name: str, folder: Path, seeds: range) -> None:
    reader = READERS[name]
    examples, path = reader.examples(), folder / reader.name
    assert examples
    for example in examples:
        path.write_bytes(example)
        reader.read(path)
    for seed in seeds:
        random = Random(f"{name} {seed}")
        data = random.choice(reader.mutators)(random, random.choice(examples))
        path.write_bytes(data)
        message = ""
        try:
            reader.read(path)
        except PlanError as error:  # a plan that is refuted is drawn in further lines
            message = str(error).partition("\n")[0]
        except PipeloomError as error:
            message = str(error)
        except Exception as error:
            error.add_note(f"{name}, seed {seed}: {data[:3000]!r}")
            raise
        assert "\n" not in message, (seed, message)
        assert len(message) < LONGEST, (seed, len(message), message[:300])


@pytest.mark.parametrize("name", READERS)
@pytest.mark.usefixtures("room")
def test_no_input_is_an_internal_error(name: str, tmp_path: Path) -> None:
    fuzz(name, tmp_path, range(15))


@pytest.mark.full
@pytest.mark.parametrize("name", READERS)
@pytest.mark.usefixtures("room")
def test_no_input_of_many_is_an_internal_error(name: str, tmp_path: Path) -> None:
    fuzz(name, tmp_path, range(15, 700))
