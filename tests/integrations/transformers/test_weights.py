"""Weights read by chunk from a library's folder, trained, and written for the library again."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pipeloom as pl
from pipeloom.cli.app import run
from pipeloom.errors import InputError
from pipeloom.integrations.data.processors import load_processor
from pipeloom.integrations.transformers.build import TransformersModel
from pipeloom.integrations.transformers.weights import TransformersWeights, load
from pipeloom.layout import separate
from pipeloom.runtime.checkpoint.digests import write_digests
from pipeloom.runtime.checkpoint.safetensors_files import ShardWriter, TensorFiles
from pipeloom.runtime.checkpoint.save_pretrained import add, begin, finish, partial_of
from pipeloom.runtime.launch.processes import launch
from pipeloom.runtime.model.weights import give_memory, give_weights

from . import on_ranks, tiny
from .on_ranks import state_of

SOME = ("mixtral", "qwen2_5_vl")
REST = tuple(pytest.param(name, marks=pytest.mark.full) for name in tiny.CASES if name not in SOME)


def saved(name: str, folder: Path, *, shards: str = "20KB", **more: Any) -> Any:
    """The library's model, saved."""
    library, _ = tiny.make(name)
    if more:
        library = tiny.CASES[name][0](**more)
    library.save_pretrained(folder, max_shard_size=shards)
    return library


def names_of(model: TransformersModel) -> dict[str, str]:
    assert isinstance(model.pretrained, TransformersWeights)
    return model.pretrained.names


def filled(folder: Path, **options: Any) -> TransformersModel:
    model = pl.from_transformers(folder, device="meta", **options)
    assert model.pretrained is not None
    model.pretrained.fill(give_memory(model))
    return model


@pytest.mark.parametrize("name", [*SOME, *REST])
def test_a_rank_reads_its_own_layers_and_no_others(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = saved(name, tmp_path)
    whole, wanted = pl.from_transformers(tmp_path), library.state_dict()
    read: list[str] = []
    plain = TensorFiles.read_into
    monkeypatch.setattr(TensorFiles, "read_into", lambda self, key, to: (read.append(key), plain(self, key, to)))
    layout = separate(whole.spec, 3, {}, lambda module, layer: 1.0)
    seen: list[str] = []
    for rank in range(3):
        model = pl.from_transformers(tmp_path, device="meta")
        read.clear()
        assert give_weights(model, layout, rank)
        own, theirs = names_of(model), dict(whole.module("lm").layers[0].named_parameters())
        assert theirs
        places = {(c.module, i) for c in layout.chunks if c.rank == rank for i in range(c.layers[0], c.layers[1] + 1)}
        for ours, other in zip(model.modules, whole.modules, strict=True):
            for number, layer in enumerate(ours.layers):
                if (ours.name, number) in places:
                    for at, tensor in layer.state_dict().items():
                        assert torch.equal(tensor, wanted[own[f"{ours.name}.{number}.{at}"]])
                    buffers = dict(other.layers[number].named_buffers())
                    for at, tensor in layer.named_buffers():
                        torch.testing.assert_close(tensor, buffers[at], rtol=0, atol=0)
                elif not any(f"{ours.name}.{number}." in each for group in model.tied for each in group):
                    assert all(p.is_meta for p in layer.parameters())
        assert len(set(read)) == len(read)
        seen += read
    # A parameter that is tied over ranks is read by each of them.
    assert len(seen) - len(set(seen)) <= len(whole.tied)


@pytest.mark.parametrize("name", [*SOME, *REST])
@pytest.mark.parametrize("given", ["shapes", "folder", "model"])
def test_a_folder_is_written_as_the_library_wrote_it(name: str, given: str, tmp_path: Path) -> None:
    library = saved(name, tmp_path / "from")
    (tmp_path / "from" / "preprocessor_config.json").write_text("{}")
    model = filled(tmp_path / "from") if given == "shapes" else pl.from_transformers(tmp_path / "from")
    if given == "model":
        model = pl.from_transformers(library)
    state, pretrained, to = state_of(model), model.pretrained, tmp_path / "to"
    assert pretrained is not None
    begin(to)
    writer = ShardWriter(partial_of(to), "0", 10_000)
    add(writer, (pretrained.saved({each: state[each] for each in piece}) for piece in pretrained.pieces()))
    add(writer, pretrained.others())
    finish(to, pretrained, writer.close())
    ours, theirs = TensorFiles(to), TensorFiles(tmp_path / "from")
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.read(key), theirs.read(key)) for key in theirs.tensors)
    assert all(stored.file.stat().st_size < 30_000 for stored in ours.tensors.values())
    again, wanted = type(library).from_pretrained(to).state_dict(), library.state_dict()
    assert again.keys() == wanted.keys()
    assert all(torch.equal(again[key], wanted[key]) for key in wanted)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (to, tmp_path / "from")]
    for config in configs:
        for part in config.values():
            if isinstance(part, dict):
                part.pop("dtype", None)
    assert configs[0] == configs[1]
    assert (to / "preprocessor_config.json").exists() == (given != "model")
    index = json.loads((to / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in map(theirs.read, theirs.tensors))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    library = saved("llama", tmp_path, tie_word_embeddings=True)
    model = filled(tmp_path)
    layers = model.module("lm").layers
    first, last = layers[0].shell.model.embed_tokens.weight, layers[-1].shell.lm_head.weight
    assert first is last
    assert torch.equal(first, library.lm_head.weight)
    one = pl.from_transformers(tmp_path, device="meta")
    give_weights(one, separate(one.spec, 2, {}, lambda module, layer: 1.0), 0)
    parameter = one.module("lm").layers[-1].shell.lm_head.weight
    assert parameter is one.module("lm").layers[0].shell.model.embed_tokens.weight
    assert not parameter.is_meta
    assert one.module("lm").layers[-1].shell.model.norm.weight.is_meta


def test_a_resumed_run_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path)
    model = pl.from_transformers(tmp_path, device="meta")
    monkeypatch.delattr(TransformersWeights, "fill")
    assert give_weights(model, separate(model.spec, 2, {}, lambda module, layer: 1.0), 1, fill=False)
    assert not any(p.is_meta for p in model.module("lm").layers[-1].parameters())


