"""Model chunks as stages, and the state of one step on one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from torch import Tensor, nn

from pipeloom.integrations.megatron.core.call import StepCall
from pipeloom.integrations.megatron.core.data import MicrobatchIterator, Reader
from pipeloom.integrations.megatron.core.gradients import GradientSync, run_hooks
from pipeloom.integrations.megatron.core.modality import ImageRange, cut_of
from pipeloom.integrations.megatron.core.recomputing import Recomputing, SavedTensors
from pipeloom.integrations.steps.running import StepExecutor, StepIteration, StepTransport, bundled, step_executor
from pipeloom.integrations.steps.shapes import Metas, unbundle
from pipeloom.plan import Verb
from pipeloom.runtime.execute.iteration import Iteration
from pipeloom.runtime.execute.unit import UnitState
from pipeloom.runtime.model.model import Part
from pipeloom.spec import Layout, TensorShape

_REMEDY = "set config.variable_seq_lengths if shapes differ, and predict_shapes=False if they depend on values"


@dataclass(eq=False)
class MegatronStep:
    """One step on one rank.

    ``readers`` has the reader of each chunk, ``numbers`` the number of each stage in ``call.model``, and ``stored``
    what the loss function returned for logging, by microbatch. ``held`` has the bytes held from forward to backward, by
    stage and number of the microbatch; None: they are not measured.
    """

    call: StepCall
    config: Any
    cp_size: int
    readers: Sequence[Reader | None]
    numbers: dict[int, int]
    sync: GradientSync
    num_tokens: Tensor
    held: dict[tuple[int, int], int] | None = None
    stored: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    started: set[int] = field(default_factory=set)
    """Stages that have run a forward."""
    in_flight: dict[int, int] = field(default_factory=dict)
    """Forwards of each stage whose backward has not ended."""

    def results(self) -> list[Any]:
        """Return what the loss function returned, in the order of the microbatches."""
        return [each for number in sorted(self.stored) for each in self.stored[number]]

    def is_first(self, stage: int) -> bool:
        """Return the flag of a stage's first forward, and note that it runs."""
        first, call = stage not in self.started, self.call
        self.started.add(stage)
        if call.first_val_step is not None and call.forward_only:
            return call.first_val_step and first
        return first

    def checkpoints_all(self, stage: int) -> bool | None:
        """Return whether a forward recomputes all layers; None where Megatron's configuration decides."""
        limit = self.config.num_microbatches_with_partial_activation_checkpoints
        before = self.in_flight.get(stage, 0)
        self.in_flight[stage] = before + 1
        return None if limit is None else before >= limit


@dataclass(slots=True, eq=False)
class MegatronMicrobatch:
    """One microbatch of a step on one rank.

    ``size`` is what costs grow by. ``metas`` has shapes and types by boundary, None if they are unknown yet; the
    boundary before a stage has the stage's number. ``strategies`` has the memory strategy of each stage as in plans;
    empty: Megatron's configuration determines what is recomputed.
    """

    number: int
    size: int
    step: MegatronStep
    metas: list[Metas | None]
    strategies: tuple[str, ...] = ()
    parts: Sequence[MegatronImages] = ()
    """Its images, as they pass through the encoder."""


@dataclass(slots=True, eq=False)
class MegatronImages:
    """Images of one microbatch that pass through the encoder together; fields as in `MegatronMicrobatch`."""

    number: int
    images: ImageRange
    step: MegatronStep
    metas: list[Metas | None]
    strategies: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(self.images.lengths[self.images.first : self.images.end])


