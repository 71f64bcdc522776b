"""Models as TOML: every model of the zoo survives, and layers that occur several times are written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.errors import InputError
from pipeloom.spec.catalog import architecture_toml, load_architecture, model_name, names


def test_every_model_of_the_zoo_is_written_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    for name in names("models"):
        model = load_architecture(name)
        file.write_text(architecture_toml(model))
        assert load_architecture(str(file)) == model, name


def test_a_layer_with_several_places_is_written_once() -> None:
    text = architecture_toml(load_architecture("qwen3-vl-8b"))
    assert text.count("inner = 12288") == 1
    assert text.count('kind = "layer_1"') == 4
    assert "eager_bytes" not in text  # nor any other field with its default


def test_a_kind_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    file.write_text(architecture_toml(load_architecture("qwen3-vl-8b")).replace('kind = "layer_1"', 'kind = "other"'))
    with pytest.raises(InputError, match=r"model\.toml: kind: 'other' is not in \[kinds\]; known are layer_0, layer_1"):
        load_architecture(str(file))


@pytest.mark.parametrize("text", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B-hf"])
def test_owners_and_suffixes_of_names_do_not_matter(text: str) -> None:
    assert model_name(text) == "llama-3.1-8b"
    assert model_name("llama-3.1-9b") is None


def combined(folder: Path, drop_last: int) -> Path:
    """Write a model that is a language model without its last layers."""
    file = folder / "model.toml"
    part = f'model = "llama2-7b"\nname = "lm"\nreads = "sequence"\ndrop_last = {drop_last}'
    file.write_text(f'name = "m"\nsource = "s"\n[[part]]\n{part}\n')
    return file


def test_the_last_layers_are_dropped_one_by_one(tmp_path: Path) -> None:
    whole = load_architecture("llama2-7b").modules[0].flat_layers
    for number in (0, 1, 2, 10, len(whole) - 1):
        found = load_architecture(str(combined(tmp_path, number))).modules[0]
        assert found.flat_layers == whole[: len(whole) - number]


def test_not_all_layers_can_be_dropped(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"part 'lm'.*drop_last.* is 34, but 34 layers are there; give at most 33"):
        load_architecture(str(combined(tmp_path, 34)))
