from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pipeloom.errors import InputError
from pipeloom.runtime import Checkpoints
from pipeloom.runtime.resume import fingerprint
from tests.cases import random_batch


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "there", every=5)
    assert checkpoints.steps() == []
    for name in ("step-00000010", "step-00000005", "step-00000015.partial", "notes", "step-x"):
        (checkpoints.folder / name).mkdir(parents=True)
    assert checkpoints.steps() == [5, 10]
    checkpoints.clear()
    assert checkpoints.steps() == []
    assert (checkpoints.folder / "notes").exists()


def test_a_fingerprint_is_of_the_samples_and_not_of_the_iteration() -> None:
    batch = random_batch(3)
    assert fingerprint(batch) == fingerprint(msgspec.structs.replace(batch, iteration=batch.iteration + 1))
    others = {fingerprint(random_batch(seed)) for seed in range(20)}
    assert len(others) == 20
    assert fingerprint(msgspec.structs.replace(batch, samples=batch.samples[::-1])) != fingerprint(batch) or (
        len(batch.samples) == 1
    )


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep": 0}])
def test_what_never_saves_is_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"checkpoint\.(every|keep): 0 is below 1"):
        Checkpoints(tmp_path, **wrong)
