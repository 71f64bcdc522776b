"""Who runs a command is told before functions are compiled, and only then."""

from __future__ import annotations

import numba

from pipeloom.compiled.notify import before_compiling


def test_told_once_and_only_if_something_is_compiled():
    @numba.njit
    def first(x):
        return x + 1

    @numba.njit
    def second(x):
        return x + 2

    told = []
    with before_compiling(lambda: told.append(1)):
        pass
    assert told == []
    with before_compiling(lambda: told.append(2)):
        assert first(1) + second(1) == 5
        assert first(2) == 3
    assert told == [2]
    with before_compiling(lambda: told.append(3)):
        assert first(3) == 4
    assert told == [2]
