"""Read a run of Megatron from its arguments: model, parallelism, batch, and the current setup of the pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from pipeloom.errors import InputError, check_count, visible_line
from pipeloom.integrations.megatron.arguments import Arguments
from pipeloom.integrations.megatron.effects import check_rejected, notes_of
from pipeloom.integrations.megatron.files import read_arguments
from pipeloom.integrations.megatron.model import GptModel, gpt_model
from pipeloom.integrations.megatron.setup import (
    GROUP,
    PIPELINE_ARGUMENTS,
    PipelineSettings,
    Rules,
    read_recompute,
    read_rules,
    read_stages,
)
from pipeloom.integrations.megatron.trainer import RunPrecision, read_precision, read_trainer
from pipeloom.limits import MAX_MICROBATCHES
from pipeloom.search import check_group_size, group_sizes
from pipeloom.spec import Workload
from pipeloom.spec.architecture import (
    MOST_SIZE,
    Architecture,
    Layer,
    MLPMixer,
    ModuleArchitecture,
    PredictionLayer,
    layer_mixers,
)
from pipeloom.spec.parallelism import Degrees, StateBytes
from pipeloom.spec.trainer import FUSED, TrainerSpec

_HALF = ("bf16", "fp16", "fp8-format", "fp4-format", "params-dtype")
_BYTES = {
    **dict.fromkeys(("fp32", "float32", "float"), 4),
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "half"), 2),
    **dict.fromkeys(("fp8", "uint8"), 1),
}
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOMENTS = {"sgd": 1, "lion": 1, "muon": 1, "dist_muon": 1, "adaptive_muon": 1}
"""Moments per parameter of optimizers that do not have two, as Adam does. Muon's are those of linear layers."""


@dataclass(frozen=True)
class MegatronRun:
    """A run of Megatron, read from its arguments.

    Attributes
    ----------
    micro_batch_size, global_batch_size : int
        Sequences of a microbatch, and of an iteration on all replicas.
    seq_length : int
        Tokens of every sequence.
    dropout : bool
        Whether layers drop out the outputs of attention and perceptron.
    now : PipelineSettings
        The current setup of the pipeline.
    precision : RunPrecision
        Precision of matrix products.
    recomputable : tuple of str
        Modules that selective recomputation supports here.
    rules : Rules
        Setups that other arguments exclude.
    replaced : tuple of str
        Arguments of the current setup.
    encoder_lengths : tuple of int
        Sequences of each sample that the encoder of the model reads: tokens of its text, or patches of each image.
    adapter_rank : int
        Rank of the low-rank adapters (LoRA) of all linear layers, whose own weights are frozen. 0: all are trained.
    trainer : TrainerSpec
        Megatron of the zoo, with what the arguments of this run switch on and off.
    section : str
        Section of a recipe of Megatron Bridge that has the fields of the pipeline; empty: the source is no recipe.
    read, ignored, notes : tuple of str
        Arguments that were read; those without effect here; and what is emulated only approximately.
    other_counts : tuple of int
        Other numbers of microbatches of one replica, in the ramp-up of the batch and in evaluation. Groups of
        microbatches must suit them too.
    lengths : tuple of int
        Lengths of the sequences that are packed into a microbatch; empty: ``micro_batch_size`` of ``seq_length``.
    """

    source: str
    model: GptModel
    degrees: Degrees
    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    now: PipelineSettings
    precision: RunPrecision = field(default_factory=RunPrecision)
    dropout: bool = False
    recomputable: tuple[str, ...] = ()
    rules: Rules = field(default_factory=Rules)
    replaced: tuple[str, ...] = ()
    encoder_lengths: tuple[int, ...] = ()
    adapter_rank: int = 0
    trainer: TrainerSpec = FUSED
    section: str = ""
    read: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    other_counts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of one replica in an iteration."""
        return self.global_batch_size // (self.micro_batch_size * self.degrees.data)

    @property
    def workload(self) -> Workload:
        """Workload of one microbatch."""
        return Workload(self.lengths or (self.seq_length,) * self.micro_batch_size)

    @property
    def encoder_workload(self) -> Workload:
        """Workload of the encoder for one microbatch."""
        return Workload(self.encoder_lengths * self.micro_batch_size)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, without multi-token prediction."""
        return len(self.model.blocks)

    def with_options(self, trainer: TrainerSpec) -> TrainerSpec:
        """Return a trainer with the run's dropout and precision."""
        precision = self.precision
        return msgspec.structs.replace(
            trainer, dropout=self.dropout, precision=precision.products, quantized_weights=precision.quantized_weights
        )

    @property
    def architecture(self) -> Architecture:
        """The model for the emulator and other commands; all prediction layers are one layer."""
        embedding, head = self.model.embedding, self.model.head
        layers: list[Layer] = [embedding, *(block.whole for block in self.model.blocks)]
        if self.model.predictors:
            mixers, depth = layer_mixers(self.model.predictors[0].whole), len(self.model.predictors)
            layers.append(PredictionLayer(head.hidden, head.vocabulary, mixers, depth, head.norm))
        towers = () if self.model.towers is None else self.model.towers.modules[:-1]
        module = ModuleArchitecture("lm", "sequence", (*layers, head), tuple(each.name for each in towers))
        return Architecture(visible_line(Path(self.source).stem), "Megatron's arguments", (*towers, module))


