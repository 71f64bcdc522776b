"""Every line that the page of error messages quotes for a wrong input is the line that is printed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeloom.cli.app import run
from tests.cli.test_lock import CONFIG, TASK, held
from tests.integrations.published import PUBLISHED
from tests.io.documents import TINY, TINY_SCHEDULE
from tests.io.test_formats_doc import FORMATS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
ROWS = dict(re.findall(r"^\| (.+?) \| `(.+)` \|$", PAGE.partition("\n## Wrong input")[2].partition("\n## ")[0], re.M))

Case = Callable[[], str]
CASES: dict[str, Case] = {}


def case(label: str) -> Callable[[Case], Case]:
    """A row of the page, and what makes its files and names its command."""

    def keep(make: Case) -> Case:
        CASES[label] = make
        return make

    return keep


def write(name: str, content: Any) -> str:
    """A file in the folder of the test: a document, text or bytes."""
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def checked(**change: Any) -> str:
    """The small instance with other fields, and its schedule."""
    return f"check {write('i.json', TINY | change)} {write('s.json', TINY_SCHEDULE)}"


def solved(**change: Any) -> str:
    return f"solve {write('i.json', TINY | change)} --budget 0.01 --out out.json"


def cooptimized(**change: Any) -> str:
    layers = write("m.layers.json", json.loads(FORMATS["pipeloom.layers/1"]) | change)
    return f"arrange {layers} --budget 0.01 --out o.json"


def packed(samples: str) -> str:
    return f"pack {write('samples.jsonl', samples)} --tokens 9 --out o.json"


def trained(old: str = "", new: str = "", more: str = "") -> str:
    assert old in CONFIG
    write("task.py", TASK)
    return f"train {write('train.toml', CONFIG.replace(old, new) + more)}"


def emulated(**change: Any) -> str:
    write("config.json", PUBLISHED["Qwen2.5-VL-3B"][0] | change)
    return "emulate config.json --cluster 8xH100"


case("a missing file")(lambda: "verify batch.plan")
case("a name of more than 255 characters")(lambda: "report " + "x" * 300)
case("a file that is not JSON")(lambda: f"check {write('i.json', '{')} i.json")
case("JSON nested a hundred thousand times")(lambda: f"check {write('i.json', '[' * 100_000)} i.json")
case("a file that is not UTF-8")(lambda: f"emulate {write('m.toml', 'name = 1 # é'.encode('latin-1'))}")
case("a number of 5,000 digits")(lambda: f"emulate {write('m.toml', 'a = ' + '9' * 5000)}")
case("a document of another format")(lambda: f"check {write('s.json', TINY_SCHEDULE)} s.json")
case("a misspelled field")(lambda: checked(tasks=TINY["tasks"] | {"durations_s": [1.0]}))
case("a negative time")(lambda: checked(tasks=TINY["tasks"] | {"duration_s": [1.0, -0.2, 2.0, 2.0]}))
case("durations whose sum exceeds 146 years")(
    lambda: checked(tasks=TINY["tasks"] | {"duration_s": [4e9, 4e9, 2.0, 2.0]})
)
case("delays whose sum exceeds 146 years")(lambda: checked(edges=TINY["edges"] | {"delay_s": [4e9, 4e9, 4e9]}))
case("two million ranks")(lambda: cooptimized(num_ranks=2_000_000))
case("a pair that exceeds its rank's memory")(lambda: solved(memory_capacity_bytes=[49, 100]))
case("an order with a deadlock")(
    lambda: f"simulate {write('i.json', TINY)} {write('s.json', TINY_SCHEDULE | {'order': [[3, 0], [1, 2]]})}"
)
case("a budget that is not a number")(lambda: f"solve {write('i.json', TINY)} --budget nan --out out.json")
case("a layer that takes 1e300 s")(
    lambda: cooptimized(layers=[json.loads(FORMATS["pipeloom.layers/1"])["layers"][0] | {"forward_s": 1e300}])
)
case("a model of 27 million layers")(lambda: emulated(num_hidden_layers=27_000_000))
case("a list where a table belongs")(lambda: emulated(vision_config=[]))
case("an unknown model name")(lambda: "emulate gtp-175b")
case("a negative sample length")(lambda: packed('{"id": "a", "text_tokens": -5}'))
case("a duplicate sample id")(lambda: packed('{"id": "a", "text_tokens": 5}\n' * 2))
case("a sample above the token budget")(lambda: packed('{"id": "a", "text_tokens": 50}'))
case("an output in a missing folder")(
    lambda: f"simulate {write('i.json', TINY)} {write('s.json', TINY_SCHEDULE)} --html no/page.html"
)
case("`seed = -1`")(lambda: trained("iterations = 1", "iterations = 1\nseed = -1"))
case("`timeout_s = 1e300`")(lambda: trained("iterations = 1", "iterations = 1\ntimeout_s = 1e300"))
case("`token_budget = 1e23`")(lambda: trained("token_budget = 6", f"token_budget = {10**23}"))
case("a run's name of 300 characters")(lambda: trained('"t"', json.dumps("n" * 300)))
case("a run's name that is a path")(lambda: trained('name = "t"', 'name = "../t"'))
case("a name with a null character")(lambda: trained('"task.py"', '"t\\u0000.py"'))
case("a missing task file")(lambda: trained('"task.py"', '"tusk.py"'))


@case("a checkpoint path that is a file")
def _() -> str:
    write("saved", "")
    return trained(more='path = "saved"')


@pytest.mark.parametrize("label", CASES)
def test_a_line_of_the_page_is_what_is_printed(
    label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = run(CASES[label]().split())
    said = capsys.readouterr().err
    assert code == 2, said
    assert said.count("\n") == 1
    quoted = ".+".join(map(re.escape, ROWS[label].split(" ... ")))
    assert re.fullmatch(f"pipeloom: {quoted}\n", said.replace(f"{tmp_path}/", "")), said


def test_a_run_that_goes_on_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/t").mkdir(parents=True)
    with held(Path("runs/t")) as pid:
        assert run(trained().split()) == 2
    said = capsys.readouterr().err.replace(f"{tmp_path}/", "").replace(str(pid), "4711")
    assert said == f"pipeloom: {ROWS['a second run in the folder of a running one']}\n"


def test_a_package_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert run(["pack", write("samples.parquet", b"PAR1"), "--tokens", "9", "--out", "o.json"]) == 2
    assert capsys.readouterr().err == f"pipeloom: {ROWS['Parquet, without pyarrow']}\n"


def test_no_line_of_the_page_is_without_a_test() -> None:
    others = {"a second run in the folder of a running one", "Parquet, without pyarrow"}
    assert ROWS.keys() == CASES.keys() | others
