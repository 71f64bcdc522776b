"""Which checkpoints stay, whatever lies in the folder and whenever saving is interrupted."""

from __future__ import annotations

import io
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist

from pipeloom.errors import InputError, PipeloomError
from pipeloom.runtime import Checkpoints, Executor, ThreadHub
from pipeloom.runtime.checkpoint import digests as checkpoint_files
from pipeloom.runtime.checkpoint.digests import PlainReader, write_digests
from pipeloom.runtime.checkpoint.replicas import FolderReplicas
from pipeloom.runtime.checkpoint.resume import TrainerState

from .cases import random_run
from .file_faults import Crash, fault
from .test_resume import drop_digests, empty, flip, half, remove, truncate

_STEPS = range(1, 13)
_HANGS_S = 120


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def checkpoints_in(folder: Path, keep: int = 2) -> Checkpoints:
    """Checkpoints of one process; making groups of ranks anew would take most of the time."""
    checkpoints = Checkpoints(folder, keep=keep, asynchronous=False)
    checkpoints.__dict__["copies"] = FolderReplicas((0,), (0,))
    return checkpoints


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Raise where a read waits for ever."""

    def end(*_: object) -> None:
        raise TimeoutError("a read hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(_HANGS_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def executor() -> Executor:
    run = random_run(3, 1)
    return Executor(run.model, run.case.layout, 0, ThreadHub().transport(0))


@pytest.fixture(scope="module")
def saved(executor: Executor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good checkpoint of every step."""
    folder = tmp_path_factory.mktemp("saved")
    for step in _STEPS:
        save(checkpoints_in(folder, 99), executor, step)
    return folder


def save(checkpoints: Checkpoints, executor: Executor, step: int) -> None:
    """Save weights that are all equal to the step."""
    with torch.no_grad():
        for _, parameter in executor.named_parameters():
            parameter.fill_(step)
    checkpoints.save(executor, None, TrainerState(step, "", executor.layout.digest)).wait()


def load(folder: Path, executor: Executor) -> int:
    """The step that a new process goes on with; 0: there is none, or all are damaged."""
    state = None
    with suppress(InputError):
        state = checkpoints_in(folder).load(executor, None)
    if state is None:
        return 0
    assert all(bool((parameter == state.iteration).all()) for _, parameter in executor.named_parameters())
    return state.iteration


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def fifo_inside(folder: Path, random: Random) -> None:
    file = random.choice(sorted(folder.iterdir()))
    file.unlink()
    os.mkfifo(file)


def device_inside(folder: Path, random: Random) -> None:
    file = random.choice(sorted(folder.iterdir()))
    file.unlink()
    file.symlink_to("/dev/zero")


def folder_inside(folder: Path, random: Random) -> None:
    file = random.choice(sorted(folder.iterdir()))
    file.unlink()
    file.mkdir()


DIGESTS = [
    '{"/dev/zero": "x"}',
    '{"../x": "x"}',
    '[["a", "b"]]',
    '[[1, "b"]]',
    '{"a": 5}',
    "5",
    '"a"',
    '{"a\\u0000": "b"}',
    '{"": "b"}',
    '{"x": {"y": "z"}}',
    "[" * 100_000,
]


def other_digests(folder: Path, random: Random) -> None:
    random.choice(sorted(folder.glob("digests-*.json"))).write_text(random.choice(DIGESTS))


def misnumbered(folder: Path, _: Random) -> None:
    step = int(folder.name[5:]) % len(_STEPS) + 1
    shutil.rmtree(folder)
    shutil.copytree(path_of(folder.parent.parent / "saved", step), folder)


def without_files(folder: Path, _: Random) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def foreign(folder: Path, _: Random) -> None:
    without_files(folder, _)
    (folder / "notes.txt").write_text("not a checkpoint")


def plain_file(folder: Path, _: Random) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


def fifo(folder: Path, _: Random) -> None:
    shutil.rmtree(folder)
    os.mkfifo(folder)


def broken_link(folder: Path, _: Random) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder.parent / "nowhere")


