"""What planned steps refuse, because it depends on Megatron Core's own order of microbatches."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from pipeloom.errors import InputError

pytestmark = [
    pytest.mark.full,  # importing Megatron Core takes seconds
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron Core is not installed"),
    # Megatron Core says what it has not found, such as Transformer Engine.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize(
    ("settings", "spans"),
    [
        ({}, False),
        ({"num_moe_experts": 8}, True),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, True),
        ({"fp8": "hybrid", "fp8_recipe": SimpleNamespace(value="delayed")}, True),
        ({"fp8": "hybrid", "fp8_recipe": "delayed", "tp_only_amax_red": True}, False),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, False),
        ({"fp8": None, "fp8_recipe": "delayed"}, False),
    ],
)
def test_layers_that_span_replicas_are_known(settings: dict[str, Any], spans: bool) -> None:
    from pipeloom.integrations.megatron.core.places import layers_span_replicas

    assert layers_span_replicas(SimpleNamespace(**settings)) is spans


def test_experts_that_are_replayed_by_order_are_refused() -> None:
    from pipeloom.integrations.megatron.core.call import check_config

    with pytest.raises(InputError, match=r"config.moe_enable_routing_replay: needs the order of Megatron Core's own"):
        check_config(SimpleNamespace(moe_enable_routing_replay=True), "whole", None)


@pytest.mark.parametrize("name", ["gtp_weight_remat_size", "expert_gtp_weight_remat_size"])
def test_weights_that_are_gathered_with_other_replicas_are_refused(name: str) -> None:
    from pipeloom.integrations.megatron.core.call import check_config

    check_config(SimpleNamespace(**{name: 1}), "whole", None)
    with pytest.raises(
        InputError, match=rf"config.{name}: is 2: ranks with other microbatches gather weights together"
    ):
        check_config(SimpleNamespace(**{name: 2}), "whole", None)


def chunk(**settings: Any) -> Any:
    return SimpleNamespace(ddp_config=SimpleNamespace(**settings), parameters=list)


def test_reductions_in_two_steps_are_refused_if_they_overlap() -> None:
    from pipeloom.integrations.megatron.core.call import check_chunks

    check_chunks([SimpleNamespace(), chunk(num_distributed_optimizer_instances=2, overlap_grad_reduce=False)], False)
    with pytest.raises(InputError, match="num_distributed_optimizer_instances: is 2, and overlap_grad_reduce is on"):
        check_chunks([chunk(num_distributed_optimizer_instances=2, overlap_grad_reduce=True)], False)


def test_chunks_that_are_cut_by_modality_do_not_gather_parameters_as_they_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pipeloom.integrations.megatron.core import modality

    cut = SimpleNamespace(num_encoder=1, num_language=1, most_images=2, encodes=True)
    monkeypatch.setattr(modality, "cuts_of", lambda chunks: [cut] * len(chunks))
    one = SimpleNamespace(size=lambda: 1)
    groups, config = SimpleNamespace(dp_cp=one, cp=one), SimpleNamespace()
    assert modality.check_cuts([chunk(overlap_param_gather=False)], config, groups, False) == ((1, 1, 2), False)
    with pytest.raises(InputError, match="overlap_param_gather: gathers parameters in the order in which chunks begin"):
        modality.check_cuts([chunk(overlap_param_gather=True)], config, groups, False)


@pytest.mark.parametrize("groups", [SimpleNamespace(), SimpleNamespace(pp=None)])
def test_process_groups_without_a_pipeline_are_refused(groups: Any) -> None:
    from pipeloom.integrations.megatron.core.forward_backward import planned_forward_backward

    with pytest.raises(InputError, match="pg_collection: has no group 'pp'"):
        planned_forward_backward(
            forward_step_func=print,
            data_iterator=None,
            model=[],
            num_microbatches=1,
            seq_length=1,
            micro_batch_size=1,
            pg_collection=groups,
        )


def test_a_measured_forward_leaves_nothing_to_the_garbage_collector() -> None:
    from pipeloom.integrations.megatron.core.recomputing import SavedTensors

    gc.disable()
    try:
        saved = SavedTensors()
        freed = weakref.ref(saved)
        del saved
        assert freed() is None
    finally:
        gc.enable()
