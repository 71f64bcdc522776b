"""check, simulate, verify and report from files: answers, exit codes, one line for whatever is wrong."""

from __future__ import annotations

import copy
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeloom.cli.app import commands, run
from pipeloom.io import write_instance, write_schedule
from pipeloom.outputs import REMEDIES
from pipeloom.timeline import lower_bound, simulate
from tests.io.documents import TINY, TINY_SCHEDULE
from tests.io.test_io_load import mutated
from tests.strategies import graphs, random_order

COMMANDS = commands()


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Invoke = Callable[..., Result]


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Invoke:
    def call(*arguments: object) -> Result:
        code = run([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


def _schedule(folder: Path, name: str = "s.json", **change: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(TINY_SCHEDULE | change))
    return path


def test_check_accepts_the_example(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    done = invoke("check", tiny, _schedule(tmp_path))
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("feasible: makespan 6.020 s, lower bound 6.020 s (critical path), gap 0.0 %")
    document = json.loads(invoke("check", tiny, _schedule(tmp_path), "--json").out)
    assert document["feasible"] is True
    assert document["violations"] == []
    assert document["makespan_s"] == 6.02
    assert document["peak_memory_bytes"] == [50, 50]


VIOLATIONS = [
    ({"order": [[3, 0], [1, 2]]}, "order"),
    ({"start_s": [0.0, 1.01, 1.5, 4.02]}, "overlap"),
    ({"start_s": [0.0, 0.5, 1.5, 3.51]}, "edge"),
    ({"start_s": [0.0, 1.01, 2.01, 5.02]}, "start"),
    ({"order": [[0, 3], [1]]}, "missing task"),
    ({"order": [[0, 3], [1, 2, 2]]}, "doubled task"),
    ({"order": [[0, 3, 2], [1]]}, "wrong rank"),
    ({"candidate": [0, 0]}, "candidate"),
    ({"makespan_s": 5.0}, "stated"),
    ({"lower_bound_s": 6.5}, "stated"),
    ({"peak_memory_bytes": [50, 49]}, "stated"),
]


@pytest.mark.parametrize(("change", "kind"), VIOLATIONS, ids=[f"{k}-{next(iter(c))}" for c, k in VIOLATIONS])
def test_check_names_each_kind_of_violation(
    change: dict[str, Any], kind: str, invoke: Invoke, tiny: Path, tmp_path: Path
) -> None:
    done = invoke("check", tiny, _schedule(tmp_path, **change))
    assert done.code == 1
    assert f"\n  {kind}: " in done.out
    document = json.loads(invoke("check", tiny, _schedule(tmp_path, **change), "--json").out)
    assert document["feasible"] is False
    assert kind in {violation["kind"] for violation in document["violations"]}


def test_check_names_memory(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "tight.json"
    path.write_text(json.dumps(TINY | {"memory_capacity_bytes": [49, 100]}))
    done = invoke("check", path, _schedule(tmp_path))
    assert done.code == 1
    assert "memory: rank 0 holds 50 bytes" in done.out
    assert "capacity is 49" in done.out


def test_check_allows_a_nanosecond_a_task(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    late = {"start_s": [0.0, 1.010000001, 2.010000002, 4.020000001], "makespan_s": 6.020000001}
    assert invoke("check", tiny, _schedule(tmp_path, **late)).code == 0


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(graphs(memory=None), st.integers(0, 1000))
def test_what_is_written_passes_the_check(graph: Any, seed: int) -> None:
    import tempfile

    schedule = random_order(graph, np.random.default_rng(seed))
    with tempfile.TemporaryDirectory() as folder:
        instance, answer = Path(folder, "i.json.gz"), Path(folder, "s.json.gz")
        write_instance(instance, graph)
        write_schedule(answer, graph, schedule, simulate(graph, schedule), lower_bound(graph))
        assert run(["check", str(instance), str(answer)]) == 0


def test_simulate_draws_and_counts(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    targets = [tmp_path / name for name in ("t.json", "t.html", "t.svg")]
    options = ["--trace", targets[0], "--html", targets[1], "--svg", targets[2]]
    document = json.loads(invoke("simulate", tiny, _schedule(tmp_path), *options, "--json").out)
    assert document["start_s"] == TINY_SCHEDULE["start_s"]
    assert document["written"] == [str(t) for t in targets]
    idle = sum(
        sum(v for k, v in rank.items() if k.endswith("_s") and k != "waiting_s") + sum(rank["waiting_s"])
        for rank in document["bubbles"]
    )
    assert idle == pytest.approx(2 * 6.02 - 6.0)
    assert json.loads(targets[0].read_text())["traceEvents"]
    assert targets[1].read_text().startswith("<!DOCTYPE html>")
    assert targets[2].read_text().startswith("<svg ")
    assert "Idle time by cause" in invoke("simulate", tiny, _schedule(tmp_path)).out


def test_simulate_runs_what_does_not_fit_and_says_so(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "tight.json"
    path.write_text(json.dumps(TINY | {"memory_capacity_bytes": [49, 100]}))
    done = invoke("simulate", path, _schedule(tmp_path))
    assert done.code == 0
    assert "is infeasible, memory: rank 0" in done.err


def test_report_compares_schedules(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    first = _schedule(tmp_path)
    second = tmp_path / "second.json"
    second.write_text(json.dumps({"format": "pipeloom.schedule/1", "instance": "tiny", "order": [[0, 3], [1, 2]]}))
    page = tmp_path / "cmp.html"
    document = json.loads(invoke("report", tiny, first, second, "--html", page, "--json").out)
    assert [s["title"] for s in document["systems"]] == ["portfolio", "second"]
    assert page.exists()
    assert "portfolio" in invoke("report", tiny, first).out


def test_report_shows_a_run(invoke: Invoke, tmp_path: Path) -> None:
    run_folder = tmp_path / "runs" / "digits"
    run_folder.mkdir(parents=True)
    summary = {
        "name": "digits",
        "iterations": 3,
        "mean_planned_s": 0.5,
        "mean_measured_s": 0.75,
        "evaluation": {"exact_match": 0.9},
        "comparison": {"1f1b": 0.6},
    }
    (run_folder / "summary.json").write_text(json.dumps(summary))
    (run_folder / "timeline.html").write_text("<!DOCTYPE html>")
    done = invoke("report", run_folder)
    assert done.code == 0
    assert "exact_match" in done.out
    assert "1f1b" in done.out
    copy_of_page = tmp_path / "page.html"
    document = json.loads(invoke("report", run_folder, "--json", "--html", copy_of_page).out)
    assert document == summary | {"written": [str(copy_of_page)]}
    assert copy_of_page.read_text() == "<!DOCTYPE html>"
    (run_folder / "summary.json").write_text('{"name": 3}')
    done = invoke("report", run_folder)
    assert (done.code, done.out) == (2, "")
    assert "summary.json: name: 3 is not a string" in done.err


PLAN = """pipeloom.plan/2 ranks=2 iteration=17 layout=3f2a
rank 0
F           lm.0 0.0 keep
SEND_F      lm.0 0.0 to=1 shape=2,3 dtype=float32
RECV_B      lm.0 0.0 from=1 shape=2,3 dtype=float32
WAIT_SEND_F lm.0 0.0
WAIT_B      lm.0 0.0
B           lm.0 0.0
rank 1
RECV_F      lm.0 0.0 from=0 shape=2,3 dtype=float32
WAIT_F      lm.0 0.0
F           lm.1 0.0 keep
B           lm.1 0.0
SEND_B      lm.0 0.0 to=0 shape=2,3 dtype=float32
WAIT_SEND_B lm.0 0.0
"""


def test_verify_proves_and_refutes(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "p.plan"
    path.write_text(PLAN)
    done = invoke("verify", path)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("verified: 2 ranks, 12 actions, 2 messages")
    assert [line.partition(": ")[0] for line in done.out.splitlines()[1:]] == ["not checked"] * 2
    assert "needs a layout" in done.out
    assert invoke("verify", path, "--serial").out.splitlines()[0].endswith("rules, and rank by rank")
    assert len(json.loads(invoke("verify", path, "--json").out)["not_checked"]) == 2
    path.write_text(PLAN.replace("SEND_B      lm.0 0.0 to=0 shape=2,3 dtype=float32\nWAIT_SEND_B lm.0 0.0\n", ""))
    done = invoke("verify", path)
    assert done.code == 1
    assert done.out.startswith("refuted: ")
    document = json.loads(invoke("verify", path, "--json").out)
    assert document["verified"] is False
    assert document["problem"]
    path.write_text(PLAN.replace("F           lm.1", "FF          lm.1"))
    done = invoke("verify", path)
    assert (done.code, done.out) == (2, "")
    assert f"{path}: plan, line 12: unknown verb 'FF'" in done.err


def test_wrong_input_is_one_line_and_exit_code_two(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    bad = copy.deepcopy(TINY)
    bad["tasks"]["duration_s"][1] = -0.2
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(bad))
    good = _schedule(tmp_path)
    for arguments, message in [
        (("check", wrong, good), f"{wrong}: tasks.duration_s[1]: -0.2 is negative"),
        (("check", good, tiny), f"{good}: format: 'pipeloom.schedule/1' is not 'pipeloom.instance/1'"),
        (("check", tiny, tmp_path / "none"), "none: cannot be read: no such file or directory"),
        (("check", tiny, _schedule(tmp_path, "short.json", start_s=[0.0])), "start_s: has 1 entries, the instance"),
        (("check", tiny), "Missing argument 'SCHEDULE'; see pipeloom check --help"),
        (("check", tiny, good, "--jsn"), "No such option: --jsn"),
        (("chekc",), "No such command 'chekc'"),
        (("simulate", tiny, _schedule(tmp_path, "stuck.json", order=[[3, 0], [1, 2]])), "json: order: order deadlocks"),
        (("simulate", tiny, good, "--html", tmp_path / "no" / "x.html"), "its folder does not exist"),
        (("report", tiny), "there is no schedule"),
        (("report", tmp_path), "has no summary.json"),
        (("verify", tiny), "plan, line 1"),
    ]:
        done = invoke(*arguments)
        assert (done.code, done.out) == (2, ""), arguments
        assert message in done.err
        assert done.err.count("\n") == 1
    assert not (tmp_path / "no").exists()


@settings(suppress_health_check=list(HealthCheck))
@given(first=mutated(), second=mutated(), command=st.sampled_from(["check", "simulate", "report"]))
def test_no_document_leads_to_a_traceback(
    first: Any, second: Any, command: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "a.json").write_text(json.dumps(first))
    (folder / "b.json").write_text(json.dumps(second))
    code = run([command, str(folder / "a.json"), str(folder / "b.json")])
    captured = capsys.readouterr()
    assert code in (0, 1, 2), captured.err
    if code == 2:
        assert captured.out == ""
        assert captured.err.endswith("\n")


@settings(suppress_health_check=list(HealthCheck))
@given(change=st.data(), command=st.sampled_from(["check", "simulate"]))
def test_no_schedule_of_a_sound_instance_leads_to_a_traceback(
    change: st.DataObject, command: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    number = st.integers(-1, 5) | st.sampled_from([2**63, 2**61])
    time = st.floats(0, 10) | st.sampled_from([4.5e9, 1e308, -1.0])
    fields = {
        "order": st.lists(st.lists(number, max_size=5), max_size=3),
        "candidate": st.none() | st.lists(number, max_size=4),
        "start_s": st.none() | st.lists(time, max_size=5),
        "makespan_s": st.none() | time,
        "lower_bound_s": st.none() | time,
        "peak_memory_bytes": st.none() | st.lists(number, max_size=3),
    }
    name = change.draw(st.sampled_from(sorted(fields)))
    folder = tmp_path_factory.getbasetemp()
    (folder / "i.json").write_text(json.dumps(TINY))
    (folder / "s.json").write_text(json.dumps(TINY_SCHEDULE | {name: change.draw(fields[name])}))
    assert run([command, str(folder / "i.json"), str(folder / "s.json")]) in (0, 1, 2)
    assert "internal error" not in capsys.readouterr().err


@given(text=st.text(max_size=80), cut=st.integers(0, len(PLAN)), at=st.integers(0, len(PLAN)))
def test_no_plan_leads_to_a_traceback(text: str, cut: int, at: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "p.plan"
    path.write_bytes((PLAN[:at] + text + PLAN[max(at, cut) :]).encode("utf-8", "surrogatepass"))
    assert run(["verify", str(path)]) in (0, 1, 2)


def test_overview_names_every_command_in_its_own_words(invoke: Invoke) -> None:
    overview = invoke("--help")
    assert overview.code == 0
    for name, command in COMMANDS.items():
        assert (name in overview.out) == (name != "planner")
        if name in ("check", "simulate", "verify", "report"):
            module = import_module(command.module)
            done = invoke(name, "--help")
            assert done.code == 0
            first = module.HELP.split(".")[0].split()
            assert " ".join(first)[:60] in " ".join(done.out.split())
            assert module.EPILOG.split(":")[0] in done.out


def test_overview_is_light_and_module_runs(tmp_path: Path) -> None:
    code = (
        "import sys; from pipeloom.cli.app import run; run(['--help']);"
        "heavy = {'numpy', 'numba', 'torch', 'msgspec', 'bokeh'} & set(sys.modules); print(heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"
    done = subprocess.run([sys.executable, "-m", "pipeloom", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pipeloom ")


def test_reader_that_goes_away_is_no_error(tiny: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "pipeloom", "check", str(tiny), str(_schedule(tmp_path)), "--json"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert done.stderr == ""


@pytest.mark.parametrize("under_torchrun", [False, True])
def test_sigterm_is_reported_and_leaves_no_temporary_files(tmp_path: Path, under_torchrun: bool) -> None:
    code = """
import tempfile, time
from pipeloom.cli.app import exit_on_sigterm
exit_on_sigterm()
with tempfile.TemporaryDirectory(prefix="pipeloom-"):
    print("here", flush=True)
    time.sleep(600)
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)} | ({"TORCHELASTIC_RUN_ID": "none"} if under_torchrun else {})
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "here\n"
        started.terminate()
        said = started.communicate(timeout=60)[1]
    # A rank of torchrun's may wait for another and hear nothing: it ends at once.
    assert (started.returncode, said) == ((-signal.SIGTERM, "") if under_torchrun else (143, "pipeloom: terminated\n"))
    assert under_torchrun or not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        (
            ">/dev/full",
            2,
            "standard output or a temporary file: cannot be written: no space left on device; free disk space",
        ),
        (">&-", 0, ""),
    ],
)
def test_an_output_that_takes_nothing_is_reported(how: str, code: int, said: str, tiny: Path, tmp_path: Path) -> None:
    command = f"{sys.executable} -m pipeloom check {tiny} {_schedule(tmp_path)} {how}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert said in done.stderr
    assert done.stderr.count("\n") == bool(said)


def test_a_pipe_is_written_through_its_device(tmp_path: Path) -> None:
    code = "from pipeloom.io import write_text; write_text('/dev/stdout', 'text')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("text", "")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_that_nobody_reads_does_not_hold_a_command(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = invoke("simulate", tiny, _schedule(tmp_path), "--svg", pipe)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"{pipe}: cannot be written: no such device or address; start the reader of the pipe first" in done.err
    # A file that Pipeloom names itself, in a folder, is refused before anything is read.
    (tmp_path / "batch.plan").symlink_to("batch.plan")
    done = invoke("plan", "samples.jsonl", "--setup", "setup.json", "--tokens", 9, "--budget", 0, "--out", tmp_path)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"{tmp_path / 'batch.plan'}: is not a regular file; remove it, or name another folder" in done.err


def test_defects_are_one_line_unless_asked_for(
    invoke: Invoke, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("pipeloom.cli.check.judge", broken)
    monkeypatch.delenv("PIPELOOM_TRACEBACK", raising=False)
    done = invoke("check", tiny, _schedule(tmp_path))
    assert (done.code, done.out, done.err.count("\n")) == (70, "", 1)
    assert "internal error, a defect of Pipeloom: RuntimeError: two lines" in done.err
    monkeypatch.setenv("PIPELOOM_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="two"):
        invoke("check", tiny, _schedule(tmp_path))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ELOOP])
def test_what_a_disk_or_a_name_refuses_is_no_defect(
    number: int, invoke: Invoke, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number), "a.bin")

    monkeypatch.setattr("pipeloom.cli.check.judge", refused)
    done = invoke("check", tiny, _schedule(tmp_path))
    reason = os.strerror(number)
    assert done.code == 2
    assert done.err == f"pipeloom: a.bin: cannot be used: {reason[0].lower()}{reason[1:]}; {REMEDIES[number]}\n"


def test_too_many_open_files_are_no_defect(
    invoke: Invoke, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("pipeloom.cli.check.judge", refused)
    done = invoke("check", tiny, _schedule(tmp_path))
    remedy = "raise the limit of open files (ulimit -n)"
    assert (done.code, done.err) == (2, f"pipeloom: a file or pipe: cannot be opened: too many open files; {remedy}\n")


def test_names_that_look_like_markup_are_text(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    document = json.loads(tiny.read_text()) | {"name": "[/x] [red]"}
    path = tmp_path / "[red].json"
    path.write_text(json.dumps(document))
    done = invoke("simulate", path, _schedule(tmp_path))
    assert done.code == 0
    assert "[/x] [red]" in done.out


@pytest.mark.parametrize("length", [300, 5000])
def test_a_name_that_is_too_long_is_reported_by_every_command(length: int, invoke: Invoke, tiny: Path) -> None:
    name = "x" * length
    for arguments in [
        ("check", name, tiny),
        ("report", name),
        ("report", name, tiny),
        ("emulate", name),
        ("emulate", "vlm-s", "--cluster", name),
        ("sweep", name),
        ("compare", name),
        ("compare", "vlm-s", "--data", name),
        ("explain", name),
        ("export", name, "--to", "x"),
        ("megatron", name),
        ("solve", tiny, "--out", name),
    ]:
        done = invoke(*arguments)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), arguments
        assert len(done.err) < 2100
    done = invoke("report", name)
    assert done.err.startswith("pipeloom: xxx")
    assert done.err.endswith("xxx: cannot be used: file name too long; give a shorter name\n")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_what_has_no_end_is_not_read_for_ever(invoke: Invoke, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeloom.io.files.MAX_FILE_BYTES", 1000)
    for arguments in [
        ("check", "/dev/zero", tiny),
        ("verify", "/dev/zero"),
        ("megatron", "/dev/zero"),
        ("compare", "/dev/zero"),
        ("emulate", "/dev/zero"),
    ]:
        done = invoke(*arguments)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), arguments
        assert "/dev/zero" in done.err


@pytest.mark.parametrize("command", ["emulate", "sweep", "compare"])
def test_microbatches_beyond_any_iteration_are_refused(command: str, invoke: Invoke) -> None:
    done = invoke(command, "vlm-s", "--microbatches", 10**20)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "--microbatches" in done.err


def test_a_long_name_in_a_file_makes_no_long_note(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    done = invoke("check", tiny, _schedule(tmp_path, instance="x" * 5000))
    assert done.code == 0
    assert done.err.startswith("note: ")
    assert len(done.err) < 1000


def test_a_package_that_is_missing_is_named_with_what_brings_it(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "train.toml"
    path.write_text("")
    for name in [name for name in sys.modules if name.startswith(("pipeloom.training", "pipeloom.cli.progress"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    done = invoke("train", path)
    assert (done.code, done.out) == (2, "Importing PyTorch ...\n")
    assert done.err == "pipeloom: torch is not installed, and this command needs it; pip install 'pipeloom[torch]'\n"
