from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch
import torch.distributed as dist

from pipeloom.errors import InputError
from pipeloom.runtime import Checkpoints, ExecutionOptions, Executor, ThreadHub
from pipeloom.runtime.checkpoint.digests import write_digests
from pipeloom.runtime.checkpoint.resume import TrainerState
from pipeloom.runtime.checkpoint.saver import Saver, Saving
from pipeloom.runtime.data.read_ahead import batch_digest
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


def test_what_is_removed_is_the_folder_or_the_link_and_not_what_that_leads_to(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "saved"
    for path in (elsewhere, folder / "step-00000002"):
        path.mkdir(parents=True)
        (path / "file").touch()
    (folder / "step-00000004").symlink_to(elsewhere)
    (folder / "step-00000006").symlink_to(tmp_path / "gone")
    (folder / "step-00000008").touch()
    checkpoints = Checkpoints(folder, every=2)
    checkpoints.make()
    checkpoints.clear()
    assert list(folder.iterdir()) == []
    assert (elsewhere / "file").exists()


def test_a_batch_digest_is_of_the_samples_and_not_of_the_iteration() -> None:
    batch = random_batch(3)
    assert batch_digest(batch) == batch_digest(msgspec.structs.replace(batch, iteration=batch.iteration + 1))
    others = {batch_digest(random_batch(seed)) for seed in range(20)}
    assert len(others) == 20
    assert batch_digest(msgspec.structs.replace(batch, samples=batch.samples[::-1])) != batch_digest(batch) or (
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
    options = ExecutionOptions(random_seed=None)
    executor = Executor(run.model, run.case.layout, 0, ThreadHub().transport(0), options=options)
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


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("seed", [None, 0])
def test_random_states_are_restored_only_if_layers_draw_from_them(tmp_path: Path, seed: int | None) -> None:
    """With a seed, only the loader draws from them, and it draws all batches again."""
    run = random_run(3, 1)
    options = ExecutionOptions(random_seed=seed)
    executor = Executor(run.model, run.case.layout, 0, ThreadHub().transport(0), options=options)
    checkpoints = Checkpoints(tmp_path)
    torch.manual_seed(1)
    saved = torch.get_rng_state()
    checkpoints.save(executor, None, TrainerState(7, "", executor.layout.digest)).wait()
    torch.manual_seed(2)
    begun = torch.get_rng_state()
    checkpoints.load(executor, None)
    assert torch.equal(torch.get_rng_state(), saved if seed is None else begun)


@pytest.mark.usefixtures("alone")
def test_no_run_resumes_from_the_checkpoint_of_another(tmp_path: Path) -> None:
    run = random_run(3, 1)
    executor = Executor(run.model, run.case.layout, 0, ThreadHub().transport(0))
    checkpoints = Checkpoints(tmp_path, keep=9)
    for step, name in ((1, ""), (2, "own"), (3, "other")):
        checkpoints.save(executor, None, TrainerState(step, "", executor.layout.digest, run=name)).wait()
    where = "after 1 iterations on host .*, after 2 .*, after 3 .*"
    with pytest.raises(InputError, match=f"{tmp_path}: has checkpoints of different runs: {where}; remove those"):
        checkpoints.load(executor, None)
    checkpoints.set_aside("own")
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "step-00000001.run-unknown",
        "step-00000002",
        "step-00000003.run-other",
    ]
    saver = Saver(Saving(checkpoints=checkpoints), executor, None, None)
    assert saver.run_id not in ("", "own")
    saver.load()
    assert saver.run_id == "own"


@pytest.mark.usefixtures("alone")
def test_batches_that_end_before_the_checkpoint_are_refused(tmp_path: Path) -> None:
    run = random_run(3, 1)
    executor = Executor(run.model, run.case.layout, 0, ThreadHub().transport(0))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(executor, None, TrainerState(7, "digest", executor.layout.digest)).wait()
    saver = Saver(Saving(checkpoints=checkpoints), executor, None, None)
    saver.load()
    for length, count, end in ((4, 7, 4), (0, 1, 6)):
        message = f"^batches: end before iteration {end}, but the checkpoint has 7 iterations; use the data of the run"
        with pytest.raises(InputError, match=message):
            saver.skip_trained(iter([[0]] * length), count, lambda _samples, _iteration: "digest")
    saver.skip_trained(iter([[0]] * 7), 7, lambda _samples, _iteration: "digest")
    with pytest.raises(InputError, match=r"^iteration 6: has other samples than when it was trained"):
        saver.skip_trained(iter([[0]] * 7), 7, lambda _samples, _iteration: "other")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("iteration", [0, 10**9])
def test_an_iteration_that_is_not_the_checkpoints_is_refused(tmp_path: Path, iteration: int) -> None:
    """Training would skip so many batches."""
    run = random_run(3, 1)
    executor = Executor(run.model, run.case.layout, 0, ThreadHub().transport(0))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(executor, None, TrainerState(7, "", executor.layout.digest)).wait()
    folder = tmp_path / "step-00000007"
    state = json.loads((folder / "trainer.json").read_text())
    (folder / "trainer.json").write_text(json.dumps(state | {"iteration": iteration}))
    write_digests(folder, "beside-0", ["trainer.json"])
    with pytest.raises(InputError, match=rf"trainer.json: iteration: says {iteration}, its tensors 7, its folder 7; "):
        checkpoints.load(executor, None)


@pytest.mark.usefixtures("alone")
def test_the_newest_checkpoint_that_is_not_damaged_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = random_run(3, 1)
    executor = Executor(run.model, run.case.layout, 0, ThreadHub().transport(0))
    parameters = [parameter for _, parameter in executor.named_parameters()]
    checkpoints = Checkpoints(tmp_path, keep=20)
    random, values = Random(5), []
    damages = [truncate, flip, remove, empty, drop_digests, half]
    for step in range(len(damages) + 1):
        saving = checkpoints.save(executor, None, TrainerState(step, "", executor.layout.digest))
        values.append([parameter.detach().clone() for parameter in parameters])
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(1)  # what is being written is not what is being trained
        saving.wait()
    for step in range(len(damages), 0, -1):
        damages[step - 1](tmp_path / f"step-{step:08d}", random)
        caplog.clear()
        state = checkpoints.load(executor, None)
        assert state is not None
        assert state.iteration == step - 1
        assert all(torch.equal(found, kept) for found, kept in zip(parameters, values[step - 1], strict=True))
        assert f"step-{step:08d}" in caplog.text
        assert "resuming from an older checkpoint" in caplog.text
    flip(tmp_path / "step-00000000", random)
    with pytest.raises(InputError, match=r"step-0000000\d/.*: .*; remove this checkpoint"):
        checkpoints.load(executor, None)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.stat().st_size)


