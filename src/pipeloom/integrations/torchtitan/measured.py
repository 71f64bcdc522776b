"""Measure the costs of a torchtitan model's parts: each runs alone on the job's device, forward and backward."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipeloom.integrations.torchtitan.costs import Costs, completed
from pipeloom.integrations.torchtitan.parts import VISION, is_other, model_part
from pipeloom.runtime.measure.workbench import Workbench

_LOG = logging.getLogger(__name__)
_WARM_UP, _REPEATS = 2, 5
_EMBEDDING, _HEAD = "tok_embeddings", "lm_head"


@dataclass(frozen=True)
class Trial:
    """One microbatch of the job, with which parts run.

    Attributes
    ----------
    rows : int
        Number of sequences.
    length : int
        Tokens per sequence.
    dtype : torch.dtype
        Type of weights and activations.
    vision_tokens : float
        Patches per token.
    """

    rows: int
    length: int
    device: torch.device
    dtype: torch.dtype
    vision_tokens: float = 1.0

    @cached_property
    def positions(self) -> Tensor:
        """Positions of all tokens, of shape (rows, length)."""
        return torch.arange(self.length, device=self.device).expand(self.rows, -1).contiguous()

    def tokens(self, vocabulary: int) -> Tensor:
        """Return random token IDs, of shape (rows, length)."""
        return torch.randint(vocabulary, (self.rows, self.length), device=self.device)

    def hidden(self, rows: int, length: int, width: int) -> Tensor:
        """Return random hidden states or pixels."""
        return torch.randn(rows, length, width, device=self.device, dtype=self.dtype)

    def image_side(self, merged: int) -> int:
        """Return the patches along each side of a square image, with one image per sequence."""
        return merged * max(1, round(math.sqrt(self.vision_tokens * self.length) / merged))


def measured_costs(model: Any, estimated: Costs, trial: Trial) -> dict[str, float]:
    """Measure the seconds of a forward and backward of one microbatch, by part, in the order in which parts run.

    Every rank measures one part at a time, with random weights and inputs, so that it needs memory for one part of the
    model, which is on the ``meta`` device. Identical parts are measured once. All ranks use the median over ranks. The
    head includes a cross entropy over its logits. Layers run whole, without tensor and expert parallelism, activation
    checkpointing and compilation. A part that does not run alone on all ranks is estimated, with a warning.
    """
    mine = _measured_here(model, estimated, trial)
    every = [mine]
    if dist.is_initialized():
        every = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, mine)
    known = {}
    for name in mine:
        found = [each[name] for each in every]
        failures = [value for value in found if isinstance(value, str)]
        if failures:
            _LOG.warning("The cost of %s is estimated, since it cannot be measured alone: %s", name, failures[0])
        else:
            known[name] = statistics.median(value for value in found if not isinstance(value, str))
    return completed(known, estimated)


def _measured_here(model: Any, estimated: Costs, trial: Trial) -> dict[str, float | str]:
    """Return the seconds of each part on this rank, or why it cannot be measured."""
    seconds: dict[str, float | str] = {}
    kinds: dict[Any, float | str] = {}
    chain = [[name] for name in estimated if name != "norm"]
    chain[-1] = ["norm", _HEAD]
    devices = [trial.device] if trial.device.type != "cpu" else []
    # Weights that are initialized later must not depend on measuring.
    with torch.random.fork_rng(devices, device_type=trial.device.type if devices else "cuda"), torch.enable_grad():
        for number, names in enumerate(chain):
            name = names[-1]
            # The first part also embeds patches.
            alone = number == 0 or ".layers." not in f".{name}"
            kind = name if alone else _kind(model.get_submodule(name))
            if kind not in kinds:
                try:
                    kinds[kind] = _seconds(*_runnable(model, chain, number, trial), trial)
                except Exception as error:
                    kinds[kind] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            seconds[name] = kinds[kind]
    return seconds


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Return a key that layers with the same cost share: modules, shapes of weights, and plain attributes."""

    def parts() -> Iterator[Any]:
        for name, part in layer.named_modules():
            plain = {key: value for key, value in vars(part).items() if isinstance(value, (bool, int, float, str))}
            shapes = tuple((key, tuple(weight.shape)) for key, weight in part.named_parameters(recurse=False))
            yield name, type(part), tuple(sorted(plain.items())), shapes

    return tuple(parts())


def _runnable(model: Any, chain: list[list[str]], number: int, trial: Trial) -> tuple[Callable[..., Tensor], Tensor]:
    """Return a function that runs a part with weights, and its input."""
    name = chain[number][-1]
    cuts_encoder = chain[0][0].startswith(f"{VISION}.")
    if name == VISION or is_other(name):
        raise NotImplementedError(f"the inputs of a {type(model.get_submodule(name)).__name__} are unknown")
    part = model_part(model, chain, number)
    part.to_empty(device=trial.device)
    with torch.no_grad():
        part.init_weights(buffer_device=None)
        for parameter in part.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(trial.dtype)
    part.train()
    if name.startswith(VISION) or (name == _EMBEDDING and cuts_encoder):
        encoder, config = part.vision_encoder, model.vision_encoder
        side = trial.image_side(getattr(config, "spatial_merge_size", 1))
        grid = torch.tensor([[1, side, side]], device=trial.device).expand(trial.rows, 3).contiguous()
        weight = config.patch_embed.weight
        width = weight.shape[1] if number == 0 else weight.shape[0]
        return lambda x: encoder(x, grid_thw=grid), trial.hidden(trial.rows, side * side, width)
    vocabulary, width = model.tok_embeddings.weight.shape
    given = trial.tokens(vocabulary) if name == _EMBEDDING else trial.hidden(trial.rows, trial.length, width)
    keywords = {"positions": trial.positions, **_masks(part, trial)}
    if name != _HEAD:
        return lambda x: part(x, **keywords), given
    targets = trial.tokens(vocabulary).flatten()
    return lambda x: F.cross_entropy(part(x, **keywords).flatten(0, 1).float(), targets), given


def _masks(part: Any, trial: Trial) -> Mapping[str, Any]:
    """Return the masks that torchtitan's trainer passes to attention."""
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention

    inner = getattr(part.config.first_attention, "inner_attention", None)
    if not isinstance(inner, (FlexAttention.Config, VarlenAttention.Config)):
        return {}
    return {"attention_masks": part.get_attention_masks(positions=trial.positions)}


def _seconds(run: Callable[..., Tensor], given: Tensor, trial: Trial) -> float:
    """Return the median seconds of a forward and backward."""
    bench = Workbench(trial.device)
    given.requires_grad_(given.is_floating_point())
    found = []
    for _ in range(_WARM_UP + _REPEATS):
        given.grad = None
        begin = bench.now_s()
        output = run(given)
        torch.autograd.backward(output, torch.ones_like(output))
        found.append(bench.now_s() - begin)
    return statistics.median(found[_WARM_UP:])