def test_keys_of_other_times_are_read(tmp_path: Path) -> None:
    """As modules are called now, and of a model without its head, which is tied to what there is."""
    library = saved("qwen2_5_vl", tmp_path / "old")
    assert "visual.merger.mlp.0.bias" in TensorFiles(tmp_path / "old").tensors
    library.save_pretrained(tmp_path / "new", save_original_format=False)
    assert "model.visual.merger.mlp.0.bias" in TensorFiles(tmp_path / "new").tensors
    old, new = state_of(filled(tmp_path / "old")), state_of(filled(tmp_path / "new"))
    assert all(torch.equal(old[name], new[name]) for name in old)
    tied = saved("llama", tmp_path / "tied", tie_word_embeddings=True)
    tied.model.save_pretrained(tmp_path / "base")
    assert "embed_tokens.weight" in TensorFiles(tmp_path / "base").tensors
    shutil.copyfile(tmp_path / "tied/config.json", tmp_path / "base/config.json")
    found = filled(tmp_path / "base")
    wanted = tied.state_dict()
    assert all(torch.equal(tensor, wanted[names_of(found)[name]]) for name, tensor in state_of(found).items())


def test_experts_are_stacked_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = saved("mixtral", tmp_path)
    monkeypatch.setattr("pipeloom.integrations.transformers.weights._AT_ONCE_BYTES", 1)
    model = filled(tmp_path)
    wanted = library.state_dict()
    assert all(torch.equal(tensor, wanted[names_of(model)[name]]) for name, tensor in state_of(model).items())


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.full) for name in ("llava", "gemma3"))]
)
def test_a_model_on_meta_runs_undivided(name: str, tmp_path: Path) -> None:
    library = saved(name, tmp_path)
    batch = on_ranks.batches(name)[0]
    models = pl.from_transformers(tmp_path, device="meta"), pl.from_transformers(library)
    losses = [pl.run_undivided(model, pl.batch_of(batch, model.describe), batch) for model in models]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.full)])
