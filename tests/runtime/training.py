"""A short training run of the digits example in double precision, for launched ranks and for one process."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import torch
from torch.utils.data import DataLoader

import pipeloom as pl
from pipeloom.cost import LayerFit, Profile
from pipeloom.errors import PlannerError
from pipeloom.explain.replay import answered_graph, timeline_of
from pipeloom.layout import ModulePlacement, replicated, separate
from pipeloom.packing import PackingSpec
from pipeloom.plan import Action, Answer
from pipeloom.planner import HostedStore, Planner, PlanningProblem
from pipeloom.runtime import ExecutionOptions, Prefetched, StepReport, TcpPlanStore, TorchTransport, Trainer, Transport

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits_vlm import data, task
from digits_vlm import model as layers_of

DOCUMENTS, CLIP, RATE = 4, 0.5, 3e-3


class Step(NamedTuple):
    """What one iteration came to, and how long it took in all."""

    loss: float
    fresh: bool
    reason: str
    took_s: float
    lead_s: float


def model(tied: bool = False) -> pl.Model:
    """The example, with as few layers as two chunks on each of four ranks take."""
    torch.set_default_dtype(torch.float64)
    try:
        with patch.multiple(layers_of, VISION_BLOCKS=2, LM_BLOCKS=6):
            made = task.build_model(seed=1)
    finally:
        torch.set_default_dtype(torch.float32)
    if tied:
        layers = made.module("lm").layers
        layers[-1].project.weight = layers[0].word
        made = replace(made)
    return made


def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def invented_problem(num_ranks: int, budget_s: float = 0.02, on_all_ranks: tuple[str, ...] = ()) -> PlanningProblem:
    """Costs are invented: a profile of the right form is all that planning needs."""
    spec = model().spec
    fit = LayerFit((1e-4, 0, 1e-6, 0), (2e-4, 0, 2e-6, 0), (0, 0, 64, 0))
    profile = Profile("invented", {f"{m.name}/{x.kind}": fit for m in spec.modules for x in m.flat_layers})
    placements = {"vision": ModulePlacement(1, 4), "lm": ModulePlacement(2)}
    layout = replicated(separate(spec, num_ranks, placements, lambda module, layer: 1.0), on_all_ranks)
    return PlanningProblem.from_profile(spec, layout, profile, PackingSpec(120), budget_s=budget_s)


def steps_on_rank(num_ranks: int, iterations: int, disturbances: list[str]) -> dict[str, list[Step]]:
    """The steps of one training after the other, each with its own disturbance."""
    return {disturb: train_disturbed(num_ranks, iterations, disturb) for disturb in disturbances}


def train_disturbed(num_ranks: int, iterations: int, disturb: str) -> list[Step]:
    """Train as one rank; returns what each iteration came to."""
    trained = model()
    disturbance = DISTURBANCES[disturb]()
    made = invented_problem(num_ranks, disturbance.budget_s, disturbance.on_all_ranks)
    planner = Planner(made, lambda: disturbance.store(TcpPlanStore.host()), deadline_s=disturbance.deadline_s)
    batches: Iterable[Sequence[data.Document]] = data.batches(3, iterations, DOCUMENTS)
    ahead = disturb == "nothing"
    if ahead:
        batches = prefetched(iterations)
    kind = TagZeroTrainer if disturb == "tag zero" else Trainer
    trainer = kind(
        trained,
        made.layout,
        planner,
        describe=None if ahead else task.describe,
        optimizer=optimizer,
        options=ExecutionOptions(clip_norm=CLIP),
    )
    found, begin = [], time.monotonic()
    for report in trainer.run(batches):
        took, begin = time.monotonic() - begin, time.monotonic()
        found.append(Step(report.loss, report.fresh, report.reason, took, report.lead_s))
        if trainer.rank == 0:
            check_report(made, report)
            disturbance.after(planner, report.iteration)
    return found


class TagZeroTrainer(Trainer):
    """Sends every message with tag 0, which is how NCCL matches them."""

    def _make_transport(self) -> Transport:
        return TorchTransport(self.membership.messages, use_tags=False)


def drawn(iterations: int, documents: int, short: Collection[int]) -> list[Any]:
    """The batches; some of a single document."""
    batches = enumerate(data.batches(3, iterations, documents))
    return [samples[:1] if number in short else samples for number, samples in batches]


def prefetched(iterations: int, documents: int = DOCUMENTS, short: Collection[int] = ()) -> Prefetched:
    """The batches by a loader of torch's, read and described ahead."""
    batches = drawn(iterations, documents, short)
    loader: DataLoader[Any] = DataLoader(batches, batch_size=None, collate_fn=list)  # type: ignore[arg-type]
    return Prefetched(loader, describe=task.describe)


