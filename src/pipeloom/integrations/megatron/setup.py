"""Settings of a pipeline in Megatron: stages, virtual stages, groups of microbatches, recomputation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from pipeloom.errors import InputError
from pipeloom.integrations.megatron.arguments import Arguments
from pipeloom.integrations.megatron.model import OLD_PATTERN, PATTERN, HybridPattern
from pipeloom.integrations.megatron.trainer import GRAPHS, SCOPES, WHOLE_ITERATION
from pipeloom.io.stage_names import megatron_stages, megatron_text

Granularity = Literal["full", "selective"]
Method = Literal["uniform", "block"]
PipelineSchedule = Literal["1f1b", "zb-1p", "zb-2p", "zb-v", "v-half", "v-min"]
"""Order of a rank's tasks: 1F1B, interleaved if a rank has several stages; or a schedule that splits backwards.
``zb-1p`` and ``zb-2p`` hold p or 2 p microbatches on each of p ranks (Qi et al., arXiv 2401.10241). The others
have two stages a rank, in a V, and hold p microbatches, a half or a third of them (Qi et al., arXiv 2405.15362)."""
VocabularySplit = Literal["ends", "one barrier", "two barriers", "interlaced"]
"""Embedding and loss on the first stage and the last, or divided over all ranks (Yeung et al. 2024, arXiv 2411.05288).
Ranks then wait for each other in each microbatch, once or twice. To hide this, 1F1B runs one or two more microbatches
ahead, and ``interlaced`` half as many again."""
V_SHAPED: frozenset[PipelineSchedule] = frozenset(("zb-v", "v-half", "v-min"))
IN_FLIGHT: Mapping[PipelineSchedule, float] = {"zb-1p": 1, "zb-2p": 2, "zb-v": 1, "v-half": 1 / 2, "v-min": 1 / 3}
"""Microbatches on a rank under a schedule that splits backwards, for each rank."""
SELECTIVE_OPERATORS = "selective_op"
"""A module that stands for torch's selective checkpointing by operator, which Megatron does not have."""
MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""Modules that selective recomputation supports."""

LAYOUT, GROUP = "pipeline-model-parallel-layout", "microbatch-group-size-per-virtual-pipeline-stage"
EACH, VIRTUAL = "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"
FIRST, LAST = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
ENDS = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
PIPELINE_ARGUMENTS = (
    *(LAYOUT, GROUP, EACH, VIRTUAL, FIRST, LAST, *ENDS, "recompute-activations", "moe-layer-recompute"),
    *(PATTERN, OLD_PATTERN),
    *("recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-modules"),
    # Megatron accepts this one with full recomputation alone, and no setup that is found needs it.
    "distribute-saved-activations",
)
"""Arguments that describe `PipelineSettings`."""
ORDER_BOUND: Mapping[str, str] = {
    "overlap_moe_expert_parallel_comm": "switch it off",
    "defer_embedding_wgrad_compute": "switch it off",
    "fine_grained_activation_offloading": "switch it off",
    "cuda_graph_impl": "set it to 'none'",
    "moe_paged_stash": "switch it off",
    "moe_enable_routing_replay": "switch it off",
}
"""Fields of Megatron Core's configuration whose buffers pair passes by their order, and what to do about
them in planned steps. Arguments have the same names, with dashes."""
INSIDE_EXPERTS = frozenset(("expert_fc1", "moe_act", "fused_group_mlp"))
"""Modules whose activations cannot be offloaded if ``moe`` is recomputed."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """Megatron's recomputation, the same on all ranks.

    Attributes
    ----------
    granularity : "full", "selective" or None
        None: nothing is recomputed.
    method : "uniform", "block" or None
        With ``full``, recompute all layers, or the first ``num_layers`` of every virtual stage.
    modules : tuple of str
        Modules that ``selective`` recomputes.
    """

    granularity: Granularity | None = None
    method: Method | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the recomputation, one a line; empty if nothing is recomputed."""
        if self.granularity is None:
            return ()
        if self.granularity == "selective":
            return ("--recompute-granularity selective", f"--recompute-modules {' '.join(self.modules)}")
        method, number = f"--recompute-method {self.method}", f"--recompute-num-layers {self.num_layers}"
        return ("--recompute-granularity full", method, number)

    def recomputed(self, num_layers: int) -> int:
        """Return the number of a virtual stage's layers that are fully recomputed, from the first."""
        if self.granularity != "full":
            return 0
        return num_layers if self.method == "uniform" else min(num_layers, self.num_layers or 0)

    def __str__(self) -> str:
        """Describe it in words."""
        if self.granularity is None:
            return "nothing"
        if self.granularity == "selective":
            return " and ".join(self.modules)
        return "every layer" if self.method == "uniform" else f"{self.num_layers} layers a virtual stage"


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """Stages of a pipeline, and how they run.

    Attributes
    ----------
    stages : tuple of str
        Letters of every virtual stage, in model order: ``E`` embedding, ``t`` layer, ``m`` multi-token prediction,
        ``L`` loss.
    group_size : int
        Microbatches that a virtual stage runs in turn; by default the number of ranks.
    vocabulary : VocabularySplit
        Where embedding and loss are. If they are divided over all ranks, the letters ``E`` and ``L`` stand for nothing.
    pattern : HybridPattern or None
        Kinds of the layers of a hybrid model, which Megatron takes in place of a layout.
    """

    stages: tuple[str, ...]
    num_ranks: int
    group_size: int
    recompute: Recompute = Recompute()
    schedule: PipelineSchedule = "1f1b"
    vocabulary: VocabularySplit = "ends"
    pattern: HybridPattern | None = None

    @property
    def splits_backward(self) -> bool:
        """Whether input and weight gradients are separate tasks."""
        return self.schedule != "1f1b"

    @property
    def spreads_vocabulary(self) -> bool:
        """Whether embedding and loss are divided over all ranks."""
        return self.vocabulary != "ends"

    def extra_microbatches(self, rank: int) -> int:
        """Return the microbatches that a rank holds beyond those of 1F1B, because the vocabulary is spread."""
        if self.vocabulary == "interlaced":
            return (self.num_ranks - rank + 1) // 2
        return {"one barrier": 1, "two barriers": 2}.get(self.vocabulary, 0)

    @property
    def in_flight(self) -> int:
        """Maximum number of microbatches on a rank, if backwards are split."""
        share = IN_FLIGHT[self.schedule]
        # Fewer than p microbatches leave one to be replaced while another ends.
        return math.ceil(self.num_ranks * share) + (share < 1)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of every stage: in turn, or in a V."""
        p, count = self.num_ranks, len(self.stages)
        if self.schedule in V_SHAPED:
            return tuple(i if i < p else 2 * p - 1 - i for i in range(count))
        return tuple(i % p for i in range(count))

    @property
    def virtual(self) -> int:
        """Number of virtual stages per rank."""
        return len(self.stages) // self.num_ranks

    @property
    def recomputed(self) -> tuple[int, int]:
        """Number of layers that are recomputed whole, and of modules that each layer recomputes."""
        sizes = (stage.count("t") + stage.count("m") for stage in self.stages)
        return sum(map(self.recompute.recomputed, sizes)), len(self.recompute.modules)

    @property
    def layout(self) -> str:
        """Layout in Megatron's notation, or the pattern of a hybrid model."""
        if self.pattern is not None:
            return self.pattern.divided([stage.count("t") for stage in self.stages])
        return megatron_text(self.stages)

    @property
    def fewest_layers(self) -> int:
        """Fewest layers of a stage with embedding or loss. Other stages have at least one."""
        return 0 if self.pattern is None else 1

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the settings, one a line."""
        lines = [f"--{LAYOUT if self.pattern is None else PATTERN} '{self.layout}'"]
        if self.virtual > 1:
            lines.append(f"--{GROUP} {self.group_size}")
        return (*lines, *self.recompute.arguments)

    def fields(self, section: str) -> tuple[str, ...]:
        """Return the fields of the settings in a recipe, in YAML, one a line; fields that do not apply are null.

        They are in ``section``, but the pattern of a hybrid model is always in ``model``.
        """
        again = self.recompute
        named = f"{section}.pipeline_model_parallel_layout" if self.pattern is None else "model.hybrid_layer_pattern"
        values = {
            "virtual_pipeline_model_parallel_size": self.virtual if self.virtual > 1 else None,
            "microbatch_group_size_per_vp_stage": self.group_size if self.virtual > 1 else None,
            "recompute_granularity": again.granularity,
            "recompute_method": again.method,
            "recompute_num_layers": again.num_layers,
            "recompute_modules": f"[{', '.join(again.modules)}]" if again.modules else None,
        }
        lines = (f"{section}.{name}: {'null' if value is None else value}" for name, value in values.items())
        return (f"{named}: '{self.layout}'", *lines)


@dataclass(frozen=True, slots=True)
class Rules:
    """The arguments that exclude settings; empty where no argument does.

    They exclude one virtual stage per rank, or several; full recomputation; plans for every step; and selective
    recomputation of a module, by module.
    """

    one_stage: str = ""
    several_stages: str = ""
    full: str = ""
    plans: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)


def read_rules(arguments: Arguments, num_ranks: int) -> Rules:
    """Read the arguments that limit virtual stages and recomputation."""

    def first(*names: str) -> str:
        # Reading all of them marks all as known.
        return next(iter([name for name in names if arguments.on(name)]), "")

    def above(name: str, most: int) -> str:
        return name if arguments.on(name) and arguments.size(name) > most else ""

    # Of a reduction of gradients in two steps, planned steps would repeat the first.
    two_steps = above("num-distributed-optimizer-instances", 1) if arguments.on("overlap-grad-reduce") else ""
    # Ranks with other microbatches gather shards of weights together, in Megatron's order.
    tensor = arguments.size("tensor-model-parallel-size", 1)
    of_experts = arguments.size("expert-tensor-parallel-size", tensor)
    sharded = above("tensor-parallel-num-weight-shards", tensor)
    sharded = above("expert-tensor-parallel-num-weight-shards", of_experts) or sharded
    modules: dict[str, str] = {}
    if arguments.on("fp8-format") and (arguments.text("fp8-recipe") or "delayed") == "delayed":
        modules |= dict.fromkeys(("layernorm", "moe_act"), "fp8-format")
    if arguments.on("moe-shared-expert-overlap"):
        modules["shared_experts"] = "moe-shared-expert-overlap"
    offloads = arguments.on("fine-grained-activation-offloading")
    if offloads and INSIDE_EXPERTS & set(arguments.words("offload-modules")):
        modules["moe"] = "offload-modules"
    overlapped = first("overlap-moe-expert-parallel-comm")
    if overlapped:
        modules["moe"] = overlapped
    graphs = first(*GRAPHS)
    if graphs:
        # Which modules a graph can recompute depends on its scope.
        modules |= dict.fromkeys(set(MODULES) - set(modules), graphs)
    # One graph of an iteration has full recomputation inside, graphs of layers do not.
    is_whole = any(WHOLE_ITERATION in arguments.words(name) for name in (GRAPHS[0], *SCOPES))
    return Rules(
        one_stage=first("overlap-param-gather-with-optimizer-step", "overlap-p2p-communication-warmup-flush")
        or (overlapped if num_ranks > 1 else ""),
        several_stages=(first("no-overlap-p2p-communication") if num_ranks == 2 else "")
        # Megatron Bridge does not build hybrid models with virtual stages.
        or (first(PATTERN, OLD_PATTERN) if arguments.is_recipe else ""),
        # The stack of a hybrid model recomputes no whole layers.
        full=overlapped or ("" if is_whole else graphs) or first(PATTERN, OLD_PATTERN),
        plans=graphs or first(*(name.replace("_", "-") for name in ORDER_BOUND)) or two_steps or sharded,
        modules=modules,
    )


def read_recompute(arguments: Arguments) -> Recompute:
    """Read the current recomputation; raises `InputError` for settings that contradict each other."""
    granularity = arguments.text("recompute-granularity")
    flags = [name for name in ("recompute-activations", "moe-layer-recompute") if arguments.flag(name)]
    if flags:
        if granularity == "full":
            raise arguments.refuse(flags[0], "contradicts --recompute-granularity full", "leave one")
        granularity = "selective"
    if "moe-layer-recompute" in flags:
        return Recompute("selective", modules=tuple(dict.fromkeys((*_modules(arguments, ("core_attn",)), "moe"))))
    method, number = arguments.text("recompute-method"), arguments.count("recompute-num-layers")
    if granularity is None:
        if method is not None:
            raise arguments.refuse("recompute-method", "has no granularity", "add --recompute-granularity full")
        return Recompute()
    if granularity == "selective":
        if method is not None:
            raise arguments.refuse("recompute-method", "contradicts selective recomputation", "leave one")
        return Recompute("selective", modules=_modules(arguments, ("core_attn",)))
    if granularity != "full":
        raise arguments.refuse("recompute-granularity", f"{granularity!r} is neither full nor selective")
    if method not in get_args(Method):
        raise arguments.refuse("recompute-method", f"{method or 'nothing'} is neither uniform nor block")
    if number is None:
        raise arguments.refuse("recompute-num-layers", "is missing", "full recomputation needs it")
    return Recompute("full", "uniform" if method == "uniform" else "block", number)


def _modules(arguments: Arguments, default: tuple[str, ...]) -> tuple[str, ...]:
    values = arguments.words("recompute-modules")
    for value in values:
        if value not in MODULES:
            raise arguments.refuse("recompute-modules", f"{value!r} is not one of {', '.join(MODULES)}")
    return values or default


def read_stages(
    arguments: Arguments, num_ranks: int, num_layers: int, predictors: int, pattern: HybridPattern | None = None
) -> tuple[str, ...]:
    """Read the current stages of a run, from its layout or pattern, or from its numbers of layers.

    Raises `InputError` if the layout is of another model, or a number of layers is not divisible.
    """
    text = arguments.text(LAYOUT)
    each, virtual, first, last = (arguments.count(name) for name in (EACH, VIRTUAL, FIRST, LAST))
    ends = [arguments.flag(name) for name in ENDS]
    if pattern is not None:
        given = {LAYOUT: text, EACH: each}
        if len(pattern.stages) > 1:
            given |= {FIRST: first, LAST: last} | dict(zip(ENDS, [end or None for end in ends], strict=True))
            if len(pattern.stages) % num_ranks:
                problem = f"has {len(pattern.stages)} stages, which is not a multiple of {num_ranks} ranks"
                raise arguments.refuse(pattern.argument, problem, "change the | between them")
        if virtual not in (None, max(1, len(pattern.stages) // num_ranks)):
            given[VIRTUAL] = virtual
        for name, value in given.items():
            if value is not None:
                raise arguments.refuse(name, f"contradicts --{pattern.argument}", "separate the stages there, by |")
        if len(pattern.stages) > 1:
            return _lettered([len(stage) for stage in pattern.stages], predictors)
    elif text is not None:
        stages = _stages_of(arguments, text, num_ranks, num_layers, predictors)
        # The number of virtual stages may be given beside a layout that has the same.
        agrees = {VIRTUAL: virtual in (None, len(stages) // num_ranks), EACH: each is None}
        agrees |= {FIRST: first is None, LAST: last is None} | {n: not e for n, e in zip(ENDS, ends, strict=True)}
        for name, good in agrees.items():
            if not good:
                raise arguments.refuse(name, f"contradicts --{LAYOUT}", "leave one")
        return stages
    if each is not None and virtual is not None:
        raise arguments.refuse(EACH, f"contradicts --{VIRTUAL}", "leave one")
    counts = _counts(arguments, num_ranks, num_layers + sum(ends), (first, last))
    if each is not None:
        if counts[0] % each:
            raise arguments.refuse(EACH, f"{each} does not divide the {counts[0]} layers of a rank")
        virtual = counts[0] // each
    virtual = virtual or 1
    for count in counts:
        if count % virtual:
            raise arguments.refuse(VIRTUAL, f"{virtual} does not divide the {count} layers of a rank")
    sizes = [count // virtual for _ in range(virtual) for count in counts]
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    if min(sizes) < 0:
        raise arguments.refuse("num-layers", f"{num_layers} are too few for {len(sizes)} stages", "use fewer stages")
    return _lettered(sizes, predictors)


def _lettered(sizes: Sequence[int], predictors: int) -> tuple[str, ...]:
    """Return stages of these numbers of layers, with the embedding, the predictions and the loss."""
    letters = ["t" * size for size in sizes]
    letters[0] = "E" + letters[0]
    letters[-1] += "m" * predictors + "L"  # of one stage, both ends
    return tuple(letters)


def _counts(arguments: Arguments, num_ranks: int, num_layers: int, given: tuple[int | None, int | None]) -> list[int]:
    """Return the number of layers of every rank, with embedding and loss if they count."""
    first, last = given
    middle = num_ranks - (first is not None) - (last is not None)
    left = num_layers - (first or 0) - (last or 0)
    if left < 0 or (middle <= 0 and left) or (middle > 0 and left % middle):
        raise arguments.refuse(
            "num-layers",
            f"{left} layers cannot be divided evenly over {max(0, middle)} ranks",
            f"change the pipeline's size, or give a --{LAYOUT}",
        )
    each = left // middle if middle > 0 else 0
    counts = [each] * num_ranks
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts


def _stages_of(arguments: Arguments, text: str, num_ranks: int, num_layers: int, predictors: int) -> tuple[str, ...]:
    name = LAYOUT
    try:
        stages = megatron_stages(text)
    except InputError as error:
        raise arguments.refuse(name, error.problem, error.remedy) from None
    if len(stages) % num_ranks:
        raise arguments.refuse(name, f"has {len(stages)} stages, which is not a multiple of {num_ranks} ranks")
    letters = "".join(stages)
    if letters.count("t") != num_layers:
        raise arguments.refuse(name, f"has {letters.count('t')} layers, --num-layers says {num_layers}")
    if letters != "E" + "t" * num_layers + "m" * predictors + "L":
        raise arguments.refuse(
            name,
            f"{text!r} is not the model in its order",
            f"write one E first, then {num_layers} t, {predictors} m, and one L last",
        )
    if sum("m" in stage for stage in stages) > 1:
        raise arguments.refuse(name, "has its multi-token prediction in several stages", "put all m into one stage")
    if any("m" in stage for stage in stages[:-num_ranks]):
        raise arguments.refuse(
            name,
            "has its multi-token prediction before a rank's last stage",
            f"put it into the last {num_ranks} stages",
        )
    return stages
