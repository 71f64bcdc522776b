"""Print which transformer classes of the installed diffusers library are accepted for training.

Each class is created with its default configuration, on the meta device. `accept` makes it smaller, and compares its
layers with the library's forward pass under every memory strategy. With ``--plans``, the gradients of a random plan on
two ranks are compared too. Run ``python scripts/diffusers_models.py [--plans] [CLASS ...]``. It takes some minutes.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.integrations.diffusers import generic, inputs
from pipeloom.integrations.diffusers.smaller import channels_of, make, shapes_only, smaller

TOLERANCE = 1e-9
# Classes whose defaults make no model. The values are those of published configurations.
NEEDED: dict[str, dict[str, Any]] = {
    "EasyAnimateTransformer3DModel": {"in_channels": 16, "out_channels": 16, "patch_size": 2},
    "HunyuanDiT2DModel": {"in_channels": 4, "patch_size": 2, "sample_size": 64},
    "LatteTransformer3DModel": {"in_channels": 4, "patch_size": 2, "sample_size": 32, "caption_channels": 64},
    "HiDreamImageTransformer2DModel": {
        **{"patch_size": 2, "in_channels": 16, "num_attention_heads": 20, "attention_head_dim": 128},
        **{"caption_channels": [4096, 4096], "text_emb_dim": 2048, "max_resolution": (128, 128)},
        **{"num_layers": 16, "num_single_layers": 32, "axes_dims_rope": (64, 32, 32), "llama_layers": [0, 1, 2]},
    },
}


def classes() -> list[str]:
    """Return the names of the library's transformer classes that make models."""
    import diffusers.models.transformers as found

    kinds = {name: getattr(found, name) for name in dir(found)}
    return [
        name
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and hasattr(kind, "from_config")
    ]


def tried(name: str, plans: bool) -> tuple[str, str]:
    """Return the outcome for a class, and a remark."""
    import diffusers.models.transformers as found

    kind = getattr(found, name)
    try:
        with shapes_only():
            model = kind(**NEEDED.get(name, {}))
    except Exception as error:
        return "no model", f"defaults make none: {type(error).__name__}: {error}"
    try:
        accepted = generic.accept(model)
        worst = plan_difference(kind, dict(model.config)) if plans else 0.0
    except InputError as error:
        return "refused", error.problem
    except Exception as error:
        return "raw error", f"{type(error).__name__}: {error}"
    remark = f"{len(accepted.base.division.parts.blocks)} blocks" + (f", plan apart {worst:.0e}" if plans else "")
    if accepted.excluded:
        remark += f", without {', '.join(accepted.excluded)}"
    return ("accepted" if worst < TOLERANCE else "wrong"), remark


def plan_difference(kind: Any, config: dict[str, Any]) -> float:
    """Return the largest relative difference of the gradients of a plan on two ranks."""
    torch.manual_seed(0)
    small = make(kind, smaller(kind, config)[1]).double().eval()
    form = inputs.Form(inputs.UNBATCHED, channels_of(config), 1.0)
    samples, _ = generic.find_samples(small, config, inputs.arguments(kind), form, None)
    model = pl.from_diffusers(small, examples=samples)
    return pl.check_gradients(model, samples, ranks=2, plans=1).worst


def main() -> None:
    """Print a row for each class, and the numbers of each outcome."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    names = [each for each in sys.argv[1:] if each != "--plans"]
    for name in names or classes():
        began = time.process_time()
        outcome, remark = tried(name, "--plans" in sys.argv)
        outcomes[outcome] += 1
        took = time.process_time() - began
        print(f"{name:40} {outcome:10} {took:5.1f} s  {' '.join(remark.split())[:160]}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))


if __name__ == "__main__":
    main()
