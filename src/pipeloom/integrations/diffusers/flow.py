"""Flow matching: the noise and the time of every sample, and what the transformer is to predict."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pipeloom.errors import InputError

Weighting = Literal["none", "logit_normal", "mode", "sigma_sqrt", "cosmap"]


@dataclass(frozen=True, kw_only=True)
class FlowMatching:
    """How times are drawn and weighted, as the library's training scripts do it, and from which seed.

    Noise and time of a sample depend on this seed, the iteration and the sample's id, and on nothing else: not on the
    packing, the ranks or the schedule, nor on whether training was resumed.

    Attributes
    ----------
    weighting : str
        One of the library's schemes. ``"none"``: times are uniform; ``"logit_normal"`` and ``"mode"`` draw them
        otherwise; ``"sigma_sqrt"`` and ``"cosmap"`` weight the loss.
    logit_mean, logit_std : float
        Of ``"logit_normal"``.
    mode_scale : float
        Of ``"mode"``.
    seed : int
    """

    weighting: Weighting = "none"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a scheme that is none of the library's."""
        if self.weighting not in get_args(Weighting):
            raise InputError(
                "flow.weighting", f"{self.weighting!r} is none", f"there are {', '.join(get_args(Weighting))}"
            )
        if not self.logit_std > 0:
            raise InputError("flow.logit_std", f"{self.logit_std} is not positive")


@dataclass(frozen=True, slots=True)
class Noised:
    """One sample as the transformer gets it, and what is asked of it.

    ``target`` is the velocity from the sample to the noise; ``weight`` is that of its squared error.
    """

    noisy: Tensor
    time: Tensor
    target: Tensor
    weight: Tensor


@dataclass(frozen=True, eq=False)
class Noising:
    """Draws noise and times; ``times`` and ``sigmas`` are those of the library's scheduler."""

    flow: FlowMatching
    times: Tensor
    sigmas: Tensor

    def of(self, latents: Tensor, name: str, iteration: int) -> Noised:
        """Return a sample with noise.

        Parameters
        ----------
        latents : Tensor
        name : str
            The sample's id.
        iteration : int
        """
        from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

        flow = self.flow
        text = f"{flow.seed}\0{iteration}\0{name}".encode("utf-8", "surrogatepass")
        # Always on the CPU: other devices draw other numbers.
        draw = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little"))
        place = compute_density_for_timestep_sampling(
            flow.weighting, 1, flow.logit_mean, flow.logit_std, flow.mode_scale, generator=draw
        )
        number = (place * len(self.times)).long().clamp(max=len(self.times) - 1)
        clean = wide(latents)
        noise = torch.randn(latents.shape, generator=draw, dtype=torch.float32).to(clean.dtype)
        sigma = self.sigmas[number].to(clean.dtype)
        weight = compute_loss_weighting_for_sd3(flow.weighting, sigma)
        return Noised((1.0 - sigma) * clean + sigma * noise, self.times[number], noise - clean, weight)


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in single precision, or in double where it is so already."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def noising(flow: FlowMatching, scheduler: Any) -> Noising:
    """Return what draws noise and times as a scheduler of the library has them.

    Raises
    ------
    InputError
        The scheduler is none of flow matching.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    if scheduler is None:
        scheduler = FlowMatchEulerDiscreteScheduler()
    elif not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        config = scheduler.config
        if not config.get("use_flow_sigmas") or config.get("flow_shift") is None:
            name, remedy = type(scheduler).__name__, "give a FlowMatchEulerDiscreteScheduler"
            raise InputError("scheduler", f"is a {name} without sigmas of flow matching", remedy)
        # One for sampling; training scripts put this in its place.
        scheduler = FlowMatchEulerDiscreteScheduler(config.num_train_timesteps, shift=config.flow_shift)
    else:
        # Anew: one that has sampled has other times.
        scheduler = type(scheduler).from_config(scheduler.config)
    return Noising(flow, scheduler.timesteps.clone(), scheduler.sigmas.clone())