def read_megatron(
    source: str | Path | Sequence[str],
    *,
    num_devices: int | None = None,
    default_devices: int | None = None,
    one_rank: bool = False,
    model: GptModel | None = None,
) -> MegatronRun:
    """Read a run from Megatron's arguments.

    Parameters
    ----------
    source : str, Path or sequence of str
        A file: an argument list, a shell script that has one, Megatron-LM's YAML, or a saved recipe of Megatron
        Bridge; or the arguments themselves.
    num_devices : int or None
        Number of devices; None to read it from the source (``torchrun``'s ``--nproc_per_node`` and ``--nnodes``).
    default_devices : int or None
        Used if the number is unknown; None for as many as one replica and the experts need.
    one_rank : bool
        Whether a run without pipeline parallelism is read too.
    model : GptModel or None
        The model; None if the source has its sizes.

    Raises
    ------
    InputError
        An argument is unknown to Megatron, a size is missing, degrees contradict each other or the number of devices,
        or the layout is of another model.
    """
    check_rejected(arguments := read_arguments(source))
    degrees = _degrees(arguments, num_devices, default_devices, model)
    model = model or gpt_model(arguments, degrees.tensor)
    if degrees.pipeline < 2 and not one_rank:
        raise arguments.refuse("pipeline-model-parallel-size", "1 is not a pipeline", "use at least 2")
    micro = arguments.size("micro-batch-size")
    batch = arguments.size("global-batch-size", micro * degrees.data)
    if batch % (micro * degrees.data):
        raise arguments.refuse(
            "global-batch-size",
            f"{batch} is not a multiple of {micro} sequences a microbatch on {degrees.data} replicas",
            f"take a multiple of {micro * degrees.data}",
        )
    count = batch // (micro * degrees.data)
    if count > MAX_MICROBATCHES:
        problem = f"{count} microbatches of a replica are more than {MAX_MICROBATCHES}"
        raise arguments.refuse("global-batch-size", problem, "give fewer")
    length = arguments.size("seq-length")
    numbers = {"context-parallel-size": 2 * degrees.context, "tensor-model-parallel-size": degrees.tensor}
    for name, number in numbers.items():
        if (degrees.context > 1 or name != "context-parallel-size") and length % number:
            raise arguments.refuse("seq-length", f"{length} is not a multiple of {number}", f"as --{name} wants it")
    stages = read_stages(arguments, degrees.pipeline, len(model.blocks), len(model.predictors), model.pattern)
    size = arguments.size(GROUP, degrees.pipeline)
    now = PipelineSettings(stages, degrees.pipeline, size, read_recompute(arguments), pattern=model.pattern)
    rules = read_rules(arguments, degrees.pipeline)
    _check_schedule(arguments, now, rules, count)
    modules = tuple(name for name in _recomputable(arguments, model) if name not in rules.modules)
    others = _other_counts(arguments, degrees, micro, batch)
    notes = arguments.notes + _notes(arguments, model, now, count, others)
    return MegatronRun(
        arguments.source,
        model,
        degrees,
        micro,
        batch,
        length,
        now,
        read_precision(arguments, len(model.blocks)),
        _dropout(arguments),
        modules,
        rules,
        replaced=tuple(arguments.given[name].label for name in PIPELINE_ARGUMENTS if name in arguments.given),
        trainer=read_trainer(arguments, sequence_parallel=degrees.sequence_parallel),
        section=arguments.section,
        read=arguments.read,
        ignored=arguments.ignored,
        notes=notes,
        other_counts=tuple(sorted(others)),
    )


