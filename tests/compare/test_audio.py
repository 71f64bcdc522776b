"""Images and recordings into one language model: lengths, packing, emulated costs, and a plan that is proved."""

from __future__ import annotations

import msgspec
import pytest

from pipeloom.cli.emulate import microbatches_of
from pipeloom.compare.baselines.dip import our_layout
from pipeloom.compare.iterations import Grouping, sampled_iterations
from pipeloom.compare.model_on_cluster import graph_of, pack_microbatches, put_on_cluster
from pipeloom.errors import InputError
from pipeloom.packing.loads import split_sample
from pipeloom.plan import boundary_shapes, lower, verify
from pipeloom.search import Budget, solve
from pipeloom.spec import Sample, catalog
from pipeloom.spec.architecture import Architecture, ModuleArchitecture
from pipeloom.spec.batch import audio_frames, audio_tokens
from pipeloom.spec.datasets import cut
from pipeloom.spec.parallelism import Degrees
from pipeloom.timeline import check


def listening() -> Architecture:
    """A vision-language model with an audio encoder like its vision encoder beside it."""
    model = catalog.load_architecture("vlm-7b")
    vision, lm = model.modules
    merger = msgspec.structs.replace(vision.layers[-1], factor=2)
    layers = (vision.layers[0], msgspec.structs.replace(vision.layers[1], count=8), merger)
    audio = ModuleArchitecture("audio", "audio", layers)
    return Architecture("listening", "test", (vision, audio, msgspec.structs.replace(lm, after=("vision", "audio"))))


def test_recordings_have_frames_and_tokens() -> None:
    sample = Sample("a", 7, (169,), (2704,), audio_seconds=(30.0, 0.001, 0.05))
    assert audio_frames(sample) == (1500, 1, 3)
    assert audio_tokens(sample) == (750, 1, 2)
    assert sample.sequence_tokens == 7 + 169 + 753
    modules = listening().modules
    assert [module.lengths(sample) for module in modules] == [(2704,), (1500, 1, 3), (929,)]


def test_no_recording_is_lost_or_divided() -> None:
    sample = Sample("a", 700, (169, 169), audio_seconds=(4.0, 2.0, 6.0))
    pieces = split_sample(sample, 400)
    assert all(piece.sequence_tokens <= 400 for piece in pieces)
    assert [s for piece in pieces for s in piece.audio_seconds] == [4.0, 2.0, 6.0]
    assert sum(piece.sequence_tokens for piece in pieces) == sample.sequence_tokens
    with pytest.raises(InputError, match=r"audio_seconds\[2\].*150 exceed.*a recording is not divided"):
        split_sample(Sample("b", 700, audio_seconds=(4.0, 2.0, 6.0)), 149)
    short = cut(sample, 169 * 2 + 110, 48)
    assert (short.image_tokens, short.audio_seconds, short.text_tokens) == ((169, 169), (4.0,), 10)
    assert cut(sample, 10_000, 48) is sample


def test_modules_without_work_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    """The data sets of the zoo have no recordings."""
    model = listening()
    setting = put_on_cluster(model, "dip-h800-64", Degrees(tensor=4, pipeline=2))
    note = "no sample of the iteration has audio, so audio does no work; give --data with audio"
    assert sampled_iterations(setting, None, Grouping(2), 0).notes == (note,)
    microbatches_of(model, None, 2, 0)
    assert capsys.readouterr().err == f"note: {note}\n"
    heard = [[Sample("a", 700, (169,), (2704,), audio_seconds=(4.0,))]]
    assert sampled_iterations(setting, None, Grouping(2), 0, heard).notes == ()
    silent = sampled_iterations(setting, None, Grouping(2), 0, [[Sample("a", 700)]]).notes
    assert [note.split(",")[0] for note in silent] == [
        "no sample of the iteration has images",
        "no sample of the iteration has audio",
    ]


def test_images_and_recordings_are_planned_together() -> None:
    setting = put_on_cluster(listening(), "dip-h800-64", Degrees(tensor=4, pipeline=2), update=False)
    groups = [
        [Sample(f"{m}.0", 900, (169,) * m, (2704,) * m), Sample(f"{m}.1", 100, audio_seconds=(20.0,) * (3 - m))]
        for m in range(4)
    ]
    layout = our_layout(setting, [groups])
    assert {chunk.module for chunk in layout.chunks} == {"vision", "audio", "lm"}
    graph = graph_of(setting, layout, groups, "listening")
    packing = pack_microbatches(setting, layout, groups)
    heard = [[n for part in m.parts[1] for n in part.workload.lengths] for m in packing.microbatches]
    assert heard == [[1000] * 3, [1000] * 2, [1000], []]
    audio = graph.module == 1
    assert (graph.duration_ns[audio] > 0).all()
    assert set(graph.microbatch[audio].tolist()) == {0, 1, 2}
    found = solve(graph, budget=Budget(evaluations=50), seed=0)
    assert check(graph, found.schedule, found.timeline) == ()
    shapes = boundary_shapes(setting.model, layout)
    verify(lower(graph, found.schedule, found.timeline, layout, packing, shapes), layout, packing)
