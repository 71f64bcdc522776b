"""Every number that a file or an option may hold has a finite lower and upper bound."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import numpy as np
import pytest
from msgspec import inspect as types

import pipeloom
from pipeloom import bounds, limits
from pipeloom.cli.app import commands, run
from pipeloom.conversion import convert
from pipeloom.errors import InputError
from pipeloom.integrations.megatron.search import best_layout
from pipeloom.io.batches import PackedMicrobatch
from pipeloom.iteration import Draw, emulate
from pipeloom.layout.cooptimize import cooptimize
from pipeloom.packing import assign_to_replicas
from pipeloom.search.params import OrderParams
from pipeloom.spec import RankSpec, Sample
from pipeloom.spec.catalog import load_architecture, load_cluster
from pipeloom.spec.datasets import DatasetSpec, Spread, draw_samples, load_mixture
from pipeloom.spec.parallelism import Degrees
from pipeloom.totals import check_total, summable
from pipeloom.tuning import tune
from tests.fuzz.commands import EXTREMES, numeric_options

# What ranks of one job send each other, and what is only written.
_NOT_READ = {
    "pipeloom.cost.profile.LayerMeasurement",
    "pipeloom.cost.profile.StrategyMeasurement",
    "pipeloom.emulator.fit.Measurement",
    "pipeloom.integrations.steps.planning.Order",
    "pipeloom.integrations.steps.control.StepMessage",
    "pipeloom.integrations.steps.control.StepReport",
    "pipeloom.spec.batch.Workload",
}
NUMBERS = (0, -1, 1, 2**31, 2**31 + 1, 2**62, 2**63, -(2**63), 10**400, 1e300, -1e300, math.nan, math.inf, -math.inf)


COMMANDS = commands()


@cache
def structs() -> tuple[type, ...]:
    """Every struct of the package."""
    root = Path(pipeloom.__file__).parent
    for path in root.rglob("*.py"):
        if "Struct" in path.read_text():
            importlib.import_module(".".join(("pipeloom", *path.relative_to(root).with_suffix("").parts)))
    todo, found = [msgspec.Struct], {}
    while todo:
        for each in todo.pop().__subclasses__():
            todo.append(each)
            name = f"{each.__module__}.{each.__qualname__}"
            # The emulator's modules have the fields of what is read, and others.
            written = name in _NOT_READ or name.startswith("pipeloom.emulator.modules.")
            if name.startswith("pipeloom.") and not written:
                found[name] = each
    return tuple(found[name] for name in sorted(found))


def numbers_in(info: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Types of numbers inside of a type, with their paths."""
    if isinstance(info, types.IntType | types.FloatType):
        yield path, info
    for inner in (*getattr(info, "types", ()), *(getattr(info, "item_types", ()) or ())):
        yield from numbers_in(inner, path)
    for name in ("item_type", "value_type"):
        if (inner := getattr(info, name, None)) is not None:
            yield from numbers_in(inner, f"{path}[]")


def fields() -> list[tuple[str, Any]]:
    """Every field with a number, of every struct."""
    found = []
    for kind in structs():
        info = types.type_info(kind)
        assert isinstance(info, types.StructType)
        for field in info.fields:
            found += numbers_in(field.type, f"{kind.__module__}.{kind.__qualname__}.{field.name}")
    return found


def test_every_field_with_a_number_has_finite_bounds() -> None:
    found = fields()
    assert len(found) > 400
    for path, info in found:
        least = info.ge if info.ge is not None else info.gt
        most = info.le if info.le is not None else info.lt
        assert least is not None, f"{path} has no lower bound: take a type of pipeloom.bounds"
        assert most is not None, f"{path} has no upper bound: take a type of pipeloom.bounds"
        assert -math.inf < least <= most < math.inf, path


@pytest.mark.parametrize("name", [n for n, a in vars(bounds).items() if hasattr(a, "__metadata__")])
def test_a_number_is_accepted_inside_its_bounds_and_refused_with_path_and_bound_outside(name: str) -> None:
    kind = msgspec.defstruct("Holder", [("field_s", getattr(bounds, name))])
    info: Any = types.type_info(getattr(bounds, name))
    values: list[Any] = [[number] for number in NUMBERS] if "Coefficients" in name else list(NUMBERS)
    for value in values:
        held, said = _converted(value, kind)
        if said:
            assert said.startswith("file: field_s"), said
            assert "xpected" not in said, said
        else:
            assert all(map(math.isfinite, np.atleast_1d(held))), (name, value)
            if isinstance(info, types.IntType):
                assert info.ge <= held <= info.le


def _converted(value: Any, kind: Any) -> tuple[Any, str]:
    try:
        return convert({"field_s": value}, kind, "file").field_s, ""
    except InputError as error:
        return None, str(error)


