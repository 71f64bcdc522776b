"""What the recipes of Megatron Bridge and NeMo AutoModel set that their tables of results leave out.

Megatron Bridge's tables name a release; the recipes are in that release's tag of NVIDIA-NeMo/Megatron-Bridge, in
``scripts/performance/configs`` (``perf_recipes`` from 0.6 on). Releases 25.09, 25.11, 26.02, 26.04, 26.06 and 26.08 are
the tags v0.1.0rc4, v0.2.0, v0.3.0, v0.4.0, v0.5.0 and v0.6.0; what 26.04.01 runs with other degrees is in v0.4.2.
All of them reduce gradients in bfloat16 and use Transformer Engine's fused cross entropy
(``scripts/performance/utils/overrides.py``). Those of NeMo AutoModel are in ``examples/benchmark/configs`` of
NVIDIA-NeMo/Automodel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from pipeloom.spec.trainer import Dispatcher
from pipeloom.validation.runs import PublishedRun
from pipeloom.validation.sizes import described

_SOURCES = ("megatron-bridge", "bridge-cards")
_TWO_PREDICTIONS = (("mtp", 2),)
"""Layers of multi-token prediction of Nemotron 3 Super and Ultra: one, which runs twice."""
_NEWEST = (26, 8)
"""Release of the verification cards."""


class Recipe(NamedTuple):
    """Settings of a recipe."""

    dispatcher: Dispatcher = "alltoall"
    """How tokens reach their experts."""
    graphs: Literal["none", "modules", "iteration"] = "none"
    """What CUDA graphs launch: nothing, attention and router (``modules``), or the whole iteration."""
    overlaps: bool = False
    """Whether messages of experts overlap with the computation of another microbatch."""
    fused: bool = False
    """Whether one kernel computes the experts of a device with their activation."""
    recompute: str | None = None
    """Modules that are recomputed; None: the table of runs says it."""
    expert: int | None = None
    """Degree of expert parallelism; None: the table of runs says it."""
    engine: bool = False
    """Whether a trainer of eager PyTorch has Transformer Engine's products and norms."""
    attention: str | None = None
    """Its attention, as in the table of runs; None: the table says it."""
    columns: tuple[tuple[str, Any], ...] = ()
    """Columns that the table of runs lacks, or has otherwise."""
    tuned: bool = True
    """Whether it has the overrides that all performance recipes of Megatron Bridge share."""
    reduces: bool = False
    """Whether gradients are reduced, and parameters gathered, while layers compute."""
    padding: float = 1.0
    """Rows of each expert relative to those that are chosen, if their number is fixed."""
    optimizer: int | None = None
    """Bytes of a parameter's optimizer state; None: those of Adam in float32."""


_AUTOMODEL = {
    "nemotron-3-nano-30b-a3b": Recipe("deepep", recompute="full", expert=8, engine=True),
    "nemotron-3-super-120b-a12b": Recipe("hybridep", recompute="full", expert=64, engine=True),
    "nemotron-3-ultra-550b-a55b": Recipe(
        "hybridep", recompute="full", expert=64, engine=True, columns=_TWO_PREDICTIONS
    ),
    "gpt-oss-120b": Recipe("deepep", recompute="none", expert=64, engine=True),
    "qwen3-30b-a3b": Recipe("deepep", recompute="full", expert=8, engine=True, attention="te"),
}
"""``gptoss_120b_te_deepep.yaml``, ``qwen3_moe_30b_te_deepep.yaml`` and, in ``examples/llm_benchmark/nemotron``,
``nemotron_nano_v3_te_deepep.yaml`` and those of Super and Ultra."""


def recipe_of(published: PublishedRun) -> Recipe | None:
    """Return the recipe of a run; None if it has none."""
    if not published.arch and (name := _name(published.model)):
        if published.source == "nemo-automodel":
            return _AUTOMODEL.get(name) if published.task == "pretrain" else None
        return _described(published, name)
    if published.source == "nemo-automodel" and published.task == "pretrain":
        return _AUTOMODEL.get(published.model)
    if published.source not in _SOURCES or "pretrain" not in f"{published.task} {published.ref}":
        return None
    if published.source == "bridge-cards" and "performance" not in published.ref:
        return None
    if not published.has_experts:
        return Recipe() if published.kind == "dense" else None
    rules = _MODELS.get(published.model.lower().replace("_", "-"))
    return None if rules is None else rules(published, _release(published))


def is_tuned(published: PublishedRun) -> bool:
    """Return whether a run has the overrides that all performance recipes of Megatron Bridge share."""
    recipe = recipe_of(published)
    return published.source in _BRIDGE_SOURCES and recipe is not None and recipe.tuned


def states_recompute(published: PublishedRun) -> bool:
    """Return whether the source states what is recomputed, rather than the recipe of another release."""
    if not published.arch and ("(recipe)" in published.assumed or published.source == "loongforge"):
        # Of models without columns, the table has the defaults of the trainer rather than the recipe.
        return False
    return published.recompute != "unknown" and "recipe of 26.08" not in published.assumed


