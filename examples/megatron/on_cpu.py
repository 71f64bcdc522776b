"""Let Megatron Core run without a GPU, for the example and for trying things out. Not needed where there is a GPU."""

import warnings

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Make on the CPU what Megatron's own schedules make on ``device="cuda"``. Planned steps do not need it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def prepare() -> None:
    """Replace what Megatron's layers ask of CUDA: the device, and the state of its random numbers."""
    warnings.simplefilter("ignore")
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    # Without Transformer Engine, 0.16.1 uses this name without defining it.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # The position ids of vision models are moved to the GPU when they are made.
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_stream = lambda *_: None
    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(1)
    random._set_cuda_rng_state = lambda *_, **__: None
