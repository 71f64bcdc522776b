"""Express published runs as runs that the emulator can time.

`express` reads what a source states; `complete` (`unstated`) has filled in the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import msgspec

from pipeloom.integrations.megatron import MegatronRun, PipelineSettings, Recompute, read_megatron
from pipeloom.integrations.megatron.setup import SELECTIVE_OPERATORS, V_SHAPED, PipelineSchedule, VocabularySplit
from pipeloom.integrations.megatron.timing import Timing
from pipeloom.spec.architecture import has_scan
from pipeloom.spec.catalog import load_cluster, load_trainer
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.precision import Precision
from pipeloom.spec.trainer import Overlap, TrainerSpec
from pipeloom.taskgraph import NS_PER_S
from pipeloom.validation.named import named_model
from pipeloom.validation.reasons import NotExpressible
from pipeloom.validation.recipes import is_tuned, named_dispatcher, recipe_of
from pipeloom.validation.runs import PublishedRun, published_sources
from pipeloom.validation.sizes import described

DEVICES = {
    "A100-80": "a100",
    "A100-40": "a100-40gb",
    "A800": "a800",
    "H100": "h100",
    "H100-500W": "h100-500w",
    "H800": "h800",
    "H200": "h200",
    "H20": "h20",
    "GH200": "gh200",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "L40S": "l40s",
}
"""Devices of the zoo by their name in tables of runs."""
_NVLINK_DOMAIN = frozenset(("GB200", "GB300"))
ONE_LAYER = "one layer"
_SCHEDULES: dict[str, PipelineSchedule] = {
    **dict.fromkeys(("", "1f1b", "interleaved", "fsdp", "zero", ONE_LAYER), "1f1b"),
    **dict.fromkeys(("zb-1p", "zb-h1"), "zb-1p"),
    **dict.fromkeys(("zb-2p", "zb-h2"), "zb-2p"),
    **dict.fromkeys(("zb-v", "v-zb"), "zb-v"),
    "v-half": "v-half",
    "v-min": "v-min",
}
"""Schedules by their name in tables of runs, in lower case."""
_LATENT = {"q": "q-lora-rank", "kv": "kv-lora-rank", "nope": "qk-head-dim", "rope": "qk-pos-emb-head-dim"}
_LATENT |= {"v": "v-head-dim"}
_DEEPSEEK_V3 = "q1536,kv512,nope128,rope64,v128"
_EAGER_SOURCES = frozenset(("llm-foundry", "torchtitan", "nemo-automodel", "nanotron", "stas-llama8b"))
"""Sources whose runs used eager PyTorch."""
_NEWER_FLASH = frozenset(("stas-llama8b",))
"""Sources whose runs used FlashAttention 3 on Hopper and 4 on Blackwell, though not all rows say so."""
_PRECISIONS: dict[str, Precision] = {
    **dict.fromkeys(("", "bf16", "fp16", "bfloat16", "float16"), "bf16"),
    **dict.fromkeys(("fp8-ds", "fp8-delayed"), "fp8_delayed"),
    # Alone, it is FP8 with one scale a tensor: delayed or current scaling, whose costs differ little.
    **dict.fromkeys(("fp8", "fp8-cs"), "fp8_current"),
    **dict.fromkeys(("fp8-sc", "fp8-block", "fp8-blockwise"), "fp8_block"),
    **dict.fromkeys(("mxfp8", "fp8-mx"), "mxfp8"),
    "nvfp4": "nvfp4",
}
"""Precisions by their name in tables of runs. Megatron Bridge writes cs for current scaling, mx for MXFP8, and sc for
subchannels."""
_QUANTIZED: dict[Precision, list[str]] = {
    "fp8_delayed": ["--fp8-format=hybrid", "--fp8-recipe=delayed"],
    "fp8_current": ["--fp8-format=hybrid", "--fp8-recipe=tensorwise"],
    "fp8_block": ["--fp8-format=e4m3", "--fp8-recipe=blockwise"],
    "mxfp8": ["--fp8-format=e4m3", "--fp8-recipe=mxfp8"],
    "nvfp4": ["--fp4-format=e2m1", "--fp4-recipe=nvfp4"],
}
_BRIDGE = frozenset(("megatron-bridge", "bridge-docs", "bridge-cards"))
"""Sources whose runs have the mixed precision of Megatron Bridge (`training/mixed_precision.py` there)."""
MEGASCALE_TENSOR = 0.5
"""Share of the tensor-parallel messages that MegaScale's parallel attention and MLP leave: one gather and one scatter
for both (arXiv 2402.15627, section 3.1)."""
DECODER_LENGTH = 128
"""Tokens that the decoder of a T5 reads: the setting of Megatron-LM's examples and tests."""
MOST_IMAGES = 65_536
"""Largest number of images of a microbatch."""
ADAPTER_RANK = 32
"""Rank of LoRA's adapters, which no source states: the default of Megatron Bridge and NeMo."""
_OWN_LAYERS = re.compile(r"gpt/gpt3_mcore_tp\d")
"""Tests of Megatron-LM with its own layers (``transformer-impl: local``), whose attention is unfused; the names of the
others have ``_te_``, for Transformer Engine."""
_GRAPHS = re.compile(
    r"(?<!no )(?<!w/o )(?<!without )(?<!disabled )cuda graphs?\b(?![\s:=]*((are|is|were|was) )?(off|disabled|not)\b)"
)
"""CUDA graphs that are not said to be off."""
_OF_ARGUMENTS = ("megatron-golden", "loongforge")
"""Sources whose runs have Megatron-LM's defaults where the table says nothing."""
_RECOMPUTABLE = frozenset(("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"))


