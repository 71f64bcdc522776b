"""A layout that was made elsewhere, for the model at hand."""

from __future__ import annotations

import msgspec

from pipeloom.errors import InputError
from pipeloom.spec import Layout, ModelSpec


def layout_for(layout: Layout, model: ModelSpec) -> Layout:
    """Take a layout for a model: check that it lays out all of its layers, and no others.

    Which modules feed which, and which are frozen, the model says. A layout of a single module, as `pipeloom arrange`
    writes it, suits any model of a single module, whatever either is called.

    Raises
    ------
    InputError
        The layout has other modules, or another number of layers.
    """
    given = [module.name for module in layout.modules]
    names = [module.name for module in model.modules]
    if len(given) == len(names) == 1:
        chunks = tuple(msgspec.structs.replace(chunk, module=names[0]) for chunk in layout.chunks)
        module = msgspec.structs.replace(layout.modules[0], name=names[0], after=(), frozen=False)
        layout = msgspec.structs.replace(layout, modules=(module,), chunks=chunks)
    elif given != names:
        raise InputError("modules", f"are {', '.join(given)}, the model has {', '.join(names)}")
    modules = []
    for theirs, ours in zip(layout.modules, model.modules, strict=True):
        last = max(layout.chunks[i].layers[1] for i in layout.chunks_of(theirs.name))
        short = theirs.on_ranks == "replicated" and any(
            layout.chunks[i].layers != (0, last) for i in layout.chunks_of(theirs.name)
        )
        if short or last + 1 != len(ours.flat_layers):
            raise InputError(
                f"module {ours.name!r}",
                f"{'is not whole on every rank' if short else f'has {last + 1} layers'}, "
                f"in the model it has {len(ours.flat_layers)}",
                "lay out the model that is trained",
            )  # fmt: skip
        modules.append(msgspec.structs.replace(theirs, after=ours.after, frozen=ours.frozen))
    return msgspec.structs.replace(layout, modules=tuple(modules))
