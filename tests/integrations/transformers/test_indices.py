"""Indices on the host beside states on a device, here the meta device: shapes. Values: `tests/simulated`."""

from __future__ import annotations

import pytest
import torch

from pipeloom.integrations.transformers.indices import _without_mask, indices_on_host

META = torch.device("meta")


def test_on_the_cpu_nothing_changes() -> None:
    with indices_on_host(torch.device("cpu")) as nothing:
        assert nothing is None


def test_indices_stay_on_the_host_until_a_state_needs_them() -> None:
    state = torch.zeros(1, 6, 4, device=META)
    ids = torch.tensor([[3, 9, 9, 3, 3, 9]])
    with indices_on_host(META):
        mask = (ids == 9).to(state.device)
        assert mask.device.type == "cpu"
        assert int(mask.sum()) == 3
        assert torch.tensor([1, 2], device=META).device.type == "cpu"
        assert torch.tensor([1.0], device=META).device.type == "meta"
        assert ids.float().to(META).device.type == "meta"
        wide = mask[..., None].expand_as(state)
        assert state[wide].shape == (12,)
        assert state[mask].shape == (3, 4)
        assert state[mask, :].shape == (3, 4)
        assert torch.where(wide, state, 0.0).device.type == "meta"
        assert state.masked_scatter(wide, torch.zeros(3, 4, device=META)).shape == state.shape
        state[mask, :] = torch.zeros(3, 4, device=META)
        state[wide] = 0.0


def test_what_the_library_keeps_on_the_host_is_written_there() -> None:
    row = torch.zeros(3)
    with indices_on_host(META), pytest.raises(NotImplementedError, match="meta tensor"):
        row[:] = torch.zeros(3, device=META)


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_places_of_a_mask(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mask, x = torch.rand(shape) < 0.5, torch.randn(*shape, 4, 2)
    place, repeated = _without_mask(mask)
    assert repeated == 0
    torch.testing.assert_close(x[place], x[mask])
    wide = mask[..., None].expand(*shape, 4)
    place, repeated = _without_mask(wide)
    assert repeated == 1
    torch.testing.assert_close(x[place].flatten(0, 1), x[wide])
    assert _without_mask((mask, 0)) == ((mask, 0), 0)