def _release(published: PublishedRun) -> tuple[int, ...]:
    found = re.search(r"(\d\d\.\d\d(\.\d\d)?)$", published.ref)
    return tuple(map(int, found[1].split("."))) if found else _NEWEST


def _deepseek(run: PublishedRun, release: tuple[int, ...]) -> Recipe:
    whole = release >= (26, 6) and "mx" in run.precision.lower()
    if run.device == "H100":
        if release < (26, 2):
            return Recipe("deepep", overlaps=True, recompute="mla_up_proj,mlp")
        return Recipe("hybridep", recompute="mla_up_proj,mlp")
    if run.device == "GB200":
        if release < (25, 11):
            return Recipe(recompute="mla_up_proj")
        if whole:
            return Recipe("hybridep", "iteration", overlaps=True, fused=True, recompute="mla_up_proj")
        dense = release >= (26, 4) and run.precision != "bf16"
        return Recipe("hybridep", "modules", recompute="mlp" if dense else "mla_up_proj")
    if run.device == "GB300":
        if whole:
            return Recipe("hybridep", "iteration", overlaps=True, fused=True, recompute="none")
        if release < (26, 2) or run.precision == "bf16":
            return Recipe("hybridep", "modules", recompute="moe_act")
        return Recipe("hybridep", recompute="mla_up_proj")
    if run.device == "B200" and run.ep == 32:
        return Recipe("deepep", "modules", overlaps=True, recompute="mla_up_proj,mlp")
    graphs: Literal["none", "modules"] = "modules" if run.device == "B300" and run.pp == 8 else "none"
    return Recipe("alltoall" if release < (26, 2) else "hybridep", graphs, recompute="mla_up_proj")


def _gpt_oss(run: PublishedRun, release: tuple[int, ...]) -> Recipe:
    quantized = run.precision != "bf16"
    if release >= (26, 6) and quantized and run.device in ("GB200", "GB300"):
        return Recipe("hybridep", "iteration", overlaps=True, fused=True, recompute="none")
    newer = release >= (26, 4)
    if run.device in ("GB300", "B300"):
        sends: Dispatcher = "hybridep" if newer and run.device == "B300" else "alltoall"
        return Recipe(sends, "modules", recompute="none")
    # The recipe of 26.04.01 and later sends by alltoall again (v0.4.2).
    once = release[:2] == (26, 4) and run.device != "H100"
    return Recipe(
        "hybridep" if once else "alltoall", overlaps=newer and run.device == "GB200", recompute="layernorm,moe_act"
    )


def _qwen_235b(run: PublishedRun, release: tuple[int, ...]) -> Recipe:
    if _whole(run, release):
        return _WHOLE
    if run.device in ("GB200", "GB300"):
        return Recipe("hybridep", "modules", recompute="none")
    sends: Dispatcher = "hybridep" if run.device == "B300" and release >= (26, 6, 1) else "alltoall"
    overlaps = run.device == "H100" or (run.device == "B300" and release < (26, 4))
    return Recipe(sends, overlaps=overlaps, recompute="none")


def _qwen_30b(run: PublishedRun, release: tuple[int, ...]) -> Recipe:
    if _whole(run, release):
        return _WHOLE
    older = release < (26, 4)
    if run.device == "H100":
        graphs: Literal["none", "modules"] = "modules" if run.precision == "bf16" else "none"
        return Recipe("deepep" if older else "hybridep", graphs, overlaps=older, recompute="none")
    return Recipe("alltoall" if run.device == "B200" and older else "hybridep", "modules", recompute="none")


def _kimi(run: PublishedRun, _release: tuple[int, ...]) -> Recipe:
    if run.device in ("GB200", "GB300"):
        return Recipe("hybridep", "modules" if run.device == "GB200" else "none", recompute="mla_up_proj")
    return Recipe(recompute="mla_up_proj,mlp" if run.device == "H100" else "mla_up_proj")


def _whole(run: PublishedRun, release: tuple[int, ...]) -> bool:
    """Return whether a recipe of Qwen 3 puts the whole iteration into a graph."""
    first = {"GB200": (26, 6), "GB300": (26, 6), "B200": (26, 6, 1), "B300": (26, 6, 1)}.get(run.device)
    return first is not None and release >= first and "mx" in run.precision.lower()


_WHOLE = Recipe("hybridep", "iteration", overlaps=True, fused=True, recompute="none")
_MODELS: dict[str, Callable[[PublishedRun, tuple[int, ...]], Recipe]] = {
    "deepseek-v3": _deepseek,
    "gpt-oss-120b": _gpt_oss,
    "qwen3-235b-a22b": _qwen_235b,
    "qwen3-30b-a3b": _qwen_30b,
    "kimi-k2": _kimi,
}


def named_dispatcher(published: PublishedRun) -> Dispatcher | None:
    """Return the dispatcher that a run's words name, if any."""
    words = f"{published.overlap} {published.how}".lower()
    return next((name for name in get_args(Dispatcher) if name in words), None)


def _name(model: str) -> str:
    """Return the name of a public model without columns, such as ``nemotron-3-nano-4b``; empty for another model."""
    found = described(model)
    return "" if found is None else found.name.lower().replace(" ", "-")


