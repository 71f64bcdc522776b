"""What a small file holds stays small: it is bounded when it is expanded, not only when it is read."""

from __future__ import annotations

import base64
import json
import math
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import pipeloom
from pipeloom.cli.app import run
from pipeloom.conversion import convert
from pipeloom.cost import Profile
from pipeloom.errors import InputError
from pipeloom.explain.traces.read import read_run
from pipeloom.explain.traces.timers import explain_timers
from pipeloom.integrations.megatron.files import read_yaml
from pipeloom.io import samples, write_text
from pipeloom.io.megatron_log import read_megatron_log
from pipeloom.planner import check_problem
from pipeloom.search import Budget
from pipeloom.spec import Layout, RankSpec
from pipeloom.spec.catalog import load_cluster
from pipeloom.spec.datasets import load_mixture
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.training.config import RunConfig
from tests.explain.traces.test_megatron_log import log
from tests.planner.cases import random_problem, with_costs


def _doubling(levels: int, form: str) -> str:
    lines = ["a0: &a0 [x, x, x, x]" if form == "list" else "a0: &a0 {x: 1}"]
    for i in range(levels):
        twice = f"*a{i}, *a{i}, *a{i}, *a{i}"
        lines.append(f"a{i + 1}: &a{i + 1} [{twice}]" if form == "list" else f"a{i + 1}: &a{i + 1}\n  <<: [{twice}]")
    return "\n".join(lines)


def test_aliases_of_yaml_are_counted_as_often_as_they_stand() -> None:
    assert read_yaml("f", "a: &a [1, 2]\nb: *a\nc: {<<: &m {x: 1}, y: *a}") == {
        "a": [1, 2],
        "b": [1, 2],
        "c": {"x": 1, "y": [1, 2]},
    }
    with pytest.raises(InputError, match="aliases stand for more than 100000 entries"):
        read_yaml("f", _doubling(40, "list"))
    for text in ("a: &a [*a]", "a: &a {b: *a}"):
        with pytest.raises(InputError, match="alias inside of what it stands for"):
            read_yaml("f", text)
    with pytest.raises(InputError, match="characters are more than"):
        read_yaml("f", "a: " + "x" * 5_000_000)


@pytest.mark.parametrize("column", ["runs", "names"])
def test_parquet_of_equal_values_is_refused_before_they_are_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    monkeypatch.setattr(samples, "MAX_VALUES", 100_000)
    if column == "runs":
        values = pyarrow.ListArray.from_arrays([0, 400_000], pyarrow.array(np.ones(400_000, np.uint8)))
        table = pyarrow.table({"id": ["a"], "image_tokens": values})
    else:
        long = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 9_000), pyarrow.array(["x" * 100_000]))
        table = pyarrow.table({"text_tokens": range(9_000), "id": long})
    parquet.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 300_000
    with pytest.raises(InputError, match=r"values, more than|is also in row 1"):
        pipeloom.load(path)


def test_parquet_rows_come_in_order_whatever_their_batches(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"id": str(i), "text_tokens": i, "image_tokens": [i + 1] * (i % 3)} for i in range(25_000)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7_000)
    found: Any = pipeloom.load(tmp_path / "a.parquet")
    assert [(s.id, s.text_tokens, s.image_tokens) for s in found] == [
        (row["id"], row["text_tokens"], tuple(row["image_tokens"])) for row in rows
    ]


def test_text_with_names_that_are_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    with pytest.raises(InputError, match=r"a.html: cannot be written: .*near <title>x\\udcff</title>; rename"):
        write_text(path, "<title>x\udcff</title>")
    assert not path.exists()


def test_timers_beyond_any_run_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for old, new, said in (
        (
            "forward-compute:\n",
            "forward-compute:\n     rank  0: " + "9" * 400 + "\n",
            "forward-compute: inf ms is above",
        ),
        ("forward-compute:\n", "forward-compute:\n     rank  999999999: 1.00\n", "rank: 999999999 is not below"),
    ):
        assert old in log()
        path.write_text(log().replace(old, new))
        with pytest.raises(InputError, match=said):
            read_megatron_log(path)
    path.write_text(log())
    timers = read_megatron_log(path, num_microbatches=10**9)
    with pytest.raises(InputError, match="tasks are more than"):
        explain_timers(timers, "a", budget=Budget(evaluations=1))


