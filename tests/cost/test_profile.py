import msgspec
import numpy as np
import pytest

from pipeloom.cost import LayerMeasurement, ProfileCosts, StrategyMeasurement, fit_profile, sharded_copies
from pipeloom.cost.fits import workload_features
from pipeloom.errors import InputError
from pipeloom.spec import Chunk, LayerSpec, ModelSpec, ModuleSpec, RankSpec, TensorShape, Workload
from tests.cases import vlm_spec


def measure(module: str, kind: str, seed: int, noise: float = 0.0) -> list[LayerMeasurement]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(30):
        lengths = tuple(int(n) for n in rng.integers(2, 60, rng.integers(1, 12)))
        load = Workload(lengths)
        truth = 2e-4 + 1e-6 * load.num_tokens + 3e-8 * load.num_token_pairs
        jitter = 1 + noise * rng.standard_normal()
        rows.append(LayerMeasurement(module, kind, lengths, truth * jitter, 2 * truth * jitter, 100 * load.num_tokens))
    return rows


KINDS = [("vision", "block"), ("vision", "merge"), ("lm", "block")]


def test_a_law_of_the_assumed_form_is_recovered() -> None:
    profile = fit_profile([row for module, kind in KINDS for row in measure(module, kind, 1)], "test")
    assert profile.mean_error < 1e-6
    costs = ProfileCosts(vlm_spec(), profile, strategies=("keep", "recompute"))
    load = Workload((40, 7, 7))
    truth = 2e-4 + 1e-6 * 54 + 3e-8 * (1600 + 98)
    keep, recompute, *mixed = costs.chunk_costs(Chunk("lm", (2, 4), 0), load)
    assert all(keep.activation_bytes > each.activation_bytes > recompute.activation_bytes for each in mixed)
    assert keep.forward_s == pytest.approx(3 * truth, rel=1e-6)
    assert keep.backward_s == pytest.approx(6 * truth, rel=1e-6)
    assert keep.activation_bytes == 3 * 5400
    assert recompute.backward_s == pytest.approx(9 * truth, rel=1e-6)
    assert recompute.activation_bytes == 3 * 54 * 8 * 4  # the inputs of its layers alone


def test_noise_does_not_give_negative_or_wild_costs() -> None:
    profile = fit_profile([row for module, kind in KINDS for row in measure(module, kind, 2, noise=0.1)], "test")
    assert 0 < profile.mean_error < 0.15
    for fit in profile.layers.values():
        assert min(fit.forward_s) >= 0
        assert min(fit.backward_s) >= 0
    big = ProfileCosts(vlm_spec(), profile).chunk_costs(Chunk("lm", (0, 0), 0), Workload((120,) * 10))[0]
    truth = 2e-4 + 1e-6 * 1200 + 3e-8 * 144_000
    assert big.forward_s == pytest.approx(truth, rel=0.3)