class ChunkLayer(nn.Module):
    """A model chunk as a layer, which takes and returns one tensor.

    The chunk is not a submodule, so that nothing but Megatron changes its parameters.
    """

    def __init__(self, chunk: nn.Module, stage: int, vp_stage: int | None, is_last: bool) -> None:
        super().__init__()
        self.stage, self.vp_stage, self.is_last = stage, vp_stage, is_last
        self._chunk = (chunk,)
        self.recomputing = Recomputing(chunk)
        self._cut = cut_of(chunk)

    def __call__(self, *given: Tensor, microbatch: MegatronMicrobatch | MegatronImages) -> Any:
        """Run Megatron Core's forward step on one microbatch, or on some of its images."""
        step, number = microbatch.step, microbatch.number
        call, reader = step.call, step.readers[step.numbers[self.stage]]
        tensor, saved = self._input(given, microbatch), SavedTensors()
        strategy = microbatch.strategies[self.stage] if microbatch.strategies else "keep"
        with self.recomputing.under(strategy), nullcontext() if step.held is None else saved:
            output, num_tokens = schedules.forward_step(
                call.forward_step_func,
                None if reader is None else MicrobatchIterator(reader, number),
                self._chunk[0],
                call.num_microbatches,
                tensor,
                step.stored[number],
                step.config,
                cp_group_size=step.cp_size,
                collect_non_loss_data=call.collect_non_loss_data,
                checkpoint_activations_microbatch=step.checkpoints_all(self.stage),
                is_first_microbatch=step.is_first(self.stage),
                current_microbatch=number,
                vp_stage=self.vp_stage,
                is_last_stage=self.is_last,
            )
        if step.held is not None:
            # The runtime holds the input of every stage.
            step.held[self.stage, number] = saved.num_bytes(self._chunk[0], *given)
        # A number on the host can be added on the device. A copy would make the host wait for the device.
        step.num_tokens += num_tokens
        if self.is_last:
            return output
        return bundled((output,), microbatch.metas, self.stage, _REMEDY)

    def _input(self, given: tuple[Tensor, ...], microbatch: MegatronMicrobatch | MegatronImages) -> Tensor | None:
        """Return the tensor that the chunk takes from the chunk before it, if there is one."""
        if self._cut is not None:
            if isinstance(microbatch, MegatronImages):
                self._cut.images = microbatch.images
            if self._cut.stage == self._cut.num_encoder:
                # Images of all sub-microbatches, one after the other; without images, an empty tensor.
                return given[0] if given[0].numel() else None
        if not given:
            return None
        metas = microbatch.metas[self.stage]
        assert metas is not None
        return unbundle(given[0], metas)[0]


def scaled_loss(output: Any, part: Part) -> Tensor:
    """Return the loss of a microbatch, scaled as for Megatron's backward."""
    step: MegatronStep = part.samples[0].step
    if step.call.forward_only:
        return torch.zeros(())
    scale = step.config.grad_scale_func
    loss: Tensor = output if scale is None else scale(output)
    return loss.reshape(())


class MegatronIteration(StepIteration):
    """An iteration whose backwards pass gradients through Megatron's hooks, and switch their reduction on and off."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.megatron: MegatronStep = self.samples[0].step
        self.last: dict[int, UnitState] = {}
        """Unit of each stage's last backward."""
        for action, argument in zip(self.linked.actions, self.linked.arguments, strict=True):
            if action.verb in (Verb.B, Verb.W):
                self.last[argument.chunk] = argument

    def backward(self, unit: UnitState) -> None:
        with self._timed(), self._ended(unit):
            super().backward(unit)

    def backward_input(self, unit: UnitState) -> None:
        with self._timed():
            super().backward_input(unit)

    def backward_weight(self, unit: UnitState) -> None:
        with self._timed(), self._ended(unit):
            super().backward_weight(unit)
            run_hooks(self.megatron.call.chunks[self.megatron.numbers[unit.chunk]])

    @contextmanager
    def _timed(self) -> Iterator[None]:
        timers = self.megatron.config.timers
        if timers is not None:
            timers("backward-compute", log_level=2).start()
        yield
        if timers is not None:
            timers("backward-compute").stop()

    @contextmanager
    def _ended(self, unit: UnitState) -> Iterator[None]:
        """Return a context in which the backward of a microbatch through a chunk ends."""
        step = self.megatron
        with step.sync.backward(step.numbers[unit.chunk], self.last[unit.chunk] is unit):
            yield
        step.in_flight[unit.chunk] -= 1


class MegatronExecutor(StepExecutor):
    """Runs plans of model chunks on one rank; see `Executor`."""

    iteration_type: type[Iteration] = MegatronIteration


class RankChunks:
    """The model chunks of a rank, as stages.

    ``group`` has the ranks of the pipeline, ``stages`` the number of each chunk's stage. ``image_size`` is that of the
    encoder's `ModalityCut`; None without an encoder.
    """

    def __init__(self, chunks: Sequence[nn.Module], stages: Sequence[int], layout: Layout, group: Any) -> None:
        self.group, self.stages = group, list(stages)
        cut = cut_of(chunks[0])
        self.image_size = None if cut is None else cut.image_size
        self.device = next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
        self._layout = layout
        self._transport = StepTransport(group, self.device)
        last, several = len(layout.chunks) - 1, len(chunks) > 1
        self._layers = {
            stage: ChunkLayer(chunk, stage, i if several else None, stage == last)
            for i, (chunk, stage) in enumerate(zip(chunks, stages, strict=True))
        }

    def with_strategies(self) -> ExitStack:
        """Return a context of a step whose microbatches have memory strategies. Afterwards, the model is as before."""
        stack = ExitStack()
        for layer in self._layers.values():
            stack.enter_context(layer.recomputing.restored())
        return stack

    def executor(self, shapes: Sequence[TensorShape]) -> StepExecutor:
        """Make the executor of a training step from the shapes of the stages' outputs by which plans are made."""
        return step_executor(
            self._layers,
            self._layout,
            dist.get_rank(self.group),
            self._transport,
            scaled_loss,
            shapes,
            device=self.device,
            executor=MegatronExecutor,
        )
