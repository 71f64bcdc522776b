"""Processes of tests begin warm: what they are told to import is there."""

from importlib import import_module


def test_all_that_ranks_import_is_there() -> None:
    # The server that ranks are forked from goes on without what it cannot import, and all tests take longer.
    import_module("tests.warm_imports")
