from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from pipeloom.cost import LayerMeasurement, fit_profile
from pipeloom.cost.fits import aligned, sum_over, workload_features
from pipeloom.errors import InputError
from pipeloom.layout import ModulePlacement, single_rank
from pipeloom.packing import Microbatch, Packing, PackingSpec, SubMicrobatch, packing_of
from pipeloom.runtime import MeasureOptions, Model, Module, measure_layers
from pipeloom.runtime.measure import measure
from pipeloom.spec import Batch, Layout, ModelSpec, Sample, TensorShape, Workload

from . import small_models
from .cases import random_run


@pytest.mark.parametrize("seed", range(6))
def test_every_kind_is_measured_on_every_workload(seed: int) -> None:
    run = random_run(seed)
    rows = measure_layers(run.model, run.case.packing, run.documents, options=MeasureOptions(repeats=1))
    wanted = {
        (module.name, layer.kind, part.workload)
        for module in run.model.spec.modules
        for layer in module.layers
        for microbatch in range(len(run.case.packing.microbatches))
        for part in run.case.packing.parts_of(microbatch, module.name)
    }
    assert {(row.module, row.kind, row.workload) for row in rows} == wanted
    assert len(rows) == len(wanted)
    for row in rows:
        trained = run.case.layout.has_backward(row.module)
        assert row.forward_s > 0
        assert (row.backward_s > 0) == trained
        assert (row.activation_bytes > 0) == trained
    for module in run.model.modules:
        assert all(p.grad is None for layer in module.layers for p in layer.parameters())
    assert (
        measure_layers(run.model, run.case.packing, run.documents, known=rows, options=MeasureOptions(repeats=1)) == []
    )


class Exp(nn.Module):
    """Saves its output and nothing else."""

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return x.exp()


class Masked(nn.Module):
    """Saves its input, for the weight, and the mask, which is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return (x * self.weight) * mask


def one_sample() -> tuple[Packing, list[Tensor]]:
    part = SubMicrobatch(0, 1, Workload((5,)))
    packing = Packing(Batch((Sample("a", 5),)), ("lm",), (Microbatch((0,), ((part,),)),))
    return packing, [torch.randn(5, 4)]


def small_model(hidden: tuple[int | str, ...]) -> Model:
    module = Module(
        "lm",
        [Exp(), Masked(), Masked()],
        reads="sequence",
        hidden=TensorShape(hidden),  # type: ignore[arg-type]
        output=("tokens", 4),
        inputs=lambda part: part.samples[0],
        context=lambda part: {"mask": torch.ones(5, 1)},
    )
    return Model([module], lambda output, part: output.square().sum(), lambda sample: 1.0)


def test_saved_bytes_are_those_of_activations_alone() -> None:
    packing, samples = one_sample()
    rows = {
        row.kind: row
        for row in measure_layers(small_model(("tokens", 4)), packing, samples, options=MeasureOptions(repeats=1))
    }
    # The inputs of layer 0 are data, without a gradient, so that Exp saves nothing.
    assert rows["Exp[0]"].activation_bytes == 0
    # Its input, 5 by 4 numbers of 4 bytes; not the weight, and not the mask.
    assert rows["Masked[4]"].activation_bytes == 5 * 4 * 4


def test_a_wrong_shape_is_named() -> None:
    packing, samples = one_sample()
    with pytest.raises(InputError, match=r"module 'lm'.hidden: declares \(5, 8\).*layer 0 returned \(5, 4\)"):
        measure_layers(small_model(("tokens", 8)), packing, samples)


class Broken(nn.Module):
    """Fails where it is to be measured with gradients."""

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise ValueError("broken")
        return x


def test_a_layer_that_fails_leaves_no_counting_behind() -> None:
    packing, samples = one_sample()
    model = small_model(("tokens", 4))
    model.modules[0].layers[1] = Broken()  # type: ignore[index]
    model = Model(model.modules, model.loss, lambda sample: 1.0)
    with pytest.raises(ValueError, match="broken"):
        measure_layers(model, packing, samples)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_small_microbatches_are_measured_for_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all sizes, each further batch is packed half as large, and never smaller than its longest sample."""
    from tests.runtime.training import data, model, task

    seen: list[int] = []
    real = measure.pack

    def noted(batch: Batch, spec: ModelSpec, layout: Layout, packing: PackingSpec) -> Packing:
        seen.append(packing.token_budget)
        return real(batch, spec, layout, packing)

    monkeypatch.setattr(measure, "pack", noted)
    batches = list(data.batches(3, 4, 6))
    placements = {"vision": ModulePlacement(1, 6)}
    measure.profile_model(
        model(),
        batches,
        describe=task.describe,
        packing=PackingSpec(400),
        placements=placements,
        options=measure.ProfileOptions(repeats=1, all_sizes=True),
    )
    longest = [max(len(document.inputs) for document in batch) for batch in batches]
    assert seen[: len(batches)] == [max(400 >> k, longest[k]) for k in range(4)]


@pytest.mark.parametrize("frozen", [pytest.param(False, marks=pytest.mark.full), True])
def test_bytes_at_sizes_that_were_not_measured_are_what_is_counted(frozen: bool) -> None:
    """Samples of one length have few image tokens or many; only attention, sequence by sequence, is bounded."""
    rng = random.Random(f"bytes {frozen}")
    made = small_models.small_model(rng, frozen)
    layout, options = (
        single_rank(made.spec, {"vision": ModulePlacement(1, 3)}),
        MeasureOptions(repeats=1, strategies=True),
    )

    def rows(packings: int) -> list[LayerMeasurement]:
        found: list[LayerMeasurement] = []
        for _ in range(packings):
            documents = small_models.small_documents(rng, 7, True)
            packed = packing_of(small_models.described(documents), made.spec, layout, ((0, 3), (1,), (2, 6, 4), (5,)))
            found += measure_layers(made, packed, documents, known=found, options=options)
        return found

    fits = fit_profile(rows(3), "here").layers
    for row in rows(1):
        fit, features, counted = fits[f"{row.module}/{row.kind}"], workload_features(row.workload), row.strategies
        assert fit.strategies is not None
        assert counted is not None
        said = sum_over(aligned([fit.activation_bytes, fit.strategies.unsaved_bytes]), features)
        assert said == pytest.approx((row.activation_bytes, counted.unsaved_bytes), abs=0.01)
        most = sum_over(aligned(fit.strategies.forward_peaks), features).max()
        assert most >= counted.forward_workspace_bytes - 0.01
        if "Attention" not in row.kind:
            assert most == pytest.approx(counted.forward_workspace_bytes, abs=0.01)
