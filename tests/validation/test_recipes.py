"""Recipes complete what tables of results leave out, by release, device and precision."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom.spec.catalog import load_trainer
from pipeloom.validation import PublishedRun, read_runs
from pipeloom.validation.express import express, trainer_of
from pipeloom.validation.recipes import _BRIDGE, _LOONGFORGE, Recipe, recipe_of
from pipeloom.validation.runs import DATA
from pipeloom.validation.sizes import described
from pipeloom.validation.unstated import complete
from tests.validation.test_runs import LLAMA

DEEPSEEK = replace(
    LLAMA,
    source="megatron-bridge",
    model="deepseek-v3",
    arch="mla-moe",
    experts=256,
    topk=8,
    device="GB300",
    precision="mxfp8",
    recompute="unknown",
    task="pretrain",
    gpus=256,
    tp=1,
    pp=2,
    ep=32,
)


def released(release: str, **changes: object) -> PublishedRun:
    return replace(DEEPSEEK, ref=f"docs/performance-summary-archive.md {release}", **changes)


@pytest.mark.parametrize(
    ("run", "recipe"),
    [
        (released("26.04"), Recipe("hybridep", recompute="mla_up_proj")),
        (released("26.06.01"), Recipe("hybridep", "iteration", overlaps=True, fused=True, recompute="none")),
        (released("25.11", device="H100"), Recipe("deepep", overlaps=True, recompute="mla_up_proj,mlp")),
        (released("26.04", model="gpt-oss-120b", precision="bf16"), Recipe("alltoall", "modules", recompute="none")),
        (released("26.04", model="qwen3-235b-a22b", device="H100"), Recipe(overlaps=True, recompute="none")),
        (released("26.08", model="Qwen3_30B_a3B"), Recipe("hybridep", "iteration", True, True, "none")),
        (released("26.04", model="kimi-k2", device="B200"), Recipe(recompute="mla_up_proj")),
        (released("26.04", model="llama3-405b", arch="dense", experts=None), Recipe()),
        (released("26.04", source="dgxc"), None),
        (released("26.04", model="another"), None),
    ],
)
def test_recipes_differ_by_release_and_device(run, recipe):
    assert recipe_of(run) == recipe


def test_a_recipe_says_what_is_recomputed_unless_the_source_does():
    completed = complete(released("26.04"))
    assert completed.run.recompute == "mla_up_proj"
    assert not completed.others
    assert complete(released("26.04", recompute="full")).run.recompute == "full"


def test_a_recipe_sets_the_trainer():
    zoo = load_trainer("megatron")
    older, newer = trainer_of(released("26.04")), trainer_of(released("26.06"))
    assert (older.dispatcher, older.fused_experts, older.hidden_expert) == ("hybridep", False, 0)
    assert (newer.fused_experts, newer.hidden_expert) == (True, zoo.hidden_expert)
    assert newer.expert_layer_host_s == 0 < older.expert_layer_host_s
    partly = trainer_of(released("26.04", device="GB200"))
    assert partly.graphed
    assert partly.expert_layer_host_s == zoo.expert_layer_host_s


def test_degrees_that_do_not_fit_the_devices():
    """The largest part of the expert degree that fits is assumed; the devices stay."""
    run = complete(released("26.04", pp=8, ep=64, mfu=0.2, recompute="none")).run
    assert (run.gpus, run.ep) == (256, 32)


def test_recipes_are_of_runs_in_the_table():
    found = {run.model for run in read_runs(DATA / "runs.csv") if recipe_of(run) is not None and run.arch}
    assert found == {"deepseek-v3", "gpt-oss-120b", "llama3-70b", "qwen3-30b-a3b"}


def test_recipes_of_hybrids_are_of_models_that_are_known():
    assert all(described(name) is not None for rules in (_BRIDGE, _LOONGFORGE) for name in rules)
    runs = [run for run in read_runs(DATA / "runs.csv") if not run.arch and recipe_of(run) is not None]
    assert {described(run.model).name for run in runs} >= {
        "nemotron-3-super-120b-a12b",
        "qwen3.5-27b",
        "gemma-4-26b-a4b",
    }


def test_a_recipe_sets_columns_that_the_table_lacks():
    card = {"id": "a", "source": "bridge-cards", "model": "nemotron_3_super_120b_a12b", "device": "GB200", "gpus": 16}
    run = PublishedRun(
        **card, ref="nemotron-3-super-120b-a12b sft_long_context", seq_len=32768, mbs=1, precision="bf16"
    )
    known = complete(run)
    assert (known.run.pp, known.run.cp, known.run.ep, known.run.gbs, known.run.mtp) == (8, 2, 2, 2, 2)
    assert any("pp is that of the recipe" in note for note in known.notes)
    assert len(express(known.run).run.model.predictors) == 2
