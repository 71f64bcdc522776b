"""How much of a compiled function is made when: a callee is machine code only within the kernels that contain it.

numba optimises every function together with all that it calls, makes machine code of it, and does so again with
whoever calls it. Of functions that only kernels call, nobody ever runs that code. So here a callee is linked, and it
is the kernel that is optimised and made machine code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import _dynfunc  # type: ignore[attr-defined]
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, Flags


class _Library(JITCodeLibrary):
    """Code whose functions are optimised with the module that they end up in, and not one by one before."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout


class _KernelLibrary(_Library):
    """Code of a kernel that counts no references: nothing is to be tidied up for the sake of pruning those."""

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()  # type: ignore[no-untyped-call]
        passes.run(self._final_module, builder)


class _CalleeLibrary(_Library):
    """Code that is linked only."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


def _no_executable(_library: Any, description: Any, environment: Any) -> Any:
    """What stands for the function inside numba, in place of what Python could call."""
    name = description.qualname.split(".")[-1]
    return _dynfunc.make_function(description.lookup_module(), name, "only linked", 0, environment, ())


class _Flags(Flags):
    """numba's flags, compared without asking for every option.

    For each call inside a function, numba looks up what it has compiled by the flags of that function too: a fifth of
    all compiling was comparing these.
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
# Of the options' names, and so the same for all.
_FLAGS_HASH = hash(Flags())  # type: ignore[no-untyped-call]


class _Compiler(Compiler):
    def compile_extra(self, func: Callable[..., Any]) -> Any:
        self.state.flags = _Flags(self.state.flags)  # type: ignore[no-untyped-call]
        return super().compile_extra(func)  # type: ignore[no-untyped-call]


class CalleeCompiler(_Compiler):
    """Compiles a function that only compiled functions call."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        """Compile as far as it takes to link it."""
        target = self.state.targetctx
        self.state.targetctx = target.subtarget(get_executable=_no_executable)
        self.state.library = _CalleeLibrary(target.codegen(), func.__qualname__)  # type: ignore[no-untyped-call]
        return super().compile_extra(func)


class KernelCompiler(_Compiler):
    """Compiles a function that Python calls."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        """Compile, and give what was linked the environments that numba gives to code that can be called."""
        codegen = self.state.targetctx.codegen()
        if not self.state.flags.nrt:
            self.state.library = _KernelLibrary(codegen, func.__qualname__)  # type: ignore[no-untyped-call]
            self.state.library.enable_object_caching()
        result: Any = super().compile_extra(func)
        for environment in result._find_referenced_environments():
            codegen.set_env(environment.env_name, environment)
        return result
