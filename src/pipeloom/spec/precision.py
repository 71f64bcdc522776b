"""Precisions of matrix products: what a number of a quantized tensor takes, and which products of a device it uses."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from pipeloom.errors import InputError
from pipeloom.spec.hardware import DeviceSpec

Precision = Literal["bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"]
"""Precision of the matrix products of linear layers, by the recipes of Transformer Engine.

FP8 has one scale for a tensor, from earlier steps (delayed) or from the tensor itself (current), or a scale for 128
numbers, of a weight for 128 x 128 (block). MXFP8 has a scale for 32 numbers, NVFP4 for 16.
"""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


class Quantization(NamedTuple):
    """How linear layers quantize their inputs, weights and gradients."""

    products: str
    """Kind of the device's products, by which their rate and efficiency are looked up."""
    num_bytes: float
    """Bytes of a number of a quantized tensor, with its part of the scales."""
    copies: int = 2
    """Quantized copies of a tensor: by rows and by columns, unless products take one copy either way."""
    amax_reads: int = 0
    """Times that a tensor is read before it is quantized, for its largest absolute value."""

    def cast_bytes(self, from_bytes: float) -> float:
        """Return the bytes that are read and written to quantize a number of ``from_bytes`` bytes."""
        return from_bytes * (1 + self.amax_reads) + self.num_bytes * self.copies


RECIPES: dict[Precision, Quantization] = {
    # Scales: float32 for each 128 numbers; 1 byte for each 32; 1 byte for each 16. Amax: of delayed scaling, the cast
    # itself finds the next step's; blocks find theirs while they cast. NVFP4 has a scale of the whole tensor too, and
    # its Hadamard transform and stochastic rounding are part of the two passes.
    "fp8_delayed": Quantization("fp8", 1.0),
    "fp8_current": Quantization("fp8", 1.0, amax_reads=1),
    "fp8_block": Quantization("fp8_block", 1.0 + 4 / 128),
    "mxfp8": Quantization("mxfp8", 1.0 + 1 / 32),
    "nvfp4": Quantization("nvfp4", 0.5 + 1 / 16, amax_reads=1),
}
"""How each precision quantizes."""


def quantization(precision: Precision, device: DeviceSpec) -> Quantization | None:
    """Return how linear layers quantize on a device; None for bfloat16.

    Raise `InputError` if the device has no such products.
    """
    if precision == "bf16":
        return None
    found = RECIPES[precision]
    if found.products not in device.quantized_products:
        able = [each for each in PRECISIONS[1:] if RECIPES[each].products in device.quantized_products]
        raise InputError(
            f"device {device.name!r}",
            f"has no products of precision {precision}",
            f"use bf16{''.join(f', {each}' for each in able)}, or another device",
        )
    # Products of Ada and Hopper read FP8 along rows alone, so the backward needs transposed copies. Those of Blackwell
    # read it either way, but scales of blocks belong to rows or to columns.
    one_copy = found.products == "fp8" and device.fp4_flops_per_s > 0
    return found._replace(copies=1) if one_copy else found
