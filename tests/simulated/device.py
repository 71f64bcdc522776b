"""The device ``sim``: tensors whose contents are CPU tensors, and the functions of a device module.

PyTorch's Python backend has one device. Here each thread has one of its own (`torch.sim.set_device`), whose number is
the ``place`` of its tensors; ``sim:1`` and so on name another thread's.

Operations run at once on the CPU. What is simulated is which memory they use, in which stream, and what the host knows.
Pinned memory is CPU memory that `pin` returns; operations of the host on it are seen inside `watching`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from pipeloom.runtime.launch import accelerator

from .clocks import Block, Clock, RaceError, Stream, World, in_engine

NUM_DEVICES = 16
KIND = "sim"
_COPIES = ("aten._to_copy.default", "aten.copy_.default", "aten._copy_from.default")
_HOST_READS = ("aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default")
"""Operations whose result the host gets."""
_SIZE_READS = (
    *("aten.nonzero.default", "aten.masked_select.default", "aten._unique2.default", "aten.unique_dim.default"),
    "aten.repeat_interleave.Tensor",
)
"""Operations for which the host waits to know the size of their result; so are those of `_by_mask`."""
_NO_MEMORY = ("aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty_strided")
"""Operations that allocate memory and do not touch it."""


class _Here(threading.local):
    device = 0

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}


class _All:
    """What all threads share."""

    def __init__(self) -> None:
        self.world = World()
        self.default: dict[int, Stream] = {}
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.blocks: weakref.WeakKeyDictionary[Any, Block] = weakref.WeakKeyDictionary()
        self.backward = threading.Lock()
        self.in_backward = 0
        """Device of the thread that runs a backward."""


_HERE = _Here()
_State = _All()


def _here() -> int:
    """Return the device of this thread; in a thread of autograd, that of the thread that runs a backward."""
    return _State.in_backward if in_engine() else _HERE.device


def one_at_a_time(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward that no other thread's runs beside, since they share a thread of autograd."""

    def run_alone(*args: Any, **kwargs: Any) -> Any:
        if in_engine():
            return run_backward(*args, **kwargs)
        with _State.backward:
            _State.in_backward = _HERE.device
            return run_backward(*args, **kwargs)

    return run_alone


def world() -> World:
    """Return the clocks and counts of this process."""
    return _State.world


def reset() -> None:
    """Forget all clocks and problems."""
    _State.world, _State.default, _State.streams = World(), {}, weakref.WeakSet()
    _HERE.streams, _HERE.device = {}, 0


def current(index: int | None = None) -> Stream:
    """Return the current stream of a device."""
    return _default(index)