def half_written(folder: Path, random: Random) -> None:
    half(folder, random)
    folder.rename(folder.with_name(f"{folder.name}.partial"))


def other_zeros(folder: Path, _: Random) -> None:
    folder.rename(folder.with_name(f"step-{int(folder.name[5:])}"))


DAMAGES: list[Callable[[Path, Random], None]] = [
    truncate,
    flip,
    remove,
    empty,
    drop_digests,
    half,
    fifo_inside,
    device_inside,
    folder_inside,
    other_digests,
    misnumbered,
    without_files,
    foreign,
    plain_file,
    fifo,
    broken_link,
    half_written,
    other_zeros,
]


def fill(folder: Path, saved: Path, random: Random) -> set[int]:
    """Put checkpoints and whatever else into a folder; which steps are good."""
    shutil.copytree(saved, folder.parent / "saved", dirs_exist_ok=True)
    folder.mkdir()
    good = set()
    for step in random.sample(_STEPS, random.randint(1, 6)):
        path = path_of(folder, step)
        shutil.copytree(path_of(saved, step), path)
        if random.random() < 0.5:
            random.choice(DAMAGES)(path, random)
        else:
            good.add(step)
            if random.random() < 0.1:
                elsewhere = folder.parent / f"elsewhere-{step}"
                path.rename(elsewhere)
                path.symlink_to(elsewhere)
            if random.random() < 0.2:
                for file in path.iterdir():
                    os.utime(file, (1, 1))
    return good


def check_kept(folder: Path, executor: Executor, good: set[int], keep: int, written: int) -> None:
    """After a checkpoint was written: what has to stay is there and good, and what is too old is gone."""
    stays = sorted(step for step in {*good, written} if step <= written)[-keep:]
    above = {step for step in good if step > written}
    steps = Checkpoints(folder).steps()
    assert {*stays, *above} <= set(steps)
    assert [step for step in steps if step < stays[0] and len(stays) == keep] == []
    # The others do not hide a damaged one.
    for step in sorted({*stays, *above}, reverse=True):
        assert load(folder, executor) == step
        remove_all(path_of(folder, step))


def remove_all(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def try_one(folder: Path, saved: Path, executor: Executor, seed: int) -> None:
    random = Random(seed)
    good, keep = fill(folder, saved, random), random.randint(1, 4)
    newest = max(good, default=0)
    checkpoints = checkpoints_in(folder, keep)
    if random.random() < 0.8:
        with suppress(InputError):
            state = checkpoints.load(executor, None)
            assert (0 if state is None else state.iteration) == newest
    written = random.choice([newest + 1, newest + random.randint(1, 4), random.choice(_STEPS)])
    kind = random.choice(["none", "crash", "crash", "full"])
    is_saved = True
    with fault(random.randrange(120), kind):  # type: ignore[arg-type]
        try:
            save(checkpoints, executor, written)
        except (Crash, PipeloomError, OSError):
            is_saved = False
    if is_saved:
        check_kept(folder, executor, good, keep, written)
        return
    # The new one may be there already.
    assert load(folder, executor) in {max(newest, written), newest}
    for step in (written, written + 1):
        save(checkpoints_in(folder, keep), executor, step)
        assert load(folder, executor) == max(newest, step)


@pytest.mark.parametrize("seed", range(12))
def test_the_newest_good_checkpoint_stays(tmp_path: Path, saved: Path, executor: Executor, seed: int) -> None:
    try_one(tmp_path / "folder", saved, executor, seed)


@pytest.mark.full
def test_the_newest_good_checkpoint_stays_with_many_seeds(tmp_path: Path, saved: Path, executor: Executor) -> None:
    for seed in range(100, 160):
        (tmp_path / str(seed)).mkdir()
        try_one(tmp_path / str(seed) / "folder", saved, executor, seed)
        signal.alarm(_HANGS_S)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["crash", "full"])
