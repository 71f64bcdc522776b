from __future__ import annotations

import io
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from pipeloom.errors import ExecutionError, InputError
from pipeloom.runtime import Executor, ThreadHub, load_checkpoint, save_checkpoint
from pipeloom.runtime.checkpoint import checkpoint
from pipeloom.runtime.checkpoint.checkpoint import state_tensors, write_state
from pipeloom.runtime.checkpoint.digests import DigestingWriter
from pipeloom.runtime.checkpoint.ema import Averages
from pipeloom.runtime.checkpoint.optimizer_options import options_by_name
from pipeloom.runtime.launch.processes import launch
from pipeloom.runtime.model.tied import TiedParameter, tied_over_ranks
from pipeloom.training.optimizers import CombinedOptimizer

from .cases import Run, random_run
from .on_ranks import train_save_resume

pytestmark = pytest.mark.ranks


def executor_of(run: Run) -> Executor:
    return Executor(run.model, run.case.layout, 0, ThreadHub().transport(0))


def test_training_resumes_in_another_layout_with_the_same_losses(tmp_path: Path) -> None:
    (first, again), (second, _) = launch(train_save_resume, 2, 12, str(tmp_path), timeout_s=60.0)
    losses = [mine + theirs for mine, theirs in zip(first, second, strict=True)]
    assert len(losses) == 6
    assert losses[0] != pytest.approx(losses[3], rel=1e-3)
    assert again == pytest.approx(losses[3:], rel=1e-12)


