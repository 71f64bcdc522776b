"""Trace which modules a forward pass enters and leaves, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.hollow import state_name

_LARGE = 0.05
"""Share of the largest list's parameters from which a list of blocks is a tower, and not a stack of convolutions."""


class Trace:
    """The modules that a call enters and leaves, with their inputs and outputs."""

    def __init__(self, model: nn.Module, call: Callable[[], Any]) -> None:
        self.model = model
        self.moments: list[tuple[str, bool]] = []
        self.taken: dict[str, Any] = {}
        self.given: dict[str, Any] = {}
        names = {module: path for path, module in model.named_modules()}

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.moments.append((names[module], True))
            self.taken[names[module]] = (args, kwargs)

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            self.moments.append((names[module], False))
            self.given[names[module]] = output

        hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in names]
        hooks += [module.register_forward_hook(leave) for module in names]
        try:
            self.output = call()
        finally:
            for hook in hooks:
                hook.remove()

    def tower(self, paths: Sequence[str]) -> str:
        """Return the path of the last list of blocks that is called in order from end to end.

        Encoders, and what joins their features, run before the language model. Raise `InputError` if there is no such
        list.
        """
        found = [path for path in paths if self._runs_in_order(path)]
        if not found:
            raise InputError("model", f"of its lists of layers, {', '.join(paths)}, none is called from end to end")
        return max(found, key=self._begin)

    def _runs_in_order(self, path: str) -> bool:
        """Return whether a list of blocks is called once from end to end."""
        called = [each for each, enters in self.moments if enters and each.rpartition(".")[0] == path]
        return bool(called) and called == [f"{path}.{i}" for i in range(len(called))]

    def _begin(self, tower: str) -> int:
        return self.moments.index((f"{tower}.0", True))

    def around(self, tower: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the modules and parameters that are used before the blocks, and those after."""
        count = self.count(tower)
        begin, end = self._begin(tower), self.moments.index((f"{tower}.{count - 1}", False))
        first: dict[str, None] = {}
        last: dict[str, None] = {}
        for moment, (path, enters) in enumerate(self.moments):
            own = [name for name, _ in self.model.get_submodule(path).named_parameters(recurse=False)]
            if not enters or not own or path.startswith(f"{tower}."):
                continue
            if tower.startswith(f"{path}." if path else ""):
                # The module contains the blocks. Its own parameters may be used before and after them.
                both = dict.fromkeys(f"{path}.{name}" if path else name for name in own)
                first, last = first | both, last | both
            elif moment < begin:
                first[path] = None
            elif moment > end:
                last[path] = None
            else:
                raise InputError("model", f"calls {path!r} between its blocks")
        return self._lifted(tower, first, last), self._lifted(tower, last, first)

    def _lifted(self, tower: str, paths: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
        """Replace each path by its outermost caller that contains neither the blocks nor any of the others."""
        called = {path for path, _ in self.moments}
        found: dict[str, None] = {}
        for path in paths:
            names = path.split(".")
            above = [".".join(names[:i]) for i in range(1, len(names))]
            whole = [a for a in above if a in called and not any(f"{o}.".startswith(f"{a}.") for o in (tower, *others))]
            found[whole[0] if whole else path] = None
        return tuple(found)

    def count(self, tower: str) -> int:
        """Return how many blocks of a tower are called."""
        return sum(enters and path.rpartition(".")[0] == tower for path, enters in self.moments)

    def first_tower(self, known: Collection[str]) -> str:
        """Return the path of the first list of blocks that is called once from end to end, and is known or large.

        Behind it there may be others, such as those of a resampler. ``known`` has the lists with as many blocks as a
        configuration says. Raise `InputError` if there is none.
        """
        sizes = {
            path: sum(p.numel() for p in module.parameters())
            for path, module in self.model.named_modules()
            if isinstance(module, nn.ModuleList) and self._runs_in_order(path)
        }
        if not any(sizes.values()):
            raise InputError("model", "has an encoder without a list of blocks that is called from end to end")
        large = [path for path, size in sizes.items() if path in known or size > _LARGE * max(sizes.values())]
        first: str = min(large, key=self._begin)
        return first

    def state(self, tower: str) -> Tensor:
        """Return the input of the first block of a tower."""
        args, kwargs = self.taken[f"{tower}.0"]
        state: Tensor = args[0] if args else kwargs[state_name(self.model.get_submodule(f"{tower}.0"))]
        return state

    def extras(self, tower: str) -> int:
        """Return how many outputs the blocks of a tower have besides the state."""
        counts = {
            max(1, len(each) - 1) if isinstance(each, (tuple, list)) else 0
            for each in (self.given[f"{tower}.{number}"] for number in range(self.count(tower)))
        }
        if len(counts) > 1:
            raise InputError("model", f"has blocks in {tower!r} that return different numbers of outputs")
        return counts.pop()
