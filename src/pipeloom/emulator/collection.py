"""Python's cycle collector, kept away from work that makes many small objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep Python's cycle collector from running.

    A step makes some hundred thousand small objects without cycles; searching all of them again and again for
    cycles took half of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