@dataclass(frozen=True)
class ExpressedRun:
    """A published run that the emulator can time, on its cluster.

    ``notes`` are what the source leaves out, with the value that is assumed.
    """

    run: MegatronRun
    cluster: ClusterSpec
    trainer: TrainerSpec
    notes: tuple[str, ...] = ()
    one_layer: bool = False
    """Whether the published time is that of forward and backward of one layer."""

    @property
    def has_scans(self) -> bool:
        """Whether layers of the model have a state space or a linear attention."""
        return any(has_scan(block.whole) for block in self.run.model.blocks)

    def predict(self) -> tuple[float, tuple[int, ...]]:
        """Return the seconds of an iteration, or of a layer, and the peak bytes of every rank."""
        timing, now = Timing(self.run, self.cluster, self.trainer), self.run.now
        if not self.one_layer:
            timed = timing.of(now)
            return timed.iteration_s, tuple(timed.peak_bytes.tolist())
        (layer,) = timing.costs.of(replace(now, stages=("t",), num_ranks=1, group_size=1))
        return (layer.forward_ns + layer.backward_ns) / NS_PER_S, (layer.held_bytes + layer.workspace_bytes,)


def express(published: PublishedRun) -> ExpressedRun:
    """Express a published run.

    Raise `NotExpressible` or another `InputError` if the run lacks a size, or has a part that the emulator does not
    know. The problem names one reason.
    """
    for fault in published.faults:
        raise NotExpressible(published.id, *fault.split(": ", 1))
    _check_kind(published)
    notes: list[str] = []
    # Megatron's default of 0.1 is left where layers are those of GPT-3; newer models train without dropout.
    is_old = published.bias is not False or published.source in _OF_ARGUMENTS
    drops = published.norm == "layer" and bool(published.arch) and is_old
    plain = [] if drops else ["--hidden-dropout=0"]
    if drops:
        notes.append("dropout is not stated, 0.1 is assumed")
    named = named_model(published)
    notes += _left_empty(published, is_named=named is not None)
    sizes = _model(published) if named is None else _lengths(published)
    arguments = [*plain, *sizes, *_parallel(published), *_batch(published), *_recompute(published)]
    arguments += _precision(published, notes)
    devices = _stated(published, "gpus")
    cluster = _cluster(published, devices)
    run = read_megatron(arguments, num_devices=devices, one_rank=True, model=named)
    if named is not None and named.towers is not None:
        run = replace(run, encoder_lengths=_images(published, run.micro_batch_size))
    if has_encoder(published):
        length, layers = _stated(published, "seq_len"), _stated(published, "layers")
        run = replace(run, model=run.model.with_encoder(layers, length), encoder_lengths=(length,))
    degrees, overlap, recipe = run.degrees, published.overlap, recipe_of(published)
    if published.zero == 3:
        degrees = msgspec.structs.replace(degrees, zero=3)
    if "bf16 gradients reduced" in overlap or is_tuned(published):
        degrees = msgspec.structs.replace(degrees, state=degrees.state._replace(gradient=2))
    if recipe is not None and recipe.optimizer is not None:
        degrees = msgspec.structs.replace(degrees, state=degrees.state._replace(optimizer=recipe.optimizer))
    if degrees.zero != (published.zero or 0):
        notes.append(f"ZeRO-{published.zero} is emulated as ZeRO-{degrees.zero}")
    run = replace(run, degrees=degrees, now=_settings(published, run.now))
    if published.task == "lora":
        run = replace(run, adapter_rank=ADAPTER_RANK)
        notes.append(f"the rank of the adapters is not stated, {ADAPTER_RANK} is assumed")
    if _is_encoder(published):
        run = replace(run, model=run.model.bidirectional())
        notes.append("the loss is that of a language model alone")
    if "MegaScale" in published.reason:
        notes.append("MegaScale's window of attention and its fused operators are not described, none are emulated")
    return ExpressedRun(
        run, cluster, trainer_of(published), tuple(notes), one_layer=published.schedule.lower() == ONE_LAYER
    )


