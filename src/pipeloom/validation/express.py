"""Express published runs as runs that the emulator can time."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import msgspec

from pipeloom.errors import InputError
from pipeloom.integrations.megatron import MegatronRun, read_megatron
from pipeloom.spec.catalog import load_cluster
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.trainer import EAGER, MEGATRON, TrainerSpec
from pipeloom.validation.runs import PublishedRun

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
_SCHEDULES = frozenset(("", "1f1b", "interleaved", "fsdp", "zero"))
_LATENT = {"q": "q-lora-rank", "kv": "kv-lora-rank", "nope": "qk-head-dim", "rope": "qk-pos-emb-head-dim"}
_LATENT |= {"v": "v-head-dim"}
_DEEPSEEK_V3 = "q1536,kv512,nope128,rope64,v128"
HIDDEN = 0.55
"""Share of overlapped collectives that computation hides: 0.5 to 0.6 of gradient reduction and parameter gathering, 0.5
to 0.65 of tensor-parallel messages, in published runs."""
_OWN_LAYERS = re.compile(r"gpt/gpt3_mcore_tp\d")
"""Tests of Megatron-LM with its own layers (``transformer-impl: local``), whose attention is unfused; the names of the
others have ``_te_``, for Transformer Engine."""
_OF_ARGUMENTS = ("megatron-golden", "loongforge")
"""Sources whose runs have Megatron-LM's defaults where the table says nothing."""
_UNKNOWN_PARTS = ("vocabulary parallelism", "layers dealt by load", "MegaScale's own changes", "asynchronous tensor")
"""Parts of a run that the table has in words only, in its column ``reason``."""
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


def express(published: PublishedRun) -> ExpressedRun:
    """Express a published run.

    Raises
    ------
    InputError
        The run lacks a size, or has a part that the emulator does not know. The problem names one reason.
    """
    for fault in published.faults:
        raise InputError(published.id, fault)
    _check_kind(published)
    notes: list[str] = []
    # Megatron's default of 0.1 is left where layers are those of GPT-3; newer models train without dropout.
    plain = [] if published.norm == "layer" else ["--hidden-dropout=0"]
    if not plain:
        notes.append("dropout is not stated, 0.1 is assumed")
    arguments = [*plain, *_model(published), *_parallel(published), *_batch(published), *_recompute(published, notes)]
    devices = _stated(published, "gpus")
    cluster = _cluster(published, devices)
    run = read_megatron(arguments, num_devices=devices, one_rank=True)
    degrees, overlap = run.degrees, published.overlap
    if published.zero == 3:
        degrees = msgspec.structs.replace(degrees, zero=3)
    if "bf16 gradients reduced" in overlap:
        degrees = msgspec.structs.replace(degrees, state=degrees.state._replace(gradient=2))
    if degrees.zero != (published.zero or 0):
        notes.append(f"ZeRO-{published.zero} is emulated as ZeRO-{degrees.zero}")
    return ExpressedRun(replace(run, degrees=degrees), cluster, trainer_of(published), tuple(notes))


def trainer_of(published: PublishedRun) -> TrainerSpec:
    """Return the trainer of a run, with the stated overlap: eager PyTorch for FSDP and nanotron, else Megatron."""
    overlap = published.overlap
    eager = published.schedule in ("fsdp", "zero") or published.zero == 3 or published.ref.startswith("nanotron")
    # Without FlashAttention, recomputing core attention alone is what the run is for.
    own = _OWN_LAYERS.match(published.ref) is not None
    unstated = published.attention in ("", "unknown")
    unfused = published.attention == "unfused" or own or (unstated and "core_attn" in published.recompute)
    engine = not eager and not own and (published.attention in ("te", "", "unknown") or "_te_" in published.ref)
    base = EAGER if eager else MEGATRON
    return msgspec.structs.replace(
        base,
        gradient_buffers=engine,
        library_bytes=base.library_bytes if engine or eager else EAGER.library_bytes,
        # SimuMax names its runs with Transformer Engine's fused cross entropy so.
        loss_in_place=published.ref.endswith("_cef"),
        output_twice="all-to-all" in published.assumed,
        attention="unfused" if unfused else "flash",
        hidden_reduction=HIDDEN if "grad reduce" in overlap else 0.0,
        hidden_gather=HIDDEN if "param gather" in overlap else 0.0,
        hidden_tensor=HIDDEN if "user buffers" in f"{overlap} {published.assumed}" else 0.0,
    )


