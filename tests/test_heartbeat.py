"""What is printed while something takes long."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import pytest

from pipeloom import heartbeat
from pipeloom.printing import print_line
from pipeloom.training.display import Lines

BOUND_S = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(heartbeat.VARIABLE, raising=False)
    monkeypatch.setattr(heartbeat, "FIRST_S", 0.05)
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.1)
    monkeypatch.setattr(heartbeat, "_LOOK_S", 0.01)


def wait_for(done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + BOUND_S
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_work_that_prints_nothing_is_named_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    said = ""

    def read() -> str:
        nonlocal said
        said += capsys.readouterr().err
        return said

    with heartbeat.heartbeat("reading"):
        wait_for(lambda: read().count("pipeloom: reading") >= 2)
        heartbeat.doing("searching")
        wait_for(lambda: "pipeloom: searching" in read())
    read()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_lines_of_the_work_itself_take_the_place_of_a_heartbeat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "FIRST_S", BOUND_S)
    monkeypatch.setattr(heartbeat, "EVERY_S", BOUND_S)
    with heartbeat.heartbeat("reading"):
        print_line("a row")
        time.sleep(0.1)
    assert capsys.readouterr() == ("a row\n", "")


@pytest.mark.parametrize("quiet", ["paused", "variable"])
def test_nothing_is_printed_if_another_process_does_or_the_user_wants_none(
    quiet: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if quiet == "variable":
        monkeypatch.setenv(heartbeat.VARIABLE, "0")
        with heartbeat.heartbeat("reading"):
            time.sleep(0.3)
    else:
        with heartbeat.paused(), heartbeat.heartbeat("reading"):
            time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_a_line_that_tells_a_result_does_not_name_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    said = ""

    def read() -> str:
        nonlocal said
        said += capsys.readouterr().err
        return said

    with heartbeat.heartbeat("loading"):
        Lines().say("Measuring the layers ...")
        Lines().say("6 kinds of layers; mean error of the fit 10.0%.")
        wait_for(lambda: "pipeloom: " in read())
    assert "pipeloom: measuring the layers" in read()
    assert "pipeloom: 6 kinds" not in read()


def test_a_printed_line_reaches_a_pipe_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(pipe, encoding="utf-8"))
    print_line("Importing PyTorch ...")
    assert pipe.getvalue() == b"Importing PyTorch ...\n"
