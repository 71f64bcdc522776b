"""Timers of Megatron-LM: each rank's mean as a cost, and what a log may lack."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from pipeloom.errors import InputError
from pipeloom.explain.traces.timers import explain_timers
from pipeloom.io.megatron_log import read_megatron_log
from pipeloom.search import Budget

PIPELINE, TENSOR, MICROBATCHES = 4, 2, 8


def log(*, chunks: str = "None", intervals: int = 3, whole: bool = True) -> str:
    """What a run of 16 ranks prints, two replicas of four pipeline ranks of two tensor ranks."""
    lines = [
        "------------------------ arguments ------------------------",
        "  global_batch_size ............................... 32",
        "  micro_batch_size ................................ 2",
        f"  pipeline_model_parallel_size .................... {PIPELINE}",
        f"  tensor_model_parallel_size ...................... {TENSOR}",
        f"  virtual_pipeline_model_parallel_size ............ {chunks}",
    ]
    for interval in range(intervals):
        slow = 10.0 if interval == 0 else 1.0
        lines.append(
            f" iteration {interval} | elapsed time per iteration (ms): {900.0 * slow:.1f} | lm loss: 1.0E+01 |"
        )
        lines.append("times across ranks (ms):")
        for name, unit in (("forward-backward", 0.0), ("forward-compute", 8.0), ("backward-compute", 16.0)):
            if name == "forward-backward" and not whole:
                continue
            lines.append(f"  {name}:")
            for rank in range(16):
                mean = (unit * (rank // 4 + 1) + rank % 2 if unit else 700.0) * slow
                lines.append(f"     rank {rank:2d}: {mean:.2f}")
        lines.append("  optimizer:")
        lines.append("     rank  0: 5.00")
    return "\n".join(lines)


def test_costs_are_means_of_each_pipeline_rank(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(log())
    timers = read_megatron_log(tmp_path / "a.log")
    assert timers.num_microbatches == MICROBATCHES
    assert timers.num_logged == 3
    assert timers.forward_s == pytest.approx([0.0085, 0.0165, 0.0245, 0.0325])
    assert timers.backward_s == pytest.approx([0.0165, 0.0325, 0.0485, 0.0645])
    assert timers.forward_backward_s == pytest.approx(0.7)
    found = explain_timers(timers, "a", budget=Budget(evaluations=20))
    # 1F1B with a last rank that is slowest: it works without a pause once the first microbatch has come.
    work = sum(timers.forward_s[:3]) / 8 + timers.forward_s[3] + timers.backward_s[3] + sum(timers.backward_s[:3]) / 8
    assert found.simulated_s == pytest.approx(work)
    assert [layer.forward_s for layer in found.layers.layers] == pytest.approx([f / 8 for f in timers.forward_s])


def test_chunks_of_a_rank_are_taken_for_equal(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(log(chunks="2", whole=False))
    timers = read_megatron_log(tmp_path / "a.log", num_microbatches=4)
    found = explain_timers(timers, "a", budget=Budget(evaluations=20))
    assert (timers.forward_backward_s, timers.num_microbatches) == (0.0, 4)
    assert len(found.layers.layers) == 8
    assert sum(layer.forward_s for layer in found.layers.layers) * 4 == pytest.approx(sum(timers.forward_s))
    assert found.simulated_s >= max(found.compute_s)


def mapped_log(milliseconds: list[float], **sizes: object) -> str:
    """What a run with ``--use-tp-pp-dp-mapping`` prints, with these times of its ranks."""
    arguments = {"global_batch_size": 8, "micro_batch_size": 1, "use_tp_pp_dp_mapping": True, **sizes}
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in arguments.items()]
    for name in ("forward-compute", "backward-compute"):
        lines += [f"  {name}:", *(f"     rank {rank:2d}: {each:.2f}" for rank, each in enumerate(milliseconds))]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("milliseconds", "sizes"),
    [
        ([100, 300, 100, 300], {}),
        ([100, 100, 300, 300] * 2, {"tensor_model_parallel_size": 2}),
        # With this order Megatron-LM requires equal numbers of replicas of experts and of other layers.
        (
            ([100] * 4 + [300] * 4) * 2,
            {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "expert_model_parallel_size": 4},
        ),
    ],
)
def test_pipeline_ranks_may_be_numbered_before_replicas(
    tmp_path: Path, milliseconds: list[float], sizes: dict[str, int]
) -> None:
    (tmp_path / "a.log").write_text(mapped_log(milliseconds, pipeline_model_parallel_size=2, **sizes))
    timers = read_megatron_log(tmp_path / "a.log")
    assert timers.forward_s == pytest.approx((0.1, 0.3))
    assert timers.backward_s == pytest.approx((0.1, 0.3))
    assert timers.num_microbatches == 4
    text = mapped_log(milliseconds[:-2], pipeline_model_parallel_size=2, **{"tensor_model_parallel_size": 2, **sizes})
    (tmp_path / "b.log").write_text(text)
    with pytest.raises(InputError, match=r"times \d+ ranks, .* is 2, and each stage has \d tensor and context ranks"):
        read_megatron_log(tmp_path / "b.log")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("times across ranks (ms):", "", ""),
        ("backward-compute", "backward", "no timer backward-compute"),
        ("pipeline_model_parallel_size", "pipeline", "pipeline_model_parallel_size: is missing"),
        ("pipeline_model_parallel_size .................... 4", "pipeline_model_parallel_size ... 5", "times 16 ranks"),
        ("global_batch_size ............................... 32", "global_batch_size ... 33", "give --microbatches"),
        ("micro_batch_size ................................ 2", "micro_batch_size ... two", "micro_batch_size: two"),
        ("rank ", "", "no timers of Megatron-LM"),
    ],
)
def test_what_a_log_lacks_is_named(tmp_path: Path, before: str, after: str, words: str) -> None:
    (tmp_path / "a.log").write_text(log().replace(before, after))
    if not words:  # the heading above the timers says nothing that they do not say
        assert read_megatron_log(tmp_path / "a.log").num_microbatches == MICROBATCHES
        return
    with pytest.raises(InputError, match=words) as caught:
        read_megatron_log(tmp_path / "a.log")
    assert caught.value.remedy


def test_least_and_most_of_all_ranks_are_no_costs(tmp_path: Path) -> None:
    text = "(min, max) time across ranks (ms):\n    forward-compute ......: (12.00, 13.00)\n"
    (tmp_path / "a.log").write_text(text)
    with pytest.raises(InputError, match="not each rank's time; run Megatron-LM with"):
        read_megatron_log(tmp_path / "a.log")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        (
            "traces.tar.gz",
            gzip.compress(b"\0" * 257 + b"ustar" + b"\0" * 250, mtime=0),
            "is a tar archive; give traces",
        ),
        ("traces.zip", b"PK\x03\x04\xff\xff", "is a zip archive"),
        ("steps.parquet", b"PAR1\xff\xff", "is a Parquet file"),
        ("report.sqlite", b"SQLite format 3\0", "is an SQLite database"),
        ("run.yaml", b"trainer: {}", "is a YAML file"),
        ("schedule.csv", b"F0,F1", "is a table of comma-separated values"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=words) as caught:
        read_megatron_log(tmp_path / name)
    assert "torch.profiler" in caught.value.remedy
