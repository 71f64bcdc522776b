from __future__ import annotations

import random
import re
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor, nn

from pipeloom.errors import ExecutionError, InputError
from pipeloom.packing import Microbatch, Packing, PackingSpec, SubMicrobatch, pack
from pipeloom.plan import Action, ExecutionPlan, Verb, boundary_shapes, lower
from pipeloom.runtime import ExecutionOptions, Executor, Model, Module, ThreadHub
from pipeloom.runtime.execute.blocks import block_bounds
from pipeloom.runtime.model.tied import sum_tied, tied_over_ranks
from pipeloom.spec import Batch, Chunk, Layout, ModuleLayout, Parallelism, Sample, TensorShape, Workload
from pipeloom.taskgraph import build_graph
from tests.plan.cases import EVERY_STRATEGY, RandomCosts, earliest, random_schedule

from .cases import Run, Tied, expected, random_run, run_threads, take_gradients, total_loss


def one_rank(run: Run) -> Executor:
    return Executor(run.model, run.case.layout, 0, ThreadHub().transport(0))


def test_layers_are_recomputed_as_often_as_the_plan_says() -> None:
    for seed in range(20):
        run = random_run(seed, strategies=EVERY_STRATEGY)
        layout = run.case.layout
        wanted = 0
        for actions in run.case.plan.ranks:
            for action in actions:
                if action.verb != "F":
                    continue
                chunk = layout.chunks[layout.chunk_names.index(action.chunk)]
                if not layout.has_backward(chunk.module):
                    continue
                words = action.strategy.split(",")
                words = words * chunk.num_layers if len(words) == 1 else words
                wanted += words.count("recompute") + words.count("selective")
                # The loss belongs to the last layer, and is recomputed with it.
                is_last = chunk == layout.chunks[-1]
                wanted += is_last and words[-1] in ("recompute", "selective")
        assert sum(result.num_recomputed for result in run_threads(run)) == wanted


def test_parameters_that_no_sample_uses_have_gradients_of_zero_on_any_number_of_replicas() -> None:
    found = 0
    for seed in range(40):
        run = random_run(seed, 2)
        trained = [m for m in run.model.modules if not m.frozen and run.case.layout.has_backward(m.name)]
        unused = [layer.idle for m in trained for layer in m.layers if isinstance(layer, Tied)]
        if not unused:
            continue
        run_threads(run)
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in unused)
        found += 1
    assert found > 1


def test_a_batch_without_images_gives_the_encoder_gradients_of_zero() -> None:
    seed = 0
    while True:
        run = random_run(seed, 2)
        names = [module.name for module in run.model.modules]
        if names == ["vision", "lm"] and not run.model.modules[0].frozen:
            break
        seed += 1
    batch = Batch(tuple(Sample(s.id, s.text_tokens) for s in run.case.packing.batch.samples))
    documents = [replace(d, images=()) for d in run.documents]

    layout, spec = run.case.layout, run.case.model
    packing = pack(batch, spec, layout, PackingSpec(10))
    graph = build_graph(layout, packing, RandomCosts(1, True))
    schedule = random_schedule(random.Random(1), graph)
    plan = lower(graph, schedule, earliest(graph, schedule), layout, packing, boundary_shapes(spec, layout))
    case = replace(run.case, packing=packing, graph=graph, schedule=schedule)
    text_only = Run(case, run.model, documents)
    loss, wanted = expected(text_only)
    results = run_threads(text_only, plan)
    found = take_gradients(run.model)
    assert abs(total_loss(results) - loss) < 1e-12
    assert {name for name, gradient in found.items() if gradient is None} == {
        name for name, gradient in wanted.items() if gradient is None
    }
    # As where they are summed over replicas, of which some had images.
    assert all(not gradient.any() for name, gradient in found.items() if name.startswith("vision"))


def test_replicas_need_the_number_of_targets_of_the_global_batch() -> None:
    run = random_run(5, 1)
    executor = one_rank(run)
    linked = executor.prepare(run.case.plan, run.case.packing)
    executor.layout = msgspec.structs.replace(executor.layout, parallelism=Parallelism(data=2))
    with pytest.raises(InputError, match=r"^normalizer: is missing, but the layout has 2 replicas; give the number of"):
        executor.run_linked(linked, run.documents)


