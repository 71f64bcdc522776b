"""Hosts that are network namespaces of this machine: own addresses, links with a limit, clocks that disagree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SUBNET = "10.87.0"
_CLOCK_STEP_S = 1000


@dataclass(frozen=True)
class Host:
    """One of them."""

    number: int
    name: str

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.number + 1}"

    def start(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a program in a session of its own, with what it prints in ``folder/host-N.txt``."""
        ahead = str(_CLOCK_STEP_S * (self.number + 1))
        clock = ["unshare", "--time", "--fork", "--kill-child", "--monotonic", ahead, "--boottime", ahead]
        with (folder / f"host-{self.number}.txt").open("a") as out:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *clock, *command],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                start_new_session=True,
                text=True,
            )

    def torchrun(self, num_hosts: str, per_host: int, *more: str, conf: str = "") -> list[str]:
        """The beginning of a command that starts this host's ranks; the first host has the meeting point."""
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", num_hosts),
            *("--nproc-per-node", str(per_host), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{SUBNET}.1:29471"),
            *("--rdzv-id", "pipeloom", "--rdzv-conf", f"is_host={self.number == 0},{conf}".lower().rstrip(",")),
            *("--local-addr", self.address, *more),
        ]


def why_not() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}"
    tried = subprocess.run(["ip", "netns", "add", "pl-try"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", "pl-try"], capture_output=True)
    return "" if tried.returncode == 0 else f"network namespaces: {tried.stderr.strip()}"


@contextmanager
def hosts(count: int, mbit_per_s: int = 1000) -> Iterator[list[Host]]:
    """Make hosts that are joined by a switch; what each sends is limited. They end with all that runs in them."""
    made = [Host(number, f"pl-{number}") for number in range(count)]
    _end(made)
    try:
        _ip("link add pl-switch type bridge")
        _ip("link set pl-switch up")
        for host in made:
            outer = f"pl-out-{host.number}"
            _ip(f"netns add {host.name}")
            _ip(f"link add {outer} type veth peer name eth0 netns {host.name}")
            _ip(f"link set {outer} master pl-switch up")
            _ip(f"-n {host.name} link set lo up")
            _ip(f"-n {host.name} addr add {host.address}/24 dev eth0")
            _ip(f"-n {host.name} link set eth0 up")
            limit = f"qdisc add dev eth0 root tbf rate {mbit_per_s}mbit burst 64kb latency 100ms"
            _run(["tc", "-n", host.name, *limit.split()])
        yield made
    finally:
        _end(made)


def stop(host: Host) -> None:
    """End everything that runs on a host at once; its kernel still says so."""
    found = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True).stdout.split()
    subprocess.run(["kill", "-KILL", *found], capture_output=True)


def cut(host: Host) -> None:
    """Take a host off the network: nobody says anything, and what runs there runs on."""
    _ip(f"link set pl-out-{host.number} down")


def join(host: Host) -> None:
    """Put it back."""
    _ip(f"link set pl-out-{host.number} up")


def runs_ranks(host: Host) -> bool:
    """Whether a rank or a planner runs there; torchrun itself is none."""
    found = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True).stdout.split()
    commands = []
    for pid in found:
        # One that has just ended has no command any more.
        with suppress(OSError):
            commands.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return any("-m pipeloom" in each and "--rdzv-backend" not in each for each in commands)


def _end(made: Sequence[Host]) -> None:
    for host in made:
        stop(host)
        subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)
        subprocess.run(["ip", "link", "delete", f"pl-out-{host.number}"], capture_output=True)
    subprocess.run(["ip", "link", "delete", "pl-switch"], capture_output=True)


def _ip(arguments: str) -> None:
    _run(["ip", *arguments.split()])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