def test_a_checkpoint_that_is_overwritten_in_part_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of each rank are written, but not what completes them."""
    executor = executor_of(random_run(1, 1))
    save_checkpoint(tmp_path, executor, None, 3)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(DigestingWriter, "finish", fail)
        with pytest.raises(ExecutionError, match="the disk is gone"):
            save_checkpoint(tmp_path, executor, None, 4)
    with pytest.raises(InputError, match="is not a complete checkpoint"):
        load_checkpoint(tmp_path, executor, None)
    save_checkpoint(tmp_path, executor, None, 5)
    assert load_checkpoint(tmp_path, executor, None) == 5


def test_what_is_no_checkpoint_of_this_model_is_refused(tmp_path: Path) -> None:
    run = random_run(1, 1)
    with pytest.raises(InputError, match="is not a complete checkpoint"):
        load_checkpoint(tmp_path, executor_of(run), None)
    save_checkpoint(tmp_path / "a", executor_of(run), None, 7)
    assert load_checkpoint(tmp_path / "a", executor_of(run), None) == 7
    stranger = next(r for r in map(random_run, range(2, 50), [1] * 48) if names(r) - names(run))
    with pytest.raises(InputError, match="is missing, the model needs"):
        load_checkpoint(tmp_path / "a", executor_of(stranger), None)
    # Same names, another width.
    layer = run.model.modules[0].layers[0]
    grown = {name: torch.zeros(2, *p.shape) for name, p in layer.named_parameters()}
    for name, value in grown.items():
        *path, last = name.split(".")
        setattr(layer.get_submodule(".".join(path)), last, torch.nn.Parameter(value))
    with pytest.raises(InputError, match="has shape"):
        load_checkpoint(tmp_path / "a", executor_of(run), None)


def names(run: Run) -> set[str]:
    return {name for name, _ in executor_of(run).named_parameters()}


class Counting(torch.optim.Optimizer):
    """Plain descent with a slot of every sort."""

    def __init__(self, groups: list[dict[str, Any]], rate: float = 0.1) -> None:
        super().__init__(groups, {"rate": rate, "pair": (0.5, rate), "word": None})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = 0.5 * state.get("mean", 0.0) + float(parameter.grad.mean())
                state["last"] = parameter.grad.clone()
                parameter.data.sub_(parameter.grad, alpha=group["rate"] / state["count"])


def grouped(executor: Executor, rate: float = 0.1, num_groups: int = 2) -> Counting:
    parameters = executor.parameters()
    groups = [{"params": parameters[i::num_groups]} for i in range(num_groups)]
    return Counting(groups, rate)


def test_options_and_plain_state_of_an_optimizer_are_kept(tmp_path: Path) -> None:
    executor = executor_of(random_run(3, 1))
    before = grouped(executor)
    before.param_groups[0]["rate"] = 1 / 3
    before.param_groups[1] |= {"initial_rate": 1e-300, "flag": True, "scale": torch.tensor(0.75)}
    for _ in range(3):
        for parameter in executor.parameters():
            parameter.grad = torch.randn_like(parameter)
        before.step()
    save_checkpoint(tmp_path, executor, before, 3)

    again = executor_of(random_run(3, 1))
    after = grouped(again, rate=99.0)
    after.param_groups[1]["scale"] = torch.tensor(0.0)
    assert load_checkpoint(tmp_path, again, after) == 3
    for one, other in zip(before.param_groups, after.param_groups, strict=True):
        assert {k: v for k, v in one.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}
    assert isinstance(after.param_groups[1]["scale"], torch.Tensor)
    for one, other in zip(executor.parameters(), again.parameters(), strict=True):
        kept, found = before.state[one], after.state[other]
        assert torch.equal(kept.pop("last"), found.pop("last"))
        assert kept == found
        assert type(found["count"]) is int

    with pytest.raises(InputError, match=r"optimizer.param_groups\[0\]: has '.*' and '.*', saved with different rate"):
        load_checkpoint(tmp_path, again, grouped(again, num_groups=1))


def test_an_optimizer_forgets_steps_that_the_saved_one_had_not_taken(tmp_path: Path) -> None:
    executor = executor_of(random_run(3, 1))
    optimizer = torch.optim.AdamW(executor.parameters())
    save_checkpoint(tmp_path, executor, optimizer, 0)
    for parameter in executor.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    load_checkpoint(tmp_path, executor, optimizer)
    assert not optimizer.state


def tied_ranks() -> tuple[TiedParameter, list[Executor]]:
    """A parameter that several ranks hold, and the ranks; each has a model of its own, as in its own process."""
    seed = next(n for n in range(60) if tied_over_ranks((run := random_run(n, 3, tied=True)).model, run.case.layout))
    executors = []
    for rank in range(3):
        run = random_run(seed, 3, tied=True)
        transport = ThreadHub().transport(rank)
        executors.append(Executor(run.model, run.case.layout, rank, transport, sum_tied=lambda *_: None))
    return tied_over_ranks(run.model, run.case.layout)[0], executors


def test_tied_weights_have_one_name_on_all_ranks_also_in_older_checkpoints(tmp_path: Path) -> None:
    tied, executors = tied_ranks()
    states: dict[str, torch.Tensor] = {}
    for rank in tied.ranks:
        trained = executors[rank].trained_parameters()
        [mine] = [parameter for name, parameter in trained if name == tied.names[0]]
        assert mine is executors[rank].model.parameter(tied.names[0])
        # Before, each rank used the first name of its own layers, so that the copies were in different groups.
        others = [parameter for _, parameter in trained if parameter is not mine]
        optimizer = Counting([{"params": [mine], "rate": 1.0 + rank}, {"params": others}])
        optimizer.state[mine] = {"last": torch.full_like(mine, rank), "count": rank}
        mine.data.fill_(rank)
        averages = Averages(trained, 0.9)
        states = state_tensors(executors[rank], optimizer, 5, averages=averages) | states
    write_state(tmp_path, states)

    first = next(rank for rank in tied.ranks if tied.names[0] in dict(executors[rank].named_parameters()))
    for rank in tied.ranks:
        executor = executors[rank]
        optimizer = grouped(executor, num_groups=len(executor.parameters()))
        mine, averages = executor.model.parameter(tied.names[0]), Averages(executor.trained_parameters(), 0.9)
        assert load_checkpoint(tmp_path, executor, optimizer, averages=averages) == 5
        assert (mine == first).all()
        average = averages.of(mine)
        assert average is not None
        assert (average == first).all()
        assert (optimizer.state[mine]["last"] == first).all()
        assert optimizer.state[mine]["count"] == first
        [group] = [each for each in optimizer.param_groups if each["params"][0] is mine]
        assert group["rate"] == 1.0 + first


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def optimizer(executor: Executor, rest: type[torch.optim.Optimizer]) -> CombinedOptimizer:
        first, *others = executor.parameters()
        return CombinedOptimizer([torch.optim.AdamW([first]), rest(others)])

    executor = executor_of(random_run(3, 1))
    last = executor.trained_parameters()[1][0]
    save_checkpoint(tmp_path / "new", executor, optimizer(executor, torch.optim.SGD), 3)
    assert load_checkpoint(tmp_path / "new", executor, optimizer(executor, torch.optim.SGD)) == 3
    message = rf"new: optimizer: is AdamW, but the checkpoint has the state of SGD for '{re.escape(last)}'; use SGD, or"
    with pytest.raises(InputError, match=message):
        load_checkpoint(tmp_path / "new", executor, optimizer(executor, torch.optim.AdamW))

    # An older checkpoint does not name them.
    without = {
        name: {k: v for k, v in each.items() if k != "class"}
        for name, each in options_by_name(executor, optimizer(executor, torch.optim.SGD)).items()
    }
    monkeypatch.setattr(checkpoint, "options_by_name", lambda *_: without)
    save_checkpoint(tmp_path / "old", executor, optimizer(executor, torch.optim.SGD), 3)
    assert load_checkpoint(tmp_path / "old", executor, optimizer(executor, torch.optim.SGD)) == 3


class Payload:
    """Whoever unpickles it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("capturable", [False, True])