def test_times_are_those_of_the_actions_in_order() -> None:
    run = random_run(4, 2)
    for rank, result in enumerate(run_threads(run)):
        actions = run.case.plan.ranks[rank]
        assert [(t.verb, t.chunk, t.microbatch, t.sub_microbatch) for t in result.times] == [
            (a.verb, a.chunk, a.microbatch, a.sub_microbatch) for a in actions
        ]
        assert [t.verb for t in result.compute_times] == [a.verb for a in actions if a.verb.is_compute]
        ends = [t.end_ns for t in result.times]
        assert ends == sorted(ends)
        assert all(t.start_ns <= t.end_ns for t in result.times)


def test_a_plan_for_another_layout_or_batch_is_refused() -> None:
    run = random_run(6, 1)
    executor = one_rank(run)
    plan, packing = run.case.plan, run.case.packing
    with pytest.raises(ExecutionError, match="for layout 00000000"):
        executor.run(ExecutionPlan(1, 0, "00000000", plan.ranks), packing, run.documents)
    with pytest.raises(ExecutionError, match="samples, but the plan"):
        executor.run(plan, packing, run.documents[1:])
    linked = executor.prepare(plan, packing)
    executor.run_linked(linked, run.documents)
    with pytest.raises(ExecutionError, match="has already run"):
        executor.run_linked(linked, run.documents)
    with pytest.raises(ExecutionError, match="the batch has"):
        executor.run(plan, packing, run.documents, normalizer=0.0)


def test_a_message_of_another_shape_than_the_model_states_is_refused() -> None:
    run = next(
        run
        for seed in range(100)
        if any(a.verb == Verb.SEND_F for run in [random_run(seed, 2)] for a in run.case.plan.ranks[0])
        for run in [random_run(seed, 2)]
    )
    plan = run.case.plan

    def grown(action: Action) -> Action:
        if action.shape is None:
            return action
        fields = {name: getattr(action, name) for name in action.__struct_fields__}
        return Action(**(fields | {"shape": (action.shape[0] + 1, *action.shape[1:])}))

    changed = tuple(tuple(map(grown, actions)) for actions in plan.ranks)
    with pytest.raises(ExecutionError, match="the model declares"):
        Executor(run.model, run.case.layout, 0, ThreadHub().transport(0)).run(
            ExecutionPlan(2, plan.iteration, plan.layout, changed), run.case.packing, run.documents
        )


class Widen(nn.Module):
    def forward(self, x: Tensor, **_: Tensor) -> Tensor:
        return torch.cat([x, x], dim=1)


def test_an_output_of_another_shape_than_stated_names_the_module_and_the_remedy() -> None:
    seed = 0
    while len((run := random_run(seed, 1)).case.layout.chunks) < 2 or run.case.layout.chunks[0].num_layers < 2:
        seed += 1
    first = run.model.modules[0]
    layers = [*first.layers]
    layers[run.case.layout.chunks[0].layers[1]] = Widen()
    changed = Model((replace(first, layers=layers), *run.model.modules[1:]), run.model.loss, run.model.num_targets)
    with pytest.raises(
        ExecutionError, match=rf"module '{first.name}', layers 0..\d+, returned .*, 6\).*declared .*, 3\)"
    ):
        run_threads(replace(run, model=changed))


def test_an_unknown_strategy_is_refused() -> None:
    assert block_bounds("keep", 3) == ((0, 3, "keep"),)
    assert block_bounds("recompute,recompute,keep", 3) == ((0, 1, "recompute"), (1, 2, "recompute"), (2, 3, "keep"))
    with pytest.raises(ExecutionError, match="'teleport' is not one of"):
        block_bounds("teleport", 3)
    with pytest.raises(ExecutionError, match="is for 2 layers, there are 3"):
        block_bounds("keep,keep", 3)


