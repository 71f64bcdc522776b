"""The tutorial runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"


@pytest.mark.full
def test_the_tutorial_runs_to_its_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    names: dict[str, Any] = {}
    exec(code.replace("Budget(seconds=1.0)", "Budget(seconds=0.2)"), names)
    planned, systems = names["planned"], names["systems"]
    assert planned.lower_bound.ns <= planned.timeline.makespan_ns
    assert [system.name for system in systems] == ["1f1b", "interleaved", "per-batch plan"]
    said = capsys.readouterr().out
    assert f"{len(planned.packing.microbatches)} microbatches" in said
    page = (tmp_path / "first.html").read_text()
    assert page.index("gain over") < page.index("layers on each rank")


@pytest.mark.full
@pytest.mark.ranks
def test_the_last_step_runs_as_a_file_of_its_own(tmp_path: Path) -> None:
    """Below the code of the first three steps, as the page says."""
    first, _, rest = PAGE.read_text().partition("\n## 4.")
    code = re.findall(r"```python\n(.*?)```", first, re.DOTALL) + re.findall(r"```py\n(.*?)```", rest, re.DOTALL)
    (tmp_path / "own.py").write_text("".join(code))
    done = subprocess.run([sys.executable, "own.py"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"loss (\S+) to (\S+); the run is in (\S+)\n", done.stdout)
    assert found is not None
    assert float(found[2]) < float(found[1])
    assert (tmp_path / found[3] / "summary.json").is_file()
