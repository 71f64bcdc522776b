"""The frame of the command line: commands are imported when called; errors are one line and an exit code.

Exit codes: 0 done; 1 a check or a verification failed; 2 wrong input, or nothing satisfies it; 70 a defect of
Pipeloom; 130 interrupted; 143 terminated by SIGTERM.
"""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from types import FrameType
from typing import Any, NamedTuple

import typer
from rich.markup import escape

from pipeloom import __version__, plugins
from pipeloom.errors import PipeloomError
from pipeloom.heartbeat import heartbeat
from pipeloom.outputs import REMEDIES, declare_outputs, refused
from pipeloom.plugins import installed
from pipeloom.printing import escape_logs, print_error, print_line

# Newer versions of Typer include their own click; Typer's public names lead to the one in use.
UsageError: Any = typer.BadParameter.__bases__[0]
ClickException: Any = UsageError.__bases__[0]

WRONG_INPUT, DEFECT, INTERRUPTED, TERMINATED = 2, 70, 130, 143


class Command(NamedTuple):
    """The module of a command, and its line in the overview, which imports no command."""

    module: str
    """Module with a function of the command's name, and the long help, ``HELP``."""
    line: str


_LINES = {
    "train": "Train a model over pipeline ranks, with a schedule for each batch.",
    "export": "Export a run's trained weights for the model's own library.",
    "plan": "Plan one batch from files: packing, instance, schedule, plan text.",
    "compare": "Estimate what a model would gain: your setup, a dozen baselines and Pipeloom.",
    "megatron": "Find the fastest pipeline that Megatron supports, and print its arguments.",
    "pack": "Pack samples into microbatches and show their loads.",
    "solve": "Search for a schedule of an instance.",
    "validate": "Predict training runs whose times are known, and print the errors.",
    "arrange": "Co-optimize partition, placement and schedule of a chain of layers.",
    "profile": "Measure a model's layers on this machine, as input for arrange.",
    "check": "Check whether a schedule is feasible for an instance; list violations.",
    "simulate": "Simulate a schedule: times, bubbles, memory, timeline.",
    "verify": "Prove that an execution plan is complete and free of deadlock, or show where it stops.",
    "report": "Show a training run, or compare schedules: table, timeline page, trace, picture.",
    "explain": "Explain a run from its profiler traces: bubbles by cause, and the best order.",
    "emulate": "Emulate an iteration on a cluster: time and memory.",
    "describe": "Describe a model: layers, parameters, operations, saved bytes.",
    "sweep": "Rank the degrees of parallelism for a model on a cluster.",
    "calibrate": "Write a device table from measurements, blended with a shipped one.",
    "doctor": "Show what is installed, what is missing, and if kernels are compiled.",
    "warmup": "Compile all kernels, so that no later command has to.",
    "planner": "The planner service; the trainer starts it itself.",
}
COMMANDS = {name: Command(f"pipeloom.cli.{name}", line) for name, line in _LINES.items()}
"""Commands of Pipeloom by name."""
_EXTRAS = {
    "torch": "pipeloom[torch]",
    "bokeh": "pipeloom[report]",
    "pyarrow": "pipeloom[data]",
    "sklearn": "pipeloom[demo]",
    "matplotlib": "pipeloom-lab[plot]",
    "ortools": "pipeloom-lab[exact]",
    "z3": "pipeloom-lab[exact]",
    "gurobipy": "pipeloom-lab[exact]",
    "transformers": "pipeloom[transformers]",
    "safetensors": "pipeloom[transformers]",
    "yaml": "pipeloom[megatron]",
}
"""What to install for an optional package."""
_HIDDEN = frozenset({"planner"})
_EPILOG = (
    "A first schedule: pipeloom solve INSTANCE --budget 1 --out SCHEDULE, then pipeloom check INSTANCE SCHEDULE. "
    "File formats: docs/formats.md."
)


def commands() -> dict[str, Command]:
    """Return all commands by name, those of other installed distributions last."""
    return COMMANDS | installed(plugins.COMMANDS)


def make_app(names: Sequence[str]) -> typer.Typer:
    """Build the application; only the commands in ``names`` are imported, the others are one line of help."""
    app = typer.Typer(
        name="pipeloom",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=_EPILOG,
    )
    app.callback(help="Plan, emulate and run pipeline-parallel training, with a schedule made for every batch.")(_root)
    # Search other distributions only if needed: that takes longer than a small command.
    known = COMMANDS if set(names) <= COMMANDS.keys() else commands()
    for name, command in known.items():
        hidden = name in _HIDDEN
        if name in names:
            module = import_module(command.module)
            function = getattr(module, name)
            text = _paragraphs(module.HELP)
            app.command(name, help=text, epilog=getattr(module, "EPILOG", None), hidden=hidden)(function)
        else:
            app.command(name, help=command.line, hidden=hidden)(_not_loaded)
    return app


