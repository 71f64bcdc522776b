"""Flow matching: noise and time of each sample, and the target of the prediction."""

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
    """Distribution and weighting of times, as in the library's training scripts, and the seed.

    Noise and time of a sample depend only on this seed, the iteration and the sample's id. They do not depend on
    packing, ranks, schedule or resumption.

    Attributes
    ----------
    weighting : str
        One of the library's schemes. With ``"none"``, times are uniform. ``"logit_normal"`` and ``"mode"`` change their
        distribution. ``"sigma_sqrt"`` and ``"cosmap"`` weight the loss.
    logit_mean, logit_std : float
        Parameters of ``"logit_normal"``.
    mode_scale : float
        Parameter of ``"mode"``.
    """

    weighting: Weighting = "none"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `InputError` for an unknown scheme or an invalid standard deviation."""
        if self.weighting not in get_args(Weighting):
            raise InputError(
                "flow.weighting", f"{self.weighting!r} is unknown", f"choose from {', '.join(get_args(Weighting))}"
            )
        if not self.logit_std > 0:
            raise InputError("flow.logit_std", f"{self.logit_std} is not positive")


@dataclass(frozen=True, slots=True)
class NoisySample:
    """One noisy sample, its time, and the target.

    ``target`` is the velocity from the sample to the noise. ``weight`` is the weight of its squared error.
    """

    noisy: Tensor
    time: Tensor
    target: Tensor
    weight: Tensor


@dataclass(frozen=True, eq=False)
class NoiseSampler:
    """Draws noise and times. ``times`` and ``sigmas`` are those of the library's scheduler."""

    flow: FlowMatching
    times: Tensor
    sigmas: Tensor

    def of(self, latents: Tensor, name: str, iteration: int) -> NoisySample:
        """Return the noisy sample for an iteration. ``name`` is the sample's id."""
        from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

        flow = self.flow
        text = f"{flow.seed}\0{iteration}\0{name}".encode("utf-8", "surrogatepass")
        # Always on the CPU, because other devices draw other numbers.
        draw = torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little"))
        place = compute_density_for_timestep_sampling(
            flow.weighting, 1, flow.logit_mean, flow.logit_std, flow.mode_scale, generator=draw
        )
        number = (place * len(self.times)).long().clamp(max=len(self.times) - 1)
        clean = wide(latents)
        noise = torch.randn(latents.shape, generator=draw, dtype=torch.float32).to(clean.dtype)
        sigma = self.sigmas[number].to(clean.dtype)
        weight = compute_loss_weighting_for_sd3(flow.weighting, sigma)
        return NoisySample((1.0 - sigma) * clean + sigma * noise, self.times[number], noise - clean, weight)


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in single precision. Double precision is kept."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def loss_of(predicted: Tensor, noised: NoisySample) -> Tensor:
    """Return the weighted mean squared error of a sample."""
    target = noised.target.to(predicted.device)
    return (noised.weight.to(predicted.device) * (wide(predicted) - target) ** 2).mean()


def noising(flow: FlowMatching, scheduler: Any) -> NoiseSampler:
    """Return a `NoiseSampler` with the times and sigmas of a scheduler of the library.

    Raise `InputError` if the scheduler is not one of flow matching, or reverses the time.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    if scheduler is None:
        scheduler = FlowMatchEulerDiscreteScheduler()
    elif not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        config = scheduler.config
        if not config.get("use_flow_sigmas") or config.get("flow_shift") is None:
            name, remedy = type(scheduler).__name__, "give a FlowMatchEulerDiscreteScheduler"
            raise InputError("scheduler", f"is a {name} without sigmas of flow matching", remedy)
        # A scheduler for sampling. The library's training scripts replace it by this one.
        scheduler = FlowMatchEulerDiscreteScheduler(config.num_train_timesteps, shift=config.flow_shift)
    else:
        if scheduler.config.get("invert_sigmas"):
            problem = "has invert_sigmas: time 0 is noise, and the model predicts the velocity from noise to the sample"
            raise InputError("scheduler", problem, "train it by a script of its own")
        # A new instance, because sampling changes the times of a scheduler.
        scheduler = type(scheduler).from_config(scheduler.config)
    return NoiseSampler(flow, scheduler.timesteps.clone(), scheduler.sigmas.clone())