@pytest.mark.parametrize("option", numeric_options(), ids=lambda o: f"{o.command} {o.name}")
def test_an_option_refuses_numbers_outside_its_bounds(
    option: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no option may be, and what is outside of what the option itself says; files are missing, so nothing runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPELOOM_TRACEBACK", "1")
    words = [option.command, *_needed(option.command, option.name)]
    for text in EXTREMES:
        inside = math.isfinite(float(text)) and _inside(option, text)
        if inside and option.command in ("bench", "warmup"):
            continue  # they need no file, and would run
        code = run([*words, option.name, text])
        said = capsys.readouterr().err
        assert code == 2, (text, said)
        assert inside or option.name.lstrip("-").replace("-", "_") in said.replace("-", "_"), (text, said)


def _inside(option: Any, text: str) -> bool:
    if option.whole and not text.lstrip("-").isdecimal():
        return False
    number = int(text) if option.whole else float(text)
    least = 0 if option.info.min is None else option.info.min
    most = (limits.MAX_SEED if option.whole else limits.MAX_WAIT_S) if option.info.max is None else option.info.max
    if option.name == "--threads":
        most = limits.MAX_THREADS
    return bool(least <= number <= most)


def _needed(command: str, given: str) -> list[str]:
    """Words that a command needs beside an option: names of files that are not there."""
    import inspect

    from typer.models import ArgumentInfo, OptionInfo

    function = getattr(importlib.import_module(COMMANDS[command].module), command)
    words = []
    for name, parameter in inspect.signature(function).parameters.items():
        info = parameter.default
        if isinstance(info, ArgumentInfo):
            words.append({"bench": "instances", "reproduce": "dip"}.get(command, "missing.json"))
        elif isinstance(info, OptionInfo) and info.default is ... and f"--{name}" != given:
            words += [f"--{name}", {"budget": "0", "device": "nothing"}.get(name, "missing/out.json")]
    return words


NOTHING: Any = None
ONE = pipeloom.Budget(evaluations=1)
SEEDED: dict[str, Callable[[Any], object]] = {
    "solve": lambda seed: pipeloom.solve(NOTHING, budget=ONE, seed=seed),
    "cooptimize": lambda seed: cooptimize(NOTHING, budget=ONE, seed=seed),
    "tune": lambda seed: tune(NOTHING, NOTHING, 1, seed=seed),
    "best_layout": lambda seed: best_layout(NOTHING, NOTHING, seed=seed),
    "assign_to_replicas": lambda seed: assign_to_replicas(NOTHING, 1, seed),
    "draw_samples": lambda seed: draw_samples("datamix2", 1, seed),
    "PackingSpec": lambda seed: pipeloom.PackingSpec(1, seed=seed),
    "PlanningProblem": lambda seed: pipeloom.PlanningProblem(NOTHING, NOTHING, NOTHING, NOTHING, seed=seed),
    "Batches": lambda seed: pipeloom.Batches(NOTHING, 1, seed=seed),
    "RunConfig": lambda seed: pipeloom.RunConfig(seed=seed),
}


@pytest.mark.parametrize("name", SEEDED)
def test_seeds_out_of_bounds_are_refused_by_name(name: str) -> None:
    for seed in (-3, 1.5, math.nan, "1", None):
        with pytest.raises(InputError, match=f"seed: {seed!r} is not an integer of at least 0"):
            SEEDED[name](seed)


def test_sums_beyond_64_bits_are_refused() -> None:
    assert summable("sizes", [2**61, 2**60]).tolist() == [2**61, 2**60]
    for values in ([2**61, 2**61], [2**63], [10**30], [1e300], [math.inf], [math.nan, 1.0], [2**62, -1]):
        with pytest.raises(InputError, match="sizes: sums to"):
            summable("sizes", values)
    for total in (2**62, 1e300, math.inf, math.nan):
        with pytest.raises(InputError, match="must stay below"):
            check_total("tasks", total, "ps")


@pytest.mark.parametrize("number", [0.0, 1e-5, 1e3, 1e5, 1e6, 1e8, 1e18, 1e300, math.inf, math.nan])
def test_a_slower_network_never_makes_an_emulated_iteration_faster(number: float) -> None:
    cluster, degrees = load_cluster("dip-h800-64"), Degrees(pipeline=2, tensor=2)
    base = emulate("vlm-s", cluster, degrees, batch=Draw(1)).iteration_s
    try:
        slow = msgspec.structs.replace(cluster, nic_latency_s=number)
        slow = msgspec.structs.replace(slow, device=msgspec.structs.replace(cluster.device, nvlink_latency_s=number))
        found = emulate("vlm-s", slow, degrees, batch=Draw(1)).iteration_s
    except (InputError, msgspec.ValidationError):
        assert not number <= 1e-5
        return
    assert math.isfinite(found)
    assert found >= base * (1 if number >= 1.5e-6 else 0.5)


def test_samples_that_are_made_in_python_are_bounded() -> None:
    for change in ({"text_tokens": 2**40}, {"image_tokens": (10**30,)}, {"video_seconds": (1e300,)}):
        with pytest.raises(InputError, match="is above"):
            Sample("a", **change)  # type: ignore[arg-type]


def test_a_mixture_of_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text('name = "m"\nsource = "s"\nfitted = true\nweights = {internvid = 0.0}\n')
    with pytest.raises(InputError, match="weights: sum to 0"):
        load_mixture(str(path))


def test_aliases_of_types_have_bounds_of_their_own_module() -> None:
    hints = get_type_hints(Sample, include_extras=True)
    assert hints["text_tokens"] == Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_COUNT)]
    assert load_architecture("vlm-s").name


@pytest.mark.parametrize(
    ("make", "entity"),
    [
        (lambda: RankSpec(link_bytes_per_s=None), "link_bytes_per_s"),  # type: ignore[arg-type]
        (lambda: Degrees(pipeline=None), "pipeline"),  # type: ignore[arg-type]
        (lambda: RankSpec(hosts=None), "hosts"),  # type: ignore[arg-type]
        (lambda: OrderParams(heat=None), "heat"),  # type: ignore[arg-type]
        (lambda: PackedMicrobatch(("a",), 1, image_tokens=-1), "image_tokens"),
        (lambda: DatasetSpec("d", "s", True, Spread(1, 1, 1), images_share=2.0), "images_share"),
    ],
)
def test_numbers_that_python_sets_are_checked(make: Callable[[], object], entity: str) -> None:
    with pytest.raises(InputError, match=entity):
        make()


def test_an_optional_number_may_be_none() -> None:
    assert RankSpec(memory_capacity_bytes=None).memory_capacity_bytes is None