@pytest.mark.parametrize("number", ["1e306", "1.8e18", "-1e306", "1e400"])
@pytest.mark.parametrize("field", ["ts", "dur"])
def test_times_of_traces_beyond_the_clock_are_refused(tmp_path: Path, field: str, number: str) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "a", "ts": 0, "dur": 1}
    text = json.dumps({"traceEvents": [event | {field: "NUMBER"}]}).replace('"NUMBER"', number)
    (tmp_path / "rank0.json").write_text(text)
    with pytest.raises(InputError, match=r"rank0\.json"):
        read_run([tmp_path / "rank0.json"])


def test_coefficients_of_more_features_than_a_workload_has_are_refused() -> None:
    fit = {"forward_s": [0.0] * 4, "backward_s": [0.0] * 4, "activation_bytes": [0.0] * 4}
    for field, values in (("forward_s", [0.0] * 5), ("backward_s", []), ("activation_bytes", [0.0] * 257)):
        with pytest.raises(InputError, match=rf"layers\.lm/block\.{field}: has {len(values)} entries"):
            convert({"machine": "a", "layers": {"lm/block": fit | {field: values}}}, Profile, "p.json")


def test_coefficients_of_modules_that_feed_none_are_refused() -> None:
    problem = random_problem(1)
    known = problem.profile_costs.profile
    for key, fit in known.layers.items():
        feeding = len(problem.model.sources(key.partition("/")[0]))
        wrong = msgspec.structs.replace(fit, activation_bytes=(0.0,) * (5 + 2 * feeding))
        profile = msgspec.structs.replace(known, layers={**known.layers, key: wrong})
        with pytest.raises(InputError, match=f"layers.{key}.activation_bytes: has {5 + 2 * feeding} entries"):
            check_problem(with_costs(problem, profile=profile), "layout", "profile")


def test_a_module_that_is_fed_by_another_twice_is_refused() -> None:
    modules = [{"name": "vision"}, {"name": "lm", "after": ["vision", "vision"]}]
    chunks = [{"module": name, "layers": [0, 0], "rank": 0} for name in ("vision", "lm")]
    with pytest.raises(InputError, match=r"modules\[1\]\.after: names 'vision' twice"):
        convert({"num_ranks": 1, "modules": modules, "chunks": chunks}, Layout, "l.json")


def test_hosts_of_other_ranks_and_links_of_other_hosts_are_refused() -> None:
    base: dict[str, Any] = {
        "name": "a",
        "task": "task.py",
        "iterations": 1,
        "layout": {"ranks": 2},
        "packing": {"token_budget": 10},
    }
    link = {"hosts": [0, 2], "bytes_per_s": 1.0, "latency_s": 0.0}
    convert(base | {"cluster": {"hosts": [0, 1]}}, RunConfig, "t")
    with pytest.raises(InputError, match=r"cluster.hosts: has 3 entries, but layout.ranks is 2"):
        convert(base | {"cluster": {"hosts": [0, 1, 1]}}, RunConfig, "t")
    with pytest.raises(InputError, match=r"cluster.links\[0\].hosts: \[0, 2\], but the ranks are on hosts \[0, 1\]"):
        convert(base | {"cluster": {"hosts": [0, 1], "links": [link]}}, RunConfig, "t")
    problem = random_problem(1)
    hosts = (0,) * (problem.layout.num_ranks + 1)
    with pytest.raises(InputError, match=r"cluster\.hosts: has"):
        check_problem(with_costs(problem, rank=RankSpec(hosts=hosts)), "layout", "profile")


def test_shares_of_data_sets_are_shares(tmp_path: Path) -> None:
    head = 'name = "d"\nsource = "s"\nfitted = true\ntext_tokens = {median = 2, mean = 2}\n'
    videos = "video_seconds = {median = 2, mean = 2}\n"
    path = tmp_path / "d.toml"
    for more, said in (
        (videos + "frames = [[64, 64, -0.3]]", r"frames\[0\]\[2\]: -0.3 is negative"),
        (videos + "frames = [[64, 64, inf]]", r"frames\[0\]\[2\]: inf is not finite"),
        (videos + "frames = [[64, 64, 0.0]]", "shares that sum to 0"),
        ("images_share = nan", "images_share: nan is not finite"),
        ("image_tokens = -1", "image_tokens: -1 is below 1"),
    ):
        path.write_text(head + more)
        with pytest.raises(InputError, match=said):
            load_mixture(str(path))


