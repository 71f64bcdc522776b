"""The tutorial runs as it stands."""

from __future__ import annotations

import re
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
    exec(code.replace("Deadline(1.0)", "Deadline(0.2)"), names)
    planned, systems = names["planned"], names["systems"]
    assert planned.lower_bound.ns <= planned.timeline.makespan_ns
    assert [system.name for system in systems] == ["1f1b", "interleaved", "per-batch plan"]
    said = capsys.readouterr().out
    assert f"{len(planned.packing.microbatches)} microbatches" in said
    page = (tmp_path / "first.html").read_text()
    assert page.index("gain over") < page.index("layers on each rank")
