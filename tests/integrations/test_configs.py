"""Files of Hugging Face configurations: what is read of them without torch, and what is refused in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeloom.emulator import count_parameters
from pipeloom.errors import InputError
from pipeloom.integrations import configs
from pipeloom.integrations.configs import check_config, config_digest, model_name, read_config
from pipeloom.integrations.models import load_model
from pipeloom.spec import catalog
from tests.integrations.published import LLAVA_7B, PUBLISHED, QWEN3_30B_A3B


def test_wrong_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"neither a config\.json nor a folder"):
        read_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("[1]")
    with pytest.raises(InputError, match="not a JSON object"):
        read_config(tmp_path)
    file.write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        read_config(file)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8}, "model_type: is missing"),
        ({"_class_name": "WanTransformer3DModel"}, "_class_name: 'WanTransformer3DModel' belongs to the diffusers"),
        (QWEN3_30B_A3B | {"num_hidden_layers": 27_000_000}, "num_hidden_layers: 27000000 is above 100000"),
        (QWEN3_30B_A3B | {"hidden_size": 10**18}, "hidden_size: 1000000000000000000 is above 2147483648"),
        (LLAVA_7B | {"text_config": []}, r"text_config: \[\] is not a JSON object"),
        (LLAVA_7B | {"vision_config": {"depth": 10**6}}, r"vision_config\.depth: 1000000 is above 100000"),
    ],
)
def test_what_no_model_has_is_refused_before_anything_is_built(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_config(config)
    assert "\n" not in str(caught.value)


def test_a_config_is_named_after_its_file_or_folder(tmp_path: Path) -> None:
    config = {"model_type": "llama"}
    for file, name in (("folder/config.json", "folder"), ("folder/tiny-model.json", "tiny-model")):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(config))
        assert model_name(config, path) == name
    assert model_name(config | {"_name_or_path": "an/owner"}, path) == "an/owner"


def test_stored_precision_does_not_change_the_digest() -> None:
    quantized = QWEN3_30B_A3B | {"torch_dtype": "bfloat16", "quantization_config": {"bits": 8}, "eos_token_id": 1}
    assert config_digest(quantized) == config_digest(QWEN3_30B_A3B)
    assert config_digest(QWEN3_30B_A3B | {"hidden_size": 4096}) != config_digest(QWEN3_30B_A3B)


def test_a_published_config_is_read_from_the_zoo_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PUBLISHED["Llama-3.1-8B"][0]
    index = catalog.ModelIndex({}, {config_digest(config): "llama-3.1-8b"})
    monkeypatch.setattr(configs, "read_index", lambda: index)
    monkeypatch.setitem(sys.modules, "pipeloom.integrations.tracing.architecture", None)
    file = tmp_path / "mine" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(config))
    model = load_model(str(file))
    assert model.name == "mine"
    assert model.modules == catalog.load_architecture("llama-3.1-8b").modules


@pytest.mark.parametrize("name", ["qwen3-vl-8b", "deepseek-ai/DeepSeek-V3", "Qwen/Qwen2.5-VL-7B-Instruct"])
def test_a_name_of_the_zoo_needs_neither_torch_nor_numba(name: str) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers')))\n"
        "from pipeloom.integrations.describe import document\n"
        "from pipeloom.integrations.models import load_model\n"
        "print(document(load_model(sys.argv[1]), 4096)['parameters'], 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True)
    published = {key.lower(): number for key, (_, number) in PUBLISHED.items()}
    assert done.stdout.split() == [str(published[catalog.model_name(name) or ""]), "False"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_in_the_zoo(name: str) -> None:
    assert count_parameters(load_model(f"owner/{name}-Instruct")) == PUBLISHED[name][1]


def test_the_index_names_models_of_the_zoo() -> None:
    index = catalog.read_index()
    assert {*index.names.values(), *index.digests.values()} <= set(catalog.names("models"))
    assert not set(index.names) & set(catalog.names("models"))


def test_the_page_lists_the_models_that_are_read_from_their_own_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "zoo-models.md").read_text("utf-8")
    listed = set(re.findall(r"^\| `(.+?)` \|", page, re.M))
    generated = {n for n in catalog.names("models") if "its own code" in catalog.load_architecture(n).source}
    assert listed == generated
    assert len(generated) >= 40
