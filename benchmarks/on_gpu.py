"""`make gpu`: all that is to be run where a GPU is at hand, unattended, each part by itself and ended in time.

``python -m benchmarks.on_gpu [--part NAME] [--dry] [--resume] [--out FOLDER]``. Parts for several GPUs run where there
are two or more. Where a part fails the next goes on; ``--resume`` leaves out those that FOLDER has. FOLDER gets
``results.md`` with what every part printed, ``results.json`` with machine, versions, times and exit codes, and the
device table of ``calibrate``. ``--dry`` rehearses on the CPU, with little of everything; a test does so with each part.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from pipeloom.io import write_text

ROOT = Path(__file__).parents[1]
PART_S = 530.0
"""A part is ended after so long: a machine is lent for ten minutes a command."""
_TASK = ROOT / "examples" / "digits_vlm" / "task.py"


@dataclass(frozen=True)
class Part:
    """What is run, on a GPU and when it is rehearsed: commands after the interpreter's name, one after the other."""

    question: str
    commands: tuple[tuple[str, ...], ...]
    dry: tuple[tuple[str, ...], ...]
    num_gpus: int = 1
    """Fewest GPUs that it needs."""


def _call(function: str, *arguments: object) -> tuple[str, ...]:
    named = ", ".join(map(repr, arguments))
    return "-c", f"from benchmarks import on_gpu; on_gpu.{function}({named})"


KEPT = ("device.toml", "kernels.csv", "models.json")
"""Files of parts that are kept beside the results."""
_TESTS = ("-m", "pytest", "-p", "no:cacheprovider", "tests/runtime/test_trainer_device.py")
_CALIBRATE = ("-m", "pipeloom", "calibrate", "--out", "device.toml", "--device")
PARTS = {
    "exact": Part(
        "Are gradients, losses and checkpoints those of the undivided model, under every strategy?",
        ((*_TESTS, "tests/runtime/test_gpu.py"),),
        ((*_TESTS, "-k", "cpu"),),
    ),
    "shared": Part(
        "Do 1, 2 and 4 processes that share one device train alike, with messages by way of the host?",
        (_call("together", "cuda", "host", (1, 2, 4), 20),),
        (_call("together", "cpu", "host", (1, 2), 3),),
    ),
    "ranks": Part(
        "Do ranks with a GPU each train alike, with messages by NCCL?",
        (_call("on_all", 20),),
        (_call("together", "cpu", "direct", (1, 2), 3),),
        num_gpus=2,
    ),
    "pairs": Part(
        "How fast are messages between every two GPUs?",
        (("-m", "benchmarks.gpu_pairs"),),
        (("-m", "benchmarks.gpu_pairs", "--dry"),),
        num_gpus=2,
    ),
    "schedules": Part(
        "Planned against measured, and against PyTorch's schedules, with a GPU for each rank?",
        (_call("schedules", 2, 5, 8),),
        (_call("schedules", 1, 1, 2),),
        num_gpus=2,
    ),
    "kernels": Part(
        "How long do the kernels of training take?",
        (("-m", "benchmarks.gpu_kernels"),),
        (("-m", "benchmarks.gpu_kernels", "--dry"),),
    ),
    "models": Part(
        "How far are planned seconds and bytes from measured ones, on layers of published models?",
        (("-m", "benchmarks.gpu_models"),),
        (("-m", "benchmarks.gpu_models", "--dry"),),
    ),
    "calibrate": Part(
        "How far is the emulator on layers that were not fitted? (mean of 5 % wanted)",
        ((*_CALIBRATE, "cuda"),),
        ((*_CALIBRATE, "cpu", "--quick", "--no-links", "--repeats", "1"),),
    ),
    "planned": Part(
        "How far is a planned iteration from the measured one, on one rank?",
        (_call("planned", "cuda", 60),),
        (_call("planned", "cpu", 2),),
    ),
    "overhead": Part(
        "What does the executor cost beside a plain loop, what do strategies hold, and how far do copies hide?",
        (_call("overhead", "cuda"),),
        (_call("overhead", "cpu"),),
    ),
    "model": Part(
        "Does a vision-language model of the transformers library train?",
        (_call("library_model", "cuda", 20),),
        (_call("library_model", "cpu", 1),),
    ),
    "megatron": Part(
        "Does `planned_forward_backward` run Megatron Core's models exactly, in what time and memory?",
        (("-m", "benchmarks.gpu_megatron"),),
        (("-m", "benchmarks.gpu_megatron", "--dry"),),
    ),
    "cores": Part(
        "Planned against measured, and against PyTorch's schedules, with a core for each rank?",
        (_call("cores", 2, 5, 8),),
        (_call("cores", 1, 1, 2),),
    ),
}


