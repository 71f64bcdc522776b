"""One rank trains as a plain loop does: in either precision, on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.cost import Correction, LayerFit, Profile
from pipeloom.errors import ExecutionError, InputError, PipeloomError
from pipeloom.layout import ModulePlacement, separate
from pipeloom.packing import PackingSpec
from pipeloom.plan import Delivery, backend_of, delivery_of
from pipeloom.planner import PlanningProblem, answer_of, plan_batch
from pipeloom.planner.forwards import forward_problem, plan_forwards
from pipeloom.runtime import Checkpoints, ExecutionOptions, Model, Module, Prefetched, Saving, Trainer
from pipeloom.runtime.execute.result import NotFiniteError
from pipeloom.runtime.launch.device import Place, join_group
from pipeloom.search import Budget
from pipeloom.spec import Batch, Parallelism, TensorShape

WIDTH, RATE, NUM_BATCHES = 32, 1e-2, 3
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
Sample = tuple[str, Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.relu(self.inner(x))
        return output


class Plans:
    """A planner in this process, without a search."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem.with_search(method="portfolio")
        self.batches: dict[int, Batch] = {}

    def start(self) -> None:
        pass

    def submit(self, batch: Batch, correction: Correction) -> None:
        self.batches[batch.iteration] = batch

    def collect(self, iteration: int) -> Delivery:
        batch = self.batches.pop(iteration)
        planned = plan_batch(self.problem, batch, budget=Budget(evaluations=1))
        answer = answer_of(planned, search_s=0.0, ready_ns=0)
        return delivery_of(answer, planned.packing, self.problem.layout, backend=self.problem.backend)

    def close(self) -> None:
        pass


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[torch.device]:
    """A device with a process group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    join_group(Place(request.param), store, 0, 1, 60.0, local_rank=0)
    yield torch.device(request.param)
    dist.destroy_process_group()


def batches() -> list[list[Sample]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [(f"{b}.{i}", torch.randn(4 + i, WIDTH, generator=generator)) for i in range(4)] for b in range(NUM_BATCHES)
    ]


def loss(output: Tensor, part: Any) -> Tensor:
    targets = torch.cat([sample[1] for sample in part.samples]).roll(1, 1).to(output.device)
    return (output.float() - targets).square().sum()


def trainer_of(
    layers: list[nn.Module],
    device: torch.device,
    autocast: torch.dtype | None,
    folder: Path | None = None,
    replicas: int = 1,
    random_seed: int | None = 0,
) -> Trainer:
    """A trainer of chunks with equal layers, which several replicas shard."""
    shape = TensorShape(("tokens", WIDTH), "float32" if autocast is None else "bfloat16")
    module = Module(
        "lm",
        layers,
        reads="sequence",
        hidden=shape,
        output=shape,
        inputs=lambda part: torch.cat([sample[1] for sample in part.samples]),
    )
    model = Model([module], loss, lambda sample: float(len(sample[1])))
    fit = LayerFit((1e-4, 0, 1e-6, 0), (2e-4, 0, 2e-6, 0), (0, 0, 64, 0))
    profile = Profile("invented", {f"lm/{kind.kind}": fit for kind in model.spec.modules[0].flat_layers})
    layout = separate(model.spec, 1, {"lm": ModulePlacement(2)}, lambda module, layer: 1.0)
    layout = msgspec.structs.replace(layout, parallelism=Parallelism(data=replicas))
    problem = PlanningProblem.from_profile(
        model.spec, layout, profile, PackingSpec(10), backend=backend_of(device.type)
    )
    return Trainer(
        model,
        layout,
        Plans(problem),
        describe=lambda sample: {"id": sample[0], "text_tokens": len(sample[1])},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        options=ExecutionOptions(
            clip_norm=1.0,
            device=device,
            autocast=autocast,
            shard="fsdp" if replicas > 1 else None,
            random_seed=random_seed,
        ),
        saving=Saving(checkpoints=None if folder is None else Checkpoints(folder, 1)),
    )


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_training_is_that_of_a_plain_loop(device: torch.device, autocast: torch.dtype | None) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Layer() for _ in range(4)]
    plain = nn.Sequential(*copy.deepcopy(layers)).to(device)
    trainer = trainer_of(layers, device, autocast)
    reports = list(trainer.run(batches()))

    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    tolerance = 1e-5 if autocast is None else 2e-2
    for report, samples in zip(reports, batches(), strict=True):
        rows = torch.cat([sample[1] for sample in samples]).to(device)
        with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            wanted = (plain(rows).float() - rows.roll(1, 1)).square().sum() / len(rows)
        wanted.backward()
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        assert report.num_microbatches > 1
        assert report.loss == pytest.approx(float(wanted.detach()), rel=tolerance)
        assert report.gradient_norm == pytest.approx(norm, rel=tolerance)
        assert report.measured is not None
        # What a GPU's host thread takes says nothing of the computation.
        assert (report.measured.cpu_ns[0] < 0) == (device.type == "cuda")
    trainer.gather_model()
    for layer, other in zip(layers, plain, strict=True):
        for mine, theirs in zip(layer.parameters(), other.parameters(), strict=True):
            assert mine.device.type == "cpu"
            torch.testing.assert_close(mine.detach(), theirs.detach().cpu(), rtol=0, atol=tolerance)


def test_random_numbers_go_on_after_a_checkpoint(device: torch.device, tmp_path: Path) -> None:
    """Without a seed, layers draw from the generators of the process."""
    trainer = trainer_of([Layer() for _ in range(2)], device, None, tmp_path / "checkpoints", random_seed=None)
    reports = trainer.run(batches())
    next(reports)
    # The first iteration is saved when the second is asked for.
    torch.manual_seed(7)
    next(reports)
    reports.close()  # type: ignore[attr-defined]
    torch.manual_seed(7)
    wanted = torch.rand(3, device=device), torch.rand(3)
    again = trainer_of([Layer() for _ in range(2)], device, None, tmp_path / "checkpoints", random_seed=None)
    torch.manual_seed(8)
    assert again.resume() == 1
    torch.testing.assert_close((torch.rand(3, device=device), torch.rand(3)), wanted, rtol=0, atol=0)


def test_training_goes_on_after_a_batch_that_is_not_finite(device: torch.device) -> None:
    trainer = trainer_of([Layer() for _ in range(2)], device, None)
    good, bad, again = batches()
    bad[0] = (bad[0][0], bad[0][1] * math.nan)
    with pytest.raises(ExecutionError, match=r"^iteration 1: the loss is nan"):
        list(trainer.run([good, bad, again]))
    [report] = trainer.run([again], 2)
    assert math.isfinite(report.gradient_norm)


@pytest.mark.parametrize(
    "error", [InputError("it", "is wrong"), NotFiniteError("the loss is nan"), ExecutionError("a layer fails")]
)
def test_a_checkpoint_is_completed_if_what_follows_it_fails(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: PipeloomError
) -> None:
    def take_over(checkpoints: Checkpoints, step: int) -> None:
        time.sleep(0.5)
        usual(checkpoints, step)

    def fail(_iteration: int) -> None:
        raise error

    usual = Checkpoints._take_over
    monkeypatch.setattr(Checkpoints, "_take_over", take_over)
    trainer = trainer_of([Layer() for _ in range(2)], device, None, tmp_path)
    with pytest.raises(type(error), match=str(error)):
        list(trainer.run(batches(), between=fail))
    assert Checkpoints(tmp_path, 1).steps() == [1]


def test_an_iterator_of_the_caller_stays_open(device: torch.device) -> None:
    trainer = trainer_of([Layer() for _ in range(2)], device, None)
    every = Prefetched(batches(), describe=lambda sample: {"id": sample[0], "text_tokens": len(sample[1])})
    reading = iter(every)
    assert [report.iteration for report in trainer.run(reading, end=1)] == [0]
    assert [report.iteration for report in trainer.run(reading, 1)] == [1, 2]
    skipped = trainer.skip_trained(every, 1)
    assert [report.iteration for report in trainer.run(skipped, 1, end=2)] == [1]
    assert [report.iteration for report in trainer.run(skipped, 2)] == [2]

    assert isinstance(trainer._planner, Plans)
    plan = partial(plan_forwards, forward_problem(trainer._planner.problem))
    reading = iter(every)
    assert trainer.evaluate(reading, plan, 3, most=1).num_batches == 1
    assert trainer.evaluate(reading, plan, 3).num_batches == NUM_BATCHES - 1
