"""Decorators for functions that numba compiles, and a cache on disk that notices every change of the source."""

from pipeloom.compiled.decorators import Array, allocating, callee, inlined, int64, kernel, one_of, pointer, pointers

__all__ = ["Array", "allocating", "callee", "inlined", "int64", "kernel", "one_of", "pointer", "pointers"]