def test_the_runs_dtype_wins(name: str, tmp_path: Path) -> None:
    library, _ = tiny.make(name)
    library.to(torch.bfloat16).save_pretrained(tmp_path)
    for options in ({}, {"dtype": torch.bfloat16}):
        dtype = options.get("dtype", torch.float32)
        shapes, real = filled(tmp_path, **options), pl.from_transformers(tmp_path, **options)
        assert shapes.spec == real.spec
        theirs = state_of(real)
        assert sum(tensor.dtype == dtype for tensor in theirs.values()) > 0.9 * len(theirs)
        for at, tensor in state_of(shapes).items():
            torch.testing.assert_close(tensor, theirs[at], rtol=0, atol=0)


# ------------------------------------------------------------------ what is refused


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def unlike(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))


KEY = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors and no model.safetensors.i"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "but pytorch_model.bin; save the model there as safetensors",
        ),
        (cut, "model.safetensors: is damaged"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"12345"), "model.safetensors: is damaged"),
        (
            lambda folder: change(folder, lambda t: t.update(more=torch.ones(1))),
            "more: is not a parameter of LlamaForCau",
        ),
        (lambda folder: change(folder, lambda t: t.pop(KEY)), f"parameter '{KEY}': is in none of the files"),
        (lambda folder: change(folder, lambda t: t.update({KEY: torch.ones(3, 2)})), "the shape .3, 2., the model's"),
        (quantized, "has quantized weights"),
        (
            lambda folder: change(folder, lambda t: t.update({KEY: t[KEY].to(torch.int8)})),
            f"{KEY}: has dtype int8, but the parameter is floating-point; quantized weights cannot be trained",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    saved("llama", tmp_path, shards="1GB")
    damage(tmp_path)
    with pytest.raises(InputError, match=message) as raised:
        pl.from_transformers(tmp_path, device="meta")
    assert "\n" not in str(raised.value)


def test_a_missing_weight_is_not_random(tmp_path: Path) -> None:
    saved("llama", tmp_path, shards="1GB")
    change(tmp_path, lambda tensors: tensors.pop(KEY))
    with pytest.raises(InputError, match=f"has no weights of '{KEY}'"):
        pl.from_transformers(tmp_path)


class Payload:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("unpickled",)


@pytest.mark.parametrize("content", [b"no pickle", pickle.dumps({"x": Payload()})])
def test_pickled_weights_that_cannot_be_read_are_one_line(content: bytes, tmp_path: Path, capfd: Any) -> None:
    saved("llama", tmp_path, shards="1GB")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(InputError, match=r"has weights that cannot be read .*save the model there as") as raised:
        pl.from_transformers(tmp_path)
    assert "\n" not in str(raised.value)
    assert "unpickled" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "processor_config.json"])
