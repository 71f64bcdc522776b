"""Weights of a pipeline's folder read by chunk, trained, and written as a folder for the libraries again."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

import pipeloom as pl
from pipeloom.cli.app import run
from pipeloom.errors import InputError
from pipeloom.integrations.diffusers import generic, prompts
from pipeloom.layout import separate
from pipeloom.runtime.checkpoint.checkpoint import write_state
from pipeloom.runtime.checkpoint.safetensors_files import ShardWriter, TensorFiles
from pipeloom.runtime.checkpoint.save_pretrained import add, begin, finish, partial_of
from pipeloom.runtime.launch.processes import launch
from pipeloom.runtime.model.weights import give_memory, give_weights

from ..transformers.on_ranks import invented_problem, sgd, state_of
from . import on_ranks, tiny
from .test_generic import chain

NAMES = ("wan", pytest.param("ltx", marks=pytest.mark.full))
BESIDE = "tokenizer", "vae"
PARTS = {"transformer/": "diffusion_pytorch_model", "text_encoder/": "model"}


def saved(name: str, folder: Path, shards: str = "20KB") -> tuple[Any, Any]:
    """A pipeline's folder, of which the auto-encoder and the tokenizer are only said to be there."""
    transformer, encoder, _ = tiny.make(name)
    # Encoders that are trained have their dropout.
    encoder.config.dropout_rate = 0.0
    transformer.save_pretrained(folder / "transformer", max_shard_size=shards)
    encoder.save_pretrained(folder / "text_encoder", max_shard_size=shards)
    diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")
    for each in BESIDE:
        (folder / each).mkdir()
        (folder / each / "some.json").write_text("{}")
    index = {
        "_class_name": "Some",
        "transformer": ["diffusers", type(transformer).__name__],
        "transformer_2": [None, None],
        "text_encoder": ["transformers", type(encoder).__name__],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return transformer, encoder


@pytest.fixture(autouse=True)
def _without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own way to load Wan with some parts in single precision needs a package that is not here."""
    monkeypatch.setattr(diffusers.WanTransformer3DModel, "_keep_in_fp32_modules", None)


def assert_same_files(folder: Path, other: Path) -> None:
    for place, stem in PARTS.items():
        ours, theirs = TensorFiles(folder / place, stem), TensorFiles(other / place, stem)
        assert ours.tensors.keys() == theirs.tensors.keys()
        assert all(torch.equal(ours.read(key), theirs.read(key)) for key in theirs.tensors)


def assert_same_beside(folder: Path, other: Path, more: tuple[str, ...]) -> None:
    for place in PARTS:
        ours, theirs = (json.loads((each / place / "config.json").read_text()) for each in (folder, other))
        assert ours == theirs
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler
    assert dict(scheduler.from_pretrained(folder / "scheduler").config)["shift"] == 3.0
    wanted = {each.split("/")[0] for each in (*PARTS, "scheduler", *more)}
    assert {each.name for each in folder.iterdir()} == wanted
    if "model_index.json" in more:
        assert (folder / "model_index.json").read_text() == (other / "model_index.json").read_text()


def write(model: pl.Model, to: Path) -> None:
    state, pretrained = state_of(model), model.pretrained
    assert pretrained is not None
    begin(to)
    writer = ShardWriter(partial_of(to), "0", 10_000)
    add(writer, (pretrained.saved({each: state[each] for each in piece}) for piece in pretrained.pieces()))
    add(writer, pretrained.others())
    finish(to, pretrained, writer.close())


def filled(folder: Path) -> pl.Model:
    model = pl.from_diffusers(folder, device="meta")
    assert model.pretrained is not None
    model.pretrained.fill(give_memory(model))
    return model


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_reads_its_own_layers_and_no_others(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = dict(zip(("transformer", "text_encoder"), saved(name, tmp_path), strict=True))
    wanted = {f"{at}.{key}": each for at, part in libraries.items() for key, each in part.state_dict().items()}
    whole = pl.from_diffusers(tmp_path)
    read: list[str] = []
    plain = TensorFiles.read_into
    monkeypatch.setattr(TensorFiles, "read_into", lambda self, key, to: (read.append(key), plain(self, key, to)))
    layout = separate(whole.spec, 3, {}, lambda module, layer: 1.0)
    seen: list[str] = []
    for rank in range(3):
        model = pl.from_diffusers(tmp_path, device="meta")
        read.clear()
        assert give_weights(model, layout, rank)
        places = {(c.module, i) for c in layout.chunks if c.rank == rank for i in range(c.layers[0], c.layers[1] + 1)}
        for ours, other in zip(model.modules, whole.modules, strict=True):
            for number, layer in enumerate(ours.layers):
                tied = any(f"{ours.name}.{number}." in each for group in model.tied for each in group)
                if (ours.name, number) in places:
                    for at, tensor in layer.state_dict().items():
                        assert torch.equal(tensor, wanted[model.names[f"{ours.name}.{number}.{at}"]])
                    buffers = dict(other.layers[number].named_buffers())
                    for at, tensor in layer.named_buffers():
                        torch.testing.assert_close(tensor, buffers[at], rtol=0, atol=0)
                else:
                    assert tied or all(p.is_meta for p in layer.parameters())
        assert len(set(read)) == len(read)
        seen += read
    # The table of position biases that all blocks of T5 share is read by each rank that has one.
    assert len(seen) - len(set(seen)) <= 2 * len(whole.tied)
    assert len(set(seen)) == len({id(p) for module in whole.modules for x in module.layers for p in x.parameters()})


@pytest.mark.parametrize("given", ["shapes", "folder", "models"])
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_written_as_the_libraries_wrote_it(name: str, given: str, tmp_path: Path) -> None:
    parts = saved(name, tmp_path / "from")
    model = filled(tmp_path / "from") if given == "shapes" else pl.from_diffusers(tmp_path / "from")
    if given == "models":
        model = pl.from_diffusers(*parts, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0))
    write(model, tmp_path / "to")
    assert_same_files(tmp_path / "to", tmp_path / "from")
    for part, folder in zip(parts, PARTS, strict=True):
        again, wanted = type(part).from_pretrained(tmp_path / "to" / folder).state_dict(), part.state_dict()
        assert again.keys() == wanted.keys()
        assert all(torch.equal(again[key], wanted[key]) for key in wanted)
    assert_same_beside(tmp_path / "to", tmp_path / "from", () if given == "models" else (*BESIDE, "model_index.json"))
    found, wanted = state_of(pl.from_diffusers(tmp_path / "to")), state_of(model)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_a_transformers_folder_is_written_as_one(tmp_path: Path) -> None:
    transformer, _, _ = tiny.make("wan")
    transformer.save_pretrained(tmp_path / "from")
    write(filled(tmp_path / "from"), tmp_path / "to")
    again, wanted = type(transformer).from_pretrained(tmp_path / "to").state_dict(), transformer.state_dict()
    assert again.keys() == wanted.keys()
    assert all(torch.equal(again[key], wanted[key]) for key in wanted)


def test_a_table_that_is_in_the_files_by_both_of_its_names(tmp_path: Path) -> None:
    saved("wan", tmp_path / "from", shards="1GB")
    change(tmp_path / "from" / TEXT, lambda t: t.update({EMBED: t["shared.weight"].clone()}))
    model = filled(tmp_path / "from")
    write(model, tmp_path / "to")
    found, wanted = (TensorFiles(tmp_path / at / "text_encoder") for at in ("to", "from"))
    assert found.tensors.keys() == wanted.tensors.keys() - {EMBED}
    assert all(torch.equal(found.read(key), wanted.read(key)) for key in found.tensors)


@pytest.mark.parametrize("source", ["pipeline", "checkpoint"])
def test_the_weights_of_a_chain_are_exported_without_another_test(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that exports has no samples with which it could test the layers again."""
    transformer, encoder, _ = chain()
    model = pl.from_diffusers(transformer, encoder, freeze=())
    for name, part in (("transformer", transformer), ("text_encoder", encoder)):
        part.save_pretrained(tmp_path / "from" / name)
    checkpoint = kept(model, tmp_path / "step-1", change=1.0)
    monkeypatch.setattr(generic, "accept", None)
    monkeypatch.setattr(prompts, "from_transformers", None)
    if source == "checkpoint":
        # The head is not trained, and no checkpoint has it.
        with pytest.raises(InputError, match=r"'lm_head.weight': is in no layer.*; give the folder that"):
            pl.export(checkpoint, tmp_path / "to", checkpoint)
        return
    pl.export(checkpoint, tmp_path / "to", tmp_path / "from")
    for name, part in (("transformer", transformer), ("text_encoder", encoder)):
        found, wanted = type(part).from_pretrained(tmp_path / "to" / name).state_dict(), part.state_dict()
        assert found.keys() == wanted.keys()
        for key in wanted:
            torch.testing.assert_close(found[key], wanted[key] + (key != "lm_head.weight"), rtol=0, atol=0)


def test_a_damaged_list_of_names_is_refused(tmp_path: Path) -> None:
    saved("wan", tmp_path / "from")
    checkpoint = kept(pl.from_diffusers(tmp_path / "from"), tmp_path / "step-1")
    for text, message in (("{", "library_names.json: cannot be read"), ('{"a": "transformer.b"}', "not a parameter")):
        (checkpoint / "library_names.json").write_text(text)
        with pytest.raises(InputError, match=message):
            pl.export(checkpoint, tmp_path / "to", tmp_path / "from")
    (checkpoint / "library_names.json").unlink()  # as in checkpoints of older versions
    pl.export(checkpoint, tmp_path / "to", tmp_path / "from")
    assert_same_files(tmp_path / "to", tmp_path / "from")


def kept(model: pl.Model, folder: Path, change: float = 0.0) -> Path:
    """Write the parts of a checkpoint from which a model is exported, with other weights."""
    assert model.pretrained is not None
    write_state(folder, {f"model.{name}": tensor + change for name, tensor in model.saved_tensors().items()})
    for name, text in model.pretrained.kept().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


# ------------------------------------------------------------------ what is refused


def change(file: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


EMBED = "encoder.embed_tokens.weight"
WEIGHTS, TEXT = "transformer/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"
KEY, TEXT_KEY = "blocks.1.attn1.to_q.weight", "encoder.block.1.layer.0.SelfAttention.q.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda at: (at / WEIGHTS).write_bytes((at / WEIGHTS).read_bytes()[:-10]), "model.safetensors: is damaged"),
        (lambda at: change(at / WEIGHTS, lambda t: t.update(more=torch.ones(1))), "transformer: more: is too many"),
        (lambda at: change(at / WEIGHTS, lambda t: t.pop(KEY)), f"{KEY}: is in none of the files"),
        (lambda at: change(at / WEIGHTS, lambda t: t.update({KEY: torch.ones(3, 2)})), "has the shape .3, 2., the mod"),
        (lambda at: change(at / TEXT, lambda t: t.pop(TEXT_KEY)), f"{TEXT_KEY}': is in none of the files"),
        (
            lambda at: (at / WEIGHTS).unlink(),
            "is on meta, and .*transformer has no safetensors; give pl.from_diffusers",
        ),
        (
            lambda at: (at / TEXT).unlink(),
            "is on meta, and .*text_encoder has no safetensors; give pl.from_diffusers a",
        ),
        (
            lambda at: (at / "scheduler/scheduler_config.json").unlink(),
            "scheduler_config.json: cannot be read .No such",
        ),
        (lambda at: (at / "text_encoder/config.json").unlink(), "text_encoder: is not a folder with a config.json"),
        (
            lambda at: change(at / TEXT, lambda t: t.update({EMBED: t["shared.weight"] + 1})),
            r"text_encoder: shared.weight: differs from encoder.embed_tokens.weight, but config.json",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    saved("wan", tmp_path, shards="1GB")
    damage(tmp_path)
    with pytest.raises(InputError, match=message) as raised:
        filled(tmp_path)
    assert "\n" not in str(raised.value)


def test_weights_that_lie_nowhere_are_refused(tmp_path: Path) -> None:
    transformer, encoder, _ = tiny.make("wan")
    model = pl.from_diffusers(transformer, encoder.to("meta"))
    assert model.pretrained is not None
    with pytest.raises(InputError, match="is on meta, and belongs to no folder; give"):
        model.pretrained.fill(give_memory(model))


def test_gradients_of_shapes_are_refused(tmp_path: Path) -> None:
    saved("wan", tmp_path)
    with pytest.raises(InputError, match="is on the meta device; create it without device"):
        pl.check_gradients(pl.from_diffusers(tmp_path, device="meta"), tiny.make("wan")[2])


# ------------------------------------------------------------------ over processes


def assert_trained(name: str, folder: Path, parts: tuple[Any, Any]) -> None:
    """The folder is that of the libraries' models which have trained the same step."""
    again = [type(part).from_pretrained(folder / place).state_dict() for part, place in zip(parts, PARTS, strict=True)]
    before = [{key: tensor.clone() for key, tensor in part.state_dict().items()} for part in parts]
    on_ranks.train_libraries(*parts, name)
    for found, start, part in zip(again, before, parts, strict=True):
        wanted = part.state_dict()
        assert found.keys() == wanted.keys()
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[key], rtol=1e-3, atol=1e-5)
        assert sum(not torch.equal(found[key], start[key]) for key in found) > 0.7 * len(found)


@pytest.mark.ranks
@pytest.mark.full
@pytest.mark.parametrize("name", ["wan", "ltx"])
def test_ranks_train_from_a_folder_and_save_for_the_libraries(name: str, tmp_path: Path) -> None:
    parts = saved(name, tmp_path / "from")
    held = launch(on_ranks.train_and_save, 2, tmp_path / "from", name, tmp_path / "to")
    sizes = [sum(each.values()) for each in held]
    assert max(sizes) < 0.9 * sum(p.numel() for part in parts for p in part.parameters())
    assert_trained(name, tmp_path / "to", parts)
    assert_same_beside(tmp_path / "to", tmp_path / "from", (*BESIDE, "model_index.json"))
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.ranks
@pytest.mark.full
def test_a_checkpoint_is_exported(tmp_path: Path) -> None:
    parts = saved("ltx", tmp_path / "from")
    build = partial(pl.from_diffusers, tmp_path / "from", device="meta", freeze=())
    made, planner = invented_problem(build(), 2), pl.PlannerConfig(budget_s=0.02)
    result = pl.fit(
        build,
        partial(on_ranks.batches, "ltx"),
        optimizer=sgd,
        layout=made.layout,
        profile=made.profile_costs.profile,
        folder=tmp_path / "run",
        config=pl.RunConfig(planner=planner),
    )
    result.save_pretrained(tmp_path / "to")
    assert_trained("ltx", tmp_path / "to", parts)
    assert run(["export", str(tmp_path / "run"), "--to", str(tmp_path / "other"), "--shard-gb", "0.001"]) == 0
    assert_same_files(tmp_path / "other", tmp_path / "to")
    (tmp_path / "from").rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="does not exist any more, and the model came from it"):
        pl.export(result.checkpoint, tmp_path / "third")
    for number, source in enumerate((tmp_path / "elsewhere", result.checkpoint)):
        pl.export(result.checkpoint, tmp_path / str(number), source)
        assert_same_files(tmp_path / str(number), tmp_path / "to")
    assert_same_beside(tmp_path / "0", tmp_path / "elsewhere", (*BESIDE, "model_index.json"))
    assert_same_beside(tmp_path / "1", tmp_path / "elsewhere", ("model_index.json",))
    state = json.loads((result.checkpoint / "trainer.json").read_text())
    (result.checkpoint / "trainer.json").write_text(json.dumps(state | {"origin": "diffusers:"}))
    pl.export(result.checkpoint, tmp_path / "third")
    assert_same_files(tmp_path / "third", tmp_path / "to")