class SimTensor(Tensor):
    """A tensor on a simulated device."""

    data_: Tensor
    place: int

    @staticmethod
    def __new__(cls, data: Tensor, index: int = 0) -> SimTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=torch.device(KIND, 0),
        )
        made.data_, made.place = data, index
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the contents."""
        return self.data_.untyped_storage()

    def tolist(self) -> Any:
        """Return the numbers, as soon as the host has them."""
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimTensor({self.data_}, {KIND}:{self.place})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(each, SimTensor) for each in types):
            # Tensors with simulated ones inside, such as the results of collectives.
            return NotImplemented
        return run(function, args, kwargs or {})

    def record_stream(self, stream: Any) -> None:
        """Say that a stream uses the memory, so that it is not reused before."""
        block_of(self).recorded.add(stream)


def contents(tensor: Tensor) -> Tensor:
    """Return the CPU tensor behind a simulated one."""
    assert isinstance(tensor, SimTensor)
    return tensor.data_


def block_of(tensor: Tensor) -> Block:
    """Return the memory of a tensor."""
    return _block(tensor)


def _own(data: Tensor, owner: Stream | None) -> Block:
    """Note new memory."""
    storage = data.untyped_storage()
    found = _State.blocks.get(storage)
    if found is None:
        found = Block(storage.nbytes(), owner)
        _State.blocks[storage] = found
        _State.world.allocate(found)
        weakref.finalize(storage, _State.world.free, found)
    return found


def is_pinned(tensor: Tensor) -> bool:
    """Return whether a CPU tensor is pinned memory."""
    return not isinstance(tensor, SimTensor) and tensor.untyped_storage() in _State.blocks


def pin(tensor: Tensor) -> Tensor:
    """Return a copy of a CPU tensor in pinned memory."""
    copied = tensor.clone()
    _own(copied, None)
    return copied


def read_by_host(tensor: Tensor, what: str) -> None:
    """Check a read of the host itself, outside of `watching`."""
    if is_pinned(tensor):
        _State.world.host_use(_here(), _block(tensor), what, writes=False)


def tensor_on(storage: torch.UntypedStorage, device: torch.device, dtype: torch.dtype, where: Any = None) -> Tensor:
    """Return a tensor in a storage, as `pipeloom.runtime.launch.accelerator.tensor_on`."""
    data = torch.empty(0, dtype=dtype)
    if device.type == "cpu":
        return data.set_(storage) if where is None else data.set_(storage, *where)
    owner = _State.blocks[storage].owner
    if owner is None:
        raise RuntimeError("a tensor on an accelerator cannot be in memory of the host")
    index = owner.device_index
    return SimTensor(data.set_(storage) if where is None else data.set_(storage, *where), index)


def made_here(data: Tensor, place: int) -> Tensor:
    """Return a tensor with contents that are new memory of the current stream."""
    _own(data, current(place))
    return SimTensor(data, place)


of_process_groups: Callable[[Any, Any, Any], Any] | None = None
"""Runs operators of `torch.distributed`, if it is set."""


def run(function: Any, args: Any, kwargs: Any) -> Any:
    """Run one operator on simulated tensors."""
    _State.world.raise_problems()
    name = str(function)
    if of_process_groups is not None and function.namespace in ("c10d", "_c10d_functional"):
        return of_process_groups(function, args, kwargs)
    flat = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    if name in _COPIES:
        return _copy(function, name, args, kwargs)
    if name == "aten._pin_memory.default":
        return pin(args[0])
    here = [each for each in flat if isinstance(each, SimTensor)]
    wrong = [each for each in flat if not isinstance(each, SimTensor) and each.dim()]
    indices = {each.place for each in here}
    if here and (wrong or len(indices) > 1):
        places = sorted({f"{KIND}:{each.place}" if isinstance(each, SimTensor) else "cpu" for each in flat})
        problem = f"{name}: expected all tensors on one device, found {' and '.join(places)}"
        _State.world.found(problem, RuntimeError)
    index = min(indices) if indices else _index(kwargs.get("device"))
    plain = {**kwargs, **({"device": torch.device("cpu")} if kwargs.get("device") is not None else {})}
    plain.pop("pin_memory", None)
    out = function(*tree_map(_inner, args), **tree_map(_inner, plain))
    stream = current(index)
    written = _written(function, args, kwargs)
    reads = [_block(each) for each in here if not any(each is w for w in written)]
    made = [each for each in tree_flatten(out)[0] if isinstance(each, Tensor)]
    if name in _SIZE_READS or _by_mask(name, args):
        stream.enqueue(name, reads, [])
        _State.world.synchronize(index, stream.clock)
    if name in _HOST_READS:
        stream.enqueue(name, reads, [])
        _State.world.synchronize(index, stream.clock)
        return out
    fresh = [_own(each, stream) for each in made if each.untyped_storage() not in _State.blocks]
    is_view = function.is_view or (made and not fresh and not written)
    if not is_view and not name.startswith(_NO_MEMORY):
        stream.enqueue(name, reads, [*(_block(each) for each in written), *fresh])
    wrapped = tree_map(lambda each: SimTensor(each, index) if isinstance(each, Tensor) else each, out)
    return return_and_correct_aliasing(function, args, kwargs, wrapped)


def _by_mask(name: str, args: Any) -> bool:
    """Return whether an operation selects by a mask on the device."""
    if not name.startswith(("aten.index.", "aten.index_put", "aten._index_put")):
        return False
    return any(isinstance(each, SimTensor) and each.dtype == torch.bool for each in tree_flatten(args[1])[0])


def _inner(value: Any) -> Any:
    return value.data_ if isinstance(value, SimTensor) else value


def _block(tensor: Tensor) -> Block:
    return _own(_inner(tensor), current(tensor.place if isinstance(tensor, SimTensor) else None))


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operator writes."""
    found: list[Tensor] = []
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [each for each in tree_flatten(value)[0] if isinstance(each, SimTensor)]
    return found


