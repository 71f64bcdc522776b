"""How tests run: kernels compiled once for all checkouts, processes that begin warm, nothing that hangs for ever."""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from packaging.version import Version

# Many times what the longest takes on two cores with other work beside it.
BOUND_S = 600
SOAK_BOUND_S = 3600
KERNELS = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "pipeloom", "tests")
"""Kernels that tests have compiled, a folder for each state of their sources."""
KEPT_S = 30 * 24 * 3600

# Read when numba and torch are imported, here and by processes that tests start. Workers and ranks are more than cores:
# further threads only wait, and burn what they wait for.
os.environ.setdefault("NUMBA_CACHE_DIR", str(KERNELS))
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests compare what commands print, on machines of any speed.
os.environ.setdefault("PIPELOOM_PROGRESS", "0")
# A change of the code below, such as one by `monkeypatch`, must reach the tests of found models.
os.environ.setdefault("PIPELOOM_FIND_AGAIN", "1")

# A shell that starts the tests in the background has them and all that they start ignore two signals.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Number of examples of each property test that does not set its own. `make test` repeats the same examples, so that it
# fails only for a change; `make test-all` draws new ones. No test asserts a time, nor does drawing an example.
_ANY_TIME = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("few", max_examples=25, derandomize=True, **_ANY_TIME)
settings.register_profile("many", max_examples=200, **_ANY_TIME)
settings.load_profile("few")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cold", action="store_true", help="start every rank and planner as an interpreter of its own")


def pytest_configure(config: pytest.Config) -> None:
    if KERNELS.is_dir() and not hasattr(config, "workerinput"):
        for folder in KERNELS.iterdir():
            if folder.stat().st_mtime < time.time() - KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)


def pytest_sessionfinish() -> None:
    from tests.warm import end_server

    end_server()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which pages no browser has opened."""
    reasons = {report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])}
    for reason in sorted(reason for reason in reasons if "chromium" in reason):
        terminalreporter.write_line(reason)


@cache
def starts_ranks(file: Path) -> bool:
    """Whether some tests of a file are marked ``ranks``."""
    return "pytest.mark.ranks" in file.read_text(encoding="utf-8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start ranks go first: one worker runs them all, and that takes longest."""
    items.sort(key=lambda item: not starts_ranks(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """All tests of a file go to one worker, and so do all files that start ranks:"""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "ranks" if starts_ranks(config.rootpath / file) else file

    # In the order that they were collected in, instead of the largest files first.
    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fork what the test starts from a warm process, unless it asks for the product's own way."""
    # Imported late: numba must not be, before this file has said where its cache is.
    from tests.warm import begin_warm

    with pytest.MonkeyPatch.context() as patch:
        if not item.config.getoption("--cold") and item.get_closest_marker("cold") is None:
            begin_warm(patch)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Bound the time of a test's fixtures: some of them train. Skip tests that need a newer torch."""
    if (needs := item.get_closest_marker("newer_torch")) is not None and Version(version("torch")) < Version("2.13"):
        pytest.skip(needs.args[0])
    with bounded(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Bound the time of a test."""
    with bounded(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Nothing that a test sets in torch for all stays for those after it."""
    result = yield
    if (torch := sys.modules.get("torch")) is not None and torch.get_default_dtype() != torch.float32:
        torch.set_default_dtype(torch.float32)
        pytest.fail("it leaves another default dtype in torch")
    return result


@contextmanager
def bounded(item: pytest.Item) -> Iterator[None]:
    """A block that fails, with the place where it stands, once it takes longer than any test may."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    bound_s = SOAK_BOUND_S if item.get_closest_marker("soak") else BOUND_S

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{item.name} has not ended within {bound_s} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, bound_s)
    # Where a thread that waits holds the interpreter's lock, no signal is seen: then the worker ends.
    faulthandler.dump_traceback_later(bound_s + 30, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _heard_loggers() -> None:
    """Let warnings be heard: some libraries configure logging when they are imported, which silences all others."""
    logging.disable(logging.NOTSET)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.split(".")[0] == "pipeloom" and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
            logger.setLevel(logging.NOTSET)
