"""Find the fastest pipeline layout for a Megatron script, and check it with Megatron Core.

pip install "pipeloom[megatron]"
python examples/megatron/plan.py
"""

import logging
import sys
import warnings
from pathlib import Path

from pipeloom.integrations.megatron import best_layout, read_megatron
from pipeloom.search import Budget
from pipeloom.spec.catalog import load_cluster


def main(seconds: float = 10.0) -> None:
    run = read_megatron(Path(__file__).with_name("llama3_70b.sh"))
    found = best_layout(run, load_cluster("h100-64"), budget=Budget(seconds=seconds))
    print(f"now  {found.now.iteration_s:.2f} s, {run.now.layout}, recomputed: {run.now.recompute}")
    print(f"best {found.best.iteration_s:.2f} s, {found.gain:.1%} faster (emulated). In place of")
    print("  " + " ".join(run.replaced))
    print("write\n  " + "\n  ".join(found.arguments()))
    warnings.simplefilter("ignore")  # about missing GPU kernels
    logging.disable()
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    theirs = PipelineParallelLayerLayout(found.best.setup.layout, run.degrees.pipeline)
    theirs.validate_layer_layout(run.num_layers, len(run.model.predictors))
    print("Megatron Core reads it as\n" + theirs.pretty_repr())


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
