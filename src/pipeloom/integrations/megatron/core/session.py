"""The planned steps of one model on one rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from pipeloom.collector import collector_paused
from pipeloom.errors import InputError
from pipeloom.integrations.megatron.core.call import (
    StepCall,
    check_chunks,
    check_config,
    check_interface,
    each_chunk,
    iterators_fit,
)
from pipeloom.integrations.megatron.core.chunks import MegatronImages, MegatronMicrobatch, MegatronStep, RankChunks
from pipeloom.integrations.megatron.core.data import Reader, Readers
from pipeloom.integrations.megatron.core.gradients import GradientSync
from pipeloom.integrations.megatron.core.modality import ImageRange, check_cuts, cuts_of, vision_language_sizes
from pipeloom.integrations.megatron.core.places import (
    RankReport,
    default_groups,
    find_place,
    groups_together,
    layers_span_replicas,
)
from pipeloom.integrations.megatron.core.recomputing import num_equal_layers
from pipeloom.integrations.steps.agreement import agree, check_reports
from pipeloom.integrations.steps.control import ControlChannel, StepMessage, StepReport
from pipeloom.integrations.steps.executors import StepExecutors
from pipeloom.integrations.steps.measuring import gather_times, step_times
from pipeloom.integrations.steps.orders import KnownOrder, KnownOrders
from pipeloom.integrations.steps.planning import Planning, Sizes, StepPlanner, checked_sizes, image_sizes, text_size
from pipeloom.integrations.steps.running import num_encoder_stages
from pipeloom.integrations.steps.shapes import Boundaries, Signature
from pipeloom.integrations.steps.sizes import default_size, signature
from pipeloom.integrations.steps.strategies import OFFERED, StepMemory
from pipeloom.plan import backend_of
from pipeloom.runtime.execute.result import StepResult
from pipeloom.spec import Strategy

_UNKNOWN: Signature = ()
"""Signature of microbatches whose shapes are sent ahead of their tensors."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of planned steps beside Megatron's own settings."""

    planner: Planning | None = None
    """Options of the planner; None for the defaults."""
    sizes: Callable[[Any], int] | None = None
    """Returns the size of a microbatch from its item of the data iterator: tokens, or another number that costs grow
    with. None: the number of elements of the item's first tensor, without the last dimension if it has floats."""
    images: Callable[[Any], Sequence[int]] | None = None
    """For chunks of `vision_language_chunks`: returns the sizes of a microbatch's images from its item of the data
    iterator, in their order; an empty sequence if it has none. None: the rows of the item's images, all of one size."""
    stages: Sequence[int] | None = None
    """Numbers of the stages that this rank's model chunks are, in their order. None: as Megatron places them, chunk i
    of pipeline rank r of p is stage i·p + r."""
    activation_bytes: int | None = None
    """Memory of a rank for what it holds between forwards and backwards, for messages and for recomputation. Plans stay
    within it by memory strategies, one for each microbatch and layer; what Megatron's configuration says about
    recomputation does not count then. None: memory is not limited, and the configuration holds."""
    strategies: Sequence[Strategy] = OFFERED
    """Memory strategies that plans may choose, ``keep`` first. ``selective`` recomputes ``config.recompute_modules``,
    and ``recompute`` every transformer layer."""
    predict_shapes: bool = True
    """With Megatron's ``variable_seq_lengths``: whether the shapes of messages are predicted from the extents of the
    tensors in an item, once they are seen to follow from these. False: they are sent ahead of every message. Set it if
    shapes depend on values, for example where a batch is cut to its longest sample."""
    read_ahead: bool = True
    """Whether the next step's microbatches are read while a step runs, so that the planner has this time."""

    @property
    def memory(self) -> StepMemory | None:
        """The limit of memory, checked; None: no limit.

        Raises
        ------
        InputError
            If the limit or a strategy is not valid.
        """
        return None if self.activation_bytes is None else StepMemory(self.activation_bytes, tuple(self.strategies))


