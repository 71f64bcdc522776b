from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

from pipeloom.errors import InputError
from pipeloom.runtime import Checkpoints, Executor, ThreadHub
from pipeloom.runtime.resume import TrainerState, fingerprint
from tests.cases import random_batch

from .cases import random_run


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


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["trainer.json", "random-0", "__0_0.distcp", ".metadata"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    run = random_run(3, 1)
    executor = Executor(run.model, run.case.layout, 0, ThreadHub().transport(0))
    checkpoints = Checkpoints(tmp_path)
    state = TrainerState(7, "", executor.layout.digest)
    checkpoints.save(executor, None, state).wait()
    assert checkpoints.load(executor, None) == state
    file = tmp_path / "step-00000007" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match=f"{file}: is damaged"):
        checkpoints.load(executor, None)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep": 0}])
def test_what_never_saves_is_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"checkpoint\.(every|keep): 0 is below 1"):
        Checkpoints(tmp_path, **wrong)