def test_a_layout_of_another_model_is_refused() -> None:
    run = random_run(6, 1)
    layout = run.case.layout
    with pytest.raises(InputError, match="rank"):
        Executor(run.model, layout, 1, ThreadHub().transport(0))
    stranger = Layout(1, tuple(ModuleLayout(m.name, m.after, not m.frozen) for m in layout.modules), layout.chunks)
    with pytest.raises(InputError, match="frozen"):
        Executor(run.model, stranger, 0, ThreadHub().transport(0))


class Noisy(nn.Module):
    """Dropout, and a count of how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.nn.functional.dropout(self.inner(x), 0.5)


@pytest.mark.parametrize("backward", ["B", "I W"])
@pytest.mark.parametrize("strategy", ["recompute", "keep,recompute,recompute", "recompute,keep,keep"])
def test_dropout_falls_alike_when_recomputed(strategy: str, backward: str) -> None:
    layout = Layout(1, (ModuleLayout("lm"),), (Chunk("lm", (0, 2), 0),))
    samples = [torch.randn(5, 4), torch.randn(2, 4)]
    packing = Packing(
        Batch((Sample("a", 5), Sample("b", 2))),
        ("lm",),
        tuple(Microbatch((i,), ((SubMicrobatch(0, 1, Workload((n,))),),)) for i, n in enumerate((5, 2))),
    )
    gradients, calls = [], []
    for chosen in ("keep", strategy):
        torch.manual_seed(0)
        module = Module(
            "lm",
            [Noisy(), Noisy(), Noisy()],
            reads="sequence",
            hidden=("tokens", 4),
            output=("tokens", 4),
            inputs=lambda part: part.samples[0],
        )
        model = Model([module], lambda output, part: output.square().sum(), lambda sample: 1.0)
        verbs = ["F", "F", *(verb for _ in (0, 1) for verb in backward.split())]
        numbers = [0, 1, *sorted([0, 1] * len(backward.split()))]
        actions = tuple(
            Action(verb=Verb(v), chunk="lm.0", microbatch=m, strategy=chosen if v == "F" else "")
            for v, m in zip(verbs, numbers, strict=True)
        )
        plan = ExecutionPlan(1, 0, layout.digest, (actions,))
        torch.manual_seed(1)
        Executor(model, layout, 0, ThreadHub().transport(0)).run(plan, packing, samples)
        gradients.append(take_gradients(model))
        calls.append([layer.calls for layer in module.layers])  # type: ignore[union-attr]
    words = strategy.split(",") * (3 if strategy == "recompute" else 1)
    assert calls == [[2, 2, 2], [2 + 2 * (word == "recompute") for word in words]]
    for name, gradient in gradients[0].items():
        assert gradient is not None
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strategy", ["keep", "recompute", "selective", "offload"])
def test_autocast_holds_in_the_forward_and_when_recomputed(strategy: str) -> None:
    seen: list[torch.dtype] = []

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.inner(x)
            seen.append(output.dtype)
            return output

    module = Module(
        "lm",
        [Watch(), Watch()],
        reads="sequence",
        hidden=TensorShape(("tokens", 4), "bfloat16"),
        output=TensorShape(("tokens", 4), "bfloat16"),
        inputs=lambda part: part.samples[0],
    )
    model = Model([module], lambda output, part: output.float().square().sum(), lambda sample: 1.0)
    layout = Layout(1, (ModuleLayout("lm"),), (Chunk("lm", (0, 0), 0), Chunk("lm", (1, 1), 0)))
    packing = Packing(Batch((Sample("a", 5),)), ("lm",), (Microbatch((0,), ((SubMicrobatch(0, 1, Workload((5,))),),)),))
    forward = tuple(Action(verb=Verb.F, chunk=f"lm.{c}", strategy=strategy) for c in (0, 1))
    plan = ExecutionPlan(
        1, 0, layout.digest, ((*forward, Action(verb=Verb.B, chunk="lm.1"), Action(verb=Verb.B, chunk="lm.0")),)
    )
    executor = Executor(model, layout, 0, ThreadHub().transport(0), options=ExecutionOptions(autocast=torch.bfloat16))
    executor.run(plan, packing, [torch.randn(5, 4)])
    assert set(seen) == {torch.bfloat16}
    assert len(seen) == (2 if strategy in ("keep", "offload") else 4)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in executor.parameters())


@pytest.mark.parametrize("name", ["clip_norm", "timeout_s"])
def test_options_that_are_not_positive_are_rejected(name: str) -> None:
    with pytest.raises(InputError, match=rf"options.{name}: 0.0 is not positive"):
        ExecutionOptions(**{name: 0.0})


def test_weights_tied_over_ranks_are_refused_where_nobody_sums_them() -> None:
    found = 0
    for seed in range(60):
        run = random_run(seed, 3, tied=True)
        tied = tied_over_ranks(run.model, run.case.layout)
        for each in tied:
            chunk_of = [chunk_with(run.case.layout, name) for name in each.names]
            assert each.ranks == tuple(sorted({chunk.rank for chunk in chunk_of}))
            assert len(each.ranks) > 1
        if tied:
            found += 1
            one, other = map(re.escape, tied[0].names[:2])
            with pytest.raises(InputError, match=f"parameter '{one}': is tied to '{other}', and they are on"):
                Executor(run.model, run.case.layout, 0, ThreadHub().transport(0))
    assert found > 5


def chunk_with(layout: Layout, name: str) -> Chunk:
    module, layer, _ = name.split(".", 2)
    return next(c for c in layout.chunks if c.module == module and c.layers[0] <= int(layer) <= c.layers[1])


def test_tied_weights_that_cannot_be_trained_alike_are_refused() -> None:
    def square(**names: bool) -> Model:
        """Two modules with one weight; given are those that are frozen."""
        one, other = nn.Linear(3, 3), nn.Linear(3, 3)
        other.weight = one.weight
        shape = TensorShape(("tokens", 3), "float32")
        first = Module(
            "first",
            [one],
            reads="text",
            inputs=lambda _: torch.zeros(1, 3),
            hidden=shape,
            output=shape,
            frozen=names.get("first", False),
        )
        last = Module(
            "last", [other], reads="text", after=("first",), hidden=shape, output=shape, frozen=names.get("last", False)
        )
        return Model([first, last], lambda x, _: x.sum(), lambda _: 1.0)

    def layout(model: Model, everywhere: bool = False) -> Layout:
        modules = tuple(
            ModuleLayout(
                m.name, m.after, m.frozen, None, "replicated" if everywhere and m.name == "first" else "pipelined"
            )
            for m in model.modules
        )
        chunks = [Chunk("first", (0, 0), 0), Chunk("last", (0, 0), 1)]
        if everywhere:
            chunks.insert(1, Chunk("first", (0, 0), 1))
        return Layout(2, modules, tuple(chunks))

    model = square()
    assert model.tied == (("first.0.weight", "last.0.weight"),)
    assert [each.ranks for each in tied_over_ranks(model, layout(model))] == [(0, 1)]
    half = square(first=True)
    with pytest.raises(InputError, match=r"'first.0.weight': is tied to 'last.0.weight', frozen in one module"):
        tied_over_ranks(half, layout(half))
    with pytest.raises(InputError, match="one module is on all ranks and the other is pipelined"):
        tied_over_ranks(model, layout(model, everywhere=True))
    tied = tied_over_ranks(model, layout(model))
    model.modules[1].layers[0].weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(InputError, match="they were separated"):
        tied_over_ranks(model, layout(model))
    for module in model.modules:
        module.layers[0].weight.requires_grad_(False)
    assert tied_over_ranks(model, layout(model)) == ()

    # Parameters of trained modules may be frozen and trained again between iterations.
    model = square()
    tied, sums = tied_over_ranks(model, layout(model)), []
    weight = tied[0].parameter
    weight.requires_grad_(False)
    assert [each.names for each in tied_over_ranks(model, layout(model))] == [tied[0].names]
    executor = Executor(model, layout(model), 0, ThreadHub().transport(0))
    sum_tied(executor.tied, executor.sum_tied)
    sum_tied(tied, lambda *given: sums.append(given))
    assert weight.grad is None
    assert not sums
    weight.requires_grad_()
    sum_tied(tied, lambda *given: sums.append(given))
    assert [ranks for ranks, _ in sums] == [(0, 1)]
    with pytest.raises(InputError, match=r"'first.0.weight': is tied to 'last.0.weight', and they are on ranks 0, 1"):
        sum_tied(executor.tied, executor.sum_tied)


class Dropping(nn.Module):
    """A layer with dropout behind it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.drop = layer, nn.Dropout(0.4)

    def forward(self, *args: Tensor, **context: Tensor) -> Tensor:
        return self.drop(self.layer(*args, **context))


