"""Layers: hand-checked times, operators that must not go missing, bytes that must balance."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.emulator import modules as m
from pipeloom.emulator.build import layer_module
from pipeloom.emulator.kernels import issue
from pipeloom.emulator.rules import Device
from pipeloom.emulator.stage import Stage, runs_of
from pipeloom.emulator.tape import NIC, NUM_DEVICES, Context, Group
from pipeloom.emulator.template import LayerTemplate
from pipeloom.errors import InputError
from pipeloom.spec import STRATEGIES, Workload
from tests.emulator.cases import PLAIN, residual_layers

NS = 1000


def kinds(layer, strategy, part):
    return [cost.kind for cost in layer.passes[strategy].programs[part].costs]


def durations(layer, workload, part, strategy="keep"):
    return layer.on(workload).leaves[strategy, part].duration_ps.tolist()


def test_norm_and_linear_by_hand():
    """The example of PipeWeaver Fig. 7: a norm and a linear layer, gradients to input and weight apart."""
    layer = LayerTemplate(m.Sequential((m.Norm(), m.Linear(8, 16, bias=False))), 8, Context(), PLAIN)
    work = Workload((10,))
    assert kinds(layer, "keep", "F") == ["norm", "matmul"]
    assert kinds(layer, "keep", "B") == ["matmul", "matmul", "norm", "norm"]
    # Norm: 480 operations, 320 bytes; product: 2 x 10 x 8 x 16 operations, 480 + 256 bytes.
    assert durations(layer, work, "F") == [480 * NS, 2560 * NS]
    # Gradient to the input, to the weight (736 - 256 + 2 x 4 x 128 bytes), and the norm's two.
    assert durations(layer, work, "B") == [2560 * NS, 2560 * NS, 800 * NS, 320 * NS]
    assert layer.on(work).leaves["keep", "F"].matrix.max() == 3040 * NS
    assert layer.on(work).leaves["keep", "B"].matrix.max() == 6240 * NS
    # Kept: the input (160), its statistic (40) and the norm's result (160); handed on: the output (320).
    assert layer.on(work).activation_bytes["keep"] == 360
    memory = layer.memory(work, "keep", "F")
    assert (memory.entry, memory.peak, memory.exit) == (160, 680, 680)
    # Held between I and W: the norm's result and the output's gradient; the input and its own gradient.
    assert layer.on(work).weight_gradient_bytes["keep"] == 160 + 320 + 160 + 160
    assert durations(layer, work, "I") == [2560 * NS, 800 * NS]
    assert durations(layer, work, "W") == [2560 * NS, 320 * NS]


def test_collectives_overlap_with_weight_gradients():
    """Sequence-parallel MLP on 2 devices: the exchange of the input gradient runs beside the weight gradient."""
    layer = LayerTemplate(m.MLP(16, gated=False, hidden=8), 8, Context(tensor=2), PLAIN)
    assert kinds(layer, "keep", "F") == ["all_gather", "matmul", "activation", "matmul", "reduce_scatter"]
    assert kinds(layer, "keep", "B") == [
        "all_gather",
        "matmul",
        "matmul",
        "activation",
        "all_gather",
        "matmul",
        "matmul",
        "reduce_scatter",
    ]
    work = Workload((10,))
    leaf = layer.on(work).leaves["keep", "B"]
    # A ring of two sends half of 10 x 8 x 2 bytes: 80 bytes, 160 ns.
    assert leaf.duration_ps[[0, 4, 7]].tolist() == [160 * NS] * 3
    free, ready = np.zeros(NUM_DEVICES, np.int64), np.zeros(2, np.int64)
    end = issue(leaf.device, leaf.predecessor_start, leaf.predecessor, leaf.duration_ps, free, ready)
    start = end - leaf.duration_ps
    assert start[7] == end[5] == start[6]
    assert leaf.matrix.max() == end.max() < leaf.duration_ps.sum()


@pytest.mark.parametrize(
    ("module", "forward", "backward"),
    [
        (
            m.Residual(m.Attention(4, 2, 4, hidden=16)),
            "norm matmul rotary causal_attention matmul add",
            "matmul matmul causal_attention_backward rotary matmul matmul norm norm add",
        ),
        (
            m.Residual(m.MLP(32, hidden=16)),
            "norm matmul activation matmul add",
            "matmul matmul activation matmul matmul norm norm add",
        ),
        (
            m.MixtureOfExperts(8, 4, 2, 8, hidden=16),
            "matmul route permute grouped_matmul activation grouped_matmul permute matmul activation matmul add",
            "matmul matmul activation matmul matmul permute grouped_matmul grouped_matmul activation grouped_matmul "
            "grouped_matmul permute add route matmul add matmul",
        ),
        (
            m.Mamba2(4, 8, 16, hidden=16),
            "matmul depthwise scan norm matmul",
            "matmul matmul norm norm scan depthwise depthwise matmul matmul",
        ),
        (
            m.LatentAttention(4, 8, 4, 2, 4, 12, hidden=16),
            "matmul norm matmul matmul matmul rotary causal_attention matmul",
            "matmul matmul causal_attention_backward rotary matmul matmul matmul matmul matmul matmul norm norm "
            "matmul add matmul",
        ),
        (
            m.Modulated(m.CrossAttention(4, 4, 3, 8, hidden=16), projection=True),
            "activation matmul norm modulate matmul matmul attention matmul modulate add",
            "modulate matmul matmul attention_backward matmul matmul matmul matmul modulate norm norm add add matmul",
        ),
        (m.LanguageHead(16, 64), "norm matmul cross_entropy", "cross_entropy matmul matmul norm norm"),
        (
            m.LanguageHead(16, 64, capped=True),
            "norm matmul activation cross_entropy",
            "cross_entropy activation matmul matmul norm norm",
        ),
        (m.PatchMerger(16, 4, 8), "norm copy matmul activation matmul", None),
        (m.DenoisingHead(16, 4), "norm matmul squared_error", "squared_error matmul matmul norm norm"),
        (m.TokenEmbedding(64, 16), "embedding", "embedding"),
        (m.PatchEmbedding(12, 16), "matmul", "matmul"),
    ],
)
def test_no_operator_goes_missing(module, forward, backward):
    layer = LayerTemplate(module, 16, Context(), PLAIN)
    assert " ".join(kinds(layer, "keep", "F")) == forward
    if backward is not None:
        assert sorted(kinds(layer, "keep", "B")) == sorted(backward.split())
    # Every operator takes time: without any one of them the pass would be shorter.
    for part in layer.passes["keep"].programs:
        times = durations(layer, Workload((7, 9)), part)
        names = kinds(layer, "keep", part)
        assert all(t > 0 for t, kind in zip(times, names, strict=True) if kind != "copy")
        assert layer.on(Workload((7, 9))).leaves["keep", part].matrix.max() == sum(times)


def test_operations_of_a_llama_layer():
    hidden, inner, tokens = 64, 96, 50
    layer = LayerTemplate(
        m.Sequential((m.Residual(m.Attention(8, 8, 8, hidden=hidden)), m.Residual(m.MLP(inner, hidden=hidden)))),
        hidden,
        Context(),
        PLAIN,
    )
    weights = 4 * hidden * hidden + 3 * hidden * inner
    assert layer.num_parameters == weights + 2 * hidden
    pairs = tokens * (tokens + 1) / 2
    assert layer.on(Workload((tokens,))).model_flops == 2 * weights * tokens + 4 * pairs * hidden
    # Packed sequences attend within themselves.
    half = layer.on(Workload((tokens // 2, tokens // 2)))
    assert half.model_flops == 2 * weights * tokens + 4 * (25 * 26 / 2 * 2) * hidden


@given(residual_layers(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.data())
def test_bytes_balance_between_passes(spec, tensor, expert, data):
    module, width = layer_module(spec)
    layer = LayerTemplate(module, width, Context(tensor=tensor, expert=expert), PLAIN)
    work = Workload(tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))) * 4)
    known = layer.on(work)
    slack = 64  # each tensor's bytes are rounded on their own
    for strategy in STRATEGIES:
        memory = {part: layer.memory(work, strategy, part) for part in ("F", "B", "I", "W")}
        kept, output = known.activation_bytes[strategy], known.output_bytes
        assert memory["F"].exit == pytest.approx(kept + output, abs=slack)
        assert memory["B"].entry == pytest.approx(kept + output, abs=slack)
        assert memory["W"].entry == pytest.approx(known.weight_gradient_bytes[strategy], abs=slack)
        assert memory["W"].exit == 0
        for part in memory.values():
            assert part.peak >= max(part.entry, part.exit)
    assert known.activation_bytes["recompute"] <= known.activation_bytes["selective"] <= known.activation_bytes["keep"]
    assert known.host_bytes["offload"] == known.activation_bytes["keep"]


@settings(deadline=None, max_examples=40)
@given(residual_layers(), st.sampled_from([1, 2]), st.sampled_from(STRATEGIES), st.sampled_from(["F", "B", "I", "W"]))
def test_the_peak_of_memory_holds_by_definition(spec, tensor, strategy, part):
    module, width = layer_module(spec)
    layer = LayerTemplate(module, width, Context(tensor=tensor), PLAIN)
    work = Workload((5, 7))
    program = layer.passes[strategy].programs[part]
    # Operators run in issue order, one at a time on each device, after those that they wait for.
    free, begin, end = {}, [], []
    lengths = durations(layer, work, part, strategy)
    for cost, before, length in zip(program.costs, program.before, lengths, strict=True):
        begin.append(max([free.get(cost.device, 0), *(end[i] for i in before if i >= 0)]))
        end.append(begin[-1] + length)
        free[cost.device] = end[-1]
    tensors = []
    for buffer in program.buffers:
        inside = [i for i in (buffer.made, *buffer.used) if i >= 0]
        last = np.inf if buffer.kept else max((end[i] for i in inside), default=0)
        tensors.append((begin[buffer.made] if buffer.made >= 0 else 0, last, round(buffer.num_bytes.of(work))))
    alive = [sum(size for made, gone, size in tensors if made <= t < gone) for t in {0, *begin, *end}]
    memory = layer.memory(work, strategy, part)
    assert memory.entry == sum(round(b.num_bytes.of(work)) for b in program.buffers if b.made < 0)
    assert memory.exit == sum(size for _, gone, size in tensors if gone == np.inf)
    assert memory.peak == max(memory.entry, *alive)


@settings(deadline=None, max_examples=40)
@given(residual_layers(), st.sampled_from([1, 2]))
def test_recomputing_runs_operators_again_and_only_those(spec, tensor):
    module, width = layer_module(spec)
    layer = LayerTemplate(module, width, Context(tensor=tensor), PLAIN)
    plain, again = kinds(layer, "keep", "B"), kinds(layer, "recompute", "B")
    extra = list(again)
    for kind in plain:
        extra.remove(kind)
    forward = kinds(layer, "keep", "F")
    for kind in set(extra):
        assert extra.count(kind) <= forward.count(kind)
    work = Workload((9,))
    total = {s: sum(durations(layer, work, "B", s)) for s in STRATEGIES}
    assert total["keep"] <= total["selective"] <= total["recompute"] <= total["keep"] + sum(durations(layer, work, "F"))
    # Split: I recomputes, W does not compute anything of the forward but gathers.
    assert set(kinds(layer, "recompute", "W")) <= {
        "matmul",
        "grouped_matmul",
        "norm",
        "depthwise",
        "multiply",
        "all_gather",
        "view",
    }


def test_frozen_layers_have_no_weight_gradients():
    module = m.Residual(m.MLP(16, hidden=8))
    passing = LayerTemplate(module, 8, Context(), PLAIN, trainable=False)
    assert kinds(passing, "keep", "B") == ["matmul", "activation", "matmul", "norm", "add"]
    assert kinds(passing, "keep", "W") == []
    still = LayerTemplate(module, 8, Context(), PLAIN, trainable=False, input_gradient=False)
    assert set(still.passes["keep"].programs) == {"F"}
    assert still.on(Workload((5,))).activation_bytes["keep"] == 0
    first = LayerTemplate(module, 8, Context(), PLAIN, input_gradient=False)
    assert "norm" in kinds(first, "keep", "B")
    assert len(kinds(first, "keep", "B")) < len(kinds(LayerTemplate(module, 8, Context(), PLAIN), "keep", "B"))


def test_sharded_weights_are_gathered_and_gradients_reduced():
    layer = LayerTemplate(m.MLP(16, hidden=8), 8, Context(shards=(4, 4)), PLAIN)
    assert kinds(layer, "keep", "F")[0] == "all_gather"
    # The gradients of the layer before, whose reduction must not delay the gathering of this layer's weights.
    assert kinds(layer, "keep", "B")[:2] == ["all_gather", "reduce_scatter"]
    plain = LayerTemplate(m.MLP(16, hidden=8), 8, Context(), PLAIN)
    assert (
        plain.on(Workload((4,))).leaves["keep", "F"].matrix.max()
        < layer.on(Workload((4,))).leaves["keep", "F"].matrix.max()
    )


def test_experts_that_are_not_sharded_are_not_gathered():
    """DeepSpeed's and torchtitan's meshes shard experts over the replicas that expert parallelism leaves."""
    module = m.Sequential((m.MLP(16, gated=False, hidden=8), m.MixtureOfExperts(16, 4, 2, hidden=8)))

    def sent(**context):
        layer = LayerTemplate(module, 8, Context(expert=2, **context), PLAIN)
        return [
            (cost.kind, cost.network.one)
            for cost in layer.passes["keep"].programs["B"].costs
            if cost.kind in ("all_gather", "reduce_scatter")
        ]

    dense, router, experts = 2 * 8 * 16, 8 * 4, 2 * 3 * 8 * 16
    assert sent() == []
    assert sent(shards=(4, 1)) == [
        ("all_gather", (dense + router) * 2 * 3 / 4),
        ("reduce_scatter", (dense + router) * 4 * 3 / 4),
    ]
    assert sent(shards=(4, 2))[1] == ("all_gather", experts * 2 / 2)
    assert len(sent(shards=(4, 2))) == 4


def test_sharded_layers_hide_messages_that_are_faster_than_their_products():
    slow = (dataclasses.replace(PLAIN[0], flops_per_s=1e6), *PLAIN[1:])
    many = 40

    def seconds(**context):
        layer = LayerTemplate(m.MLP(16, hidden=8), 8, Context(**context), slow)
        stage = Stage(runs_of([layer] * many))
        return stage.cost(Workload((64,)), ("B",)).duration_ps["B"] / 1e12

    plain, sharded = seconds(), seconds(shards=(4, 4))
    one = seconds(shards=(4, 4)) / many
    assert plain < sharded < plain + 2 * one


def test_context_parallel_latent_attention_sends_whole_keys():
    attention = m.LatentAttention(4, kv_rank=16, query_rank=None, nope_width=8, rope_width=4, value_width=8, hidden=64)
    layer = LayerTemplate(attention, 64, Context(context=2), PLAIN)
    (sent,) = [c.network for c in layer.passes["keep"].programs["F"].costs if c.kind == "ring_exchange"]
    # Keys of 8 + 4 and values of 8 columns in each of 4 heads, of 2 bytes a number, for half of the tokens.
    assert sent.tokens == 4 * (12 + 8) * 2 / 2


def test_keys_take_one_network_interface_between_nodes():
    def sent(group):
        layer = LayerTemplate(m.Attention(4, 4, 16, hidden=64), 64, Context(context=4, context_group=group), PLAIN)
        return [c.network.tokens for c in layer.passes["keep"].programs["B"].costs if c.kind == "ring_exchange"]

    assert sent(Group(NIC, lanes=4.0, local=2)) == sent(Group(NIC)) != []


def test_context_parallel_scans_exchange_heads():
    mamba = m.Mamba2(heads=4, head_width=8, state=8, hidden=16)
    layer = LayerTemplate(mamba, 16, Context(context=2), PLAIN)
    sent = [c.network.tokens for c in layer.passes["keep"].programs["F"].costs if c.kind == "all_to_all"]
    inner, mixed = 4 * 8, 4 * 8 + 2 * 8
    # Half of the rows are local, and the other device is on another node.
    assert sent == [(inner + mixed + 4) * 2 / 2 / 2, inner * 2 / 2 / 2]
    assert kinds(layer, "keep", "B").count("all_to_all") == 2
    assert "all_to_all" not in kinds(LayerTemplate(mamba, 16, Context(), PLAIN), "keep", "F")


def test_context_parallel_attention_sends_keys_round():
    layer = LayerTemplate(m.Attention(4, 4, 4, hidden=16), 16, Context(context=2), PLAIN)
    assert "ring_exchange" in kinds(layer, "keep", "F")
    whole = LayerTemplate(m.Attention(4, 4, 4, hidden=16), 16, Context(), PLAIN)
    work = Workload((64,))
    assert layer.on(work).model_flops == whole.on(work).model_flops / 2


def test_rotary_embeddings_with_a_scale_are_eager():
    plain, scaled = (
        LayerTemplate(m.Attention(4, 2, 4, rotary_scaled=scale, hidden=16), 16, Context(), PLAIN)
        for scale in (False, True)
    )
    assert kinds(plain, "keep", "F") == kinds(scaled, "keep", "F")
    work = Workload((64,))
    times = [
        {part: dict(zip(kinds(layer, "keep", part), durations(layer, work, part), strict=True)) for part in ("F", "B")}
        for layer in (plain, scaled)
    ]
    assert times[1]["F"]["rotary"] == 6 * times[0]["F"]["rotary"]
    assert times[1]["B"]["rotary"] == 5 * times[0]["B"]["rotary"]


def test_experts_travel_only_with_expert_parallelism():
    module = m.MixtureOfExperts(8, 4, 2, hidden=16)
    assert "all_to_all" not in kinds(LayerTemplate(module, 16, Context(tensor=2), PLAIN), "keep", "F")
    spread = LayerTemplate(module, 16, Context(expert=2), PLAIN)
    assert kinds(spread, "keep", "F").count("all_to_all") == 2
    assert spread.local_parameters == (16 * 4, 4 * 3 * 16 * 8 // 2)
    assert spread.num_parameters == 16 * 4 + 4 * 3 * 16 * 8


def test_heads_must_divide():
    with pytest.raises(InputError, match="attention heads: 6 is not a multiple of tensor parallelism 4"):
        LayerTemplate(m.Attention(6, 6, 4, hidden=24), 24, Context(tensor=4), PLAIN)


def test_a_new_operator_and_a_rule_of_ones_own():
    """What `docs/emulator.md` shows: a module of one's own, and a rule for its operator."""
    from pipeloom.emulator.tape import Backward, Cost

    class Sort:
        def __call__(self, x):
            return x.tape.record(
                Cost("sort", memory=x.num_bytes * 20),
                [x],
                (x.rows, x.width),
                backward=Backward(saved=[x], input_gradient=Cost("sort", memory=x.num_bytes * 2)),
            )

    compute = Device(
        "compute", flops_per_s=1e9, memory_bytes_per_s=1e9, overrides={"sort": lambda c: c.memory_bytes * 3e-9}
    )
    layer = LayerTemplate(Sort(), 4, Context(), (compute, *PLAIN[1:]))
    assert durations(layer, Workload((5,)), "F") == [5 * 4 * 2 * 20 * 3 * NS]
    assert np.array_equal(layer.on(Workload((5,))).leaves["keep", "F"].outputs, [0, -1])
