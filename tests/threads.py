"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from pipeloom.runtime import ThreadHub

T = TypeVar("T")


def on_threads(hub: ThreadHub, num_ranks: int, work: Callable[[int], T]) -> list[T]:
    """Run a function for every rank, and return the results by rank. An error ends all ranks; its cause is raised."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            hub.fail()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if "another rank failed" not in str(error)), errors[0])
    return [results[rank] for rank in range(num_ranks)]