def _stated(published: PublishedRun, name: str) -> int:
    value = getattr(published, name)
    if not value:
        raise InputError(published.id, f"{name} is not stated")
    assert isinstance(value, int)
    return value


def _check_kind(published: PublishedRun) -> None:
    if published.kind == "other":
        raise InputError(published.id, f"model {published.model or 'not stated'}: hybrid, multimodal or not described")
    if re.match(r"(bert|t5)\b", published.model):
        raise InputError(published.id, f"model {published.model}: not a decoder")
    for words in _UNKNOWN_PARTS:
        if words in published.reason:
            raise InputError(published.id, words)
    if "optimiser offloaded" in published.reason:
        raise InputError(published.id, "optimizer offloaded to the host")
    if published.schedule not in _SCHEDULES:
        raise InputError(published.id, f"schedule {published.schedule}")
    if precision(published.precision) != "bf16":
        raise InputError(published.id, f"precision {published.precision}")
    if published.task not in ("", "pretrain", "sft"):
        raise InputError(published.id, f"task {published.task}")


def precision(text: str) -> str:
    """Return the normalized name of a precision: bf16, fp32, fp8, mxfp8, nvfp4 or unknown."""
    word = re.split(r"[\s(]", text.lower().strip(), maxsplit=1)[0].replace("_", "-")
    if word in ("bf16", "fp16", "bfloat16", "float16", ""):
        return "bf16"
    if word in ("mxfp8", "fp8-mx"):
        return "mxfp8"
    if word.startswith("fp8"):
        return "fp8"
    return word if word in ("fp32", "nvfp4") else "unknown"


