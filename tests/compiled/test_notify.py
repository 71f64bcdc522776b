"""A command prints a note before it compiles functions, and only then."""

from __future__ import annotations

import numba

from pipeloom.compiled.decorators import before_compiling


def test_notified_once_and_only_if_something_is_compiled():
    @numba.njit
    def first(x):
        return x + 1

    @numba.njit
    def second(x):
        return x + 2

    reported = []
    with before_compiling(lambda: reported.append(1)):
        pass
    assert reported == []
    with before_compiling(lambda: reported.append(2)):
        assert first(1) + second(1) == 5
        assert first(2) == 3
    assert reported == [2]
    with before_compiling(lambda: reported.append(3)):
        assert first(3) == 4
    assert reported == [2]
