"""The runtime: plans executed on `torch.distributed`. The only home of torch."""

from pipeloom.runtime.model import Model, Module, Part

__all__ = ["Model", "Module", "Part"]