def test_counts_that_would_take_minutes_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = {"name": "l", "forward_s": 1.0, "backward_s": 1.0, "activation_bytes": 1, "parameter_bytes": 1}
    table = {"format": "pipeloom.layers/1", "name": "a", "num_ranks": 2, "boundary_s": 0.0, "boundary_bytes": 0}
    path = tmp_path / "layers.json"
    monkeypatch.chdir(tmp_path)
    for count in (4_000_000, 100_000):
        path.write_text(json.dumps(table | {"num_microbatches": count, "layers": [layer] * 6}))
        begin = time.process_time()
        assert run(["arrange", str(path), "--budget", "0.05", "--out", "o.json"]) == 2
        assert "num_microbatches" in capsys.readouterr().err
        assert time.process_time() - begin < 60


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host_cores", 0),
        ("nic_latency_s", 1e6),
        ("nic_latency_s", math.inf),
        ("nic_bytes_per_s", 0.0),
        ("num_nodes", 0),
    ],
)
def test_clusters_that_cannot_be_are_refused_by_field(field: str, value: float) -> None:
    cluster = msgspec.to_builtins(load_cluster("dip-h800-64"))
    with pytest.raises(InputError, match=f"c.toml: {field}: "):
        convert(cluster | {field: value}, ClusterSpec, "c.toml")


def test_parquet_with_damaged_metadata_of_a_column_is_refused(tmp_path: Path) -> None:
    """Where pyarrow itself is asked for such metadata, it ends the process."""
    path = tmp_path / "samples.parquet"
    path.write_bytes(zlib.decompress(base64.b85decode(_DAMAGED)))
    with pytest.raises(InputError, match="is not a readable Parquet file"):
        samples.read_samples(path)


_DAMAGED = """
c-oa#&u<z>6rLT{YwVDgSeezX#DRmea#SZ^67r)Wss?P<PDzSa3dCHZ1vY@Z{3xu!LODe}=2-RIL;sAPs-7yJs+_7Gs{RpGkDWKO%VNMvJ+j{J
y!XEEd+*JxaG6?rL?*Y1R$>pdh0x}<gb=d9)CnS6MBQbPI8lg_c!YMOx+dATZn5Y_5;H4HQUtSvB-sua;<+^>*1G>(<k6x*M2iNwD%x4${gjgI
=WT>aEWXQB0;P=^XOOGnofTfL6wiTD1V_Mrj#dc9{q*fC1-EC^@j1a|@702Fa=Sz@7mOxE^1ojNLg5U9NcaXq%icL58F8Tqk}!gn2re-LLeR)(
WGm!{<I@C&rRslXk*16qZKrFK7$UJdSi_y>9aMruBD3uc&pG$rc>PnSH$qvg#X4QP<@gTPj#A38)U2$@ZfE2XEKuu?>vWx-2Z);jF|a+R^M4>n
yE*POo&KAV)9Ck_t09~75Q1UnI=z<H9=Sim;mCSIcMX&vF+GcvxDI_0tjg*;^*hPP8PWM`ukVVn!MNh=kz;U0H(*EzIAot=ei)qWLQ+3U#)V{j
kgj+AmlW@=(0g)e*u3?iWu~sEe@N=zlJR52_zPd}lUP<aWULo4TB_jk;aye2`!(Yi`FbD8r%TujO1N|x7E6%T-z4>S$@r)kKV9?lSyck!C1Ae<
?4NsZwYXkctr*`&jepkft~x_LW%Y-sDjQMt*C^5xT8vuOH`Oo2XQo}OrC^=Y0;TkriuE<66Pj<)BBd=_XmMXYPw5MIVTniF5kA>EfyhH(u<3#C
E`U>jICXxK8mCe`X3ao8p07hNb+d9-dtmh&ll&><cgv4csR>X_UP1i%j88y0h^Aqiv8$F_-+MZ(RbP(lU26&vj(;-!f*H0u*ca6Sp(vDw^$nV4
#bYlf^v(J={a}HXXZROI?l}(e$1}c{VC?E%yOycEZJ5RMNv7>KASCb;7&WiEy|RDKXTN4Wi1zw^KBc_#d@I23=Xt_ui09A-n0+v&>z!1a?&}BE
*v?eWcnv<@EvNi>9&r*goF|>}nQppPP4oRU$fvw>dcJ^vzJM=4?9g(ZL+fqRd^)UEvs0MoKEE#we$m7#29>|^=Y0tGj+4!Xa!?fK)mk{OBYs{r
QSX7T{|sr#fj#{8%<=9u27`O{aM+(D$Ifun>GzVENB7hB_jH&2m@NFEcM3vf_Fu|>ejb53
""".replace("\n", "")
