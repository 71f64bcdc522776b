"""Compile callees only as far as linking needs.

numba optimizes every function together with all functions that it calls, generates machine code, and repeats this for
every caller. Functions that only kernels call never run by themselves. So here a callee is only linked, and only the
kernel is optimized and translated to machine code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import _dynfunc  # type: ignore[attr-defined]
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, Flags


class _Library(JITCodeLibrary):
    """A library whose functions are optimized with the final module, not one by one before."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout


class _KernelLibrary(_Library):
    """Library of a kernel without reference counts: the passes that prune reference counts are skipped."""

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()  # type: ignore[no-untyped-call]
        passes.run(self._final_module, builder)


class _CalleeLibrary(_Library):
    """A library that is only linked."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


def _no_executable(_library: Any, description: Any, environment: Any) -> Any:
    """Return a placeholder in numba for the function that Python could call."""
    name = description.qualname.split(".")[-1]
    return _dynfunc.make_function(description.lookup_module(), name, "only linked", 0, environment, ())


class _Flags(Flags):
    """numba's flags with a fast comparison.

    For each call in a function, numba looks up compiled code by the flags of the callee. Comparing flags option by
    option took a fifth of the compile time.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Flags):
            return NotImplemented
        mine, theirs = self._values, other._values
        return bool(mine == theirs or {**_DEFAULTS, **mine} == {**_DEFAULTS, **theirs})

    def __hash__(self) -> int:
        return _FLAGS_HASH


_DEFAULTS: dict[str, Any] = Flags().values()  # type: ignore[no-untyped-call]
# The hash of the option names, which is the same for all flags.
_FLAGS_HASH = hash(Flags())  # type: ignore[no-untyped-call]


class _Compiler(Compiler):
    def compile_extra(self, func: Callable[..., Any]) -> Any:
        self.state.flags = _Flags(self.state.flags)  # type: ignore[no-untyped-call]
        return super().compile_extra(func)  # type: ignore[no-untyped-call]


class CalleeCompiler(_Compiler):
    """Compiles a function that only compiled functions call."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        """Compile as far as linking needs."""
        target = self.state.targetctx
        self.state.targetctx = target.subtarget(get_executable=_no_executable)
        self.state.library = _CalleeLibrary(target.codegen(), func.__qualname__)  # type: ignore[no-untyped-call]
        return super().compile_extra(func)


class KernelCompiler(_Compiler):
    """Compiles a function that Python calls."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        """Compile, and set the environments of linked callees, which numba does only for functions with code."""
        codegen = self.state.targetctx.codegen()
        if not self.state.flags.nrt:
            self.state.library = _KernelLibrary(codegen, func.__qualname__)  # type: ignore[no-untyped-call]
            self.state.library.enable_object_caching()
        result: Any = super().compile_extra(func)
        for environment in result._find_referenced_environments():
            codegen.set_env(environment.env_name, environment)
        return result
