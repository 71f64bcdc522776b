"""The state of the process's generator, asked for by several threads."""

from __future__ import annotations

import subprocess
import sys

# Finalisers of cycles let other threads run, wherever the collector finds them.
THREADS = """
import faulthandler, gc, sys, threading
import torch
from pipeloom.runtime.model.random_state import RandomState

faulthandler.dump_traceback_later(60, exit=True)
gc.set_threshold(50)
sys.setswitchinterval(1e-6)

class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        sum(range(300))

def ask():
    for _ in range(1500):
        Cycle()
        states.append(RandomState.now(torch.device("cpu")))
        del states[:-10]

states = []
threads = [threading.Thread(target=ask) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_ask_for_the_state_never_wait_for_one_another_for_ever() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
