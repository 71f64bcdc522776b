"""A run that a baseline would have trained faster says so, with what to do."""

from __future__ import annotations

import io

from rich.console import Console

from pipeloom.cli.progress import summary_tables
from pipeloom.training import Summary
from pipeloom.training.finish import advice


def test_a_faster_baseline_is_reported_with_what_to_do() -> None:
    compared = {"1f1b": 1.1, "interleaved": 0.92, "per-batch plan": 1.0}
    reported = advice(compared, "separate")
    assert reported == (
        "interleaved 1F1B on its own layout is planned to be 8.7% faster on these batches; set layout.kind = "
        '"chosen", or train with --choose-layout'
    )
    assert "is already chosen" in advice(compared, "chosen")
    assert 'layout.kind = "chosen"' in advice(compared, "arranged")
    assert advice(compared | {"interleaved": 0.9999}, "separate") == ""
    assert advice({}, "separate") == advice({"per-batch plan": 1.0}, "separate") == ""
    numbers = dict.fromkeys((n for n in Summary.__struct_fields__ if n.startswith(("mean_", "loss_", "elapsed"))), 1.0)
    counts = dict.fromkeys(
        ("iterations", "plans_fresh", "plans_fallback", "num_ranks", "num_cores", "num_parameters"), 1
    )
    summary = Summary(
        name="n",
        resumed_at=(),
        fallback_iterations={},
        seed=0,
        layout="",
        comparison=compared,
        advice=reported,
        evaluations=((4, 0.25),),
        **numbers,
        **counts,  # type: ignore[arg-type]
    )
    written = io.StringIO()
    Console(file=written, width=200).print(summary_tables(summary))
    assert reported in written.getvalue()
    assert "0.2500, after 4 iterations" in written.getvalue()