def truncate(folder: Path, random: Random) -> None:
    file = random.choice(files(folder))
    file.write_bytes(file.read_bytes()[: random.randrange(file.stat().st_size)])


def flip(folder: Path, random: Random) -> None:
    file = random.choice(files(folder))
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def remove(folder: Path, random: Random) -> None:
    random.choice(files(folder)).unlink()


def empty(folder: Path, random: Random) -> None:
    random.choice(files(folder)).write_bytes(b"")


def drop_digests(folder: Path, _: Random) -> None:
    for file in folder.glob("digests-*.json"):
        file.unlink()


def half(folder: Path, random: Random) -> None:
    found = files(folder)
    for file in random.sample(found, (len(found) + 1) // 2):
        file.unlink()


@pytest.mark.full
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("seed", range(200))
def test_no_damage_gives_a_wrong_weight(tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    run, random = random_run(3, 1), Random(seed)
    executor = Executor(run.model, run.case.layout, 0, ThreadHub().transport(0))
    parameters = [parameter for _, parameter in executor.named_parameters()]
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(executor, None, TrainerState(1, "", executor.layout.digest)).wait()
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1)
    checkpoints.save(executor, None, TrainerState(2, "", executor.layout.digest)).wait()
    random.choice([truncate, flip, remove, empty, drop_digests, half])(tmp_path / "step-00000002", random)
    state = checkpoints.load(executor, None)
    assert state is not None
    assert state.iteration == 1
    assert all(torch.equal(found, kept) for found, kept in zip(parameters, before, strict=True))


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep": 0}])
def test_what_never_saves_is_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"checkpoint\.(every|keep): 0 is below 1"):
        Checkpoints(tmp_path, **wrong)