def test_counts_of_steps_are_loaded_to_where_the_optimizer_reads_them(capturable: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, device="meta"))
    executor: Any = SimpleNamespace(trained_parameters=lambda: [("w", parameter)])
    properties = SimpleNamespace(dtype=torch.float32)
    stored = {
        "optimizer.w/step": SimpleNamespace(size=torch.Size([]), properties=properties),
        "optimizer.w/exp_avg": SimpleNamespace(size=torch.Size([2]), properties=properties),
    }
    slots = checkpoint._empty_slots(executor, torch.optim.AdamW([parameter], capturable=capturable), stored)
    assert slots["optimizer.w/exp_avg"].device.type == "meta"
    assert slots["optimizer.w/step"].device.type == ("meta" if capturable else "cpu")


def test_a_checkpoint_runs_nothing(tmp_path: Path) -> None:
    executor, saved, made = executor_of(random_run(3, 1)), tmp_path / "saved", tmp_path / "made"
    save_checkpoint(saved, executor, None, 3)
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    without_digests(saved)

    (saved / ".metadata").write_bytes(pickle.dumps(Payload(made)))
    with pytest.raises(InputError, match=r"\.metadata: is not the metadata of a checkpoint: it asks for posix.mkdir"):
        load_checkpoint(saved, executor, None)

    # What torch takes for an object of Python's it unpickles, whatever the model wants in its place.
    metadata.state_dict_metadata["iteration"] = BytesStorageMetadata()
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    index = next(i for i in metadata.storage_data if i.fqn == "iteration")
    content = io.BytesIO()
    torch.save(Payload(made), content)
    metadata.storage_data[index] = replace(metadata.storage_data[index], offset=0, length=len(content.getvalue()))
    metadata.storage_data[index].relative_path = "payload"
    (saved / "payload").write_bytes(content.getvalue())
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InputError, match=r"asks for .*BytesStorageMetadata"):
        load_checkpoint(saved, executor, None)
    assert not made.exists()


def without_digests(folder: Path) -> None:
    """Make it a checkpoint of an older version."""
    for file in folder.glob("digests-*.json"):
        file.unlink()


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    executor = executor_of(random_run(3, 1))
    save_checkpoint(tmp_path, executor, None, 3)
    for file in (tmp_path / "__0_0.distcp", tmp_path / ".metadata"):
        whole = file.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 20)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(InputError, match=rf"{file}: is damaged: .*; remove this checkpoint to resume from"):
                load_checkpoint(tmp_path, executor, None)
        file.write_bytes(whole[:-1])
        with pytest.raises(InputError, match=f"{file}: is damaged"):
            load_checkpoint(tmp_path, executor, None)
        file.write_bytes(whole)
    assert load_checkpoint(tmp_path, executor, None) == 3
    (tmp_path / "digests-0.json").write_text("{}")
    with pytest.raises(InputError, match=r"__0_0.distcp: has no digest beside it"):
        load_checkpoint(tmp_path, executor, None)
    (tmp_path / "digests-0.json").write_text("{")
    with pytest.raises(InputError, match=r"digests-0.json: cannot be read"):
        load_checkpoint(tmp_path, executor, None)
    without_digests(tmp_path)
    assert load_checkpoint(tmp_path, executor, None) == 3


def test_what_torch_says_of_a_file_is_reported_in_one_line(tmp_path: Path) -> None:
    executor = executor_of(random_run(3, 1))
    save_checkpoint(tmp_path / "saved", executor, None, 3)
    without_digests(tmp_path / "saved")
    (tmp_path / "saved" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(InputError, match=r"saved/__0_0.distcp: cannot be read \(\w+") as read:
        load_checkpoint(tmp_path / "saved", executor, None)
    (tmp_path / "file").touch()
    with pytest.raises(ExecutionError, match=r"file/a cannot be written: rank 0: \w+: ") as written:
        save_checkpoint(tmp_path / "file" / "a", executor, None, 3)
    for error in (read, written):
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400


def test_state_that_no_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    executor = executor_of(random_run(3, 1))
    optimizer = grouped(executor)
    name, parameter = next(iter(executor.named_parameters()))
    optimizer.state[parameter]["history"] = [object()]
    with pytest.raises(InputError, match=rf"optimizer.state\['{name}'\]\['history'\]: is a object"):
        save_checkpoint(tmp_path, executor, optimizer, 1)
    optimizer.state.clear()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(7))]})
    with pytest.raises(InputError, match=r"param_groups\[2\]: has a parameter of shape \(7,\)"):
        save_checkpoint(tmp_path, executor, optimizer, 1)