@pytest.mark.parametrize("written", [4, 6])
def test_saving_may_be_interrupted_at_every_file_operation(
    tmp_path: Path, saved: Path, executor: Executor, written: int, kind: str
) -> None:
    """With a good checkpoint 4 that is replaced, or with 6, which is damaged."""
    for at in range(1000):
        folder = tmp_path / str(at) / "folder"
        for step in (2, 4, 6):
            shutil.copytree(path_of(saved, step), path_of(folder, step))
        flip(path_of(folder, 6), Random(1))
        checkpoints = checkpoints_in(folder, 1)
        with fault(at, kind) as faults:  # type: ignore[arg-type]
            with suppress(Crash, PipeloomError, OSError):
                save(checkpoints, executor, written)
            ended = faults.count <= at
        assert load(folder, executor) in {4, written}
        save(checkpoints_in(folder, 1), executor, 7)
        assert load(folder, executor) == 7
        assert Checkpoints(folder).steps() == [7]
        shutil.rmtree(folder.parent)
        signal.alarm(_HANGS_S)
        if ended:
            break
    assert 20 < at < 999


def test_a_damaged_checkpoint_of_a_higher_number_displaces_no_good_one(
    tmp_path: Path, saved: Path, executor: Executor
) -> None:
    for step in (4, 8):
        shutil.copytree(path_of(saved, step), path_of(tmp_path, step))
    flip(path_of(tmp_path, 8), Random(1))
    checkpoints = checkpoints_in(tmp_path, 1)
    assert checkpoints.load(executor, None) is not None
    save(checkpoints, executor, 7)
    assert checkpoints.steps() == [7, 8]
    assert checkpoints.newest() == path_of(tmp_path, 7)
    assert load(tmp_path, executor) == 7


def test_what_was_written_or_found_good_is_read_once(
    tmp_path: Path, saved: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    digest = checkpoint_files._digest

    def counted(file: Path) -> str:
        if file.suffix == ".distcp":
            read.append(file.parent.name)
        return digest(file)

    monkeypatch.setattr(checkpoint_files, "_digest", counted)
    for step in (1, 2, 3):
        shutil.copytree(path_of(saved, step), path_of(tmp_path, step))
    checkpoints = checkpoints_in(tmp_path, 3)
    checkpoints.load(executor, None)
    assert set(read) == {"step-00000003"}
    for step in (4, 5, 6):
        read.clear()
        save(checkpoints, executor, step)
        others = {name for name in read if not name.endswith(".partial")}
        assert others == ({"step-00000002"} if step == 4 else set())
    flip(path_of(tmp_path, 5), Random(1))
    save(checkpoints, executor, 7)
    assert checkpoints.steps() == [4, 5, 6, 7]


def test_only_text_digests_of_files_in_the_folder_are_accepted(tmp_path: Path, saved: Path, executor: Executor) -> None:
    for number, text in enumerate(DIGESTS):
        folder = tmp_path / str(number)
        shutil.copytree(path_of(saved, 3), path_of(folder, 3))
        (path_of(folder, 3) / "digests-0.json").write_text(text)
        with pytest.raises(InputError, match=r"step-00000003/[^;]*; remove this checkpoint"):
            checkpoints_in(folder).load(executor, None)


def test_files_other_than_tensors_are_refused_by_name(tmp_path: Path, saved: Path, executor: Executor) -> None:
    """Torch advises to load such a file without protection."""
    folder = path_of(tmp_path, 3)
    shutil.copytree(path_of(saved, 3), folder)
    entries = PlainReader(str(folder)).read_metadata().storage_data.values()
    entry = max(entries, key=lambda each: each.length)
    forged = io.BytesIO()
    torch.save(Forged(), forged)
    with (folder / entry.relative_path).open("r+b") as file:
        file.seek(entry.offset)
        file.write(forged.getvalue()[: entry.length].ljust(entry.length, b"\0"))
    write_digests(folder, "0", [entry.relative_path])
    with pytest.raises(InputError, match=r"step-00000003/__0_0\.distcp: contains data other than tensors;") as refused:
        checkpoints_in(tmp_path).load(executor, None)
    assert "weights_only" not in str(refused.value)


class Forged:
    """Would print when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return print, ("run",)
