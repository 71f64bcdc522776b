"""Decorators of compiled functions, with a cache on disk that notices every change of the source.

numba's own cache checks only the file of the function itself. A kernel contains the kernels that it calls, so a change
in the file of any of them must invalidate the cached code of all. So must a change of the arrays' layout. Here the
stamp of cached code is a digest of the contents of all files that it is made from (`pipeloom.compiled.stamp`).
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.core import cgutils, event, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile
from numba.core.errors import TypingError
from numba.core.runtime.nrt import rtsys
from numba.extending import intrinsic

from pipeloom.collector import collector_paused
from pipeloom.compiled.libraries import CalleeCompiler, KernelCompiler
from pipeloom.compiled.stamp import stamp
from pipeloom.compiled.turn import Turn
from pipeloom.errors import InputError

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise InputError("NUMBA_DISABLE_JIT", "is set, but kernels run only compiled", "unset it")

_njit: Any = numba.njit
Function = TypeVar("Function", bound=Callable[..., Any])
Array = npt.NDArray[Any]
"""An array argument of a compiled function."""

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
"""C code calls no function here, so numba need not create C wrappers."""
_BORROWING: dict[str, Any] = {**_OPTIONS, "_nrt": False}
"""No reference counts of arrays. Callers from Python hold all arrays until the call returns."""
_DIGEST_BYTES = hashlib.sha256().digest_size
READ_ONLY = "PIPELOOM_KERNELS"
"""Environment variable with folders of kernels that were compiled before, as by ``NUMBA_CACHE_DIR=FOLDER pipeloom
warmup``, separated as in PATH. They are only read, so they may be part of an image, or shared."""
KERNELS: list[Any] = []
"""All kernels of the imported modules."""
_CALLEE_OPTIONS: dict[str, Any] = {**_BORROWING, "no_cpython_wrapper": True, "pipeline_class": CalleeCompiler}


class BusyError(Exception):
    """Another process compiles the kernel."""


class _State:
    depth: int = 0
    """Kernels that this process is compiling: one, and those that it calls."""
    skips: bool = False
    """Whether `BusyError` is raised instead of waiting for another process."""


@contextmanager
def skipping_busy() -> Iterator[None]:
    """Raise `BusyError` for a kernel that another process compiles, instead of waiting."""
    _State.skips = True
    try:
        yield
    finally:
        _State.skips = False


class _Index(IndexDataCacheFile):
    """Cache files of one function. A file that cannot be read counts as missing.

    Every file begins with a digest of its content, of numba's version and of the stamp. Nothing else is read before the
    digest is checked, because one wrong bit in a pickle or in machine code can crash the process.
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
        """Save code under a name that depends on its key alone.

        numba counts files. If two processes compiled one function for different types at once, both would write file 1,
        and the index of the later one could name the code of the other.
        """
        index = self._load_index()
        index[key] = self._data_name(hashlib.sha256(repr(key).encode()).hexdigest()[:16])
        self._save_checked(self._data_path(index[key]), data)  # type: ignore[no-untyped-call]
        self._save_index(index)

    @property
    def has_code(self) -> bool:
        """Whether code for any types of arguments is stored."""
        return bool(self._load_index())

    def _data_name(self, number: int | str) -> str:
        return self._index_name.removesuffix("nbi") + f"{number}.nbc"

    def _checked(self, file: str) -> Any:
        """Return the object in a file, or None if the file is missing, damaged or of other code."""
        try:
            # O_NONBLOCK: opening a pipe would wait for a writer.
            with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
                digest, content = opened.read(_DIGEST_BYTES), opened.read()
            return pickle.loads(content) if digest == self._digest(content) else None
        # An undamaged pickle may still name a class that no longer exists.
        except Exception:
            return None

    def _save_checked(self, file: str, saved: Any) -> None:
        content = self._dump(saved)  # type: ignore[no-untyped-call]
        with self._open_for_write(file) as opened:
            opened.write(self._digest(content) + content)

    def _digest(self, content: bytes) -> bytes:
        return hashlib.sha256(f"{self._version} {self._source_stamp}\n".encode() + content).digest()


class _BesideSource:
    """numba's locator for the folder beside the source, without a test of whether it is writable."""

    def __init__(self, function: Any, file: str) -> None:
        self.file, self.line = file, function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, function: Any, file: str) -> _BesideSource:
        """Return the locator of a function."""
        return cls(function, file)

    def get_cache_path(self) -> str:
        """Return the folder."""
        return str(Path(self.file).parent / "__pycache__")

    def get_source_stamp(self) -> str:
        """Return nothing: files have a stamp of their own."""
        return ""

    def get_disambiguator(self) -> str:
        """Return what distinguishes functions of one name."""
        return str(self.line)