def _left_empty(published: PublishedRun, *, is_named: bool) -> list[str]:
    """Return notes on columns that a user's own table leaves empty, with the values that are assumed.

    What the sources of the published table leave out is known of each of them.
    """
    if published.source in published_sources():
        return []
    tensor, devices = published.tp or 1, published.gpus or 1
    replicated = devices > tensor * (published.pp or 1)
    values = {} if is_named else {"gated": "0", "norm": "layer", "pos": "learned", "tied": "1", "bias": "1"}
    if not is_named and not published.mla:
        values["kv_heads"] = str(published.heads)
    values |= ({"sp": "0"} if tensor > 1 else {}) | ({"zero": "0"} if replicated else {})
    if tensor > 1 and (published.ep or 1) > 1 and _expert_tensor(published) == 1:
        values["etp"] = "1"
    elif tensor > 1 and published.has_experts and (published.ep or 1) == 1:
        values["etp"] = str(tensor)
    empty = [f"{name} {value}" for name, value in values.items() if getattr(published, name) in (None, "")]
    return [f"assumed for empty columns: {', '.join(empty)}"] if empty else []


def has_encoder(published: PublishedRun) -> bool:
    """Return whether the model has an encoder and a decoder. Its columns then are those of each."""
    return re.match(r"(m?t5|ul2)\b", published.model.lower()) is not None


def _is_encoder(published: PublishedRun) -> bool:
    return re.match(r"(bert|roberta)\b", published.model.lower()) is not None


def _settings(published: PublishedRun, now: PipelineSettings) -> PipelineSettings:
    """Return the settings of a pipeline with what Megatron itself does not have."""
    if published.recompute == "selective-op":
        now = replace(now, recompute=Recompute("selective", modules=(SELECTIVE_OPERATORS,)))
    return replace(now, schedule=_SCHEDULES[published.schedule.lower()], vocabulary=_vocabulary(published))


def _vocabulary(published: PublishedRun) -> VocabularySplit:
    """Return where the vocabulary is; two barriers, the first algorithm of the paper, if the variant is not named."""
    words = f"{published.schedule} {published.how} {published.reason}".lower()
    if (published.pp or 1) == 1 or not re.search(r"vocab(ulary)?[ -]?(parallel|[12])", words):
        return "ends"
    if "interlaced" in words:
        return "interlaced"
    return "one barrier" if re.search(r"vocab-?2", words) else "two barriers"


