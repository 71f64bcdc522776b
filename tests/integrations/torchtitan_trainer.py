"""What the test of torchtitan's own trainer runs inside launched processes: all of it, on CPU ranks.

torchtitan asks its device's module for names and memory, which `torch.cpu` does not tell; `Host` does. Data and
tokenizer are of a few lines, since torchtitan's own lie in its repository, not in its package.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LENGTH, VOCABULARY = 32, 512


class Host(types.ModuleType):
    """`torch.cpu` with what torchtitan asks a device's module for beside."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, _: Any) -> str:
        return "CPU"

    def get_device_properties(self, _: Any) -> Any:
        return types.SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, _: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        """Nothing is counted."""

    def empty_cache(self) -> None:
        """There is none."""


def use_host() -> None:
    """Let torchtitan take CPUs for its devices: before any other part of it is imported."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    assert "torchtitan.trainer" not in sys.modules
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", Host("host")
    if not hasattr(dist, "set_timeout"):
        # What torch 2.13 has not; the trainer shortens waits by it after the first step.
        dist.set_timeout = lambda *_: None


def config(pipelining: Callable[..., Any], folder: str, schedule: str, steps: int) -> Any:
    """torchtitan's debug Llama, with its optimiser, rates, chunked loss, validation and checkpoints."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import Validator
    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    class Numbers(BaseTokenizer):
        """Tokens are numbers already."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            """Nothing more."""

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    class Drawn(BaseDataLoader):
        """Drawn tokens, of which some have no target."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            infinite: bool = True

        def __init__(self, config: Any, *, dp_rank: int, local_batch_size: int, **_: Any) -> None:
            self.rows, self.drawn = local_batch_size, torch.Generator().manual_seed(dp_rank)

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                tokens = torch.randint(VOCABULARY, (self.rows, LENGTH), generator=self.drawn)
                labels = tokens.roll(-1, 1)
                labels[:, -3:] = -100
                positions = torch.arange(LENGTH).expand(self.rows, -1).contiguous()
                yield {"input": tokens, "positions": positions}, labels

        def state_dict(self) -> dict[str, Any]:
            return {"drawn": self.drawn.get_state()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.drawn.set_state(state["drawn"])

    made = llama3_debugmodel()
    for layer in made.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return dataclasses.replace(
        made,
        model_spec=dataclasses.replace(made.model_spec, pipelining_fn=pipelining),
        dump_folder=folder,
        debug=DebugConfig(seed=1),
        tokenizer=Numbers.Config(),
        dataloader=Drawn.Config(),
        training=TrainingConfig(
            local_batch_size=4, seq_len=LENGTH, steps=steps, mixed_precision_param="float32", disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=2,
            data_parallel_shard_degree=1,
            pipeline_parallel_schedule=schedule,
            spmd_backend="partial_dtensor",
        ),
        checkpoint=CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False),
        validator=Validator.Config(enable=True, freq=2, steps=1, dataloader=Drawn.Config()),
    )


def trained(pipelining: Callable[..., Any], folder: str, schedule: str, steps: int) -> dict[str, Any]:
    """What torchtitan's trainer logs of its steps; where the folder has a checkpoint, of those after it."""
    trainer = config(pipelining, folder, schedule, steps).build()
    logged: list[tuple[Any, ...]] = []

    def log(step: int, *values: Any, **_: Any) -> None:
        logged.append(("step", step, *values[:3]))

    def log_validation(loss: float, step: int, **_: Any) -> None:
        logged.append(("validation", step, loss))

    trainer.metrics_processor.log, trainer.metrics_processor.log_validation = log, log_validation
    trainer.train()
    names = sorted(name for part in trainer.model_parts for name in part.state_dict())
    trainer.close()
    if hasattr(trainer.pp_schedule, "close"):
        trainer.pp_schedule.close()
    return {"logged": logged, "names": names}


def by_microbatch(pipelining: Callable[..., Any]) -> Callable[..., Any]:
    """Let a schedule of torch 2.13 take microbatches, as the trainer gives them and schedules after it take them."""

    def whole(given: dict[str, Any]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        args, keywords = given.pop("arg_mbs"), given.pop("kwarg_mbs")
        targets = given.pop("target_mbs")
        given["target"] = None if targets is None else torch.cat(targets)
        joined = {name: torch.cat([each[name] for each in keywords]) for name in keywords[0]}
        return () if args is None else (torch.cat([each for (each,) in args]),), given | joined

    def made(*given: Any, **more: Any) -> Any:
        schedule, *rest = pipelining(*given, **more)
        step = schedule.step

        def called(**given: Any) -> Any:
            args, keywords = whole(given)
            return step(*args, **keywords)

        # Its evaluation calls it, too.
        schedule.step = called
        return schedule, *rest

    return made


def both(folder: str, schedule: str) -> dict[str, Any]:
    """The same training with torchtitan's pipelining function and with ours, cut alike."""
    use_host()
    from torchtitan.distributed.pipeline_parallel import pipeline_llm

    from pipeloom.integrations.torchtitan import pipeline_planned

    # Taken up again from the checkpoint, cut elsewhere.
    other = {f"layers.{i}": 1.0 + 9.0 * (i == 0) for i in range(6)}
    found = {}
    for who, first, second in (
        ("theirs", by_microbatch(pipeline_llm), by_microbatch(pipeline_llm)),
        (
            "ours",
            functools.partial(pipeline_planned, costs="estimated"),
            functools.partial(pipeline_planned, costs=other),
        ),
    ):
        runs = [trained(each, f"{folder}/{who}", schedule, 2 + 2 * i) for i, each in enumerate((first, second))]
        found[who] = {"logged": runs[0]["logged"] + runs[1]["logged"], "parts": [run["names"] for run in runs]}
    return found