@pytest.mark.parametrize("with_empty", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_bytes_cover_all_measurements_though_some_are_of_nothing(seed: int, with_empty: bool) -> None:
    """As where a layer holds rows of images and some samples have none: lengths do not tell which."""
    rng = np.random.default_rng(seed)
    rows = [
        msgspec.structs.replace(row, activation_bytes=int(rng.integers(0, 2) * rng.integers(1, 10**4)))
        for row in measure("lm", "block", seed)[:6]
    ]
    if with_empty:
        rows.append(LayerMeasurement("lm", "block", (0,), 1e-4, 1e-4, 7))
    fit = np.array(fit_profile(rows, "test").layers["lm/block"].activation_bytes)
    for row in rows:
        assert np.dot(fit, workload_features(Workload(row.lengths))) >= row.activation_bytes * (1 - 1e-9)


def test_bytes_of_nothing_are_nothing() -> None:
    rows = [msgspec.structs.replace(row, activation_bytes=0) for row in measure("lm", "block", 1)]
    assert fit_profile(rows, "test").layers["lm/block"].activation_bytes == (0, 0, 0, 0)


def test_factors_and_links_enter() -> None:
    profile = fit_profile([row for module, kind in KINDS for row in measure(module, kind, 1)], "test")
    cluster = RankSpec(link_bytes_per_s=1e6, link_latency_s=1e-3)
    plain = ProfileCosts(vlm_spec(), profile, cluster)
    slow = ProfileCosts(vlm_spec(), profile, cluster, factors={"lm": (2.0, 3.0)})
    chunk, load = Chunk("lm", (0, 0), 0), Workload((10,))
    before, after = plain.chunk_costs(chunk, load)[0], slow.chunk_costs(chunk, load)[0]
    assert after.forward_s == pytest.approx(2 * before.forward_s)
    assert after.backward_s == pytest.approx(3 * before.backward_s)
    assert plain.transfer_s(plain.boundary_bytes(chunk, load)) == pytest.approx(1e-3 + 320e-6)


def test_replicas_that_hold_shards_hold_less() -> None:
    rows = TensorShape(("tokens", 8))
    layers = (LayerSpec("block", rows, 3, num_parameters=72), LayerSpec("head", rows, num_parameters=10))
    spec = ModelSpec("lm", (ModuleSpec("lm", "sequence", layers),))
    profile = fit_profile(measure("lm", "block", 1) + measure("lm", "head", 1), "test")
    chunk, head = Chunk("lm", (1, 2), 0), Chunk("lm", (3, 3), 0)
    # Whole weights and gradients, and beside them a part of weights, gradients and both moments.
    for num_replicas, copies in ((2, 1 + 1 + (1 + 1 + 2) / 2), (8, 1 + 1 + (1 + 1 + 2) / 8)):
        shards = ProfileCosts(spec, profile, held_copies={"lm/block": sharded_copies(num_replicas)})
        assert shards.static_bytes(chunk) == 2 * 72 * 4 * copies
        assert shards.static_bytes(head) == ProfileCosts(spec, profile).static_bytes(head) == 10 * 4 * 4


def test_an_unmeasured_kind_is_named() -> None:
    profile = fit_profile(measure("lm", "block", 1), "test")
    with pytest.raises(InputError, match=r"profile.layers\['vision/block'\]: is missing; measure"):
        ProfileCosts(vlm_spec(), profile)
    with pytest.raises(InputError, match="measurements: is empty"):
        fit_profile([], "test")


def measure_copies(copy_s: float) -> list[LayerMeasurement]:
    """Layers of 1e-6 s a token forward, whose copies take ``copy_s`` a token to the host, and half of it back."""
    rows = []
    for n in (8, 16, 32, 64):
        parts = StrategyMeasurement(
            input_gradient_s=1.2e-6 * n,
            weight_gradient_s=0.8e-6 * n,
            weight_gradient_bytes=100 * n,
            selective_forward_s=1.1e-6 * n,
            selective_backward_s=2.5e-6 * n,
            selective_bytes=60 * n,
            offload_s=copy_s * n,
            load_s=0.5 * copy_s * n,
            given_bytes=32 * n,
            unsaved_bytes=32 * n,
            workspace_bytes=200 * n,
        )
        rows += [
            LayerMeasurement(module, kind, (n,), 1e-6 * n, 2e-6 * n, 100 * n, parts)
            for module, kind in [("vision", "block"), ("vision", "merge"), ("lm", "block")]
        ]
    return rows


@pytest.mark.parametrize("copy_s", [0.5e-6, 1.5e-6, 5e-6])
def test_copies_beside_computation_lengthen_a_pass_only_if_they_are_longer(copy_s: float) -> None:
    profile = fit_profile(measure_copies(copy_s), "test")
    assert not profile.copies_overlap
    chunk, load = Chunk("lm", (1, 4), 0), Workload((40,))
    found = {}
    for overlap in (False, True):
        costs = ProfileCosts(
            vlm_spec(),
            msgspec.structs.replace(profile, copies_overlap=overlap),
            strategies=("keep", "recompute", "offload"),
            split_backward=True,
        )
        assert costs.pass_bytes(chunk, load, "offload").leaving_bytes == overlap * 16_000
        assert costs.pass_bytes(chunk, load, "keep").leaving_bytes == 0
        found[overlap] = {each.layers or each.strategy: each for each in costs.chunk_costs(chunk, load)}
        for word, cost in found[overlap].items():
            # Layers under recomputation have a longer backward, beside which copies of the others may hide.
            layers = word if isinstance(word, tuple) else (word,) * 4
            again, away = layers.count("recompute") * 40e-6, layers.count("offload") * copy_s * 40
            together = max if overlap else lambda one, other: one + other
            assert cost.forward_s == pytest.approx(together(160e-6, away))
            assert cost.backward_s == pytest.approx(together(320e-6 + again, away / 2))
            assert cost.backward_input_s == pytest.approx(together(192e-6 + again, away / 2))
            assert cost.backward_weight_s == pytest.approx(128e-6)
    assert found[True]["keep"] == found[False]["keep"]
    # If all copies hide, every layer offloads at no cost, and no mixture is better.
    assert (copy_s < 1e-6) != any("offload" in word for word in found[True] if isinstance(word, tuple))


def test_what_is_on_its_way_to_the_host_has_room() -> None:
    profile = fit_profile(measure_copies(1e-6), "test")
    chunk, load = Chunk("lm", (1, 1), 0), Workload((40,))
    staged = [
        ProfileCosts(
            vlm_spec(), msgspec.structs.replace(profile, copies_overlap=overlap), strategies=("keep", "offload")
        ).staging_bytes(chunk, load)
        for overlap in (False, True)
    ]
    assert staged[1] - staged[0] == 4_000
