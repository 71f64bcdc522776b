"""Compiled code: decorators for functions that numba compiles, and a cache for them that notices every change."""

from pipeloom.compiled.decorators import allocating, callee, inlined, int64, kernel, pointer

__all__ = ["allocating", "callee", "inlined", "int64", "kernel", "pointer"]