def trainer_of(published: PublishedRun) -> TrainerSpec:
    """Return the trainer of a run, with the stated overlap: eager PyTorch for FSDP and nanotron, else Megatron."""
    overlap = published.overlap
    sharded = published.schedule in ("fsdp", "zero") or published.zero == 3
    # Megatron FSDP has Transformer Engine.
    eager = (sharded and published.attention != "te") or published.source in _EAGER_SOURCES
    trainer = load_trainer("torchtitan" if eager else "megatron")
    words = f"{overlap} {published.how} {published.reason}".lower()
    asynchronous = re.search(r"async\w*[ -]t(p|ensor)", words) is not None
    hides_tensor = asynchronous or "user buffers" in f"{overlap} {published.assumed}"
    megascale = "megascale" in words
    if megascale:
        tensor = 1 - MEGASCALE_TENSOR * (1 - trainer.hidden_tensor)
        trainer = msgspec.structs.replace(trainer, hidden_tensor=tensor)
    # Without FlashAttention, recomputing core attention alone is what the run is for.
    own = _OWN_LAYERS.match(published.ref) is not None
    unstated = published.attention in ("", "unknown")
    unfused = published.attention == "unfused" or own or (unstated and "core_attn" in published.recompute)
    if unfused:
        trainer = msgspec.structs.replace(trainer, attention="unfused")
    elif published.attention == "flash":
        # FlashAttention 3 and 4 are as fast as cuDNN's kernels, of which the device's table is.
        newer = published.source in _NEWER_FLASH or re.search(r"\bfa[34]\b", words) is not None
        trainer = msgspec.structs.replace(trainer, attention="fused" if newer else "flash2")
    elif published.attention == "te":
        trainer = msgspec.structs.replace(trainer, attention="fused")
    recipe = recipe_of(published)
    if re.search(r"liger|torch\.compile", words) or (recipe is not None and recipe.engine):
        # Liger's kernels and compiled graphs fuse norms and activations, as Transformer Engine's do.
        trainer = msgspec.structs.replace(trainer, elementwise=load_trainer("megatron").elementwise)
    graphs = recipe.graphs if recipe else "iteration" if _GRAPHS.search(words) else "none"
    if graphs != "none":
        # Dropless experts cannot be in a graph unless it is of the whole iteration.
        trainer = trainer.with_graphs(
            experts=graphs == "iteration" and (recipe is not None or not published.has_experts)
        )
    engine = not eager and not own and (published.attention in ("te", "", "unknown") or "_te_" in published.ref)
    hidden = Overlap(
        reduction="grad reduce" in overlap or megascale or (recipe is not None and recipe.reduces),
        gather="param gather" in overlap or megascale or (recipe is not None and recipe.reduces),
        tensor=hides_tensor or megascale,
        expert=recipe.overlaps if recipe else re.search("overlap of all-to-all|ep overlap", words) is not None,
    )
    # SimuMax names its runs with Transformer Engine's fused cross entropy so.
    fused_loss = published.ref.endswith("_cef") or is_tuned(published)
    trainer = msgspec.structs.replace(
        trainer,
        dispatcher=(recipe.dispatcher if recipe else named_dispatcher(published)) or trainer.dispatcher,
        fused_experts=trainer.fused_experts or (recipe is not None and recipe.fused),
        cross_entropy=1.0 if fused_loss else trainer.cross_entropy,
    )
    return msgspec.structs.replace(
        trainer.overlapping(hidden),
        gradient_buffers=engine,
        library_bytes=trainer.library_bytes if engine or eager else load_trainer("torchtitan").library_bytes,
        loss_in_place=fused_loss,
        output_twice="all-to-all" in published.assumed,
        scan_loops="deterministic" in words,
        host_optimizer=re.search(r"optimi[sz]er offloaded|adamw? offload", words) is not None,
    )


def _stated(published: PublishedRun, name: str) -> int:
    value = getattr(published, name)
    if not value:
        raise NotExpressible(published.id, f"{name} is not stated")
    assert isinstance(value, int)
    return value


def _check_kind(published: PublishedRun) -> None:
    if published.kind == "other" and described(published.model) is None:
        model = published.model or "not stated"
        raise NotExpressible(published.id, "model that is not described", model)
    if re.search(r"grpo|rlhf", f"{published.ref} {published.task}".lower()):
        raise NotExpressible(published.id, "iteration that generates samples", "reinforcement learning")
    if has_encoder(published) and ((published.pp or 1) > 1 or published.kind != "dense" or published.mla):
        raise NotExpressible(published.id, "encoder and decoder on a pipeline or with experts", published.model)
    if published.schedule.lower() not in _SCHEDULES:
        raise NotExpressible(published.id, "schedule", published.schedule)
    if precision(published.precision) is None:
        raise NotExpressible(published.id, "precision", published.precision)
    if published.task not in ("", "pretrain", "sft", "lora"):
        raise NotExpressible(published.id, "task", published.task)


def precision(text: str) -> Precision | None:
    """Return the precision that a table spells in one of many ways; None for an unknown one, or float32."""
    return _PRECISIONS.get(_word(text))


def _word(text: str) -> str:
    return re.split(r"[\s(]", text.lower().strip(), maxsplit=1)[0].replace("_", "-")


