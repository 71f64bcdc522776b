"""A short training run of the digits example in double precision, for launched ranks and for one process."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import pipeloom as pl
from pipeloom.arrange import ModulePlacement, separate
from pipeloom.cost import LayerFit, Profile
from pipeloom.packing import PackingSpec
from pipeloom.planner import Planner, Setup
from pipeloom.planner.service import answer_key
from pipeloom.runtime import TcpPlanStore, Trainer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits_vlm import data, task

DOCUMENTS, CLIP, RATE = 6, 0.5, 3e-3


def model() -> pl.Model:
    torch.set_default_dtype(torch.float64)
    try:
        return task.build_model(seed=1)
    finally:
        torch.set_default_dtype(torch.float32)


def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def setup(num_ranks: int, budget_s: float = 0.02) -> Setup:
    """Costs are invented: a profile of the right form is all that planning needs."""
    spec = model().spec
    fit = LayerFit((1e-4, 0, 1e-6, 0), (2e-4, 0, 2e-6, 0), (0, 0, 64, 0))
    profile = Profile("invented", {f"{m.name}/{x.kind}": fit for m in spec.modules for x in m.flat_layers})
    placements = {"vision": ModulePlacement(1, 4), "lm": ModulePlacement(2)}
    layout = separate(spec, num_ranks, placements, lambda module, layer: 1.0)
    return Setup(spec, layout, profile, PackingSpec(120), budget_s=budget_s)


def losses_on_rank(num_ranks: int, iterations: int, disturb: str) -> list[tuple[float, bool, str]]:
    """Train as one rank; returns loss, whether the plan was fresh, and why not, of every iteration."""
    trained = model()
    planner = Planner(setup(num_ranks), TcpPlanStore.host, deadline_s=5.0)
    trainer = Trainer(trained, planner.setup.layout, planner, describe=task.describe, optimizer=optimizer,
                      clip_norm=CLIP, tag_zero=disturb == "tag zero")  # fmt: skip
    found = []
    for report in trainer.run(data.batches(3, iterations, DOCUMENTS)):
        found.append((report.loss, report.fresh, report.reason))
        if trainer.rank == 0:
            DISTURBANCES[disturb](planner, report.iteration)
    return found


def losses_undivided(iterations: int) -> list[float]:
    """The same training in one process, without pipeline, packing or planner."""
    whole = model()
    vision, language = whole.modules
    parameters = [p for module in whole.modules for layer in module.layers for p in layer.parameters()]
    adam, found = optimizer(parameters), []
    for samples in data.batches(3, iterations, DOCUMENTS):
        everything = pl.Part(
            tuple(samples),
            tuple((i, j) for i, document in enumerate(samples) for j in range(len(document.images))),
        )
        images = vision.inputs(everything)
        for layer in vision.layers:
            images = layer(images)
        context = language.context(everything)
        x = language.layers[0](*language.inputs(everything), images, **context)
        for layer in language.layers[1:]:
            x = layer(x, **context)
        loss = whole.loss(x, everything) / sum(map(whole.num_targets, samples))
        loss.backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in parameters))
        for p in parameters:
            p.grad.mul_(min(1.0, CLIP / float(norm)))
        adam.step()
        adam.zero_grad()
        found.append(float(loss.detach()))
    return found


def _nothing(planner: Planner, iteration: int) -> None:
    pass


def _kill(planner: Planner, iteration: int) -> None:
    """Kill the planner after iteration 2; after iteration 5 wait until it is back."""
    if iteration == 2:
        _end(planner, iteration)
    if iteration == 5:
        _wait(lambda: planner.ready)


def _kill_for_good(planner: Planner, iteration: int) -> None:
    """Kill it whenever it runs."""
    if planner.process.is_alive():
        _end(planner, iteration)


def _garbage(planner: Planner, iteration: int) -> None:
    """Answer in the planner's place: half an answer, and a good one for another iteration."""
    if iteration in (2, 4):
        answer = _take_answer(planner, iteration + 1)
        planner._store.put(
            answer_key(iteration + 1), answer[: len(answer) // 2] if iteration == 2 else SAVED[0]
        )
        SAVED.append(answer)


def _hang(planner: Planner, iteration: int) -> None:
    """Stop the process without ending it, then let it go on."""
    if iteration == 2:
        _take_answer(planner, iteration + 1)
        planner.deadline_s = 0.3
        os.kill(planner.process.pid, signal.SIGSTOP)
    if iteration == 4:
        os.kill(planner.process.pid, signal.SIGCONT)
        planner.deadline_s = 30.0


def _end(planner: Planner, iteration: int) -> None:
    os.kill(planner.process.pid, signal.SIGKILL)
    planner.process.stop()
    # What it had answered before it died would still be used.
    planner._store.take(answer_key(iteration + 1))


def _take_answer(planner: Planner, iteration: int) -> bytes:
    key = answer_key(iteration)
    _wait(lambda: planner._store.peek(key) is not None)
    return planner._store.take(key)


SAVED: list[bytes] = []
DISTURBANCES: dict[str, Callable[[Planner, int], None]] = {
    "nothing": _nothing, "tag zero": _nothing, "kill": _kill, "kill for good": _kill_for_good,
    "garbage": _garbage, "hang": _hang,
}  # fmt: skip


def _wait(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            raise TimeoutError("the planner did not come back")
        time.sleep(0.01)
