from __future__ import annotations

import pytest
import torch
from torch.distributed import HashStore

from pipeloom.errors import InputError
from pipeloom.runtime import choose_device
from pipeloom.runtime.launch.processes import check_device


@pytest.mark.parametrize("num_gpus", [0, 1, 4])
def test_a_gpu_for_each_process_or_none(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert choose_device("cpu", 2) == "cpu"
    assert choose_device("auto", 2) == ("cuda" if num_gpus >= 2 else "cpu")
    if num_gpus >= 2:
        assert choose_device("cuda", 2) == "cuda"
    else:
        if num_gpus:
            # By way of the host several processes can share one.
            assert choose_device("cuda", 2, "host") == choose_device("auto", 2, "host") == "cuda"
        with pytest.raises(InputError, match=f"'cuda' for 2 ranks, and this host has {num_gpus} GPUs"):
            choose_device("cuda", 2)


def test_all_ranks_compute_on_the_same_type_of_device() -> None:
    store = HashStore()
    check_device(store, 0, "cuda")
    check_device(store, 1, "cuda")
    with pytest.raises(InputError, match=r"'cpu' was chosen on host .*, and 'cuda' on the host of rank 0"):
        check_device(store, 2, "cpu")
