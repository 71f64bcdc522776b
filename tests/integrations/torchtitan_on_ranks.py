"""What the tests of `pipeline_planned` run inside launched processes: torchtitan's models on gloo ranks.

torchtitan is made for GPUs. Here its meshes are of CPUs; attention of Triton or of compiled masks is torch's own
``scaled_dot_product_attention``; layers of the hybrid model that are linear attention, kernels of GPUs alone, are left
out; and FSDP sums gradients without scaling them on the way, which gloo cannot.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, ROWS, LENGTH = 512, 4, 16
STEPS = 3
IMAGE = 7
"""Number of the token in the place of pixels."""


def use_cpus() -> None:
    """Let torchtitan make meshes of CPUs."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from torchtitan.distributed import parallel_dims

    parallel_dims.device_type = "cpu"


def settings(schedule: str = "1F1B", csv: str = "", precision: str = "float32", **degrees: Any) -> dict[str, Any]:
    """What torchtitan's trainer gives a pipelining function beside model and loss."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import utils
    from torchtitan.distributed.parallel_dims import ParallelDims

    parallelism = ParallelismConfig(
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_schedule_csv=csv,
        **{"data_parallel_shard_degree": 1, "spmd_backend": "partial_dtensor"} | degrees,
    )
    utils.set_spmd_backend(parallelism.spmd_backend)
    training = TrainingConfig(
        local_batch_size=ROWS, seq_len=LENGTH, mixed_precision_param=precision, mixed_precision_reduce="float32"
    )
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    return {
        "parallel_dims": dims,
        "training": training,
        "parallelism": parallelism,
        "compile_config": CompileConfig(enable=False),
        "ac_config": None,
        "dump_folder": "",
        "device": torch.device("cpu"),
    }


def loss() -> Any:
    """torchtitan's: a sum over the global number of tokens, and something beside it."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import CompileConfig

    config = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    return config.build(compile_config=CompileConfig(enable=False))


def dense() -> Any:
    """Its debug Llama."""
    from torchtitan.models.llama3 import model_registry

    return _on_cpu(model_registry("debugmodel"))


def unequal() -> Any:
    """Its debug Llama with a first layer that takes many times longer than the rest, of no more weights."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    class Repeated(ScaledDotProductAttention):
        """Attention that is computed over and over."""

        @dataclass(kw_only=True, slots=True)
        class Config(ScaledDotProductAttention.Config):
            """Nothing more."""

        def forward(self, *given: Any, **more: Any) -> Tensor:
            return torch.stack([super(Repeated, self).forward(*given, **more) for _ in range(400)]).mean(0)

    spec = dense()
    spec.model.layers[0].attention.inner_attention = Repeated.Config()
    return spec


def sparse() -> Any:
    """Its debug Qwen 3 with experts, of fewer and smaller ones."""
    from torchtitan.models import qwen3

    spec = qwen3.model_registry("debugmodel_moe")
    attention = spec.model.layers[0].attention
    spec.model.layers = qwen3._build_qwen3_moe_layers(
        fuse_qkv=True,
        n_layers=4,
        dim=spec.model.dim,
        n_heads=4,
        n_kv_heads=2,
        head_dim=128,
        moe_hidden_dim=32,
        num_experts=8,
        top_k=2,
        attn_backend="flex",
        rope=attention.rope,
        moe_comm_backend="standard",
    )
    return _on_cpu(spec)


def seeing() -> Any:
    """Its debug Qwen 3.5 with a vision encoder, whose layers of linear attention are left out."""
    # The kernels of its linear attention: another package, for GPUs alone.
    for name in ("fla.modules.conv.triton.ops", "fla.ops.gated_delta_rule", "fla.modules.conv.causal_conv1d"):
        for kernels in (name, "fla.ops.gated_delta_rule.chunk", "fla.ops.gated_delta_rule.fused_recurrent"):
            sys.modules.setdefault(kernels, MagicMock())
    from torchtitan.models.qwen3_5 import model_registry, vision_encoder
    from torchtitan.protocols.module import Module

    class Dense(Module):
        """Attention over all patches, of which all images have as many."""

        def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    class Config:
        def build(self) -> Module:
            return Dense()

    spec = model_registry("debugmodel", attn_backend="varlen")
    full = next(layer for layer in spec.model.layers if layer.attention is not None)
    spec.model.layers = [copy.deepcopy(full) for _ in range(4)]
    spec.model.vision_encoder.block.attn.inner_attention = Config()
    vision_encoder.compiled_create_block_mask = lambda *_, **__: None
    return _on_cpu(spec)


def _on_cpu(spec: Any) -> Any:
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = spec.model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = VOCABULARY
    return spec


def built(pipelining: Callable[..., Any], spec: Any, given: dict[str, Any]) -> tuple[Any, ...]:
    """As the trainer begins: a model on meta, pipelined, then given weights; the same ones however it is cut."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, distribute_tensor

    spec.model.update_from_config(config=SimpleNamespace(parallelism=given["parallelism"]))
    with torch.device("meta"):
        model = spec.model.build()
    schedule, parts, first, last = pipelining(
        model, **given, model_config=spec.model, parallelize_fn=spec.parallelize_fn, loss_fn=loss()
    )
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights(buffer_device=None)
            for name, parameter in part.named_parameters():
                drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                whole = 0.05 * torch.randn(parameter.shape, generator=drawn) + float(parameter.dim() == 1)
                if isinstance(parameter, DTensor):
                    whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                parameter.copy_(whole)
        part.train()
    return schedule, parts, first, last