def test_code_of_a_folder_is_never_run(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"config.json": "AutoConfig", "tokenizer_config.json": "AutoTokenizer"}
    kind = kinds.get(file, "AutoProcessor")
    code = ["code.Own", None] if kind == "AutoTokenizer" else "code.Own"
    names = {"model_type": "own", "tokenizer_class": "Own", "processor_class": "Own", "auto_map": {kind: code}}
    (tmp_path / file).write_text(json.dumps(names))
    (tmp_path / "code.py").write_text("raise SystemExit('the code ran')")
    # Whoever is asked says yes.
    monkeypatch.setattr("builtins.input", lambda _="": "y")
    with pytest.raises(InputError, match=r"requires its own Python code .auto_map., which is never run") as raised:
        (pl.from_transformers if file == "config.json" else load_processor)(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_file_that_goes_away_is_named(tmp_path: Path) -> None:
    saved("llama", tmp_path, shards="1GB")
    model = pl.from_transformers(tmp_path, device="meta")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model.safetensors: .*weight: cannot be read .No such file") as raised:
        give_weights(model, separate(model.spec, 2, {}, lambda module, layer: 1.0), 0)
    assert "\n" not in str(raised.value)


def lose_a_shard(folder: Path) -> None:
    next(iter(sorted(folder.glob("*.safetensors")))).unlink()


def lose_a_key(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_shard, "is missing, model.safetensors.index.json names it; fetch the folder again"),
        (lose_a_key, "is missing, model.safetensors.index.json names it"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "is not an index of shards"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'),
            "is not an index of shards .it names files in other folders",
        ),
    ],
)
def test_shards_that_do_not_fit_are_refused(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    saved("mixtral", tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError, match=message) as raised:
        pl.from_transformers(tmp_path, device="meta")
    assert "\n" not in str(raised.value)


def test_an_expert_too_few_is_refused(tmp_path: Path) -> None:
    saved("mixtral", tmp_path, shards="1GB")
    change(tmp_path, lambda t: t.pop("model.layers.1.block_sparse_moe.experts.2.w1.weight"))
    with pytest.raises(InputError, match=r"experts.0.w1.weight: .*model.layers.1.mlp.experts.gate_up_proj") as raised:
        pl.from_transformers(tmp_path, device="meta")
    assert "\n" not in str(raised.value)


def test_unlike_weights_that_are_to_be_one_are_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path, shards="1GB", tie_word_embeddings=True)
    change(tmp_path, unlike)
    with pytest.raises(
        InputError, match=r"lm_head.weight: differs from model.embed_tokens.weight|differs from lm_head"
    ):
        filled(tmp_path)


def test_weights_that_lie_nowhere_are_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    model = pl.from_transformers(tmp_path, device="meta")
    layout = separate(model.spec, 2, {}, lambda module, layer: 1.0)
    with pytest.raises(InputError, match="is on meta, and the model has no source of weights; build the model with"):
        give_weights(replace(model, pretrained=None), layout, 0)
    shapes = pl.from_transformers(load(tmp_path, lambda *_: None, "meta", None))
    with pytest.raises(InputError, match=r"is on meta, and belongs to no folder; give pl\.from_transformers"):
        give_weights(shapes, layout, 0)


# ------------------------------------------------------------------ over processes


def assert_trained(name: str, folder: Path, to: Path, library: Any) -> None:
    """The folder is that of a library's model which has trained the same steps."""
    again = type(library).from_pretrained(to)
    assert TensorFiles(to).tensors.keys() == TensorFiles(folder).tensors.keys()
    before = {key: tensor.clone() for key, tensor in library.state_dict().items()}
    wanted = on_ranks.train_library(library, name).state_dict()
    found = again.state_dict()
    assert found.keys() == wanted.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[key], rtol=1e-3, atol=1e-5)
    assert sum(not torch.equal(found[key], before[key]) for key in found) > 0.7 * len(found)
    for ours, theirs in zip(on_ranks.logits(again, name), on_ranks.logits(library.eval(), name), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        "qwen2_5_vl",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3", "qwen3_vl", "llava")
        ),
    ],
)
def test_ranks_train_from_a_folder_and_save_for_the_library(name: str, tmp_path: Path) -> None:
    library = saved(name, tmp_path / "from")
    (tmp_path / "from" / "tokenizer.json").write_text("{}")
    held = launch(on_ranks.train_and_save, 2, tmp_path / "from", name, tmp_path / "to", 2)
    sizes = [sum(each.values()) for each in held]
    assert max(sizes) < 0.9 * sum(p.numel() for p in library.parameters())
    assert_trained(name, tmp_path / "from", tmp_path / "to", library)
    assert (tmp_path / "to" / "tokenizer.json").exists()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.ranks
@pytest.mark.full
def test_a_process_that_keeps_a_part_of_its_layers_never_holds_two_whole(tmp_path: Path) -> None:
    library = saved("llama", tmp_path)
    for shards, tensors in launch(on_ranks.read_both_ways, 2, tmp_path):
        assert not any(whole for _, whole in shards)
        # Over tensor-parallel ranks this model divides the products of its blocks, and nothing else.
        assert not any("_proj." in name and ".mlp." in name for _, whole in tensors for name in whole)
        for found in (shards, tensors):
            assert sum(elements for elements, _ in found) == sum(p.numel() for p in library.parameters())
            assert len(found) == 1 + library.config.num_hidden_layers + 1


