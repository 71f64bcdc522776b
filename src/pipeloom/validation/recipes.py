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
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from pipeloom.spec.trainer import Dispatcher
from pipeloom.validation.runs import PublishedRun

_SOURCES = ("megatron-bridge", "bridge-cards")
_NEWEST = (26, 8)
"""Release of the verification cards."""


class Recipe(NamedTuple):
    """Settings of a recipe.

    Attributes
    ----------
    dispatcher : Dispatcher
        How tokens reach their experts.
    graphs : str
        What CUDA graphs launch: nothing, attention and router (``modules``), or the whole iteration.
    overlaps : bool
        Whether messages of experts overlap with the computation of another microbatch.
    fused : bool
        Whether one kernel computes the experts of a device with their activation.
    recompute : str or None
        Modules that are recomputed; None: the table of runs says it.
    expert : int or None
        Degree of expert parallelism; None: the table of runs says it.
    engine : bool
        Whether a trainer of eager PyTorch has Transformer Engine's products and norms.
    attention : str or None
        Its attention, as in the table of runs; None: the table says it.
    """

    dispatcher: Dispatcher = "alltoall"
    graphs: Literal["none", "modules", "iteration"] = "none"
    overlaps: bool = False
    fused: bool = False
    recompute: str | None = None
    expert: int | None = None
    engine: bool = False
    attention: str | None = None


_AUTOMODEL = {
    "gpt-oss-120b": Recipe("deepep", recompute="none", expert=64, engine=True),
    "qwen3-30b-a3b": Recipe("deepep", recompute="full", expert=8, engine=True, attention="te"),
}
"""``gptoss_120b_te_deepep.yaml`` and ``qwen3_moe_30b_te_deepep.yaml``."""


def recipe_of(published: PublishedRun) -> Recipe | None:
    """Return the recipe of a run; None if it has none."""
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
    return published.source in _SOURCES and recipe_of(published) is not None


def states_recompute(published: PublishedRun) -> bool:
    """Return whether the source states what is recomputed, rather than the recipe of another release."""
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
