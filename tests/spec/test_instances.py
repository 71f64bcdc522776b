from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from pipeloom.spec import Sample
from pipeloom.spec.model import Reads, instance_lengths, num_instances


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    videos = draw(st.integers(0, 3))
    images = draw(st.lists(st.integers(1, 50), max_size=4))
    seconds = st.floats(0.1, 60.0)
    return Sample(
        "s",
        text_tokens=draw(st.integers(0, 20)),
        image_tokens=tuple(images),
        image_patches=draw(st.sampled_from((None, tuple(4 * n for n in images)))),
        video_seconds=tuple(draw(st.lists(seconds, min_size=videos, max_size=videos))),
        video_height=(480,) * videos,
        video_width=(640,) * videos,
        audio_seconds=tuple(draw(st.lists(seconds, max_size=3))),
    )


@given(samples())
def test_instances_are_counted_as_they_are_measured(sample: Sample) -> None:
    for reads in get_args(Reads):
        assert num_instances(reads, sample) == len(instance_lengths(reads, sample))
