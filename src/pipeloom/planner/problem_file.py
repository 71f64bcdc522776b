"""Files and messages that hold a planning problem, such as ``setup.json`` of a run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeloom.bounds import Magnitude, Seed, Threads, Wait
from pipeloom.cost import Profile
from pipeloom.errors import InputError, PlannerError, located
from pipeloom.io import read_spec, write_text
from pipeloom.limits import MAX_FEATURES, NUM_OWN_FEATURES
from pipeloom.packing import PackingSpec
from pipeloom.plan import BackendName
from pipeloom.planner.messages import decode, encode
from pipeloom.planner.problem import PlanningProblem
from pipeloom.search import SearchParams
from pipeloom.spec import Layout, ModelSpec, ModuleLayout, RankSpec, Strategy
from pipeloom.taskgraph.iteration import MemoryLimit
from pipeloom.tuning import TuningSpec

_SAME_FIELDS = (
    *("model", "layout", "packing", "budget_s", "seed", "method", "tuning", "backend", "split_backward", "search"),
    "threads",
)
"""Fields that the file shares with `PlanningProblem`."""


class ProblemFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields of the file and the message; see `PlanningProblem` and `ProfileCosts`."""

    model: ModelSpec
    layout: Layout
    profile: Profile
    packing: PackingSpec
    cluster: RankSpec = RankSpec()
    budget_s: Wait = 1.0
    seed: Seed = 0
    method: str = "default"
    strategies: tuple[Strategy, ...] = ("keep",)
    tuning: TuningSpec | None = None
    backend: BackendName = "gloo"
    split_backward: bool = False
    held_copies: dict[str, Magnitude] = {}
    search: SearchParams = SearchParams()
    threads: Threads = 1

    @classmethod
    def of(cls, problem: PlanningProblem) -> ProblemFile:
        """Return the fields of a problem.

        Raises
        ------
        InputError
            If the file has no fields for its costs or memory.
        """
        costs, memory = problem.profile_costs, problem.memory
        cluster = msgspec.structs.replace(
            costs.rank, memory_capacity_bytes=memory.capacity_bytes, host_capacity_bytes=memory.host_bytes
        )
        if costs.factors or costs.slowness:
            raise InputError("costs", "are corrected", "write the problem as it was before the correction")
        if memory != MemoryLimit.of(cluster):
            raise InputError("memory", "has a reserve other than the default", "use the default reserve")
        return cls(
            profile=costs.profile,
            cluster=cluster,
            strategies=costs.strategies,
            held_copies=costs.held_copies,
            **{name: getattr(problem, name) for name in _SAME_FIELDS},
        )

    def problem(self) -> PlanningProblem:
        """Return the problem.

        Raises
        ------
        InputError
            If the profile lacks a measurement, or settings contradict each other.
        """
        return PlanningProblem.from_profile(**{name: getattr(self, name) for name in self.__struct_fields__})


def encode_problem(problem: PlanningProblem) -> bytes:
    """Encode a problem for the planner's process.

    Raises
    ------
    InputError
        If its costs do not come from a profile, or are corrected.
    """
    return encode(ProblemFile.of(problem))


def decode_problem(data: bytes) -> PlanningProblem:
    """Decode and validate a problem.

    Raises
    ------
    PlannerError
        If the bytes are not a valid problem.
    """
    try:
        return decode(ProblemFile, data).problem()
    except InputError as error:
        raise PlannerError(f"problem of {len(data)} bytes is not valid: {error}") from error


def write_problem(path: Path, problem: PlanningProblem) -> None:
    """Write a problem to a JSON file.

    Raises
    ------
    InputError
        If its costs do not come from a profile, or are corrected.
    """
    document = msgspec.json.encode(ProblemFile.of(problem))
    write_text(path, msgspec.json.format(document, indent=1).decode() + "\n")


def read_problem(path: Path) -> PlanningProblem:
    """Read a problem from a file, JSON or TOML, and check it.

    Raises
    ------
    InputError
        If a field is invalid or its parts do not belong together. The message names the file and the field.
    """
    file = read_spec(path, ProblemFile)
    # First, because costs of a model that does not match its layout raise a less clear error.
    check_layout(file.model, file.layout, str(path))
    with located(str(path)):
        problem = file.problem()
    check_problem(problem, str(path), str(path))
    return problem


def check_problem(problem: PlanningProblem, layout_file: str, profile_file: str) -> None:
    """Check that the parts of a problem belong together.

    Raises
    ------
    InputError
        If the layout belongs to another model, or costs are impossible. The message names the file and the field.
    """
    check_layout(problem.model, problem.layout, layout_file)
    costs = problem.profile_costs
    modules = {module.name for module in problem.model.modules}
    hosts, ranks = len(costs.rank.hosts), problem.layout.num_ranks
    if hosts not in (0, ranks):
        text = f"has {hosts} entries, the layout {ranks} ranks"
        raise InputError("cluster.hosts", text, "give one for each rank, or leave it out")
    for rule in problem.search.rules:
        try:
            rule.check_layout(problem.layout)
        except InputError as error:
            raise InputError(f"{layout_file}: rule.{error.entity}", error.problem, error.remedy) from error
    for key, fit in costs.profile.layers.items():
        name = key.partition("/")[0]
        most = NUM_OWN_FEATURES + 2 * len(problem.model.sources(name)) if name in modules else MAX_FEATURES
        for field, coefficients in fit.of_bytes():
            if len(coefficients) > most:
                entity = f"{profile_file}: layers.{key}.{field}"
                text = f"has {len(coefficients)} entries, which is above the {most} features of {name!r}"
                raise InputError(entity, text, "give one per feature, with two for each module that feeds it")


def check_layout(model: ModelSpec, layout: Layout, layout_file: str) -> None:
    """Raise `InputError` if a layout belongs to another model. The message names the file and the field."""
    modules = {module.name: module for module in model.modules}
    laid = {module.name for module in layout.modules}
    for name in modules.keys() - laid:
        raise InputError(f"{layout_file}: modules", f"{name!r} of the model is not in the layout")
    num_laid = dict.fromkeys(laid, 0)
    for chunk in layout.chunks:
        num_laid[chunk.module] = max(num_laid[chunk.module], chunk.layers[1] + 1)
    for i, module in enumerate(layout.modules):
        where = f"{layout_file}: modules[{i}]"
        if module.name not in modules:
            raise InputError(f"{where}.name", f"{module.name!r} is not a module of the model")
        spec = modules[module.name]
        if set(module.after) != set(spec.after):
            raise InputError(f"{where}.after", f"is {list(module.after)}, but the model says {list(spec.after)}")
        ours = ModuleLayout.of(spec)
        for end in ("emits", "takes"):
            if set(getattr(module, end)) != set(getattr(ours, end)):
                raise InputError(f"{where}.{end}", "differs from the model", "make a layout of this model")
        num_layers = sum(layer.count for layer in spec.layers)
        if num_laid[module.name] != num_layers:
            text = f"chunks of {module.name!r} have {num_laid[module.name]} layers, the model {num_layers}"
            raise InputError(f"{layout_file}: chunks", text)