def _other_counts(arguments: Arguments, degrees: Degrees, micro: int, batch: int) -> dict[int, str]:
    """Return other numbers of microbatches of a replica, in ramp-up and evaluation, each with its argument."""
    together = micro * degrees.data
    ramp, schedule = "rampup-batch-size", "step-batch-size-schedule"
    batches: dict[int, str] = {}
    if arguments.on(ramp):
        words = arguments.words(ramp)
        if len(words) != 3:
            raise arguments.refuse(ramp, f"has {len(words)} values", "give the first batch, the increment and samples")
        start, increment = (_samples(arguments, ramp, word) for word in words[:2])
        # Smaller increments than one microbatch of all replicas have every number of microbatches.
        batches = dict.fromkeys(range(start, batch, max(increment, together)), ramp)
    if arguments.on(schedule):
        sizes = (word.rpartition(":")[2] for word in arguments.words(schedule))
        batches |= {_samples(arguments, schedule, size): schedule for size in sizes}
    found = {size // together: name for size, name in batches.items()}
    evaluation = {"eval-micro-batch-size": micro, "eval-global-batch-size": batch}
    one, whole = (arguments.size(name, default) for name, default in evaluation.items())
    data = degrees.data * degrees.context // arguments.size("eval-context-parallel-size", degrees.context)
    name = next((name for name in evaluation if name in arguments.given), "eval-context-parallel-size")
    found[whole // (one * max(1, data))] = name
    found.pop(batch // together, None)
    return found


def _samples(arguments: Arguments, name: str, word: str) -> int:
    """Read a number of samples, which may end in K, M, B or T."""
    factor = _SUFFIXES.get(word[-1:].upper(), 1)
    try:
        number = int(float(word if factor == 1 else word[:-1]) * factor)
    except (ValueError, OverflowError):
        raise arguments.refuse(name, f"{word!r} is not a number of samples") from None
    if not 1 <= number <= MOST_SIZE:
        raise arguments.refuse(name, f"{word} is not between 1 and {MOST_SIZE}")
    return number


def _dropout(arguments: Arguments) -> bool:
    text = arguments.text("hidden-dropout")
    try:
        return text is None or float(text) > 0  # the default is 0.1
    except ValueError:
        raise arguments.refuse("hidden-dropout", f"{text!r} is not a number") from None


def _recomputable(arguments: Arguments, model: GptModel) -> tuple[str, ...]:
    """Return the modules that Megatron can recompute separately; none without Transformer Engine.

    A dense perceptron with biases is none of them: the backward of Megatron's checkpoint does not terminate then.
    """
    if arguments.text("transformer-impl") == "local":
        return ()
    found = ["layernorm"] if any(block.routed or block.latent for block in model.blocks) else []
    biases = {mixer.bias for mixer in _perceptrons(model)}
    if biases and not any(biases):
        found.append("mlp")
    if any(block.routed for block in model.blocks):
        found += ["moe_act", "moe"] if arguments.flag("moe-grouped-gemm") else ["moe"]
    if any(block.latent for block in model.blocks):
        found.append("mla_up_proj")
    return tuple(found)


def _perceptrons(model: GptModel) -> tuple[MLPMixer, ...]:
    """Return the dense perceptrons of the decoder layers."""
    mixers = (mixer for block in model.blocks for mixer in layer_mixers(block.whole))
    return tuple(mixer for mixer in mixers if isinstance(mixer, MLPMixer))


def _launched(arguments: Arguments) -> int | None:
    """Return the number of processes that torchrun starts; None if it is not given or depends on the machines."""
    per_node, nodes = arguments.text("nproc-per-node"), arguments.text("nnodes") or ""
    if per_node is None or per_node.isalpha() or ":" in nodes:  # such as `gpu` and `1:4`
        return None
    return arguments.size("nproc-per-node") * arguments.size("nnodes", 1)


def _degrees(
    arguments: Arguments, num_devices: int | None, default_devices: int | None, model: GptModel | None
) -> Degrees:
    tensor = arguments.size("tensor-model-parallel-size", 1)
    pipeline = arguments.size("pipeline-model-parallel-size", 1)
    context = arguments.size("context-parallel-size", 1)
    expert = arguments.size("expert-model-parallel-size", 1)
    # By default Megatron divides experts like other layers.
    wide = arguments.size("expert-tensor-parallel-size", tensor)
    one = tensor * pipeline * context
    devices = _launched(arguments) if num_devices is None else num_devices
    devices = default_devices if devices is None else devices
    if devices is None:
        of_experts = expert * wide if expert > 1 else 1
        devices = one * (of_experts // math.gcd(of_experts, tensor * context))
    check_count("num_devices", devices)
    if devices % one:
        raise InputError(
            f"{arguments.source}: degrees",
            f"tensor {tensor} x pipeline {pipeline} x context {context} = {one} does not divide {devices} devices",
            "change a degree or the number of devices",
        )
    data = devices // one
    experts = arguments.count("num-experts", 0, least=0) if model is None else model.num_experts
    if expert > 1 and (not experts or experts % expert):
        raise arguments.refuse("expert-model-parallel-size", f"{expert} does not divide {experts} experts")
    problem = f"does not divide data {data} x context {context} x tensor {tensor}"
    remedy = "lower it, or use more devices"
    if (data * context * tensor) % expert:
        raise arguments.refuse("expert-model-parallel-size", f"{expert} {problem}", remedy)
    if expert > 1 and (data * context * tensor) % (expert * wide):
        raise arguments.refuse("expert-tensor-parallel-size", f"{wide} x expert {expert} {problem}", remedy)
    if expert == 1 and wide != tensor and experts:
        raise arguments.refuse(
            "expert-tensor-parallel-size",
            f"{wide} differs from tensor parallelism {tensor}, and expert parallelism is 1",
            "leave it out; only with expert parallelism may it differ",
        )
    sharded = [arguments.flag(f"use-{kind}distributed-optimizer") for kind in ("", "layer-wise-")]
    zero: Literal[0, 1] = 1 if any(sharded) or _optimizer(arguments).startswith("dist_") else 0
    return Degrees(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        expert=expert,
        expert_tensor=wide if expert > 1 else 1,
        sequence_parallel=arguments.flag("sequence-parallel"),
        zero=zero,
        state=_state(arguments),
    )


def _optimizer(arguments: Arguments) -> str:
    return (arguments.text("optimizer") or "adam").lower()


def _state(arguments: Arguments) -> StateBytes:
    """Read the bytes of a parameter's gradient and of its optimizer state.

    Raises `InputError` for an unknown data type, and for a precision-aware optimizer that Megatron does not accept.
    """
    main_gradient = _bytes(arguments, "main-grads-dtype")
    gradient = 4
    in_fp32, in_bf16 = (arguments.flag(name) for name in ("accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16"))
    if arguments.flag("bf16"):
        # Reduction in bfloat16 overrides accumulation in float32. Without both, the arguments reduce in float32;
        # Megatron Core's configuration, which a recipe is, does not.
        if in_bf16 or (arguments.is_recipe and not in_fp32):
            gradient = 2
        elif not in_fp32:
            gradient = main_gradient
    elif arguments.flag("fp16") and not in_fp32:
        gradient = 2
    name = _optimizer(arguments)
    if arguments.flag("use-precision-aware-optimizer"):
        if name != "adam" or not arguments.flag("use-distributed-optimizer"):
            raise arguments.refuse(
                "use-precision-aware-optimizer",
                "goes with --optimizer adam and --use-distributed-optimizer alone",
                "add these, or leave it out",
            )
        main, *moments = (
            _bytes(arguments, kind) for kind in ("main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype")
        )
        if main == 4 and arguments.flag("bf16") and arguments.text("fp8-recipe") in (None, "delayed"):
            # The optimizer keeps only the bits of the main weight that the bfloat16 weight lacks
            # (``store_param_remainders`` of Megatron Core's ``OptimizerConfig``).
            main = 2
        return StateBytes(gradient, main + sum(moments))
    number = _MOMENTS.get(name, 2)
    if name == "sgd" and arguments.text("sgd-momentum") in ("0", "0.0"):
        number = 0
    return StateBytes(gradient, 4 + 4 * number)


def _bytes(arguments: Arguments, name: str) -> int:
    text = arguments.text(name) or "fp32"
    number = _BYTES.get(text.removeprefix("torch."))
    if number is None:
        raise arguments.refuse(name, f"{text!r} is not one of fp32, bf16, fp16, fp8")
    return number


def _check_schedule(arguments: Arguments, now: PipelineSettings, rules: Rules, num_microbatches: int) -> None:
    """Reject setups that Megatron's schedules reject."""
    if now.virtual > 1:
        entity = f"{arguments.source}: {arguments.label(GROUP)}"
        remedy = "use a larger --global-batch-size"
        check_group_size(entity, now.group_size, now.num_ranks, num_microbatches, remedy)
        if rules.several_stages:
            problem = f"does not go with virtual stages on {now.num_ranks} ranks"
            raise arguments.refuse(rules.several_stages, problem, "leave one")
    elif rules.one_stage:
        raise arguments.refuse(rules.one_stage, "needs several virtual stages a rank", "leave it out, or add them")
    if now.recompute.granularity == "full" and rules.full:
        raise arguments.refuse(rules.full, "does not go with full recomputation", "leave one")
    for module in now.recompute.modules:
        # What a graph can recompute depends on its scope, so the current recomputation is assumed to work.
        if module in rules.modules and "graph" not in rules.modules[module]:
            raise arguments.refuse(rules.modules[module], f"does not go with recomputing {module}", "leave one")


def _notes(
    arguments: Arguments, model: GptModel, now: PipelineSettings, num_microbatches: int, others: Mapping[int, str]
) -> tuple[str, ...]:
    """Return what is emulated only approximately, and the numbers of microbatches that the current groups do not suit.

    ``others`` are those beside ``num_microbatches``, with the argument of each.
    """
    found = notes_of(arguments)
    method, number = arguments.text("recompute-method"), arguments.count("recompute-num-layers")
    if method == "uniform" and number is not None and number > 1:
        found.append(
            "full recomputation of several layers at once is emulated layer by layer; "
            "the emulated memory may be too high or too low"
        )
    if "mlp" in now.recompute.modules and any(mixer.bias for mixer in _perceptrons(model)):
        found.append(
            f"{arguments.label('recompute-modules')}: the backward of Megatron's checkpoint of an mlp with biases does "
            "not terminate; add --disable-bias-linear, or leave out mlp"
        )
    if "shared_experts" in arguments.words("recompute-modules"):
        found.append(
            "shared_experts are emulated without recomputation; the emulated time is too low and the memory too high"
        )
    if not any(arguments.values(name) is not None for name in _HALF) and "mixed_precision.*" not in arguments.given:
        found.append(
            "without --bf16 or --fp16 Megatron trains in float32, bfloat16 is emulated; "
            "the emulated time and memory are too low"
        )
    unsuited: dict[str, str] = {}
    for count, name in others.items():
        if now.virtual > 1 and now.group_size not in group_sizes(now.num_ranks, num_microbatches, count):
            problem = f"groups of {now.group_size} do not suit {count} microbatches on {now.num_ranks} ranks"
            unsuited.setdefault(name, f"{arguments.label(name)}: {problem}, and Megatron's schedule rejects them")
    return (*found, *unsuited.values())
