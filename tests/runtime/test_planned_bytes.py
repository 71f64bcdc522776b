"""What costs promise to be held under every memory strategy and a split backward is what the executor holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeloom.cost import ProfileCosts, fit_profile
from pipeloom.plan import Verb
from pipeloom.runtime import MeasureOptions, measure_layers
from pipeloom.runtime.measure.workbench import LiveBytes
from pipeloom.spec import Strategy, Workload, strategy_word
from pipeloom.taskgraph import Candidate, build_graph
from tests.runtime.test_counts import COUNT, ITEM, Counted, Feed, Live, action

STRATEGIES: tuple[Strategy, ...] = ("keep", "recompute", "selective", "offload")


@pytest.fixture(scope="module")
def counted() -> Counted:
    return Counted()


@pytest.fixture(scope="module")
def costs(counted: Counted) -> ProfileCosts:
    rows = measure_layers(
        counted.model, counted.packing, counted.samples, options=MeasureOptions(repeats=1, strategies=True)
    )
    return ProfileCosts(counted.model.spec, fit_profile(rows, "here"), strategies=STRATEGIES, split_backward=True)


def options(counted: Counted, costs: ProfileCosts, microbatch: int, strategy: str) -> list[Candidate]:
    """What is planned for the two chunks under one strategy, with a split backward."""
    graph = build_graph(counted.layout, counted.packing, costs, backward="split")
    assert graph.candidates is not None
    return [
        next(c for c in candidates if c.strategy == strategy)
        for label, candidates in zip(graph.labels or (), graph.candidates, strict=True)
        if label.microbatch == microbatch
    ]


@pytest.mark.parametrize("microbatch", [0, 1])
@pytest.mark.parametrize("second", STRATEGIES)
@pytest.mark.parametrize("first", STRATEGIES)
def test_the_bytes_held_after_forwards_are_the_plans(
    counted: Counted, costs: ProfileCosts, first: str, second: str, microbatch: int
) -> None:
    actions = []
    for chunk, strategy in enumerate((first, second)):
        actions.append(action("F", chunk, microbatch, strategy))
        actions += [action(Verb.OFFLOAD, chunk, microbatch)] if strategy == "offload" else []
        actions.append(COUNT)
    for chunk, strategy in ((1, second), (0, first)):
        actions += [action(Verb.LOAD, chunk, microbatch)] if strategy == "offload" else []
        actions += [action("B", chunk, microbatch), COUNT]
    held, _, result = counted.run(actions)
    planned = [options(counted, costs, microbatch, strategy)[chunk] for chunk, strategy in enumerate((first, second))]
    kept = [option.activation_bytes for option in options(counted, costs, microbatch, "keep")]
    # The samples are the user's, and the first chunk holds one whatever the strategy; no operation made it.
    sample = counted.samples[counted.packing.microbatches[microbatch].samples[0]]
    # On this device, what the host has counts too.
    moved = [k - p.activation_bytes if p.strategy == "offload" else 0 for k, p in zip(kept, planned, strict=True)]
    loss, handed = ITEM, sample.nbytes
    assert result.offloaded_bytes == sum(moved)
    assert held[0] == planned[0].activation_bytes + moved[0] - sample.nbytes + handed
    both = sum(option.activation_bytes for option in planned) + sum(moved)
    assert held[1] == both - sample.nbytes + 2 * loss
    gradients = sum(p.nbytes for layer in counted.layers[2:] for p in layer.parameters())
    assert held[2] == planned[0].activation_bytes + moved[0] - sample.nbytes + 2 * loss + handed + gradients


@pytest.mark.parametrize("microbatch", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_bytes_held_between_the_halves_of_a_backward_are_the_plans(
    counted: Counted, costs: ProfileCosts, strategy: str, microbatch: int
) -> None:
    moves = strategy == "offload"
    actions = []
    for chunk in (0, 1):
        actions.append(action("F", chunk, microbatch, strategy))
        actions += [action(Verb.OFFLOAD, chunk, microbatch)] if moves else []
    for chunk in (1, 0):
        actions += [action(Verb.LOAD, chunk, microbatch)] if moves else []
        actions += [action("I", chunk, microbatch), COUNT]
    actions += [action("W", chunk, microbatch) for chunk in (1, 0)]
    held, _, _ = counted.run(actions)
    planned = options(counted, costs, microbatch, strategy)
    kept = options(counted, costs, microbatch, "keep")
    sample = counted.samples[counted.packing.microbatches[microbatch].samples[0]]
    moved = kept[0].activation_bytes - planned[0].activation_bytes if moves else 0
    waiting = planned[0].activation_bytes + moved - sample.nbytes
    assert held[0] == waiting + planned[1].weight_gradient_bytes + 2 * ITEM
    # Nobody wants the gradient of data, so the first chunk leaves all to its W, and holds less than planned.
    both = planned[0].weight_gradient_bytes + planned[1].weight_gradient_bytes
    assert held[1] <= both - sample.nbytes + 2 * ITEM


@pytest.mark.parametrize("microbatch", [0, 1])
def test_mixtures_hold_what_is_planned(counted: Counted, microbatch: int) -> None:
    """Layers of a chunk under strategies of their own, each that is offered."""
    options_ = MeasureOptions(repeats=1, strategies=True)
    rows = measure_layers(counted.model, counted.packing, counted.samples, options=options_)
    offered = ProfileCosts(counted.model.spec, fit_profile(rows, "here"), strategies=("keep", "recompute", "selective"))
    graph = build_graph(counted.layout, counted.packing, offered)
    assert graph.candidates is not None
    mixed = 0
    for label, candidates in zip(graph.labels or (), graph.candidates, strict=True):
        if label.microbatch != microbatch or label.chunk != 0:
            continue
        for candidate in candidates:
            word = strategy_word(candidate.strategy, candidate.layers)
            mixed += "," in word
            held, _, _ = counted.run(
                [
                    action("F", 0, microbatch, word),
                    COUNT,
                    action("F", 1, microbatch),
                    action("B", 1, microbatch),
                    action("B", 0, microbatch),
                    COUNT,
                ]
            )
            # The sample, which the pair holds, was made by nobody; what it hands on is as large, and not yet taken.
            assert held[0] == candidate.activation_bytes
    assert mixed > 0


def test_workspaces_bound_what_a_computation_uses(counted: Counted, costs: ProfileCosts) -> None:
    """Peaks inside computations stay below what is held and the workspace together."""
    for microbatch in (0, 1):
        part = counted.packing.parts_of(microbatch, "lm")[0].workload
        for strategy in STRATEGIES:
            planned = options(counted, costs, microbatch, strategy)
            moves = strategy == "offload"
            work = max(
                costs.workspace_bytes(chunk, part) + moves * costs.staging_bytes(chunk, part)
                for chunk in counted.layout.chunks
            )
            actions = []
            for chunk in (0, 1):
                actions.append(action("F", chunk, microbatch, strategy))
                actions += [action(Verb.OFFLOAD, chunk, microbatch)] if moves else []
            for chunk in (1, 0):
                actions += [action(Verb.LOAD, chunk, microbatch)] if moves else []
                actions.append(action("B", chunk, microbatch))
            with LiveBytes() as live:
                counted.run_plainly(actions)
            parameters = sum(p.nbytes for layer in counted.layers for p in layer.parameters())
            assert live.peak_bytes <= sum(o.activation_bytes for o in planned) + work + parameters + 4 * ITEM


def test_live_bytes_are_those_that_another_count_finds() -> None:
    layer, x = Feed().double(), torch.randn(5, 8, dtype=torch.float64)

    def run() -> tuple[Tensor, Tensor]:
        first = layer(x)
        return first, layer(first).sum()

    with Live() as other, LiveBytes() as live:
        kept = run()
        assert live.num_bytes == other.num_bytes > 0
        del kept
        assert live.num_bytes == other.num_bytes == 0
    assert live.peak_bytes > 0
    live.forget_peak()
    assert live.peak_bytes == 0


def test_only_what_was_measured_can_be_offered(counted: Counted, costs: ProfileCosts) -> None:
    rows = measure_layers(counted.model, counted.packing, counted.samples, options=MeasureOptions(repeats=1))
    bare = fit_profile(rows, "here")
    for options in ({"strategies": ("keep", "selective")}, {"split_backward": True}):
        with pytest.raises(ValueError, match="strategies: is missing"):
            ProfileCosts(counted.model.spec, bare, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names one twice"):
        ProfileCosts(counted.model.spec, bare, strategies=("keep", "keep"))
    chunk, workload = counted.layout.chunks[1], Workload((5,))
    whole = ProfileCosts(counted.model.spec, costs.profile).chunk_costs(chunk, workload)
    assert [cost.backward_input_s for cost in whole] == [None]
    assert isinstance(counted.layers[0], nn.Module)