def with_dropout(run: Run, share: float, seed: int) -> Run:
    """The same, with dropout in some layers."""
    rng = random.Random(seed)
    modules = tuple(
        replace(m, layers=[Dropping(layer) if rng.random() < share else layer for layer in m.layers])
        for m in run.model.modules
    )
    return replace(run, model=Model(modules, run.model.loss, run.model.num_targets))


def run_alone(run: Run, plan: ExecutionPlan, **options: int | None) -> tuple[float, list[Tensor | None]]:
    executor = Executor(run.model, run.case.layout, 0, ThreadHub().transport(0), options=ExecutionOptions(**options))
    for _ in range(2):
        take_gradients(run.model)
        result = executor.run(plan, run.case.packing, run.documents)
    return result.loss_sum, list(take_gradients(run.model).values())


def test_dropout_falls_alike_under_every_plan() -> None:
    num_changed = 0
    for seed in range(6):
        run = with_dropout(random_run(seed, 1, strategies=EVERY_STRATEGY), 0.5, seed)
        case, shapes = run.case, boundary_shapes(run.case.model, run.case.layout)
        plans = []
        for _ in range(2):
            schedule = random_schedule(random.Random(f"{seed} {len(plans)}"), case.graph)
            graph = case.graph if schedule.candidate is None else case.graph.with_candidates(schedule.candidate)
            plans.append(lower(case.graph, schedule, earliest(graph, schedule), case.layout, case.packing, shapes))
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        loss, gradients = run_alone(run, plans[0], random_seed=7)
        again, others = run_alone(run, plans[1], random_seed=7)
        assert torch.equal(state, torch.get_rng_state()), "who draws outside sees nothing of it"
        assert again == pytest.approx(loss, rel=1e-12)
        for one, other in zip(gradients, others, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)
        num_changed += run_alone(run, plans[0], random_seed=8)[0] != pytest.approx(loss, rel=1e-6)
        num_changed += run_alone(run, plans[0], random_seed=None)[0] != pytest.approx(loss, rel=1e-6)
    assert num_changed >= 9