@pytest.mark.ranks
@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma3_text", "qwen2_5_vl"])
def test_shards_of_replicas_train_from_a_folder(name: str, tmp_path: Path) -> None:
    library = saved(name, tmp_path / "from")
    launch(on_ranks.train_and_save, 4, tmp_path / "from", name, tmp_path / "to", 2, 2, "fsdp")
    assert_trained(name, tmp_path / "from", tmp_path / "to", library)


def fit(folder: Path, resume: bool | None = None, **more: Any) -> pl.FitResult:
    build = partial(pl.from_transformers, folder / "from", device="meta")
    made, planner = on_ranks.invented_problem(build(), 2), pl.PlannerConfig(budget_s=0.02)
    return pl.fit(
        build,
        partial(on_ranks.batches, "llama"),
        optimizer=on_ranks.sgd,
        layout=made.layout,
        profile=made.profile_costs.profile,
        folder=folder / "run",
        resume=resume,
        config=pl.RunConfig(planner=planner, **more),
    )


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pl.FitResult]:
    """A folder, and what `fit` made of it."""
    folder = tmp_path_factory.mktemp("fitted")
    saved("llama", folder / "from", tie_word_embeddings=True)
    (folder / "from" / "tokenizer.json").write_text("{}")
    return folder, fit(folder, ema=pl.EmaConfig(0.5))


@pytest.mark.ranks
@pytest.mark.full
def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    library = saved("llama", tmp_path / "from")
    fit(tmp_path, iterations=1)
    fit(tmp_path, resume=True).save_pretrained(tmp_path / "to")
    assert_trained("llama", tmp_path / "from", tmp_path / "to", library)


@pytest.mark.ranks
def test_a_checkpoint_is_exported(fitted: tuple[Path, pl.FitResult], tmp_path: Path) -> None:
    folder, result = fitted
    result.save_pretrained(tmp_path / "to")
    again = tiny.hf.AutoModelForCausalLM.from_pretrained(tmp_path / "to")
    model = pl.from_transformers(folder / "from", device="meta")
    pl.load_weights(result.checkpoint, model)
    on_ranks.assert_saved(model, tmp_path / "to")
    wanted, start, found = state_of(model), state_of(filled(folder / "from")), again.state_dict()
    assert not any(torch.equal(start[name], tensor) for name, tensor in wanted.items())
    assert "tokenizer.json" in {file.name for file in (tmp_path / "to").iterdir()}
    assert again.lm_head.weight is again.model.embed_tokens.weight
    averaged = pl.from_transformers(folder / "from", device="meta")
    pl.load_weights(result.checkpoint, averaged, weights="ema")
    pl.export(result.checkpoint, tmp_path / "averaged", weights="ema")
    on_ranks.assert_saved(averaged, tmp_path / "averaged")
    assert any(not torch.equal(wanted[name], tensor) for name, tensor in state_of(averaged).items())
    assert len(load_file(tmp_path / "to" / "model.safetensors")) == len(found) - 1


