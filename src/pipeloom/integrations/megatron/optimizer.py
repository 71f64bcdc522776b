"""Read the bytes of gradients and optimizer states from Megatron's arguments."""

from __future__ import annotations

from pipeloom.integrations.megatron.arguments import Arguments
from pipeloom.spec.parallelism import StateBytes

_BYTES = {
    **dict.fromkeys(("fp32", "float32", "float"), 4),
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "half"), 2),
    **dict.fromkeys(("fp8", "uint8"), 1),
}
_MOMENTS = {"sgd": 1, "lion": 1}
"""Moments per parameter of optimizers that do not have two, as Adam does."""


def read_state(arguments: Arguments) -> StateBytes:
    """Read the bytes of a parameter's gradient and of its optimizer state.

    Raises
    ------
    InputError
        A data type is unknown, or the precision-aware optimizer is not one that Megatron accepts.
    """
    main_gradient = _bytes(arguments, "main-grads-dtype")
    gradient = 4
    if not arguments.flag("accumulate-allreduce-grads-in-fp32"):
        # The arguments reduce gradients of bfloat16 in float32 by default; Megatron Core's configuration does not.
        in_bf16 = arguments.flag("grad-reduce-in-bf16") or arguments.is_recipe
        if arguments.flag("fp16") or (in_bf16 and arguments.flag("bf16")):
            gradient = 2
        elif arguments.flag("bf16"):
            gradient = main_gradient
    name = (arguments.text("optimizer") or "adam").lower()
    kinds = [_bytes(arguments, kind) for kind in ("main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype")]
    if arguments.flag("use-precision-aware-optimizer"):
        if name != "adam" or not arguments.flag("use-distributed-optimizer"):
            raise arguments.refuse(
                "use-precision-aware-optimizer",
                "goes with --optimizer adam and --use-distributed-optimizer alone",
                "add these, or leave it out",
            )
        return StateBytes(gradient, sum(kinds))
    moments = _MOMENTS.get(name, 2)
    if name == "sgd" and arguments.text("sgd-momentum") in ("0", "0.0"):
        moments = 0
    return StateBytes(gradient, 4 + 4 * moments)


def _bytes(arguments: Arguments, name: str) -> int:
    text = arguments.text(name) or "fp32"
    number = _BYTES.get(text.removeprefix("torch."))
    if number is None:
        raise arguments.refuse(name, f"{text!r} is not one of fp32, bf16, fp16, fp8")
    return number