class _StampedCache(FunctionCache):
    """numba's cache with another stamp."""

    writable = True

    def __init__(self, function: Callable[..., Any], stamp: str) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        if folder := os.environ.get("NUMBA_CACHE_DIR"):
            # Checkouts share the folder: equal stamps mean equal code, wherever the source file is.
            self._cache_path = str(Path(folder, stamp))
            if self.writable:
                Path(self._cache_path).mkdir(parents=True, exist_ok=True)
        self._cache_file = own = self._index(self.cache_path, stamp)
        beside = Path(function.__code__.co_filename).parent / "__pycache__"
        folders = [Path(each, stamp) for each in os.environ.get(READ_ONLY, "").split(os.pathsep) if each]
        # The folder beside the source is where the installation may have been warmed up by another user.
        folders += [beside] if str(beside) != self.cache_path else []
        self._indices = [own, *(self._index(str(each), stamp) for each in folders)]
        self.turn = Turn(Path(self.cache_path, f"{self._impl.filename_base}.lock"))

    @property
    def has_code(self) -> bool:
        """Whether code for any types of arguments is stored."""
        return any(each.has_code for each in self._indices)

    def _index(self, folder: str, stamp: str) -> _Index:
        return _Index(folder, self._impl.filename_base, stamp)  # type: ignore[no-untyped-call]

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Load cached code without numba's setup for compiling.

        numba first registers everything that code could call, which takes half a second because it searches for SciPy's
        BLAS. Compiled code needs only the runtime for arrays. If the cache has no code, numba's own method follows. If
        another process is compiling it, wait for that process, see `pipeloom.compiled.turn`.
        """
        rtsys.initialize(target_context)
        found = self._found(signature, target_context)
        if found is None:
            if not self.turn.take(0.0 if _State.skips and _State.depth == 1 else None):
                raise BusyError
            found = self._found(signature, target_context)
        return found

    def save_overload(self, signature: Any, data: Any) -> None:
        """Save code. An error of the file system is ignored: the next process compiles again."""
        with suppress(OSError):
            super().save_overload(signature, data)  # type: ignore[no-untyped-call]

    def _found(self, signature: Any, target_context: Any) -> Any:
        with self._guard_against_spurious_io_errors():
            key = self._index_key(signature, target_context.codegen())  # type: ignore[no-untyped-call]
            for index in self._indices:
                code = index.load(key)
                if code is not None:
                    return self._impl.rebuild(target_context, code)
        return super().load_overload(signature, target_context)  # type: ignore[no-untyped-call]


class _ReadOnlyImpl(CompileResultCacheImpl):
    _locator_classes: Any = (_BesideSource,)


class _ReadOnlyCache(_StampedCache):
    """Reads code that was stored by others, where no folder is writable."""

    writable = False
    _impl_class: Any = _ReadOnlyImpl

    def save_overload(self, signature: Any, data: Any) -> None:
        """Save nothing."""


def has_code(kernel: Any) -> bool:
    """Return whether code of a kernel is stored."""
    return isinstance(kernel._cache, _StampedCache) and kernel._cache.has_code


def is_storable(kernel: Any) -> bool:
    """Return whether code of a kernel can be stored."""
    return isinstance(kernel._cache, _StampedCache) and kernel._cache.writable


def kernel(function: Function) -> Function:
    """Compile a function at its first call, to run without the GIL, and cache the code on disk.

    It and the functions that it calls may not create arrays, nor call NumPy functions that do, only views of their
    arguments: see `allocating`.
    """
    return cast(Function, _cached(_njit(**_BORROWING, pipeline_class=KernelCompiler)(function)))


def allocating(function: Function) -> Function:
    """Compile a `kernel` that creates arrays, and therefore counts references to all arrays."""
    return cast(Function, _cached(_njit(**_OPTIONS, _nrt=True, pipeline_class=KernelCompiler)(function)))


def callee(function: Function) -> Function:
    """Compile a function that only compiled functions call, without a wrapper for calls from Python.

    For dozens of array arguments, the wrapper takes longer to compile than the function. The function has no file of
    its own on disk: each caller contains it. It may create arrays only if all its callers are `allocating`.
    """
    return cast(Function, _for_types(_njit(**_CALLEE_OPTIONS)(function)))


def inlined(function: Function) -> Function:
    """Compile a `callee` that is always inlined in its callers."""
    return cast(Function, _for_types(_njit(**_CALLEE_OPTIONS, forceinline=True)(function)))


def one_of(functions: Sequence[Any], first: int = 0) -> Any:
    """Return a compiled function ``(number, *arguments)`` that calls one of several compiled functions.

    It searches the number by halves, because kernels have no tables of functions.

    Parameters
    ----------
    functions : sequence
        Compiled functions with the same types of arguments and results.
    first : int
        Number of the first function.

    Raises
    ------
    TypeError
        A function is not compiled, or takes another number of arguments than the first one.
    """
    for each in functions:
        if not hasattr(each, "py_func"):
            raise TypeError(f"{each.__qualname__} must be compiled: decorate it with @callee")
        expected, takes = (one.py_func.__code__.co_argcount for one in (functions[0], each))
        if takes != expected:
            raise TypeError(f"{each.py_func.__qualname__} takes {takes} arguments, not {expected} as the others")
    if len(functions) == 1:
        only = functions[0]

        @inlined
        def call(_number: int, *arguments: Any) -> Any:
            return only(*arguments)

        return call
    half = len(functions) // 2
    middle = first + half
    low, high = one_of(functions[:half], first), one_of(functions[half:], middle)

    @inlined
    def choose(number: int, *arguments: Any) -> Any:
        if number < middle:
            return low(number, *arguments)
        return high(number, *arguments)

    return choose


def _cached(compiled: Any) -> Any:
    """Load code from disk, and cache it there if there is a writable folder."""
    KERNELS.append(compiled)
    cache = _cache_of(compiled.py_func)
    if cache is None:
        return _for_types(compiled)
    compiled._cache = cache
    compile_for = _for_types(compiled).compile

    def compile_in_turn(signature: Any) -> Any:
        _State.depth += 1
        try:
            # Garbage collection would take a ninth of the compile time, because it visits all imported objects.
            with collector_paused():
                return compile_for(signature)
        except TypingError as error:
            raise TypingError(_cause(error)) from error
        finally:
            _State.depth -= 1
            cache.turn.end()

    compiled.compile = compile_in_turn
    return compiled


def _cause(error: TypingError) -> str:
    """Return what and where in one line. numba repeats both for every caller."""
    lines = [line.strip() for line in str(error).splitlines()]
    what = next((line for line in lines if line and not line.startswith("Failed in nopython mode")), "")
    where = next((line for line in lines if line.startswith("File ")), "")
    return f"{where} {what}".strip()


def _cache_of(function: Callable[..., Any]) -> _StampedCache | None:
    """Return the cache of a function, or one that is only read. None if a setting of numba allows neither."""
    for kind in (_StampedCache, _ReadOnlyCache):
        with suppress(RuntimeError, OSError):  # RuntimeError: numba found no writable folder
            return kind(function, stamp(Path(function.__code__.co_filename)))
    return None


def _for_types(compiled: Any) -> Any:
    """Compile a function for types of arguments, never for literals.

    A variable that is initialized with a literal has a literal type for one round of type inference. numba would
    compile each function that receives it for that type too.
    """
    compile_for = compiled.compile

    def compile_types(signature: Any) -> Any:
        unliteral: Any = types.unliteral
        return compile_for(tuple(unliteral(each) for each in signature))

    compiled.compile = compile_types
    return compiled


class _FirstCompilation(event.Listener):
    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell, self.called = tell, False

    def on_start(self, _event: Any) -> None:
        if not self.called:
            self.called = True
            self.tell()

    def on_end(self, _event: Any) -> None:
        pass


def before_compiling(tell: Callable[[], None]) -> AbstractContextManager[None]:
    """Return a context in which ``tell`` is called once, when a function is not in the cache and must be compiled."""
    listening: AbstractContextManager[None] = event.install_listener("numba:compile", _FirstCompilation(tell))
    return listening


def _pointer(_typing: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        struct: Any = cgutils.create_struct_proxy(signature.args[0])  # type: ignore[no-untyped-call]
        return struct(context, builder, arguments[0]).data

    if not isinstance(array, types.Array) or array.layout != "C":
        return None
    made: Any = types.CPointer(array.dtype)  # type: ignore[no-untyped-call]
    return made(array), generate


def _pointers(_typing: Any, arrays: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        values = [builder.extract_value(arguments[0], i) for i in range(len(arrays))]
        for i, each in enumerate(arrays):
            if isinstance(each, types.Array):
                struct: Any = cgutils.create_struct_proxy(each)  # type: ignore[no-untyped-call]
                values[i] = struct(context, builder, values[i]).data
        return context.make_tuple(builder, made, values)

    named: Any = types.BaseNamedTuple
    if not isinstance(arrays, named):
        return None
    kinds: list[Any] = []
    for each in arrays:
        if isinstance(each, types.Array) and each.layout != "C":
            return None
        kinds.append(types.CPointer(each.dtype) if isinstance(each, types.Array) else each)  # type: ignore[no-untyped-call]
    made: Any = types.BaseTuple.from_types(kinds, arrays.instance_class)  # type: ignore[no-untyped-call]
    return made(arrays), generate


pointer: Any = intrinsic(_pointer)
"""``pointer(array)``: pointer to the first element of a contiguous array, which the kernel must hold.

Pointers are indexed in C order. They have no reference count, which in an inlined function can take longer than its
work, and their indices are not checked for negative values.
"""
pointers: Any = intrinsic(_pointers)
"""``pointers(arrays)``: the same named tuple with a `pointer` in place of each array. Other fields do not change."""

int64: Any = np.int64
"""Convert a narrower integer to 64 bits."""
