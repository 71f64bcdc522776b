"""`check_gradients` compares the loss and the gradients of plans with the library's own."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from pipeloom.cost import StrategyCost
from pipeloom.errors import InputError
from pipeloom.integrations.transformers.build import TransformersModel, from_transformers
from pipeloom.integrations.transformers.reference import (
    GradientRow,
    Gradients,
    double,
    doubled,
    library_gradients,
    rows_of,
    twin,
)
from pipeloom.packing import Packing, PackingSpec, budget_tokens, pack
from pipeloom.plan import ExecutionPlan, boundary_shapes, lower, verify
from pipeloom.runtime import Executor, ThreadHub, batch_of
from pipeloom.spec import STRATEGIES, Batch, Chunk, Layout, ModelSpec, ModuleLayout, Strategy, Workload
from pipeloom.taskgraph import build_graph
from pipeloom.timeline import random_schedule, simulate

_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class GradientCheck:
    """Comparison of the worst plan's loss and gradients with the library's. ``str`` formats it as a table.

    Attributes
    ----------
    rows : tuple of GradientRow
        One row for each parameter with a gradient in the library, worst first.
    """

    loss: float
    library_loss: float
    rows: tuple[GradientRow, ...]

    @property
    def worst(self) -> float:
        """Largest relative difference over all gradients and the loss."""
        loss = abs(self.loss - self.library_loss) / max(abs(self.library_loss), 1e-300)
        return max([loss, *(row.relative for row in self.rows)])

    def __str__(self) -> str:
        """Format the comparison as a table."""
        width = max([len(row.name) for row in self.rows] + [9])
        lines = [f"{'parameter':{width}}  {'largest':>10}  {'difference':>10}  {'relative':>10}"]
        lines += [
            f"{row.name:{width}}  {row.largest:10.3e}  {row.difference:10.3e}  {row.relative:10.3e}"
            for row in self.rows
        ]
        lines.append(f"loss {self.loss:.12g}, the library's {self.library_loss:.12g}; worst {self.worst:.3e}")
        return "\n".join(lines)


def check_gradients(
    model: Any, batch: Sequence[Any], ranks: int = 2, *, freeze: Sequence[str] = (), plans: int = 3, seed: int = 0
) -> GradientCheck:
    """Compare the loss and the gradients of random plans with the library's own, in this process.

    The library runs sample by sample. Each plan has a different layout, packing, order, and different memory strategies
    and sub-microbatches. Its ranks are threads. Everything is computed in double precision and without dropout; casts
    to single precision inside the library are replaced. So any difference is rounding or a defect.

    Parameters
    ----------
    model : transformers.PreTrainedModel or DiffusersModel
        A model that `from_transformers` accepts, or the result of `from_diffusers`. It is copied.
    batch : sequence
        A few small samples.
    ranks : int
        Number of pipeline ranks of every plan.
    freeze : sequence of str
        Modules that are not trained, as in `from_transformers`. Not allowed with the result of `from_diffusers`.
    plans : int
        Number of random plans. The worst one is returned.
    seed : int
        Seed of the random plans.

    Raises
    ------
    InputError
        The model or a sample is not supported.
    """
    beside, batch = getattr(model, "beside_library", None), doubled(batch)
    with double():
        if beside is not None:
            if freeze:
                remedy = "pass freeze to from_diffusers"
                raise InputError("freeze", f"is {tuple(freeze)}, but the model exists already", remedy)
            ours, library_loss, wanted = beside(batch)
        elif hasattr(model, "config"):
            ours = from_transformers(twin(model), freeze=freeze)
            library_loss, wanted = library_gradients(twin(model), batch, ours.per_token, ours.num_targets)
        else:
            raise InputError("model", f"is a {type(model).__name__}", "give the library's own model")
    described = batch_of(batch, ours.describe)
    worst: GradientCheck | None = None
    for number in range(plans):
        rng = random.Random(f"{seed} {number}")
        loss, found = _run(ours, _draw(rng, ours, described, ranks), batch)
        check = _compare(ours, loss, found, library_loss, wanted)
        worst = check if worst is None or check.worst > worst.worst else worst
    if worst is None:
        raise InputError("plans", f"is {plans}", "give at least 1")
    return worst


# ------------------------------------------------------------------ random plans


@dataclass(frozen=True)
class _Costs:
    """Random costs, so that plans differ."""

    seed: str
    split: bool
    strategies: Sequence[Strategy]

    split_backward = True
    slowness = ()

    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        rng = random.Random(f"{self.seed} {chunk} {workload}")
        forward, inputs, weights = (rng.randint(1, 5) * 1e-3 for _ in range(3))
        halves = (inputs, weights) if self.split else (None, None)
        return tuple(
            StrategyCost(each, forward, inputs + weights, rng.randint(1, 100), *halves) for each in self.strategies
        )

    def boundary_bytes(self, chunk: Chunk, workload: Workload) -> int:
        del chunk, workload
        return 8

    def stream_bytes(self, stream: str, workload: Workload) -> int:
        del stream, workload
        return 8

    def link_between(self, first: int, second: int) -> int:
        del first, second
        return 0

    def transfer_s(self, num_bytes: int, link: int = 0) -> float:
        del num_bytes, link
        return 1e-3

    def static_bytes(self, chunk: Chunk) -> int:
        del chunk
        return 0


@dataclass(frozen=True)
class _RandomPlan:
    layout: Layout
    packing: Packing
    plan: ExecutionPlan


def _draw(rng: random.Random, model: TransformersModel, batch: Batch, ranks: int) -> _RandomPlan:
    """Draw a random layout, packing, order and memory strategies."""
    spec, strategies = model.spec, [each for each in STRATEGIES if each not in model.excluded]
    layout = _draw_layout(rng, spec, ranks)
    longest = int(budget_tokens(batch, spec).max())
    packing = pack(batch, spec, layout, PackingSpec(rng.randint(longest, 3 * longest), "first_fit"))
    split = rng.random() < 0.5
    costs: Any = _Costs(str(rng.random()), split, strategies)
    graph = build_graph(layout, packing, costs, backward="split" if split else "whole")
    schedule = random_schedule(rng, graph)
    timeline = simulate(graph, schedule)
    plan = lower(graph, schedule, timeline, layout, packing, boundary_shapes(spec, layout))
    verify(plan, layout, packing)
    return _RandomPlan(layout, packing, plan)


def _draw_layout(rng: random.Random, spec: ModelSpec, ranks: int) -> Layout:
    chunks: list[Chunk] = []
    for module in spec.modules:
        count = len(module.flat_layers)
        cuts = sorted(rng.sample(range(1, count), min(count - 1, rng.randint(ranks - 1, 2 * ranks))))
        runs = list(zip([0, *cuts], [*cuts, count], strict=True))
        chunks += [Chunk(module.name, (begin, end - 1), rng.randrange(ranks)) for begin, end in runs]
    if len(chunks) < ranks:
        raise InputError("ranks", f"is {ranks}, the model was cut into {len(chunks)} chunks", "take fewer ranks")
    # No rank without work.
    for rank in range(ranks):
        chunks[-1 - rank] = msgspec.structs.replace(chunks[-1 - rank], rank=rank)
    modules = tuple(
        ModuleLayout.of(m, rng.choice((None, 1, 2)) if len(spec.modules) > 1 else None) for m in spec.modules
    )
    return Layout(ranks, modules, tuple(chunks))


def _run(model: TransformersModel, drawn: _RandomPlan, batch: Sequence[Any]) -> tuple[float, Gradients]:
    """Run a plan with one thread per rank, each with a copy of the layers.

    Return the loss, and the gradients by the library's names, summed over the ranks that hold a parameter.
    """
    hub = ThreadHub("tags", _TIMEOUT_S)
    names = model.library_names()
    sums: Gradients = {}
    losses, errors = [], []
    lock = threading.Lock()

    def work(rank: int, mine: TransformersModel) -> None:
        try:
            executor = Executor(mine, drawn.layout, rank, hub.transport(rank), sum_tied=lambda *_: None)
            with double():
                result = executor.run(drawn.plan, drawn.packing, batch)
            with lock:
                losses.append(result.loss_sum / result.normalizer)
                seen: set[int] = set()
                for name, parameter in executor.named_parameters():
                    if parameter.grad is not None and id(parameter) not in seen:
                        seen.add(id(parameter))
                        theirs = names[name]
                        sums[theirs] = parameter.grad if theirs not in sums else sums[theirs] + parameter.grad
        except BaseException as error:
            errors.append(error)
            hub.fail()

    copies = [replace(model, modules=_copied(model)) for _ in range(drawn.layout.num_ranks)]
    threads = [threading.Thread(target=work, args=(rank, mine)) for rank, mine in enumerate(copies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if "another rank failed" not in str(e)), errors[0])
    return sum(losses), sums


def _copied(model: TransformersModel) -> tuple[Any, ...]:
    """Return modules with copies of their layers. Parameters that layers share remain shared."""
    memo: dict[int, Any] = {}
    return tuple(
        replace(module, layers=[copy.deepcopy(layer, memo) for layer in module.layers]) for module in model.modules
    )


def _compare(
    model: TransformersModel, loss: float, found: Gradients, library_loss: float, wanted: Gradients
) -> GradientCheck:
    names = model.library_names()
    frozen = {
        names[f"{module.name}.{number}.{name}"]
        for module in model.modules
        for number, layer in enumerate(module.layers)
        for name, parameter in layer.named_parameters()
        if module.frozen or not parameter.requires_grad
    }
    return GradientCheck(loss, library_loss, rows_of(_by_holder(model, found), wanted, frozen))


def _by_holder(model: TransformersModel, found: Gradients) -> Gradients:
    """Return the gradients, with the sum over tied parameters under each of their names."""
    names = model.library_names()
    merged = dict(found)
    for group in model.tied:
        theirs = list(dict.fromkeys(names[each] for each in group))
        parts = [found[each] for each in theirs if each in found]
        if parts:
            total = torch.stack(parts).sum(0)
            merged |= dict.fromkeys(theirs, total)
    return merged