def on_all(iterations: int) -> None:
    """Train the digits example on one GPU, on two, and on all of up to eight."""
    import torch

    count = min(8, torch.cuda.device_count())
    together("cuda", "direct", tuple(dict.fromkeys((1, 2, count))), iterations)


def together(device: str, transport: str, ranks: tuple[int, ...], iterations: int) -> None:
    """Train the digits example over numbers of processes, and compare the losses.

    Parameters
    ----------
    transport : str
        ``host`` if they share a device.
    """
    first: list[float] = []
    for number in ranks:
        losses = _train(f"ranks_{number}", number, device, transport if number > 1 else "direct", iterations)
        first = first or losses
        worst = max(abs(a - b) / abs(a) for a, b in zip(first, losses, strict=True))
        print(f"{number} ranks: losses {losses[0]:.6f} to {losses[-1]:.6f}, at most {worst:.1e} from those of one rank")
        if worst > 1e-2:
            sys.exit(f"the losses of {number} ranks are others")


def planned(device: str, iterations: int) -> None:
    """Train the digits example on one rank, and compare planned with measured seconds."""
    _train("planned", 1, device, "direct", iterations)
    rows = _rows("planned")[iterations // 3 :]
    ratios = [row["measured_s"] / row["planned_s"] for row in rows if row["planned_s"]]
    print(f"measured over planned: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


def overhead(device: str) -> None:
    """The section of the benchmarks of this name, where it is no GPU with little work."""
    from benchmarks import gpu

    print(gpu.run() if device == "cuda" else gpu.measure(gpu.Size(64, 32, 2, 2, 2), "cpu"))


def library_model(device: str, iterations: int) -> None:
    """Make the example's folder of a Qwen2.5-VL, and train it on one rank."""
    # Packages of the examples' extras, of which a bare machine may lack some.
    sys.path.insert(0, str(ROOT / "examples" / "hf_vlm"))
    import make  # type: ignore[import-not-found]

    make.main(1, 400, 20)
    text = (ROOT / "examples" / "hf_vlm" / "train.toml").read_text().replace("../../runs", str(Path("runs").absolute()))
    text = text.replace("ranks = 4", "ranks = 1").replace("iterations = 200", f"iterations = {iterations}")
    print(_fit("hf_vlm", f'{text}\n[runtime]\ndevice = "{device}"\n'))


def cores(num_batches: int, repeats: int, microbatches: int) -> None:
    """Pipelines of processes with a core each, also where there are GPUs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    schedules(num_batches, repeats, microbatches)


def schedules(num_batches: int, repeats: int, microbatches: int) -> None:
    """Pipelines of processes, with a GPU each where there are two."""
    from benchmarks import real

    real.FIGURE = Path("real-computation.svg").absolute()
    print(real.run(num_batches, repeats, microbatches))


def _train(name: str, ranks: int, device: str, transport: str, iterations: int) -> list[float]:
    text = f"""
name = "{name}"
task = "{_TASK}"
iterations = {iterations}
[data]
documents_per_batch = 24
[layout]
ranks = {ranks}
[packing]
token_budget = 200
[planner]
budget_s = 0.05
[runtime]
device = "{device}"
transport = "{transport}"
"""
    print(_fit(name, text))
    return [row["loss"] for row in _rows(name)]


def _fit(name: str, text: str) -> str:
    from pipeloom.training import TrainingRun

    write_text(Path(f"{name}.toml"), text)
    found = TrainingRun.from_toml(f"{name}.toml").train(resume=False if "[checkpoint]" in text else None)
    assert found is not None
    numbers = f"mean {found.mean_measured_s * 1e3:.2f} ms, planned {found.mean_planned_s * 1e3:.2f} ms"
    return f"{name}: {found.iterations} iterations, {found.plans_fresh} fresh plans, {numbers}"


def _rows(name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path("runs", name, "history.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------ the list


def main(arguments: list[str] | None = None) -> int:
    """Run the parts, write what they gave after each, and return how many failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_gpu", description=__doc__)
    parser.add_argument("--part", choices=list(PARTS), help="only this one")
    parser.add_argument("--dry", action="store_true", help="rehearse on the CPU, with little of everything")
    parser.add_argument("--resume", action="store_true", help="leave out parts that FOLDER has, done")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=PART_S, help="after which a part is ended")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    results = {"machine": _machine(), "date": str(date.today()), "dry": given.dry, "parts": {}}
    bodies = [f"# On {json.dumps(results['machine'])}, {results['date']}{', a rehearsal' if given.dry else ''}"]
    if given.resume and (given.out / "results.json").exists():
        results = json.loads((given.out / "results.json").read_text())
        bodies = [(given.out / "results.md").read_text().strip()]
    done = {name for name, part in results["parts"].items() if part["exit"] == 0}
    num_gpus = sys.maxsize if given.dry else results["machine"].get("gpus", 1)
    failed = 0
    for name, part in PARTS.items():
        if given.part not in (None, name) or name in done:
            continue
        if num_gpus < part.num_gpus:
            print(f"{name}: needs {part.num_gpus} GPUs, here is {num_gpus}", flush=True)
            continue
        print(f"{name}: {part.question}", flush=True)
        begin = time.monotonic()
        code, printed = _run(part.dry if given.dry else part.commands, given.out, begin + given.seconds)
        seconds = time.monotonic() - begin
        failed += code != 0
        results["parts"][name] = {"exit": code, "seconds": round(seconds, 1)}
        how = "done" if code == 0 else f"FAILED, exit {code}"
        print(f"{printed}\n{name}: {how} after {seconds:.0f} s", flush=True)
        bodies.append(f"## {name}: {part.question}\n\n{how}, {seconds:.0f} s\n\n```\n{printed.strip()}\n```")
        write_text(given.out / "results.md", "\n\n".join(bodies) + "\n")
        write_text(given.out / "results.json", json.dumps(results, indent=1) + "\n")
    return failed


def _run(commands: tuple[tuple[str, ...], ...], folder: Path, until: float) -> tuple[int, str]:
    """Run commands in a folder of their own until one fails; the exit code (-9: ended), and what they printed."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    paths = [str(ROOT / "src"), str(ROOT / "lab" / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    printed = ""
    for command in commands:
        # Tests are found from the root; whatever else is written is written beside the results.
        where = ROOT if "pytest" in command else work
        with subprocess.Popen(
            [sys.executable, *command],
            cwd=where,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as started:
            try:
                text, _ = started.communicate(timeout=max(1.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)
                text, _ = started.communicate()
        printed += text
        for name in KEPT:
            if (work / name).exists():
                (work / name).replace(folder / name)
        if started.returncode:
            return started.returncode, printed
    return 0, printed


def _machine() -> dict[str, object]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"gpu": gpu, "gpus": torch.cuda.device_count(), "cores": len(os.sched_getaffinity(0)), **versions}


if __name__ == "__main__":
    sys.exit(main())