def test_only_chunks_that_draw_are_seeded() -> None:
    run = random_run(5, 1)
    executor = one_rank(run)
    assert executor.forward_seeds is not None
    executor.run(run.case.plan, run.case.packing, run.documents)
    assert executor.forward_seeds.silent == set(executor.layers)
    # Dropout begins later: an iteration afterwards each part is seeded.
    late = with_dropout(run, 1.0, 0)
    for number, layers in executor.layers.items():
        chunk = run.case.layout.chunks[number]
        layers[:] = late.model.module(chunk.module).layers[chunk.layers[0] : chunk.layers[1] + 1]
    first = []
    for seed in range(2):
        torch.manual_seed(seed)
        executor.forward_seeds.silent = set(executor.layers)
        outside = torch.get_rng_state()
        first.append(executor.run(run.case.plan, run.case.packing, run.documents).loss_sum)
        assert executor.forward_seeds.silent == set()
        assert torch.equal(torch.get_rng_state(), outside)
    assert first[0] == first[1]
    results = [executor.run(run.case.plan, run.case.packing, run.documents).loss_sum for _ in range(2)]
    assert results[0] == results[1] != first[0]
    assert executor.forward_seeds.silent == set()
    # A chunk that begins to draw is noticed although others are seeded after it.
    for chunk in executor.layers:
        executor.forward_seeds.silent = {chunk}
        executor.run(run.case.plan, run.case.packing, run.documents)
        assert executor.forward_seeds.silent == set()