def _described(run: PublishedRun, name: str) -> Recipe | None:
    """Return the recipe of a run of a hybrid or of a model that reads images."""
    virtual = "virtual" if (run.vpp or 1) > 1 else ""
    words = f"{virtual} {run.ref} {run.task} {run.device} {run.precision}".lower()
    rules = _LOONGFORGE if run.source == "loongforge" else _BRIDGE if run.source in _BRIDGE_SOURCES else {}
    return next((recipe for pattern, recipe in rules.get(name, ()) if re.search(pattern, words)), None)


_BRIDGE_SOURCES = (*_SOURCES, "bridge-docs")
_CORD = (("images", 1), ("seq_len", 1024))
"""A receipt of CORD v2 is one image and its text, which is not padded to the recipe's 4096 tokens. About a thousand
tokens are assumed."""
_MEDPIX = (("images", 1),)
"""MedPix has one image of 448 x 448 pixels; a sample is padded to the recipe's length."""
_FROZEN = (("frozen", "encoder"),)
_DETERMINISTIC = (("overlap", "deterministic"),)
_GRAPHS = Recipe("hybridep", "modules", recompute="none", reduces=True)
_SUPER_LONG = (*_TWO_PREDICTIONS, ("tp", 1), ("pp", 8), ("cp", 2), ("ep", 2), ("dp", 1), ("gbs", 2))
_SUPER_LORA = (*_TWO_PREDICTIONS, ("tp", 8), ("ep", 16), ("dp", 2))
_AWARE = 6
"""Bytes of a weight in float16, which completes the one in bfloat16, and two moments in bfloat16."""
_SUPER = Recipe(
    "hybridep", recompute="layernorm,moe_act,moe,core_attn", columns=_TWO_PREDICTIONS, padding=1.1, optimizer=_AWARE
)
_Rules = Mapping[str, tuple[tuple[str, Recipe], ...]]
_BRIDGE: _Rules = {
    "nemotron-3-nano-30b-a3b": (
        # These rows compare what is recomputed.
        ("skill", Recipe("hybridep", "modules", reduces=True)),
        ("h100 bf16$", _GRAPHS._replace(recompute="moe,layernorm")),
        ("h100", _GRAPHS._replace(recompute="layernorm")),
        ("", _GRAPHS),
    ),
    "nemotron-3-nano-4b": (
        ("pretrain", Recipe(recompute="none", tuned=False, reduces=True)),
        ("", Recipe(recompute="none", tuned=False)),
    ),
    "nemotron-3-super-120b-a12b": (
        ("long_context.* h100", Recipe(recompute="full", columns=(*_SUPER_LONG, ("overlap", "optimizer offloaded")))),
        ("long_context", Recipe(recompute="none", columns=_SUPER_LONG, optimizer=_AWARE)),
        ("peft", Recipe(recompute="core_attn", columns=_SUPER_LORA)),
        ("h100", _SUPER),
        ("", _GRAPHS._replace(columns=_TWO_PREDICTIONS)),
    ),
    "nemotron-3-ultra-550b-a55b": (
        ("", Recipe("hybridep", fused=True, recompute="moe", columns=_TWO_PREDICTIONS, reduces=True)),
    ),
    "nemotron-3-nano-omni-30b-a3b": (
        ("sft", Recipe(recompute="none", tuned=False, columns=(*_CORD, *_FROZEN))),
        ("", Recipe(recompute="none", tuned=False, columns=_CORD)),
    ),
    "gemma-4-26b-a4b": (
        ("sft", Recipe(recompute="full", tuned=False, columns=(*_CORD, *_FROZEN))),
        ("", Recipe(recompute="none", tuned=False, columns=_CORD)),
    ),
    "qwen3.5-27b": (
        ("performance", Recipe(recompute="none", columns=(*_MEDPIX, *_FROZEN))),
        ("pretrain", Recipe(recompute="none", tuned=False, columns=(*_MEDPIX, *_FROZEN, *_DETERMINISTIC))),
        ("long_context", Recipe(recompute="full", tuned=False, columns=(*_MEDPIX, ("mtp", 1)))),
        ("", Recipe(recompute="full", tuned=False, columns=(*_MEDPIX, ("mtp", 1), *_DETERMINISTIC))),
    ),
}
"""Recipes of Megatron Bridge 0.6 for models that have no columns, by a pattern of reference, task, device and precision
(``perf_recipes/nemotronh``, ``recipes/nemotronh``, ``recipes/nemotron_omni``, ``recipes/gemma4_vl`` and
``recipes/qwen_vl``), with what the commands of the verification cards change."""
_LOONGFORGE: _Rules = {
    "internvl2.5-8b": (("virtual", Recipe(recompute="full", columns=(("layout", "Et*7|t*9|t*7|t*9L"),))),),
    "qwen2.5-vl-7b": (("virtual", Recipe(recompute="full", columns=(("layout", "Et*6|t*8|t*6|t*8L"),))),),
}
"""Tests of LoongForge with virtual stages (``tests/llm_vlm/configs``): their layers, all of which are recomputed."""
