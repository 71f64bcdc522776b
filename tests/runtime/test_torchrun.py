from __future__ import annotations

import pytest

from pipeloom.errors import InputError
from pipeloom.runtime import Worker, this_worker

STARTED = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
}


def test_a_worker_knows_itself_from_its_environment() -> None:
    assert this_worker({}) is None
    assert this_worker({"RANK": "0", "WORLD_SIZE": "1"}) is None, "another launcher's"
    assert this_worker(STARTED) == Worker(
        rank=1, num_ranks=4, num_restarts=2, on_one_host=True, local_rank=1, num_local=4
    )
    several_hosts = this_worker(STARTED | {"LOCAL_WORLD_SIZE": "2"})
    assert several_hosts is not None
    assert not several_hosts.on_one_host


def test_an_environment_that_lacks_something_is_refused() -> None:
    with pytest.raises(InputError, match="lacks a rank or world size"):
        this_worker({name: value for name, value in STARTED.items() if name != "RANK"})