def _cluster(published: PublishedRun, devices: int) -> ClusterSpec:
    name = DEVICES.get(published.device)
    if name is None:
        raise InputError(published.id, f"device {published.device or 'not stated'}")
    per_node = published.per_node or 8
    if published.device in _NVLINK_DOMAIN:
        # A rack of 72 is one NVLink domain; jobs of a power of two use 64 of them.
        per_node = 64 if devices % 72 else 72
    nodes = -(-devices // per_node)
    return load_cluster(f"{nodes}x{min(devices, per_node)}x{name}")


def _model(published: PublishedRun) -> list[str]:
    sizes = {
        "num-layers": _stated(published, "layers"),
        "hidden-size": _stated(published, "hidden"),
        "ffn-hidden-size": published.ffn or published.moe_ffn or _stated(published, "ffn"),
        "num-attention-heads": _stated(published, "heads"),
        "kv-channels": published.head_dim,
        "vocab-size": _stated(published, "vocab"),
        "seq-length": _stated(published, "seq_len"),
        "max-position-embeddings": _stated(published, "seq_len"),
        "mtp-num-layers": published.mtp,
    }
    words = [f"--{name}={value}" for name, value in sizes.items() if value]
    words.append(f"--normalization={'RMSNorm' if published.norm == 'rms' else 'LayerNorm'}")
    words.append(f"--position-embedding-type={'rope' if published.pos == 'rope' else 'learned_absolute'}")
    words += _flags(
        swiglu=published.gated,
        disable_bias_linear=published.bias is False,
        untie_embeddings_and_output_weights=published.tied is False,
        qk_layernorm=published.qk_norm,
        bf16=True,
    )
    if published.kv_heads and published.kv_heads != published.heads and not published.mla:
        words += ["--group-query-attention", f"--num-query-groups={published.kv_heads}"]
    return words + _attention(published) + _experts(published)


def _attention(published: PublishedRun) -> list[str]:
    words = []
    if published.window:
        found = re.fullmatch(r"(\d+)/(\d+)", published.window)
        if found is None:
            raise InputError(published.id, f"window: {published.window!r} is not like 128/2")
        words += [f"--window-size=({int(found[1]) - 1},0)", f"--window-attn-skip-freq={found[2]}"]
    if published.mla:
        text = _DEEPSEEK_V3 if published.mla == "default" else published.mla
        words.append("--multi-latent-attention")
        for part in text.split(","):
            named = re.fullmatch(r"([a-z]+)(\d+)", part)
            if named is None or named[1] not in _LATENT:
                raise InputError(published.id, f"mla: {part!r} is not a width such as kv512")
            words.append(f"--{_LATENT[named[1]]}={named[2]}")
    return words


def _experts(published: PublishedRun) -> list[str]:
    if published.kind != "experts":
        return []
    words = [
        f"--num-experts={_stated(published, 'experts')}",
        f"--moe-router-topk={_stated(published, 'topk')}",
        f"--moe-ffn-hidden-size={published.moe_ffn or _stated(published, 'ffn')}",
        "--moe-grouped-gemm",
    ]
    if published.shared_ffn:
        words.append(f"--moe-shared-expert-intermediate-size={published.shared_ffn}")
    if published.dense_layers:
        dense, layers = published.dense_layers, _stated(published, "layers")
        words.append(f"--moe-layer-freq=([0]*{dense}+[1]*{layers - dense})")
    return words


def _parallel(published: PublishedRun) -> list[str]:
    tensor, pipeline, virtual = published.tp or 1, published.pp or 1, published.vpp or 1
    words = [
        f"--tensor-model-parallel-size={tensor}",
        f"--pipeline-model-parallel-size={pipeline}",
        f"--context-parallel-size={published.cp or 1}",
        f"--expert-model-parallel-size={published.ep or 1}",
    ]
    if (published.ep or 1) > 1 and (wide := _expert_tensor(published)) is not None:
        words.append(f"--expert-tensor-parallel-size={wide}")
    words += _flags(
        sequence_parallel=bool(published.sp) and tensor > 1, use_distributed_optimizer=(published.zero or 0) > 0
    )
    if published.layout:
        return [*words, f"--pipeline-model-parallel-layout={published.layout}"]
    if virtual > 1 and pipeline > 1:
        words.append(f"--num-virtual-stages-per-pipeline-rank={virtual}")
    layers, stages = _stated(published, "layers"), pipeline * (virtual if pipeline > 1 else 1)
    if layers % stages:
        # Embedding and loss then take the place of a layer, together or one of them.
        ends = {2: (True, True), 1: (False, True)}.get(-layers % stages)
        if ends is None:
            raise InputError(published.id, f"layout: {layers} layers on {stages} stages are not described")
        words += _flags(account_for_embedding_in_pipeline_split=ends[0], account_for_loss_in_pipeline_split=ends[1])
    return words


def _expert_tensor(published: PublishedRun) -> int | None:
    """Return the devices among which each expert is divided; None: Megatron's default, which is tensor parallelism.

    Names of Megatron-LM's tests have it. Runs of recipes (Megatron Bridge, NeMo, dgxc) leave each expert whole.
    """
    found = re.search(r"etp(\d+)", published.ref)
    if found is not None:
        return int(found[1])
    return None if published.source in _OF_ARGUMENTS else 1


def _batch(published: PublishedRun) -> list[str]:
    return [f"--micro-batch-size={_stated(published, 'mbs')}", f"--global-batch-size={_stated(published, 'gbs')}"]


def _recompute(published: PublishedRun, notes: list[str]) -> list[str]:
    text = published.recompute
    if text in ("", "none"):
        return []
    if text == "unknown":
        notes.append("recomputation is not stated, none is assumed")
        return []
    if text == "full":
        return ["--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"]
    if block := re.fullmatch(r"block:(\d+)", text):
        return ["--recompute-granularity=full", "--recompute-method=block", f"--recompute-num-layers={block[1]}"]
    modules = ["shared_experts" if module == "shared_expert" else module for module in text.split(",")]
    if not set(modules) <= _RECOMPUTABLE:
        raise InputError(published.id, f"recomputation {text}")
    return ["--recompute-granularity=selective", "--recompute-modules", *modules]


def _flags(**values: bool | None) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name, value in values.items() if value]
