"""Messages between trainer and planner: validated MessagePack, never pickled."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pipeloom.bounds import Magnitude, Seed, Threads, Wait
from pipeloom.conversion import convert
from pipeloom.cost import Correction, Profile, ProfileCosts, check_strategies
from pipeloom.errors import InputError, PlannerError, check_not_negative, check_positive
from pipeloom.limits import MAX_FEATURES, NUM_OWN_FEATURES
from pipeloom.packing import PackingSpec
from pipeloom.plan import Answer, BackendName, packing_counts
from pipeloom.planner.planning import PlannedBatch
from pipeloom.planner.problem import Problem
from pipeloom.search import SearchParams
from pipeloom.spec import Batch, Layout, ModelSpec, ModuleLayout, RankSpec, Strategy
from pipeloom.taskgraph import FORWARD
from pipeloom.taskgraph.iteration import MemoryLimit
from pipeloom.tuning import TuningSpec


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The problem and the search settings, sent once."""

    model: ModelSpec
    layout: Layout
    profile: Profile
    packing: PackingSpec
    cluster: RankSpec = RankSpec()
    budget_s: Wait = 1.0
    seed: Seed = 0
    method: str = "default"
    strategies: tuple[Strategy, ...] = ("keep",)
    """Memory strategies from which the planner chooses for each pair; the first is the base."""
    tuning: TuningSpec | None = None
    """PipeTune's techniques, chosen one by one; see `pipeloom.tuning`."""
    backend: BackendName = "gloo"
    """Message backend for which plans are made and verified."""
    split_backward: bool = False
    """Whether the planner may split a microbatch's backwards into input and weight gradients."""
    held_copies: dict[str, Magnitude] = {}
    """By module/kind, how many copies of a layer's weights a process holds; see `ProfileCosts`."""

    search: SearchParams = SearchParams()
    """Parameters of the search for orders."""
    threads: Threads = 1
    """Search threads; 0: half of the cores."""

    def __post_init__(self) -> None:
        """Raise `InputError` for budgets, strategies or threads out of range, and contradictory tuning choices."""
        check_positive("planner.budget_s", self.budget_s)
        check_strategies("planner.strategies", self.strategies)
        check_not_negative("planner.threads", self.threads)
        if self.tuning is not None:
            self.tuning.check_choices(self.strategies, self.split_backward)

    @property
    def costs(self) -> ProfileCosts:
        """Measured costs of the layers."""
        return ProfileCosts(
            self.model,
            self.profile,
            self.cluster,
            self.strategies,
            split_backward=self.split_backward,
            held_copies=self.held_copies,
        )

    def problem(self) -> Problem:
        """Return the planning problem."""
        capacity = self.cluster.memory_capacity_bytes
        return Problem(
            self.model,
            self.layout,
            self.costs,
            self.packing,
            capacity,
            self.tuning,
            backend=self.backend,
            search=self.search,
            threads=self.threads,
            memory_model=MemoryLimit(host_bytes=self.cluster.host_capacity_bytes),
        )


def check_setup(setup: Setup, layout_file: str, profile_file: str) -> None:
    """Check that the parts of a setup belong together.

    Raises
    ------
    InputError
        If the layout belongs to another model, or costs are impossible. The message names the file and the field.
    """
    modules = {module.name: module for module in setup.model.modules}
    laid = {module.name for module in setup.layout.modules}
    for name in modules.keys() - laid:
        raise InputError(f"{layout_file}: modules", f"{name!r} of the model is not in the layout")
    hosts, ranks = len(setup.cluster.hosts), setup.layout.num_ranks
    if hosts not in (0, ranks):
        problem = f"has {hosts} entries, the layout {ranks} ranks"
        raise InputError("cluster.hosts", problem, "give one for each rank, or leave it out")
    num_laid = dict.fromkeys(laid, 0)
    for i, chunk in enumerate(setup.layout.chunks):
        num_laid[chunk.module] = max(num_laid[chunk.module], chunk.layers[1] + 1)
        if chunk.layers[0] < 0:
            raise InputError(f"{layout_file}: chunks[{i}].layers", f"{list(chunk.layers)} begins below 0")
    for i, module in enumerate(setup.layout.modules):
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
            problem = f"chunks of {module.name!r} have {num_laid[module.name]} layers, the model {num_layers}"
            raise InputError(f"{layout_file}: chunks", problem)
    for rule in setup.search.rules:
        try:
            rule.check_layout(setup.layout)
        except InputError as error:
            raise InputError(f"{layout_file}: rule.{error.entity}", error.problem, error.remedy) from error
    for key, fit in setup.profile.layers.items():
        name = key.partition("/")[0]
        most = NUM_OWN_FEATURES + 2 * len(setup.model.sources(name)) if name in modules else MAX_FEATURES
        for field, coefficients in fit.of_bytes():
            if len(coefficients) > most:
                entity = f"{profile_file}: layers.{key}.{field}"
                problem = f"has {len(coefficients)} entries, which is above the {most} features of {name!r}"
                raise InputError(entity, problem, "give one per feature, with two for each module that feeds it")


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metadata of a coming batch, and the correction of predicted times by measured ones."""

    batch: Batch
    correction: Correction = Correction()
    ahead: Batch | None = None
    """The global batch after this one. It is assigned to replicas before this one is planned."""
    replicas: tuple[Correction, ...] = ()
    """Correction of each replica for the assignment of ``ahead``, without links."""


def answer_of(
    planned: PlannedBatch, *, search_s: float, ready_ns: int, replica_of_sample: tuple[int, ...] = ()
) -> Answer:
    """Reduce a planned batch to the answer that is sent."""
    graph, timeline = planned.resolved.graph, planned.resolved.timeline(planned.timeline)
    duration = timeline.end_ns - timeline.start_ns
    order = [int(task) for tasks in planned.resolved.schedule(planned.schedule).order for task in tasks]
    return Answer(
        plan=planned.plan,
        packing=packing_counts(planned.packing),
        planned_ns=timeline.makespan_ns,
        lower_bound_ns=planned.lower_bound.ns,
        lower_bound=planned.lower_bound.name,
        bubble_share=1.0 - int(duration.sum()) / max(timeline.makespan_ns * graph.num_ranks, 1),
        planned_module_ns={
            name: (
                int(duration[(graph.module == m) & (graph.kind == FORWARD)].sum()),
                int(duration[(graph.module == m) & (graph.kind != FORWARD)].sum()),
            )
            for m, name in enumerate(graph.module_names)
        },
        planned_start_ns=tuple((int(timeline.start_ns[task]), int(timeline.end_ns[task])) for task in order),
        search_s=search_s,
        evaluations=planned.evaluations,
        method=planned.schedule.method,
        ready_ns=ready_ns,
        peak_bytes=planned.peak_bytes,
        replica_of_sample=replica_of_sample,
    )


Message = TypeVar("Message", Setup, Request, Answer)


def encode(message: Setup | Request | Answer) -> bytes:
    """Encode a message for the store."""
    return msgspec.msgpack.encode(message)


def decode(kind: type[Message], data: bytes) -> Message:
    """Decode and validate a message.

    Raises
    ------
    PlannerError
        If the bytes are not a valid message of that kind.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = " ".join(str(_explain(kind, data) or error).split())
        raise PlannerError(f"{kind.__name__} message of {len(data)} bytes is not valid: {reason}") from error


def _explain(kind: type[Message], data: bytes) -> InputError | None:
    """Return the error in a decodable message, with path, value and bound."""
    try:
        convert(msgspec.msgpack.decode(data), kind, kind.__name__)
    except InputError as error:
        return error
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return None