@pytest.mark.ranks
def test_export_by_the_command_line(
    fitted: tuple[Path, pl.FitResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, result = fitted
    assert run(["export", str(folder / "run"), "--to", str(tmp_path / "to"), "--shard-gb", "0.001"]) == 0
    assert "step-00000002" in capsys.readouterr().out
    again = TensorFiles(tmp_path / "to")
    result.save_pretrained(tmp_path / "other")
    other = TensorFiles(tmp_path / "other")
    assert all(torch.equal(again.read(key), other.read(key)) for key in other.tensors)
    assert run(["export", str(folder / "run"), "--to", str(tmp_path / "to")]) == 2
    assert "to: exists and is not empty; name a new folder" in capsys.readouterr().err
    saved("qwen3", tmp_path / "unlike")
    assert (
        run(["export", str(folder / "run"), "--to", str(tmp_path / "third"), "--source", str(tmp_path / "unlike")]) == 2
    )
    assert "is missing, the model needs" in capsys.readouterr().err
    assert run(["export", str(folder / "from"), "--to", str(tmp_path / "third")]) == 2
    assert "is not a checkpoint and contains none" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()


@pytest.mark.ranks
def test_export_where_the_source_is_gone(fitted: tuple[Path, pl.FitResult], tmp_path: Path) -> None:
    folder, result = fitted
    (folder / "from").rename(folder / "elsewhere")
    try:
        with pytest.raises(
            InputError, match="does not exist any more, and the model came from it; give the folder that"
        ):
            pl.export(result.checkpoint, tmp_path / "to")
        assert not list(tmp_path.iterdir())
        pl.export(result.checkpoint, tmp_path / "to", folder / "elsewhere")
        pl.export(result.checkpoint, tmp_path / "bare", result.checkpoint)
    finally:
        (folder / "elsewhere").rename(folder / "from")
    full, bare = TensorFiles(tmp_path / "to"), TensorFiles(tmp_path / "bare")
    assert all(torch.equal(full.read(key), bare.read(key)) for key in full.tensors)
    assert full.tensors.keys() == bare.tensors.keys()
    assert not (tmp_path / "bare" / "tokenizer.json").exists()
    tiny.hf.AutoModelForCausalLM.from_pretrained(tmp_path / "bare")


@pytest.mark.ranks
def test_export_of_a_model_that_came_from_no_folder(fitted: tuple[Path, pl.FitResult], tmp_path: Path) -> None:
    """Its checkpoints have its configuration; those of models of no library have none."""
    _, result = fitted
    checkpoint = tmp_path / "step-00000002"
    shutil.copytree(result.checkpoint, checkpoint)
    state = json.loads((checkpoint / "trainer.json").read_text())
    (checkpoint / "trainer.json").write_text(json.dumps(state | {"origin": "transformers:"}))
    write_digests(checkpoint, "beside-0", json.loads((checkpoint / "digests-beside-0.json").read_text()))
    assert pl.export(tmp_path, tmp_path / "to") == checkpoint
    pl.export(result.checkpoint, tmp_path / "other")
    ours, theirs = TensorFiles(tmp_path / "to"), TensorFiles(tmp_path / "other")
    assert all(torch.equal(ours.read(key), theirs.read(key)) for key in theirs.tensors)
    (checkpoint / "trainer.json").write_text(json.dumps(state | {"origin": ""}))
    with pytest.raises(InputError, match="does not say from which folder its model came; give the folder that the mod"):
        pl.export(checkpoint, tmp_path / "third")
    with pytest.raises(InputError, match=r"has no config.json; give the folder of a model that"):
        pl.export(checkpoint, tmp_path / "third", tmp_path)


@pytest.mark.parametrize("place", [0, 2])
def test_of_a_process_killed_while_it_writes_nothing_is_taken_for_whole(place: int, tmp_path: Path) -> None:
    saved("llama", tmp_path / "from")
    model, to = pl.from_transformers(tmp_path / "from"), tmp_path / "to"
    state, pretrained = state_of(model), model.pretrained
    assert pretrained is not None

    def write() -> None:
        begin(to)
        writer = ShardWriter(partial_of(to), "0", 10_000)
        add(writer, (pretrained.saved({each: state[each] for each in piece}) for piece in pretrained.pieces()))
        finish(to, pretrained, writer.close())

    child = os.fork()
    if child == 0:
        names = itertools.count()
        rename = Path.rename

        def killed(path: Path, target: Path) -> Path:
            if next(names) == place:
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(path, target)

        Path.rename = killed  # type: ignore[method-assign]
        write()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not to.exists()
    with pytest.raises(InputError, match=r"to.partial: has no model.safetensors and no model.safetensors.index.json"):
        pl.from_transformers(partial_of(to), device="meta")
    write()
    assert not partial_of(to).exists()
    assert TensorFiles(to).tensors.keys() == TensorFiles(tmp_path / "from").tensors.keys()


def test_a_size_of_files_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for size in ("inf", "nan", "-1"):
        assert run(["export", "nowhere", "--to", "there", "--shard-gb", size]) == 2
        assert "Invalid value for '--shard-gb'" in capsys.readouterr().err