def check_report(problem: PlanningProblem, report: StepReport) -> None:
    """What a report says of its plan is what the plan was made with, and everything was measured."""
    assert report.answer is not None
    assert report.batch is not None
    assert report.measured is not None
    graph = answered_graph(problem, report.batch, report.answer, report.correction)
    planned = timeline_of(graph, problem, report.answer, report.answer.planned_start_ns)
    assert (planned.end_ns - planned.start_ns).tolist() == graph.duration_ns.tolist()
    for actions, times in zip(report.answer.plan.ranks, report.measured.times_ns, strict=True):
        assert len(actions) == len(times)
        assert (times[:, 1] >= times[:, 0]).all()
        assert (times[1:, 0] >= times[:-1, 1]).all()
    for message in report.measured.messages(report.answer.plan):
        assert message.arrived_ns >= message.wait_ns
        assert message.num_bytes > 0


def losses_undivided(
    iterations: int, tied: bool = False, documents: int = DOCUMENTS, short: Collection[int] = ()
) -> list[float]:
    """The same training in one process, without pipeline, packing or planner."""
    whole = model(tied)
    vision, language = whole.modules
    every = [p for module in whole.modules for layer in module.layers for p in layer.parameters()]
    parameters = list({id(p): p for p in every}.values())
    adam, found = optimizer(parameters), []
    for samples in drawn(iterations, documents, short):
        everything = pl.Part(
            tuple(samples), tuple((i, j) for i, document in enumerate(samples) for j in range(len(document.images)))
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


class Disturbance:
    """What goes wrong, and when: one for each kind of fault."""

    deadline_s = 5.0
    budget_s = 0.02
    on_all_ranks: tuple[str, ...] = ()

    def after(self, planner: Planner, iteration: int) -> None:
        """Called on rank 0 after every iteration."""

    def store(self, store: TcpPlanStore) -> HostedStore:
        """The store through which the planner's client speaks."""
        return store


class Replicated(Disturbance):
    """Nothing goes wrong, but the encoder lies whole on every rank."""

    on_all_ranks = ("vision",)


class Kill(Disturbance):
    """The planner is killed after iteration 2; after iteration 5 we wait until it is back."""

    def after(self, planner: Planner, iteration: int) -> None:
        if iteration == 2:
            end(planner)
        if iteration == 5:
            wait_for(lambda: planner.ready)

    def store(self, store: TcpPlanStore) -> HostedStore:
        # What it had answered before it died would still be used.
        return Meddling(store, lambda iteration, data: None if iteration == 3 else data)


class KillForGood(Disturbance):
    """The planner is killed whenever it runs."""

    def after(self, planner: Planner, iteration: int) -> None:
        if planner.process.is_alive():
            end(planner)


class Garbage(Disturbance):
    """Half an answer for iteration 3, and for iteration 5 a good one for another iteration."""

    def store(self, store: TcpPlanStore) -> HostedStore:
        kept: list[bytes] = []

        def meddle(iteration: int, data: bytes) -> bytes:
            kept.append(data)
            return data[: len(data) // 2] if iteration == 3 else kept[3] if iteration == 5 else data

        return Meddling(store, meddle)


class OtherShapes(Disturbance):
    """A plan that is good, but for a batch with other samples; and one with another packing than it says."""

    def store(self, store: TcpPlanStore) -> HostedStore:
        def meddle(iteration: int, data: bytes) -> bytes:
            answer = msgspec.msgpack.decode(data, type=Answer)
            replace = msgspec.structs.replace
            if iteration == 3:
                (first, *others), *rest = answer.packing.samples
                packing = replace(answer.packing, samples=((*others, first + DOCUMENTS), *rest))
                answer = replace(answer, packing=packing)
            if iteration == 5:
                ranks = [[grown(action) for action in actions] for actions in answer.plan.ranks]
                answer = replace(answer, plan=replace(answer.plan, ranks=tuple(map(tuple, ranks))))
            return msgspec.msgpack.encode(answer)

        def grown(action: Action) -> Action:
            if action.shape is None:
                return action
            return msgspec.structs.replace(action, shape=(action.shape[0] + 1, *action.shape[1:]))

        return Meddling(store, meddle)


class Hang(Disturbance):
    """The planner is stopped, but not ended, after iteration 2, and goes on after iteration 4."""

    def after(self, planner: Planner, iteration: int) -> None:
        if iteration == 2:
            planner.deadline_s = 0.3
            os.kill(planner.process.pid, signal.SIGSTOP)
        if iteration == 4:
            os.kill(planner.process.pid, signal.SIGCONT)
            planner.deadline_s = 30.0

    def store(self, store: TcpPlanStore) -> HostedStore:
        return Meddling(store, lambda iteration, data: None if iteration == 3 else data)


class Slow(Disturbance):
    """The planner searches for longer than anybody waits."""

    deadline_s = 0.1
    budget_s = 60.0


class StoreFails(Disturbance):
    """The store breaks once, from inside the client; the next one that is opened works."""

    def __init__(self) -> None:
        self.opened = 0

    def store(self, store: TcpPlanStore) -> HostedStore:
        self.opened += 1
        breaks = self.opened == 1

        def meddle(iteration: int, data: bytes) -> bytes:
            if breaks and iteration == 3:
                raise PlannerError("the plan store is gone")
            return data

        return Meddling(store, meddle)

    def after(self, planner: Planner, iteration: int) -> None:
        if iteration == 5:
            wait_for(lambda: planner.ready)


class StoreHangs(StoreFails):
    """The store never answers again."""

    deadline_s = 0.5

    def store(self, store: TcpPlanStore) -> HostedStore:
        self.opened += 1
        breaks = self.opened == 1

        def meddle(iteration: int, data: bytes) -> bytes:
            if breaks and iteration == 3:
                time.sleep(1000)
            return data

        return Meddling(store, meddle)


class Meddling:
    """A store that changes, drops or never gives what the planner answers."""

    def __init__(self, store: TcpPlanStore, meddle: Callable[[int, bytes], bytes | None]) -> None:
        self.inner, self.meddle = store, meddle
        self.address, self.secret = store.address, store.secret
        self.put, self.peek = store.put, store.peek

    def take(self, key: str) -> bytes | None:
        data = self.inner.take(key)
        kind, _, iteration = key.partition("/")
        return self.meddle(int(iteration), data) if data and kind == "answer" else data


def end(planner: Planner) -> None:
    os.kill(planner.process.pid, signal.SIGKILL)
    planner.process.stop()


DISTURBANCES: dict[str, type[Disturbance]] = {
    "nothing": Disturbance,
    "tag zero": Disturbance,
    "replicated": Replicated,
    "kill": Kill,
    "kill for good": KillForGood,
    "garbage": Garbage,
    "other shapes": OtherShapes,
    "hang": Hang,
    "slow": Slow,
    "store fails": StoreFails,
    "store hangs": StoreHangs,
}


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            raise TimeoutError("the planner did not come back")
        time.sleep(0.01)
