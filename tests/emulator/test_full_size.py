"""Planned memory of published models is what PyTorch counts, or up to 3 % more."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.emulator.full_size import PUBLISHED, Published, model_of, on_meta, peaks

STRATEGIES = ("keep", "selective", "recompute")


def check(published: Published, strategy: str) -> None:
    with on_meta():
        found = peaks(model_of(published), strategy, published.ranks)
    for rank, (planned, counted) in enumerate(found):
        assert counted <= planned <= 1.03 * counted, f"rank {rank}: {100 * (planned / counted - 1):+.2f} %"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_planned_peaks_of_a_few_layers(strategy: str) -> None:
    published = PUBLISHED["Llama 3.1 8B"]
    config = type(published.config)(**published.config.to_dict() | {"num_hidden_layers": 8})
    check(Published(config, 4), strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if published.ranks == 4 else pytest.mark.soak)
        for name, published in PUBLISHED.items()
    ],
)
def test_planned_peaks_of_published_models(name: str, strategy: str) -> None:
    check(PUBLISHED[name], strategy)