def _paragraphs(text: str) -> str:
    """Return the text with one line for each paragraph, so that the terminal can wrap it."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _command(app: typer.Typer) -> Any:
    """Return the command of an application, with brackets in help texts escaped from rich's markup."""
    command: Any = typer.main.get_command(app)
    for one in (command, *command.commands.values()):
        if one.rich_markup_mode == "rich":
            for holder in (one, *one.params):
                for name in ("help", "epilog", "short_help"):
                    text = getattr(holder, name, None)
                    if text:
                        setattr(holder, name, escape(text))
    return command


def _show_version(wanted: bool) -> None:
    if wanted:
        print_line(f"pipeloom {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_show_version
    ),
) -> None:
    """Accept the options before a command."""


def _not_loaded() -> None:
    """Stand in for a command in the overview; `run` imports a command before it is called."""


def exit_on_sigterm() -> None:
    """Make SIGTERM end this process as Ctrl-C does, with a message and without temporary files.

    A second SIGTERM ends it at once. Not under torchrun, nor in processes forked from this one: a rank that waits
    for another would not react.
    """
    own = os.getpid()

    def leave(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != own:
            os.kill(os.getpid(), number)
        print_error("terminated")
        sys.exit(TERMINATED)

    if "TORCHELASTIC_RUN_ID" not in os.environ:
        signal.signal(signal.SIGTERM, leave)


def run(arguments: Sequence[str], *, whole_process: bool = False) -> int:
    """Run one command line and return its exit code; only a defect leaves a traceback.

    ``whole_process`` means that this process has no other purpose, so that another process can do its work: commands
    find ``arguments`` in their context.
    """
    # A stream is None if the program was started with it closed.
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A terminal without Unicode gets escapes, not an error.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    escape_logs()
    named = next((word for word in arguments if not word.startswith("-")), "")
    try:
        # The trainer reports the planner's progress.
        beat = nullcontext() if named in _HIDDEN else heartbeat(f"{named}: loading" if named else "loading")
        with beat:
            app = make_app([named])
            result = _command(app).main(
                list(arguments), prog_name="pipeloom", standalone_mode=False, obj=arguments if whole_process else None
            )
        sys.stdout.flush()
        code = result if isinstance(result, int) else 0
        if code == INTERRUPTED:  # some versions of Typer silently turn Ctrl-C into this code
            print_error("interrupted")
        return code
    except typer.Exit as leave:
        return leave.exit_code
    except UsageError as error:
        place = error.ctx.command_path if error.ctx is not None else "pipeloom"
        problem = error.format_message().rstrip(".") + _rejected_value(error)
        if problem:  # empty if no argument was given: then the help was shown
            print_error(f"{problem}; see {place} --help", place)
        return WRONG_INPUT
    except ClickException as error:
        return _fail(error.format_message())
    except PipeloomError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        print_error("interrupted")
        return INTERRUPTED
    except BrokenPipeError as error:
        return _broken_pipe(error)
    except SystemExit as leave:
        # click and rich exit with code 1 if a pipe is broken
        if not isinstance(leave.__context__, BrokenPipeError):
            raise
        return _broken_pipe(leave.__context__)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            return _defect(error)
        return _fail(f"{error.name} is not installed, and this command needs it; pip install '{extra}'")
    except OSError as error:
        if error.errno not in REMEDIES:
            return _defect(error)
        if error.filename is not None:
            return _fail(str(refused(os.fspath(error.filename), error, "", "cannot be used")))
        if error.errno == errno.EMFILE:
            return _fail(str(refused("a file or pipe", error, "", "cannot be opened")))
        _discard_stdout()
        return _fail(str(refused("standard output or a temporary file", error, "")))
    except MemoryError:
        return _fail("memory is exhausted; free some, raise the limit (ulimit -v), or give a smaller input")
    except Exception as error:
        return _defect(error)
    finally:
        declare_outputs(())


def _rejected_value(error: Exception) -> str:
    """Return the option value that Typer rejects; empty if there is none, or Typer's message names it."""
    found: list[Any] = getattr(error.__cause__, "errors", list)()
    return f", not {found[0]['input']!r}" if found else ""


def _defect(error: Exception) -> int:
    if os.environ.get("PIPELOOM_TRACEBACK"):
        raise error
    what = f"{type(error).__name__}: {error} (PIPELOOM_TRACEBACK=1 shows where)"
    print_error(f"internal error, a defect of Pipeloom: {what}")
    return DEFECT


def _fail(message: str) -> int:
    print_error(message)
    return WRONG_INPUT


def _broken_pipe(error: BrokenPipeError) -> int:
    """Return 0 if the reader of our output is gone (a pager, head); any other broken pipe is a defect."""
    if not any(map(_is_closed, (1, 2))):
        return _defect(error)
    _discard_stdout()
    return 0


def _is_closed(descriptor: int) -> bool:
    if os.path.samestat(os.fstat(descriptor), os.stat(os.devnull)):  # set by rich
        return True
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


def _discard_stdout() -> None:
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