def batch(step: int, replica: int, images: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Tokens, labels and what else the model takes."""
    torch.manual_seed(100 * step + replica)
    tokens = torch.randint(10, VOCABULARY, (ROWS, LENGTH))
    labels = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    more: dict[str, Any] = {"positions": torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous()}
    if images:
        # Of 4 by 4 patches each, which are 4 tokens.
        tokens[:, 3:7] = IMAGE
        more["pixel_values"] = torch.randn(ROWS, 16, 16 * 16 * 2 * 3)
        more["grid_thw"] = torch.tensor([[1, 4, 4]]).expand(ROWS, 3).contiguous()
        more["mrope_positions"] = torch.arange(LENGTH)[None, :, None].expand(ROWS, LENGTH, 3).contiguous()
        more["special_tokens"] = {"image_id": IMAGE, "video_id": IMAGE + 1}
    return tokens, labels, more


def train(pipelining: Callable[..., Any], spec: Any, given: dict[str, Any], images: bool = False) -> dict[str, Any]:
    """Several steps with AdamW; of every step losses and gradients of all ranks."""
    from torch.distributed.tensor import DTensor
    from torchtitan.distributed.utils import get_spmd_context

    schedule, parts, first, last = built(pipelining, spec, given)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
    dims = given["parallel_dims"]
    replica = dims.get_mesh("fsdp").get_local_rank() if dims.dp_shard_enabled else 0
    context = get_spmd_context(parallel_dims=dims)
    steps = []
    for step in range(STEPS):
        tokens, labels, more = batch(step, replica, images)
        losses: list[Any] = []
        optimizer.zero_grad()
        with context():
            schedule.step(
                *((tokens,) if first else ()),
                target=labels if last else None,
                losses=losses,
                loss_kwargs={"global_valid_tokens": torch.tensor(float(ROWS * LENGTH))},
                return_outputs=False,
                **more,
            )
        steps.append(([float(value.detach()) for value in losses], _gradients(parts)))
        optimizer.step()
    if hasattr(schedule, "close"):
        schedule.close()
    mine = [[name for name, _ in part.named_parameters()] for part in parts]
    over = {
        axis
        for part in parts
        for parameter in part.parameters()
        if isinstance(parameter, DTensor)
        for axis in parameter.device_mesh.mesh_dim_names or ()
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (steps, mine))
    return {
        "losses": [[here[0][step][0] for here in every] for step in range(STEPS)],
        "gradients": [{n: g for here in every for n, g in here[0][step][1].items()} for step in range(STEPS)],
        "parts": [part for here in every for part in here[1]],
        "meshes": over,
    }


def _gradients(parts: list[nn.Module]) -> dict[str, Tensor]:
    found = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                found[name] = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()
    return found


def compared(kind: str, schedule: str, precision: str, degrees: dict[str, Any]) -> dict[str, Any]:
    """The same training with torchtitan's pipelining function and with ours."""
    use_cpus()
    from torchtitan.distributed.pipeline_parallel import pipeline_llm, pipeline_vlm

    from pipeloom.integrations.torchtitan import pipeline_planned

    spec = {"dense": dense, "unequal": unequal, "sparse": sparse, "seeing": seeing}[kind]()
    images = kind == "seeing"
    given = settings(schedule, precision=precision, **degrees)
    theirs = train(pipeline_vlm if images else pipeline_llm, spec, given, images)
    ours = train(functools.partial(pipeline_planned, vision_tokens=4.0), spec, given, images)
    worst = 0.0
    for wanted, found in zip(theirs["gradients"], ours["gradients"], strict=True):
        assert wanted.keys() == found.keys()
        worst = max([worst, *(float((wanted[n] - found[n]).abs().max()) for n in wanted)])
    return {
        "losses": (theirs["losses"], ours["losses"]),
        "worst": worst,
        "num_gradients": len(theirs["gradients"][0]),
        "parts": ours["parts"],
        "meshes": ours["meshes"],
    }


def by_file(folder: str) -> dict[str, Any]:
    """A plan of ours as CSV, run by torchtitan's own loader, beside its own schedule."""
    use_cpus()
    from torchtitan.distributed.pipeline_parallel import pipeline_llm

    from pipeloom.integrations.steps.planning import Planning, StepPlanner
    from pipeloom.plan import to_pytorch_csv
    from pipeloom.spec import Chunk, Layout, ModuleLayout

    layout = Layout(2, (ModuleLayout("stages"),), tuple(Chunk("stages", (i, i), i % 2) for i in range(4)))
    plan = StepPlanner(layout, Planning(budget_s=0.0), "gloo").order((LENGTH,) * ROWS, True).plan
    path = Path(folder) / f"{dist.get_rank()}.csv"
    path.write_text(to_pytorch_csv(plan, layout))
    spec = dense()
    theirs = train(pipeline_llm, spec, settings(schedule="Interleaved1F1B"))
    ours = train(pipeline_llm, spec, settings(schedule="Interleaved1F1B", csv=str(path)))
    pairs = zip(theirs["gradients"], ours["gradients"], strict=True)
    return {
        "losses": (theirs["losses"], ours["losses"]),
        "worst": max(float((wanted[n] - found[n]).abs().max()) for wanted, found in pairs for n in wanted),
    }
