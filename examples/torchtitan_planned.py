"""Train torchtitan's debug Llama on two CPU ranks: torchrun --nproc-per-node 2 examples/torchtitan_planned.py.

Needs the extra ``pipeloom[torchtitan]``. With torchtitan's trainer, which needs GPUs, only one line changes:
``dataclasses.replace(spec, pipelining_fn=pipeline_planned)``. This script runs torchtitan's pipelining on CPUs, with
plain attention instead of Triton's. ``--theirs`` uses torchtitan's own function.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import parallel_dims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from pipeloom.integrations.torchtitan import pipeline_planned

ROWS, LENGTH = 8, 64


def loss(output: Tensor, labels: Tensor) -> tuple[Tensor, dict]:
    total = torch.nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(0, 1), reduction="sum")
    return total / (ROWS * LENGTH), {}


def main(theirs: bool, steps: int) -> None:
    dist.init_process_group("gloo")
    parallel_dims.device_type = "cpu"
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=dist.get_world_size(),
        data_parallel_shard_degree=1,
        pipeline_parallel_schedule="Interleaved1F1B",
        spmd_backend="partial_dtensor",
    )
    training = TrainingConfig(local_batch_size=ROWS, seq_len=LENGTH, mixed_precision_param="float32")
    dims = parallel_dims.ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    with torch.device("meta"):
        model = spec.model.build()
    pipelining = pipeline_llm if theirs else pipeline_planned
    schedule, parts, first, last = pipelining(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=loss,
    )
    for part in parts:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights(buffer_device=None)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
    for step in range(steps):
        torch.manual_seed(step)
        tokens = torch.randint(0, 2048, (ROWS, LENGTH))
        positions = torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous()
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([tokens] if first else []),
            target=tokens.roll(-1, 1) if last else None,
            losses=losses,
            return_outputs=False,
            positions=positions,
        )
        optimizer.step()
        if last:
            print(f"step {step}: loss {float(torch.stack(losses).detach().sum()):.4f}", flush=True)
    if not theirs:
        schedule.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--theirs", action="store_true", help="use pipeline_llm instead")
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    main(given.theirs, given.steps)
