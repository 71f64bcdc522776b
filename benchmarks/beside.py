"""What planning beside training costs the training, and what delivering a plan takes."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.planning import _batch, _problem
from pipeloom.cost import Correction, LayerFit, Profile
from pipeloom.layout import ModulePlacement, separate
from pipeloom.packing import PackingSpec
from pipeloom.plan import Delivery
from pipeloom.planner import Planner, PlanningProblem, Request, answer_of, plan_batch
from pipeloom.planner.messages import encode
from pipeloom.report import markdown_table
from pipeloom.runtime import Checkpoints, Executor, Model, Module, Saving, TcpPlanStore, TorchTransport, Trainer
from pipeloom.runtime.launch.coordination import PLAN_FIRST_BYTES, scatter_bytes, scatter_plan
from pipeloom.runtime.launch.processes import launch
from pipeloom.search import Budget
from pipeloom.spec import Batch, ModelSpec

TITLE = "Planning and checkpoints during training, and delivery of plans"
_RANKS, _FORWARD_S, _BACKWARD_S = 4, 0.01, 0.02
_WIDTH = 4
_APART_S = 0.02
_EVERY, _BUFFER_BYTES = (3, 10), 4_000_000


def run(iterations: int = 28, repeats: int = 15) -> str:
    """Measure, and return the section as Markdown.

    Parameters
    ----------
    iterations : int
        Of each kind of training.
    repeats : int
        Deliveries of the large plan.
    """
    size = 2 * _BUFFER_BYTES / 1e6
    text = (
        f"{_RANKS} ranks with layers that sleep ({_FORWARD_S * 1e3:.0f} ms forward, {_BACKWARD_S * 1e3:.0f} "
        f"ms backward) run under the trainer. {iterations} iterations of each kind alternate, with the "
        "same plans. Times are whole iterations of rank 0 by the wall clock. They include waiting for "
        f"the plan, its delivery, and the part of a checkpoint that blocks training. A rank saves {size:.0f} "
        "MB. The goal is less than 2 % longer on average, both with planning and with asynchronous checkpoints. "
        "Sleeping layers do not compete with the planner for cores."
    )
    return "\n\n".join([text, *(_beside(iterations, every) for every in _EVERY), _delivery(repeats)])


# ------------------------------------------------------------------ planning beside training


def _beside(iterations: int, every: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        kinds = launch(_train_by_turns, _RANKS, iterations, folder, every)[0]
    alone = kinds["alone"]

    def row(what: str, name: str) -> list[str]:
        found = kinds[name]
        median, mean = (each(found) / each(alone) - 1 for each in (statistics.median, statistics.mean))
        more = ["", ""] if name == "alone" else [f"{median:+.2%}", f"{mean:+.2%}"]
        return [what, f"{statistics.median(found) * 1e3:.1f}", f"{statistics.mean(found) * 1e3:.1f}", *more]

    rows = [
        row("plans known in advance, no checkpoint", "alone"),
        row("planner searches during training, no checkpoint", "beside"),
        row(f"plans known in advance, a checkpoint every {every} iterations", "saving"),
        row("the same, synchronous (`asynchronous = false`)", "waiting"),
    ]
    header = ["", "median, ms", "mean, ms", "median longer by", "mean longer by"]
    return markdown_table(header, rows)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        time.sleep(_FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        time.sleep(_BACKWARD_S)
        return gradient.clone()


class Sleeper(nn.Module):
    """A layer that takes time and no core."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(_WIDTH))
        self.register_buffer("saved", torch.rand(_BUFFER_BYTES // 4))

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``(tokens, _WIDTH)``."""
        slept: Tensor = _Sleep.apply(x * self.scale)  # type: ignore[no-untyped-call]
        return slept


def _sleeping_model() -> Model:
    module = Module(
        "lm",
        [Sleeper() for _ in range(2 * _RANKS)],
        reads="sequence",
        hidden=("tokens", _WIDTH),
        output=("tokens", _WIDTH),
        inputs=lambda part: torch.ones(sum(length for _, length in part.samples), _WIDTH),
    )
    return Model([module], lambda out, _: out.sum(), lambda sample: float(sample[1]))


class _Kept:
    """A plan source that has every plan beforehand."""

    def __init__(self, deliveries: dict[int, Delivery]) -> None:
        self.deliveries = deliveries

    def start(self) -> None:
        """Nothing to start."""

    def submit(self, batch: Batch, correction: Correction) -> None:
        """Everything is planned."""

    def collect(self, iteration: int) -> Delivery:
        """Return the plan."""
        return self.deliveries[iteration]

    def close(self) -> None:
        """Nothing to close."""


class _Keeping(Planner):
    """A planner that keeps what it delivers."""

    def collect(self, iteration: int) -> Delivery:
        """Return the plan, and keep it."""
        delivery = super().collect(iteration)
        KEPT[iteration] = delivery
        return delivery


KEPT: dict[int, Delivery] = {}


def _train_by_turns(iterations: int, folder: str, every: int) -> dict[str, list[float]]:
    """On one rank: seconds of every iteration, alone, beside a planner, and with checkpoints, by turns."""
    torch.set_num_threads(1)
    model = _sleeping_model()
    fit = LayerFit((_FORWARD_S, 0, 0, 0), (_BACKWARD_S, 0, 0, 0), (0, 0, 16, 0))
    profile = Profile("sleeping", {f"lm/{layer.kind}": fit for layer in model.spec.modules[0].layers})
    layout = separate(model.spec, _RANKS, {"lm": ModulePlacement(2)}, lambda *_: 1.0)
    microbatches = 8
    # Long enough to be searching until shortly before the plan is needed.
    budget_s = 0.8 * microbatches * 2 * (_FORWARD_S + _BACKWARD_S)
    problem = PlanningProblem.from_profile(model.spec, layout, profile, PackingSpec(10), budget_s=budget_s)
    found: dict[str, list[float]] = {"beside": [], "alone": [], "saving": [], "waiting": []}
    chunk = 2 * every + 1
    for first in range(0, iterations, chunk):
        numbers = range(first, min(iterations, first + chunk))
        for name, taken in found.items():
            source = _Keeping(problem, TcpPlanStore.host, deadline_s=30.0) if name == "beside" else _Kept(KEPT)
            saved = Checkpoints(Path(folder, name), every, keep=1, asynchronous=name == "saving")
            trainer = Trainer(
                model,
                layout,
                source,
                describe=_describe,
                optimizer=lambda p: torch.optim.SGD(p, 1e-6),
                saving=Saving(checkpoints=saved if name in ("saving", "waiting") else None),
            )
            batches = [[(j, 6 + (i + j) % 5) for j in range(microbatches)] for i in numbers]
            dist.barrier()
            begin = time.monotonic()
            for number, _ in enumerate(trainer.run(batches, first)):
                now = time.monotonic()
                # The first waits for its plan, which nobody could have made before.
                if number:
                    taken.append(now - begin)
                begin = now
    return found


def _describe(sample: tuple[int, int]) -> dict[str, Any]:
    return {"id": str(sample[0]), "text_tokens": sample[1]}


# ------------------------------------------------------------------ delivery


def _delivery(repeats: int) -> str:
    model, costs, packing = _problem()
    layout = separate(model, _RANKS, {"vision": ModulePlacement(1, 12), "lm": ModulePlacement(2)}, lambda *_: 1.0)
    problem = PlanningProblem.from_profile(model, layout, costs.profile, packing)
    batch = _batch(17)
    planned = plan_batch(problem.with_search(method="portfolio"), batch, budget=Budget(evaluations=1))
    data = encode(answer_of(planned, search_s=0.0, ready_ns=0))
    actions = sum(map(len, planned.plan.ranks))
    by_rank = launch(_deliver, _RANKS, problem, batch, data, repeats)
    turns = range(1, repeats)

    def median(of: Callable[[int], float]) -> str:
        return f"{statistics.median(map(of, turns)) * 1e3:.2f}"

    def last(name: str, begin: str = "begin_s") -> Callable[[int], float]:
        return lambda i: max(getattr(rank[i], name) for rank in by_rank) - getattr(by_rank[0][i], begin)

    waking = last("woken_s", "woken_begin_s")

    def spent(name: str) -> Callable[[int], float]:
        return lambda i: max(getattr(rank[i], name) for rank in by_rank[1:])

    rows = [
        [
            "read from the store, decoded, checked, verified and encoded for every rank, during the previous iteration",
            median(lambda i: by_rank[0][i].checked_s),
        ],
        ["empty message to all ranks", median(waking)],
        ["broadcast until all ranks have decoded their actions", median(last("there_s"))],
        ["broadcast until all ranks have linked their actions and are ready to run", median(last("ready_s"))],
        ["the same, less the empty message (goal: 5)", median(lambda i: last("ready_s")(i) - waking(i))],
        ["CPU time of a receiving rank: decoding and packing", median(spent("decode_cpu_s"))],
        ["CPU time of a receiving rank: linking", median(spent("link_cpu_s"))],
    ]
    text = (
        f"One plan of {actions} actions for {_RANKS} ranks ({len(data) / 1e3:.0f} kB). Medians of {repeats - 1} "
        "deliveries; the slowest rank counts. Training waits only for the steps from rank 0 to the other "
        "ranks, measured from the moment rank 0 starts to send. Every rank receives, decodes and links "
        "only its own actions."
    )
    return f"{text}\n\n{markdown_table(['step', 'ms'], rows)}"


class _Delivery(NamedTuple):
    checked_s: float
    """Until rank 0 may use a plan."""
    begin_s: float
    woken_begin_s: float
    woken_s: float
    there_s: float
    ready_s: float
    """On the clock that all processes of a host share: when this rank began to send or to wait, for the plan and for an
    empty message; when the empty message was there, when its own actions were there, and when they were linked."""
    decode_cpu_s: float
    link_cpu_s: float


def _standing_in(spec: ModelSpec) -> Model:
    """A model of such a spec whose layers do nothing: they are linked, and never run."""
    modules = [
        Module(
            module.name,
            [nn.Identity() for _ in module.flat_layers],
            reads=module.reads,
            hidden=module.flat_layers[0].output,
            output=module.flat_layers[-1].output,
            inputs=lambda part: torch.empty(0),  # noqa: ARG005
            after=module.after,
            kinds=tuple(layer.kind for layer in module.flat_layers),
        )
        for module in spec.modules
    ]
    return Model(modules, lambda out, _: out.sum(), lambda _: 1.0, name=spec.name)


def _deliver(problem: PlanningProblem, batch: Batch, data: bytes, repeats: int) -> list[_Delivery]:
    """On one rank: the times of every delivery."""
    torch.set_num_threads(1)
    planner = Planner(problem, TcpPlanStore.host)
    store, rank = TcpPlanStore.host(), dist.get_rank()
    executor = Executor(_standing_in(problem.model), problem.layout, rank, TorchTransport())
    found = []
    for _ in range(repeats):
        gc.collect()
        dist.barrier()
        delivery, checked = None, 0.0
        if rank == 0:
            planner._submitted[batch.iteration] = Request(batch)
            store.put("answer", data)
            begin = time.perf_counter()
            delivery = planner._accept(batch.iteration, store.take("answer") or b"")
            checked = time.perf_counter() - begin
        woken_begin, woken = _woken(rank)
        dist.barrier()
        if rank == 0:
            # In training rank 0 asks the planner while the others already wait for the plan; so they do here.
            time.sleep(_APART_S)
        begin = time.monotonic()
        cpu = [time.thread_time()]
        handed = scatter_plan(delivery, batch, problem.model, problem.layout)
        there = time.monotonic()
        cpu.append(time.thread_time())
        linked = executor.prepare(handed.plan, handed.packing)
        ready = time.monotonic()
        cpu.append(time.thread_time())
        linked.unlink()
        found.append(_Delivery(checked, begin, woken_begin, woken, there, ready, cpu[1] - cpu[0], cpu[2] - cpu[1]))
    return found


def _woken(rank: int) -> tuple[float, float]:
    """When a message without content is sent or waited for, and when it is here."""
    dist.barrier()
    if rank == 0:
        time.sleep(_APART_S)
    begin = time.monotonic()
    parts = [b""] * _RANKS if rank == 0 else None
    scatter_bytes(parts, None, PLAN_FIRST_BYTES)
    return begin, time.monotonic()