class PlannedSteps:
    """Runs the steps of one model, on one rank. All ranks make one together, with their first step."""

    def __init__(self, call: StepCall, options: StepOptions) -> None:
        self.options = options
        self._groups = call.pg_collection or default_groups()
        self._config = get_model_config(call.chunks[0])
        report = self._report(call)
        self.place = find_place(report)
        layout = self.place.layout
        self._here = RankChunks(call.chunks, report.stages, layout, self._groups.pp)
        self._control = ControlChannel(self.place.group, self.place.source, "cpu")
        self._executors = StepExecutors(layout, self._here.executor)
        stages, num_encoder = set(report.stages), num_encoder_stages(layout)
        self._boundaries = {trains: Boundaries(len(layout.chunks), stages, num_encoder) for trains in (False, True)}
        """By whether a step trains."""
        self._orders = KnownOrders(layout)
        self._readers = Readers(self._here.device)
        self._num_steps = 0
        self.planner: StepPlanner | None = None
        """Only on the rank that decides; None on others."""
        if self._control.broadcasts:
            memory = options.memory
            if memory is not None:
                memory = replace(memory, num_layers=self.place.num_layers)
            self.planner = StepPlanner(
                layout, options.planner or Planning(), backend_of(self._here.device.type), memory
            )
            weakref.finalize(self, self.planner.close)

    def _report(self, call: StepCall) -> RankReport:
        pipeline = tuple(dist.get_process_group_ranks(self._groups.pp))
        size, rank = len(pipeline), dist.get_rank(self._groups.pp)
        cuts = cuts_of(call.chunks)
        usual = [cut.stage for cut in cuts] or [i * size + rank for i in range(len(call.chunks))]
        stages = usual if self.options.stages is None else list(self.options.stages)
        problem, encoder, trains_encoder = "", None, False
        try:
            check_interface()
            memory = self.options.memory
            check_config(self._config, (self.options.planner or Planning()).backward, memory)
            check_chunks(call.chunks, stages != usual)
            iterators_fit(call.iterators, call.chunks)
            if len(stages) != len(call.chunks):
                raise InputError("stages", f"has {len(stages)} numbers for {len(call.chunks)} chunks", "give one each")
            if memory is not None:
                memory.check_encoder(len(cuts))
            if cuts:
                encoder, trains_encoder = check_cuts(call.chunks, self._config, self._groups, stages != usual)
        except InputError as error:
            problem = str(error)
        reads = 0 in stages and len(call.iterators) > 0 and call.iterators[0] is not None
        together = groups_together(self._groups, self._config)
        num_layers = tuple(map(num_equal_layers, call.chunks))
        return RankReport(tuple(stages), pipeline, together, reads, problem, encoder, trains_encoder, num_layers)

    def close(self) -> None:
        """Stop the planner's process and the reading thread."""
        if self.planner is not None:
            self.planner.close()
        self._readers.close()

    # ---------------------------------------------------------------- one step

    def run(self, call: StepCall) -> list[Any]:
        """Run one step, as Megatron Core's forward-backward functions do, and return what they return."""
        config, trains = self._config, not call.forward_only
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        readers = self._readers.of(call.iterators)
        message = self._agreed(call, readers)
        step = MegatronStep(
            call,
            config,
            self._groups.cp.size(),
            readers,
            {stage: i for i, stage in enumerate(self._here.stages)},
            GradientSync(call.chunks, config, self._hooks_agree(call)),
            torch.zeros([], dtype=torch.int, device=self._here.device),
            {} if message.measures and self.options.memory is not None else None,
        )
        if trains:
            step.sync.off()
            self._gather_parameters(call)
        self._execute(step, message)
        if trains:
            step.sync.finish()
            self._num_steps += 1
            self._finalize(step)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return step.results()

    def _hooks_agree(self, call: StepCall) -> bool:
        """Return whether all data-parallel ranks run the hooks of their last backwards in one order."""
        whole = (self.options.planner or Planning()).backward == "whole"
        if self._here.image_size is not None:
            # A replica without images runs no hooks of the encoder.
            return False
        return self.place.one_order or (whole and len(call.chunks) == 1)

    def _agreed(self, call: StepCall, readers: Sequence[Reader | None]) -> StepMessage:
        """Return what all ranks run, after each has read its microbatches."""
        failure: InputError | None = None
        count = call.num_microbatches
        report = StepReport("num_microbatches", count, not call.forward_only)
        try:
            if not count or count < 1:
                raise InputError("num_microbatches", f"is {count}", "give at least 1")
            iterators_fit(call.iterators, call.chunks)
            ends = {0, len(self.place.layout.chunks) - 1}
            for each in dict.fromkeys(reader for reader in readers if reader is not None):
                each.begin()
            for stage, reader in zip(self._here.stages, readers, strict=True):
                if reader is not None and (stage in ends or reader.was_read):
                    reader.fill(count)
        except InputError as error:
            failure, report = error, StepReport(failure=str(error))
        return agree(self._control, report, failure, lambda reports: self._decide(call, readers, reports))

    def _decide(self, call: StepCall, readers: Sequence[Reader | None], reports: Sequence[StepReport]) -> StepMessage:
        planner, trains, count = self.planner, not call.forward_only, call.num_microbatches
        assert planner is not None
        check_reports(self._control, reports, trains, count, "pass the same forward_only on all ranks")
        reader = readers[self._here.stages.index(0)]
        items = [] if reader is None else reader.items(count)
        sizes = self._sizes(items, count)
        widths = planner.begin(self._num_steps) if trains else None
        order = planner.order(sizes, trains)
        if trains and reader is not None and self.options.read_ahead and reader.may_read_ahead:
            ahead = reader.read_ahead(count, self._readers.thread)
            ahead.add_done_callback(lambda future: self._ask(future, count))
        measures = trains and planner.measures
        return self._orders.message(order, self._signatures(call, items), measures, widths)

    def _signatures(self, call: StepCall, items: Sequence[Any]) -> tuple[Signature, ...]:
        """Return what the shapes of each microbatch's tensors follow from."""
        count = call.num_microbatches
        if not self._config.variable_seq_lengths:
            return ((call.seq_length, call.micro_batch_size, call.decoder_seq_length or 0),) * count
        # If layers span replicas, these run one plan on items of their own.
        several = layers_span_replicas(self._config) and self._groups.dp_cp.size() > self._groups.cp.size()
        # The length of text with images depends on the values of tokens.
        several = several or self._here.image_size is not None
        if several or not self.options.predict_shapes or len(items) < count:
            return (_UNKNOWN,) * count
        return tuple(signature((item,), {}) for item in items)

    def _sizes(self, items: Sequence[Any], count: int) -> Sizes:
        options, image_size = self.options, self._here.image_size
        if image_size is not None:
            if len(items) < count:
                raise InputError("data_iterator", "is None on the rank of the encoder's first stage", "give one there")
            return vision_language_sizes(items, image_size, options.sizes, options.images)
        if len(items) < count:
            return (1,) * count
        return checked_sizes(map(options.sizes or default_size, items))

    def _ask(self, ahead: Future[list[Any]], count: int) -> None:
        """Ask for the plan of the next step, in the reading thread."""
        # What failed in reading is raised by the next step.
        if ahead.exception() is None and len(ahead.result()) == count and self.planner is not None:
            self.planner.ask(self._sizes(ahead.result(), count))

    def _execute(self, step: MegatronStep, message: StepMessage) -> None:
        trains = not step.call.forward_only
        executor, boundaries = self._executors.get(trains, message.widths), self._boundaries[trains]
        with collector_paused():
            known = self._orders.receive(message)
            strategies = known.order.strategies if trains else ()
            microbatches = [
                MegatronMicrobatch(
                    number,
                    text_size(size),
                    step,
                    [None] * (len(boundaries.before) + 1) if seen == _UNKNOWN else boundaries.predict(seen),
                    strategies[number] if strategies else (),
                )
                for number, (size, seen) in enumerate(zip(known.order.sizes, known.signatures, strict=True))
            ]
            if self._here.image_size is not None:
                self._divide_images(known, microbatches, boundaries)
            linked = executor.with_shapes(executor.prepare(known.order.plan, known.packing), microbatches)
            with self._here.with_strategies() if strategies else nullcontext():
                result = executor.run_linked(linked, microbatches, normalizer=1.0)
            del linked
        for seen, microbatch in zip(known.signatures, microbatches, strict=True):
            if seen != _UNKNOWN:
                boundaries.learn(seen, microbatch.metas)
            for part in microbatch.parts:
                boundaries.learn(part.images.signature, part.metas, images=True)
        if message.measures:
            self._gather_times(known, result, microbatches, step.held)

    def _divide_images(
        self, known: KnownOrder, microbatches: Sequence[MegatronMicrobatch], boundaries: Boundaries
    ) -> None:
        """Divide the images of the microbatches as the plan does."""
        for packed in known.packing.microbatches:
            microbatch = microbatches[packed.samples[0]]
            lengths = image_sizes(known.order.sizes[microbatch.number])
            parts = []
            for part in packed.parts[0]:
                images = ImageRange(part.first, part.first + part.count, lengths)
                shapes = boundaries.predict(images.signature, images=True)
                parts.append(MegatronImages(microbatch.number, images, microbatch.step, shapes))
            microbatch.parts = parts

    def _gather_times(
        self,
        known: KnownOrder,
        result: StepResult,
        microbatches: Sequence[MegatronMicrobatch],
        held: dict[tuple[int, int], int] | None,
    ) -> None:
        times = step_times(self.place.layout, self._here.stages, known, result, microbatches, held)
        # The other pipelines of the group run the same stages.
        own = times if self.place.is_first else ([], {})
        into = None if self.planner is None else self.planner.measurements
        gather_times(own, into, self.place.group, self._control.place)

    # ---------------------------------------------------------------- before and after

    def _gather_parameters(self, call: StepCall) -> None:
        """Begin to gather parameters where Megatron's configuration asks for it at the beginning of a step."""
        functions = self._config.param_sync_func
        if functions is not None:
            for function, chunk in zip(each_chunk(functions, len(call.chunks)), call.chunks, strict=True):
                function(chunk.parameters())

    def _finalize(self, step: MegatronStep) -> None:
        """Finish the gradients with Megatron's function."""
        config, call = self._config, step.call
        if config.finalize_model_grads_func is None:
            return
        num_tokens = None
        if config.calculate_per_token_loss:
            num_tokens = step.num_tokens
            # Megatron takes the number from the last rank.
            if self.place.layout.chunks[-1].rank != self.place.layout.num_ranks - 1:
                dist.all_reduce(num_tokens, group=self._here.group)
        config.finalize_model_grads_func(
            call.chunks, num_tokens, pg_collection=self._groups, force_all_reduce=call.force_all_reduce
        )
