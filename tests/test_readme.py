"""What the README shows is what runs."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_fifteen_lines_are_the_example_and_run() -> None:
    example = (ROOT / "examples" / "by_hand.py").read_text()
    snippet = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert snippet in example
    done = subprocess.run([sys.executable, ROOT / "examples" / "by_hand.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