def _precision(published: PublishedRun, notes: list[str]) -> list[str]:
    found = precision(published.precision)
    if found is None or found == "bf16":
        return ["--bf16"]
    if _word(published.precision) == "fp8":
        notes.append("the recipe of FP8 is not stated, current scaling is assumed")
    words = ["--bf16", *_QUANTIZED[found]]
    if published.source in _BRIDGE and found != "fp8_block":
        notes.append("weights are gathered as they are quantized, as in the recipes of Megatron Bridge")
        words.append("--fp4-param-gather" if found == "nvfp4" else "--fp8-param-gather")
    return words


def _cluster(published: PublishedRun, devices: int) -> ClusterSpec:
    name = DEVICES.get(published.device)
    if name is None:
        kind = "device" if published.device else "device not stated"
        raise NotExpressible(published.id, kind, published.device)
    per_node = published.per_node or 8
    if published.device in _NVLINK_DOMAIN:
        # A rack of 72 is one NVLink domain; jobs of a power of two use 64 of them.
        per_node = 64 if devices % 72 else 72
    nodes = -(-devices // per_node)
    return _loaded(f"{nodes}x{min(devices, per_node)}x{name}")


@cache
def _loaded(name: str) -> ClusterSpec:
    """Return a cluster, read once for all runs on it."""
    return load_cluster(name)


def _images(published: PublishedRun, samples: int) -> tuple[int, ...]:
    """Return the patches of each image of a sample."""
    number = published.images or 0
    if number * samples > MOST_IMAGES:
        raise NotExpressible(published.id, "images", f"{number} of a sample are more than {MOST_IMAGES} a microbatch")
    return (_stated(published, "patches"),) * number


def _lengths(published: PublishedRun) -> list[str]:
    length = _stated(published, "seq_len")
    own = DECODER_LENGTH if has_encoder(published) else length
    return [f"--seq-length={own}", f"--max-position-embeddings={length}"]


def _model(published: PublishedRun) -> list[str]:
    sizes = {
        "num-layers": _stated(published, "layers"),
        "hidden-size": _stated(published, "hidden"),
        "ffn-hidden-size": published.ffn or published.moe_ffn or _stated(published, "ffn"),
        "num-attention-heads": _stated(published, "heads"),
        "kv-channels": published.head_dim,
        "vocab-size": _stated(published, "vocab"),
        "mtp-num-layers": published.mtp,
    }
    words = [*_lengths(published), *(f"--{name}={value}" for name, value in sizes.items() if value)]
    words.append(f"--normalization={'RMSNorm' if published.norm == 'rms' else 'LayerNorm'}")
    # The rotary embeddings of gpt-oss are those of YaRN, in tables of runs too.
    rotary = "yarn" if published.model.startswith("gpt-oss") else "rope"
    words.append(f"--position-embedding-type={rotary if published.pos == 'rope' else 'learned_absolute'}")
    words += _flags(
        swiglu=published.gated,
        disable_bias_linear=published.bias is False,
        untie_embeddings_and_output_weights=published.tied is False,
        qk_layernorm=published.qk_norm,
    )
    if published.kv_heads and published.kv_heads != published.heads and not published.mla:
        words += ["--group-query-attention", f"--num-query-groups={published.kv_heads}"]
    return words + _attention(published) + _experts(published)


def _attention(published: PublishedRun) -> list[str]:
    words = []
    if published.window:
        words += _window(published)
    if published.mla:
        text = _DEEPSEEK_V3 if published.mla == "default" else published.mla
        words.append("--multi-latent-attention")
        for part in text.split(","):
            named = re.fullmatch(r"([a-z]+)(\d+)", part)
            if named is None or named[1] not in _LATENT:
                raise NotExpressible(published.id, "mla", f"{part!r} is not a width such as kv512")
            words.append(f"--{_LATENT[named[1]]}={named[2]}")
    return words


def _window(published: PublishedRun) -> list[str]:
    """Return the arguments of windows: in all layers, or without those in every k-th."""
    found = re.fullmatch(r"([1-9]\d*)(?:/([1-9]\d*))?", published.window)
    if found is None:
        raise NotExpressible(published.id, "window", f"{published.window!r} is not like 128/2")
    size, every = f"--window-size=({int(found[1]) - 1},0)", int(found[2] or 1)
    if every == 1:
        return [size]
    return [size, f"--window-attn-skip-freq={every}"]


def _experts(published: PublishedRun) -> list[str]:
    if not published.has_experts:
        return []
    words = [
        f"--num-experts={_stated(published, 'experts')}",
        f"--moe-router-topk={_stated(published, 'topk')}",
        f"--moe-ffn-hidden-size={published.moe_ffn or _stated(published, 'ffn')}",
        "--moe-grouped-gemm",
    ]
    if published.model.startswith("gpt-oss"):
        # Its configuration on Hugging Face has swiglu_limit = 7.
        words.append("--activation-func-clamp-value=7")
    if published.model == "deepseek-v3":
        # n_group and topk_group of its configuration.
        words += ["--moe-router-num-groups=8", "--moe-router-group-topk=4"]
    if published.shared_ffn:
        words.append(f"--moe-shared-expert-intermediate-size={published.shared_ffn}")
    if published.dense_layers:
        dense, layers = published.dense_layers, _stated(published, "layers")
        words.append(f"--moe-layer-freq=([0]*{dense}+[1]*{layers - dense})")
    return words


def _parallel(published: PublishedRun) -> list[str]:
    tensor, pipeline, virtual = published.tp or 1, published.pp or 1, virtual_stages(published)
    words = [
        f"--tensor-model-parallel-size={tensor}",
        f"--pipeline-model-parallel-size={pipeline}",
        f"--context-parallel-size={published.cp or 1}",
        f"--expert-model-parallel-size={published.ep or 1}",
    ]
    # Without expert parallelism, Megatron divides experts like other layers, so that only a stated number counts.
    wide = _expert_tensor(published) if (published.ep or 1) > 1 else published.etp if published.has_experts else None
    if wide is not None:
        words.append(f"--expert-tensor-parallel-size={wide}")
    words += _flags(
        sequence_parallel=bool(published.sp) and tensor > 1, use_distributed_optimizer=(published.zero or 0) > 0
    )
    if published.layout:
        return [*words, f"--pipeline-model-parallel-layout={published.layout}"]
    if virtual > 1:
        words.append(f"--num-virtual-stages-per-pipeline-rank={virtual}")
    layers, stages = _stated(published, "layers"), pipeline * virtual
    if layers % stages:
        # Embedding and loss then take the place of a layer, together or one of them.
        ends = {2: (True, True), 1: (False, True)}.get(-layers % stages)
        if ends is None:
            raise NotExpressible(published.id, "layout", f"{layers} layers on {stages} stages are not described")
        words += _flags(account_for_embedding_in_pipeline_split=ends[0], account_for_loss_in_pipeline_split=ends[1])
    return words


def virtual_stages(published: PublishedRun) -> int:
    """Return the stages of each pipeline rank. Without a pipeline there is one; a V-shaped schedule has two."""
    if (published.pp or 1) == 1:
        return 1
    return 2 if _SCHEDULES.get(published.schedule.lower()) in V_SHAPED else published.vpp or 1


def _expert_tensor(published: PublishedRun) -> int | None:
    """Return the devices among which each expert is divided; None: Megatron's default, which is tensor parallelism.

    A table may state it, and names of Megatron-LM's tests have it. Runs of recipes (Megatron Bridge, NeMo, dgxc) leave
    each expert whole.
    """
    if published.etp:
        return published.etp
    found = re.search(r"etp(\d+)", published.ref)
    if found is not None:
        return int(found[1])
    return None if published.source in _OF_ARGUMENTS and published.arch else 1


def _batch(published: PublishedRun) -> list[str]:
    return [f"--micro-batch-size={_stated(published, 'mbs')}", f"--global-batch-size={_stated(published, 'gbs')}"]


def _recompute(published: PublishedRun) -> list[str]:
    text = published.recompute
    if text in ("", "none", "selective-op"):
        return []
    if text == "full":
        return ["--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"]
    if block := re.fullmatch(r"block:(\d+)", text):
        return ["--recompute-granularity=full", "--recompute-method=block", f"--recompute-num-layers={block[1]}"]
    modules = ["shared_experts" if module == "shared_expert" else module for module in text.split(",")]
    if not set(modules) <= _RECOMPUTABLE:
        raise NotExpressible(published.id, "recomputation", text)
    return ["--recompute-granularity=selective", "--recompute-modules", *modules]


def _flags(**values: bool | None) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name, value in values.items() if value]
