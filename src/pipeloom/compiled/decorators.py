"""Decorators of compiled functions, with a cache on disk that notices every change.

numba's own cache looks at the file of the function alone. A kernel that calls another one contains it, so a
change in the other's file must throw the cached code of both away; so must a change of the arrays' layout. Here
the stamp of cached code is a digest of all files that it is made from (`pipeloom.compiled.stamp`), contents and not
dates.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import cgutils, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.runtime.nrt import rtsys
from numba.extending import intrinsic

from pipeloom.collector import collector_paused
from pipeloom.compiled.libraries import CalleeCompiler, KernelCompiler
from pipeloom.compiled.stamp import stamp
from pipeloom.compiled.turn import Turn

_njit: Any = numba.njit
Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
"""Nothing here is called by C, so no code is made for that."""
_BORROWING: dict[str, Any] = {**_OPTIONS, "_nrt": False}
"""References to arrays are not counted: those who call from Python hold all arrays until the call returns."""
_DIGEST_BYTES = hashlib.sha256().digest_size
_CALLEE_OPTIONS: dict[str, Any] = {**_BORROWING, "no_cpython_wrapper": True, "pipeline_class": CalleeCompiler}


class _Index(IndexDataCacheFile):
    """What is cached of a function; what cannot be read is as good as nothing.

    Every file begins with a digest of the rest, of numba's version and of the stamp. Neither a pickle nor machine code
    is looked at before its digest is right: one wrong bit in them can end the process.
    """

    def _load_index(self) -> Any:
        """Load the index. Its keys name the types of arguments, which may have moved since it was written."""
        return self._checked(self._index_path) or {}

    def _save_index(self, overloads: Any) -> None:
        self._save_checked(self._index_path, overloads)

    def load(self, key: Any) -> Any:
        """Load code."""
        name = self._load_index().get(key)
        return None if name is None else self._checked(self._data_path(name))  # type: ignore[no-untyped-call]

    def save(self, key: Any, data: Any) -> None:
        """Save code under a name that its key alone decides.

        numba counts files. Of two processes that compile one function for different types at once, each would write
        file 1, and the index of the later one could name the code of the other.
        """
        index = self._load_index()
        index[key] = self._data_name(hashlib.sha256(repr(key).encode()).hexdigest()[:16])
        self._save_checked(self._data_path(index[key]), data)  # type: ignore[no-untyped-call]
        self._save_index(index)

    def _data_name(self, number: int | str) -> str:
        return self._index_name.removesuffix("nbi") + f"{number}.nbc"

    def _checked(self, file: str) -> Any:
        """Return the object that was saved in a file; None where it is missing, damaged, or of other code."""
        try:
            # Opening a pipe would wait for a writer.
            with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
                digest, content = opened.read(_DIGEST_BYTES), opened.read()
            return pickle.loads(content) if digest == self._digest(content) else None
        # What was saved whole may still name a class that is gone.
        except Exception:
            return None

    def _save_checked(self, file: str, saved: Any) -> None:
        content = self._dump(saved)  # type: ignore[no-untyped-call]
        with self._open_for_write(file) as opened:
            opened.write(self._digest(content) + content)

    def _digest(self, content: bytes) -> bytes:
        return hashlib.sha256(f"{self._version} {self._source_stamp}\n".encode() + content).digest()


class _StampedCache(FunctionCache):
    """numba's cache with another stamp."""

    def __init__(self, function: Callable[..., Any], stamp: str) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        if folder := os.environ.get("NUMBA_CACHE_DIR"):
            # Shared by checkouts: what has the same stamp is the same code, wherever its file lies.
            self._cache_path = str(Path(folder, stamp))
            Path(self._cache_path).mkdir(parents=True, exist_ok=True)
        place = {"cache_path": self.cache_path, "filename_base": self._impl.filename_base}
        self._cache_file = _Index(**place, source_stamp=stamp)  # type: ignore[no-untyped-call]
        self.turn = Turn(Path(self.cache_path, f"{self._impl.filename_base}.lock"))

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Load cached code; unlike numba's own way, without all that only compiling needs.

        numba first registers whatever code could call, half a second with its search for SciPy's BLAS. Code that is
        compiled already only needs the runtime for arrays. What is not in the cache takes numba's way.
        What another process is compiling is waited for; see `pipeloom.compiled.turn`.
        """
        rtsys.initialize(target_context)
        found = self._found(signature, target_context)
        if found is None:
            self.turn.take()
            found = self._found(signature, target_context)
        return found

    def save_overload(self, signature: Any, data: Any) -> None:
        """Keep code, where there is room for it: whoever finds none compiles."""
        with suppress(OSError):
            super().save_overload(signature, data)  # type: ignore[no-untyped-call]

    def _found(self, signature: Any, target_context: Any) -> Any:
        with self._guard_against_spurious_io_errors():
            found = self._load_overload(signature, target_context)  # type: ignore[no-untyped-call]
            if found is not None:
                return found
        return super().load_overload(signature, target_context)  # type: ignore[no-untyped-call]


def kernel(function: Function) -> Function:
    """Compile a function at its first call, without the interpreter's lock, and keep the code on disk.

    It and what it calls may make no arrays, nor call what does so in NumPy, only views of those that it gets: see
    `allocating`.
    """
    return cast(Function, _kept(_njit(**_BORROWING, pipeline_class=KernelCompiler)(function)))


def allocating(function: Function) -> Function:
    """Compile a `kernel` that makes arrays of its own, and therefore counts references to all arrays."""
    return cast(Function, _kept(_njit(**_OPTIONS, _nrt=True, pipeline_class=KernelCompiler)(function)))


def callee(function: Function) -> Function:
    """Compile a function that only compiled functions call, without what it takes to call it from Python.

    Where it gets dozens of arrays, that is longer than the function. It is no file of its own on disk: whoever calls
    it contains it.
    """
    return cast(Function, _for_types(_njit(**_CALLEE_OPTIONS)(function)))


def inlined(function: Function) -> Function:
    """Compile a `callee` that has no code of its own in whoever calls it."""
    return cast(Function, _for_types(_njit(**_CALLEE_OPTIONS, forceinline=True)(function)))


def _kept(compiled: Any) -> Any:
    """Keep code on disk, where there is a place that can be written."""
    try:
        cache = _StampedCache(compiled.py_func, stamp(Path(compiled.py_func.__code__.co_filename)))
    except (RuntimeError, OSError):  # numba's word for no such place
        return _for_types(compiled)
    compiled._cache = cache
    compile_for = _for_types(compiled).compile

    def compile_in_turn(signature: Any) -> Any:
        try:
            # A ninth of compiling would be looks at all that the process has imported.
            with collector_paused():
                return compile_for(signature)
        finally:
            cache.turn.end()

    compiled.compile = compile_in_turn
    return compiled


def _for_types(compiled: Any) -> Any:
    """Let a function be compiled for types of arguments alone, not for literals.

    A variable that begins with a literal has its type for one round of type inference, and numba compiled whatever it
    is given to for that, too.
    """
    compile_for = compiled.compile

    def compile_types(signature: Any) -> Any:
        unliteral: Any = types.unliteral
        return compile_for(tuple(unliteral(each) for each in signature))

    compiled.compile = compile_types
    return compiled


def _pointer(_typing: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        struct: Any = cgutils.create_struct_proxy(signature.args[0])  # type: ignore[no-untyped-call]
        return struct(context, builder, arguments[0]).data

    if not isinstance(array, types.Array) or array.layout != "C":
        return None
    made: Any = types.CPointer(array.dtype)  # type: ignore[no-untyped-call]
    return made(array), generate


pointer: Any = intrinsic(_pointer)
"""``pointer(array)``: first element of a contiguous array, to be indexed in C's order by a kernel that holds the array.

A pointer is neither counted, which in an inlined function can take longer than its work, nor are indices
tested for those that count from the end.
"""

int64: Any = np.int64
"""Widens a narrower number."""