def _copy(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Copy between devices and the host, or within one."""
    if name == "aten._to_copy.default":
        source, wanted = args[0], kwargs.get("device")
        place = source.place if wanted is None and isinstance(source, SimTensor) else _index(wanted)
        to_host = not isinstance(source, SimTensor) if wanted is None else torch.device(wanted).type == "cpu"
        plain = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "non_blocking")}
        data = function(_inner(source), **plain)
        result: Tensor = data if to_host else SimTensor(data, place)
        waits = not kwargs.get("non_blocking", False)
    else:
        result, source = (args[0], args[1]) if name == "aten.copy_.default" else (args[1], args[0])
        with torch.no_grad():
            _inner(result).copy_(_inner(source))
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    _copied(name, source, result, waits)
    return result


def _copied(name: str, source: Tensor, result: Tensor, waits: bool) -> None:
    """Check a copy. With pageable host memory, and if it is not non-blocking, the host waits for it."""
    on = [each for each in (source, result) if isinstance(each, SimTensor)]
    stream = current(on[-1].place)
    host = [each for each in (source, result) if not isinstance(each, SimTensor)]
    pageable = any(not is_pinned(each) for each in host)
    if host and (waits or pageable) and isinstance(source, SimTensor) is False:
        # The host reads its own memory now.
        for each in host:
            if is_pinned(each):
                _State.world.host_use(stream.device_index, _block(each), name, writes=False)
    reads = [_block(each) for each in (source,) if isinstance(each, SimTensor) or is_pinned(each)]
    writes = [_block(each) for each in (result,) if isinstance(each, SimTensor) or is_pinned(each)]
    stream.enqueue(name, reads, writes)
    if host and (waits or pageable):
        _State.world.synchronize(stream.device_index, stream.clock)


class _Watching(TorchDispatchMode):
    """Check what the host itself does with pinned memory."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        if not any(isinstance(each, SimTensor) for each in flat) and not function.is_view:
            wanted = kwargs.get("device")
            to_sim = wanted is not None and torch.device(wanted).type == KIND
            if not to_sim:
                written = [id(each) for each in _written_plain(function, args, kwargs)]
                for each in flat:
                    if is_pinned(each):
                        block = _State.blocks[each.untyped_storage()]
                        _State.world.host_use(_here(), block, str(function), writes=id(each) in written)
        return function(*args, **kwargs)


def _written_plain(function: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (each for each in tree_flatten(value)[0] if isinstance(each, Tensor))


@contextmanager
def watching() -> Iterator[World]:
    """Watch pinned memory, and raise at the end what finalizers found."""
    with _Watching():
        yield _State.world
    _State.world.raise_problems()


class Event:
    """An event, as ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock, self.timing, self.device_index, self.recorded = Clock(), enable_timing, 0, False

    def record(self, stream: Stream | None = None) -> None:
        """Mark what a stream has been given so far."""
        stream = stream or current()
        clock = stream.clock.copy()
        clock.join(_State.world.host(stream.device_index))
        self.clock, self.device_index, self.recorded = clock, stream.device_index, True

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait for it."""
        (stream or current()).wait(self.clock)

    def synchronize(self) -> None:
        """Make the host wait for it."""
        _State.world.synchronize(self.device_index, self.clock)

    def query(self) -> bool:
        """Return whether it has happened. Everything happens at once here, and the host then knows."""
        self.synchronize()
        return True

    def elapsed_time(self, other: Event) -> float:
        """Return milliseconds between events, all 0."""
        if not (self.timing and other.timing and self.recorded and other.recorded):
            raise RuntimeError("both events must be recorded, with timing enabled")
        return 0.0


class PublicStream(Stream):
    """A stream, as ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        del priority
        super().__init__(_State.world, _index(device))
        _State.streams.add(self)

    @property
    def device(self) -> torch.device:
        """Its device."""
        return torch.device(KIND, 0)

    def wait_stream(self, other: Stream) -> None:
        """Wait for all that another stream has been given so far."""
        self.wait(other.clock.copy())

    def wait_event(self, event: Event) -> None:
        """Wait for an event."""
        self.wait(event.clock)

    def record_event(self) -> Event:
        """Return an event that is recorded here."""
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait for it."""
        _State.world.synchronize(self.device_index, self.clock)


def empty_on_host(like: Tensor) -> Tensor:
    """Return an empty tensor, as `pipeloom.runtime.launch.accelerator.empty_on_host`."""
    made = torch.empty(like.shape, dtype=like.dtype)
    return pin(made) if like.device.type == KIND else made


def _by_copy(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that makes tensors of numbers on the host first: PyTorch calls no Python code on its way."""

    def made(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != KIND:
            return make(data, device=device, **options)
        return make(data, **options).to(device)

    return made


def install(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let the runtime use pinned memory that is watched, and autograd one device at a time."""
    put(accelerator, "empty_on_host", empty_on_host)
    put(accelerator, "pinned", lambda tensor: tensor if is_pinned(tensor) else pin(tensor))
    put(accelerator, "tensor_on", tensor_on)
    for name in ("tensor", "as_tensor"):
        put(torch, name, _by_copy(getattr(torch, name)))
    # Layers keep their parameters when they are moved, as between the host and CUDA.
    put(torch.__future__, "_swap_module_params_on_conversion", True)
    put(torch.autograd, "_engine_run_backward", one_at_a_time(torch.autograd._engine_run_backward))


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device or _here()
    return (None if device is None else torch.device(device).index) or _here()


@contextmanager
def _entered(stream: Stream) -> Iterator[Stream]:
    before = _HERE.streams.get(stream.device_index)
    _HERE.streams[stream.device_index] = stream
    try:
        yield stream
    finally:
        if before is None:
            del _HERE.streams[stream.device_index]
        else:
            _HERE.streams[stream.device_index] = before


@contextmanager
def _on(device: Any) -> Iterator[None]:
    before, _HERE.device = _HERE.device, _index(device)
    try:
        yield
    finally:
        _HERE.device = before


def _default(device: Any = None) -> Stream:
    index = _index(device)
    if index in _HERE.streams:
        return _HERE.streams[index]
    if index not in _State.default:
        made = PublicStream(index)
        _State.default[index] = made
    return _State.default[index]


def _synchronize(device: Any = None) -> None:
    for stream in list(_State.streams):
        if stream.device_index == _index(device):
            _State.world.synchronize(stream.device_index, stream.clock)


_GENERATOR = torch.Generator()
_RANDOM = torch.zeros(2, dtype=torch.int64)
"""Seed and offset of the generator, as on CUDA. Numbers are drawn by that of the host."""


def _register() -> None:
    module: Any = ModuleType(f"torch.{KIND}")
    module.Event, module.Stream = Event, PublicStream
    module.device_count, module.is_available = (lambda: NUM_DEVICES), (lambda: True)
    module.is_initialized, module._is_in_bad_fork, module._lazy_init = (lambda: True), (lambda: False), (lambda: None)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.current_device = lambda: 0
    module.set_device = lambda device: setattr(_HERE, "device", device)
    module.current_stream, module.stream, module.device = _default, _entered, _on
    module.synchronize = _synchronize
    module.get_rng_state = lambda _device=None: _RANDOM.view(torch.uint8).clone()
    module.set_rng_state = lambda state, _device=None: _RANDOM.copy_(state.view(torch.int64))
    module.manual_seed = module.manual_seed_all = lambda seed: _RANDOM.copy_(torch.tensor([seed, 0]))
    module.default_generators = [_GENERATOR] * NUM_DEVICES
    module.get_device_name = lambda _device=None: "simulated"
    backend_registration._setup_privateuseone_for_python_backend(KIND, backend_module=module)
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda function, *args, **kwargs: run(function, args, kwargs), "PrivateUse1")
    _KEPT.append(library)


_KEPT: list[Any] = []
_register()
__all__ = ["KIND", "NUM_DEVICES", "RaceError", "block_of", "current", "is_pinned", "pin", "reset", "watching", "world"]
