"""What samples are made of examples: fields, conversations, targets, images of every processor; and what is refused."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import pickle
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.integrations.data.blobs import Blob
from pipeloom.integrations.data.chat import conversation, in_named_order
from pipeloom.integrations.data.examples import Fields, read_example
from pipeloom.integrations.data.processed import ProcessedDataset, _Media, _Outline
from pipeloom.integrations.data.processors import Outline, SizedImages, decode, decode_wave, image_size, load_processor
from pipeloom.integrations.data.sources import Shards, Table
from pipeloom.runtime.data.batches import bound
from pipeloom.runtime.data.dataset import CorruptSampleError

from . import made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.save_processor(tmp_path_factory.mktemp("processor"))


@pytest.fixture(scope="module")
def model() -> Any:
    return pl.from_transformers(made.vlm())


def samples_of(shard: Path, folder: Path, model: Any, **options: Any) -> Any:
    return pl.WebDataset(shard, folder, **options).bind(model)


def words(folder: Path, ids: torch.Tensor) -> str:
    return str(made.tokenizer().decode(ids))


def said(*turns: tuple[str, str]) -> bytes:
    return json.dumps([{"role": role, "content": content} for role, content in turns]).encode()


def test_outlines_are_what_the_processor_gives_without_pixels(tmp_path: Path, folder: Path, model: Any) -> None:
    data = samples_of(made.write_shard(tmp_path / "0.tar", made.talks(3)), folder, model)
    processor = load_processor(folder)
    for i in range(3):
        outline, whole = data.load(i, "lm", (0,)), data.load(i, "vision", (0, 1))
        assert data.sizes(i)["id"] == f"0.tar/{i:03d}"
        for name, value in outline.items():
            if name == "pixel_values":
                assert value.shape == whole[name].shape
                # One number for all of it.
                assert value.untyped_storage().nbytes() == 4
            elif name != "id":
                assert torch.equal(value, whole[name])
    assert data.num_decoded == 3
    # As the library's processor makes it of the decoded images.
    import io

    from PIL import Image

    whole = data.load(2, "vision", (0, 1))
    blobs = data.source[2]
    images = [Image.open(io.BytesIO(blobs[f"{k}.png"].read())).convert("RGB") for k in range(2)]
    text = processor.apply_chat_template(
        conversation(json.loads(blobs["json"].read()), "", {"image": 2}), tokenize=False
    )
    wanted = processor(text=[text], images=images, return_tensors="pt")
    for name in wanted:
        assert torch.equal(wanted[name].reshape(whole[name].shape), whole[name]), name


def test_only_what_the_assistant_says_is_a_target(tmp_path: Path, folder: Path, model: Any) -> None:
    turns = said(("system", "be kind"), ("user", "a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "d"))
    shard = made.write_shard(tmp_path / "0.tar", [{"json": turns}])
    sample = samples_of(shard, folder, model).load(0, "lm", (0,))
    targets = sample["input_ids"][sample["labels"] != -100]
    assert words(folder, targets) == "b<stop>\nd<stop>\n"
    every = samples_of(shard, folder, model, train_on="all").load(0, "lm", (0,))
    assert torch.equal(every["labels"], every["input_ids"])


def test_captions_answer_their_images(tmp_path: Path, folder: Path, model: Any) -> None:
    shard = made.write_shard(tmp_path / "0.tar", [{"png": made.png(0), "txt": b"a cat", "ask.txt": b"what?"}])
    data = samples_of(shard, folder, model, fields={"text": "txt", "prompt": "ask.txt"})
    sample = data.load(0, "lm", (0,))
    assert words(folder, sample["input_ids"]) == (
        "<turn>user\n<see>" + "<image_pad>" * data.sizes(0)["image_tokens"][0] + "<seen>what?<stop>\n"
        "<turn>assistant\na cat<stop>\n"
    )
    assert words(folder, sample["input_ids"][sample["labels"] != -100]) == "a cat<stop>\n"


def test_both_forms_of_conversations_are_read() -> None:
    given = {"conversations": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a cat"}]}
    found = conversation(given, "x", {"image": 1})
    assert found == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nwhat?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
    ]
    # Nowhere placed, images stand first.
    plain = conversation([{"role": "user", "content": "what?"}], "x", {"image": 2})
    assert [part["type"] for part in plain[0]["content"]] == ["image", "image", "text"]


def talk(*names: str) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": name} for name in names]
    return [{"role": "user", "content": [*parts, "what?"]}, {"role": "assistant", "content": "a cat"}]


def test_images_are_in_the_order_in_which_messages_name_them(tmp_path: Path) -> None:
    images = {f"{name}.png": made.png(i) for i, name in enumerate("ab")}
    given = [talk("000.b.png", "000.a.png"), talk("b.png", "a.png"), talk("coco/7.png", "coco/3.png"), talk("", "")]
    given += [talk("train/003.b.png", "train/003.a.png"), talk("b.png", "b.png"), talk("a.png", "coco/3.png")]
    given.append([{"role": "user", "content": "<image>"}, *talk("b.png")])
    rows = [{**images, "json": json.dumps(each).encode()} for each in given]
    source = Shards(made.write_shard(tmp_path / "0.tar", rows))
    fields = Fields().check(source)
    reversed_images = [images["b.png"], images["a.png"]]
    for i, wanted in ((0, reversed_images), (1, reversed_images), (2, [*images.values()]), (3, [*images.values()])):
        assert [image.read() for image in read_example(source, i, fields, None).images] == wanted
    # The names of another sample.
    assert [image.read() for image in read_example(source, 4, fields, None).images] == [*images.values()]
    # One name twice, one of another data set, and a mark beside a name.
    for i in (5, 6, 7):
        assert [image.read() for image in read_example(source, i, fields, None).images] == [*images.values()]


def test_a_name_that_fits_several_images_is_that_of_the_closest() -> None:
    blobs = [Blob(f"0.tar/001.{field}", data=b"") for field in ("depth.jpg", "jpg")]
    assert in_named_order(blobs, talk("jpg", "depth.jpg"), "image") == (blobs[1], blobs[0])
    blobs = [Blob(f"rows/0.images[{i}]", Path(folder, "0.jpg"), data=b"") for i, folder in enumerate("ab")]
    assert in_named_order(blobs, talk("b/0.jpg", "a/0.jpg"), "image") == (blobs[1], blobs[0])
    assert in_named_order(blobs, talk("0.jpg", "a/0.jpg"), "image") == tuple(blobs)
    blobs = [Blob(f"rows/0.images[{i}]", Path(path), data=b"") for i, path in enumerate(("0.jpg", "a/0.jpg"))]
    assert in_named_order(blobs, talk("a/0.jpg", "b/0.jpg"), "image") == tuple(blobs)
    assert in_named_order(blobs, talk("a/0.jpg"), "image") == (blobs[1], blobs[0])


def test_images_of_a_table_are_named_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    pictures = [{"bytes": made.png(i), "path": f"{i}.png"} for i in range(2)]
    parts = [{"type": "image", "image": f"train/{i}.png"} for i in (1, 0)]
    rows = {"images": [pictures], "messages": [[{"role": "user", "content": parts}]]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "disk")
    source = Table("datasets", tmp_path / "disk")
    found = read_example(source, 0, Fields().check(source), None).images
    assert [image.read() for image in found] == [pictures[1]["bytes"], pictures[0]["bytes"]]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_image_with_damaged_exif_is_good(kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (30, 20)).save(file, kind, exif=b"Exif\0\0garbage garbage")
    blob = Blob("x", data=file.getvalue())
    assert image_size(blob) == (30, 20)
    assert decode(blob).size == (30, 20)


def test_the_size_of_an_image_needs_only_its_header_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)
    plain = io.BytesIO()
    Image.fromarray(pixels).save(plain, "PNG")
    (tmp_path / "x.png").write_bytes(plain.getvalue())
    read: list[int] = []

    class Counting(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            read.append(super().readinto(buffer) or 0)
            return read[-1]

        def readall(self) -> bytes:
            found = super().readall() or b""
            read.append(len(found))
            return found

    monkeypatch.setattr(Blob, "open", lambda self: io.BufferedReader(Counting(self.path)))
    assert image_size(Blob("x", tmp_path / "x.png")) == (512, 512)
    assert sum(read) < len(plain.getvalue()) / 5


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("words", "not a list of messages"),
        ([], "not a list of messages"),
        ([{"role": "cat", "content": "x"}], "'cat' is none of"),
        ([{"role": "user", "content": 3}], "content: is a int"),
        ([{"role": "user", "content": [{"type": "smell"}]}], "of type 'smell'"),
        ([{"role": "user", "content": "<image><image>"}], "2 places for 1 of image"),
    ],
)
def test_other_conversations_are_damaged(given: Any, problem: str) -> None:
    with pytest.raises(CorruptSampleError, match=problem):
        conversation(given, "x", {"image": 1})


def test_labels_are_shifted_for_models_that_do_not_shift_them(tmp_path: Path) -> None:
    made.tokenizer(chat=False).save_pretrained(tmp_path / "words")
    shard = made.write_shard(tmp_path / "0.tar", [{"q": b"what?", "txt": b"a cat"}])
    data = pl.WebDataset(shard, tmp_path / "words", {"prompt": "q", "text": "txt"})
    from tests.integrations.transformers import test_generic, tiny

    first = data.bind(pl.from_transformers(tiny.make("llama")[0]))
    model = pl.from_transformers(test_generic.make("bart")[0])
    sample = data.bind(model).load(0, "lm", (0,))
    before = first.load(0, "lm", (0,))["labels"]
    assert sample["labels"].tolist() == [*before[1:].tolist(), -100]
    assert words(tmp_path, sample["labels"][sample["labels"] != -100]) == "a cat<stop>"
    assert data.bind(model).sizes(0)["targets"] == first.sizes(0)["targets"] == model.num_targets(sample)
    # The first token of a text without a prompt is no target.
    assert pl.WebDataset(shard, tmp_path / "words").bind(model).sizes(0)["targets"] == 5


def test_texts_alone_need_a_tokenizer_and_end_with_its_end(tmp_path: Path) -> None:
    made.tokenizer(chat=False).save_pretrained(tmp_path / "words")
    shard = made.write_shard(tmp_path / "0.tar", [{"txt": b"a cat"}])
    from tests.integrations.transformers import tiny

    library, _ = tiny.make("llama")
    sample = samples_of(shard, tmp_path / "words", pl.from_transformers(library)).load(0, "lm", (0,))
    assert words(tmp_path, sample["input_ids"]) == "a cat<stop>"
    assert torch.equal(sample["labels"], sample["input_ids"])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_photograph_taken_upright_has_the_size_it_is_seen_in(kind: str, orientation: int) -> None:
    import io

    from PIL import Image, ImageOps, features

    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("Pillow was built without AVIF")
    turned = Image.Exif()
    turned[0x0112] = orientation
    blob = Blob("x", data=made.png(0, 40, 20, kind, exif=turned))
    files = [blob]
    if kind == "PNG":
        # The EXIF may also follow the pixels.
        before, exif, after = re.split(rb"(.{4}eXIf.*?)(?=.{4}IDAT)", blob.read(), flags=re.DOTALL)
        files.append(Blob("x", data=before + after[:-12] + exif + after[-12:]))
        assert "exif" not in Image.open(files[-1].open()).info
    wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(blob.read()))).convert("RGB")
    for each in files:
        assert image_size(each) == ((20, 40) if orientation == 6 else (40, 20))
        assert decode(each).tobytes() == wanted.tobytes()


def test_shards_of_equal_names_are_named_with_their_folders(tmp_path: Path, folder: Path, model: Any) -> None:
    for name in ("a", "b/c"):
        (tmp_path / name).mkdir(parents=True)
        made.write_shard(tmp_path / name / "0.tar", made.talks(2))
    data = samples_of(tmp_path / "**/*.tar", folder, model, exclude=["b/c/0.tar/001"])
    assert [data.source.name(i) for i in range(4)] == ["a/0.tar/000", "a/0.tar/001", "b/c/0.tar/000", "b/c/0.tar/001"]
    assert data.unknown(["0.tar/001"]) == ["0.tar/001"]
    assert data.sizes(1)
    with pytest.raises(CorruptSampleError, match=r"b/c/0\.tar/001: is excluded"):
        data.sizes(3)
    made.write_shard(tmp_path / "b/1.tar", made.talks(1))
    assert Shards([tmp_path / "a/0.tar", tmp_path / "b/1.tar"]).name(2) == "1.tar/000"


def test_a_data_set_travels_to_other_processes(tmp_path: Path, folder: Path, model: Any) -> None:
    data = samples_of(made.write_shard(tmp_path / "0.tar", made.talks(3)), folder, model)
    other = pickle.loads(pickle.dumps(pl.WebDataset(tmp_path / "0.tar", folder))).bind(model)
    assert [other.sizes(i) for i in range(3)] == [data.sizes(i) for i in range(3)]


@pytest.mark.parametrize(
    "name", ["CLIPImageProcessorPil", "Gemma3ImageProcessorPil", "GotOcr2ImageProcessorPil", "PixtralImageProcessorPil"]
)
def test_sizes_of_every_image_processor_are_known_without_contents(name: str) -> None:
    import transformers
    from PIL import Image

    small = {"CLIPImageProcessorPil": {"size": {"shortest_edge": 28}, "crop_size": 28}}
    small["Gemma3ImageProcessorPil"] = {"size": {"height": 28, "width": 28}}
    small["GotOcr2ImageProcessorPil"] = {"size": {"height": 28, "width": 28}, "crop_to_patches": True}
    small["PixtralImageProcessorPil"] = {"size": {"longest_edge": 64}, "patch_size": 16}
    real = getattr(transformers, name)(**small[name])
    images = [Image.new("RGB", (40, 90), "red"), Image.new("RGB", (70, 30), "blue")]
    sized, wanted = SizedImages(real)(images), real(images, return_tensors="pt")
    assert set(sized) == set(wanted)
    for key, value in wanted.items():
        assert tuple(torch.as_tensor(value).shape) == tuple(sized[key].shape), key
        if key != "pixel_values":
            assert torch.equal(torch.as_tensor(value), sized[key]), key


def test_images_that_are_resized_to_one_size_are_asked_for_once(folder: Path) -> None:
    from PIL import Image

    real = load_processor(folder).image_processor
    sized, draw = SizedImages(real), random.Random(0)
    sizes = [(draw.randint(20, 400), draw.randint(20, 400)) for _ in range(60)]
    for size in sizes:
        wanted = real([Image.new("RGB", size)], return_tensors="pt")
        found = sized.outline(size)
        assert found.shape == tuple(wanted["pixel_values"].shape)
        assert torch.equal(found.given["image_grid_thw"], wanted["image_grid_thw"])
    assert sized._known.cache_info().currsize < len(set(sizes)) / 2
    with pytest.raises(ValueError, match="aspect ratio"):
        sized.outline((6000, 2))


def test_tables_are_read_as_shards_are(
    tmp_path: Path, folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [
        {"image": {"bytes": talk["0.png"], "path": None}, "messages": json.loads(talk["json"])}
        for talk in made.talks(4)
        if "0.png" in talk and "1.png" not in talk
    ]
    table = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "disk")
    shard = made.write_shard(tmp_path / "0.tar", [t for t in made.talks(4) if "0.png" in t and "1.png" not in t])
    wanted = samples_of(shard, folder, model)
    for data in (
        pl.ParquetDataset(tmp_path / "*.parquet", folder).bind(model),
        pl.ArrowDataset(tmp_path / "disk", folder).bind(model),
    ):
        assert len(data) == len(wanted) == 2
        # Every process maps it for itself.
        assert "_table" not in pickle.loads(pickle.dumps(data.source)).__dict__
        for i in range(2):
            have, want = data.load(i, "vision", (0,)), wanted.load(i, "vision", (0,))
            assert have.keys() == want.keys()
            assert all(torch.equal(have[name], want[name]) for name in have if name != "id")


def test_a_column_of_json_is_a_conversation(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    messages = json.loads(said(("user", "<image>what?"), ("assistant", "a cat")))
    rows = {"image": [{"bytes": made.png(0), "path": None}], "messages": [messages]}
    features = datasets.Features({"image": datasets.Image(), "messages": datasets.List(datasets.Json())})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "disk")
    row = pl.ArrowDataset(tmp_path / "disk", folder).source[0]
    assert row["messages"] == messages
    assert isinstance(row["image"], Blob)


def test_a_function_makes_other_forms_known(tmp_path: Path, folder: Path, model: Any) -> None:
    shard = made.write_shard(tmp_path / "0.tar", [{"a.png": made.png(0), "q": b"what?", "a": b"a cat"}])
    fields = samples_of(shard, folder, model, function=answered).load(0, "lm", (0,))
    assert words(folder, fields["input_ids"][fields["labels"] != -100]) == "a cat<stop>\n"


def answered(fields: Any) -> dict[str, Any]:
    return {"prompt": fields["q"].read().decode(), "text": fields["a"].read().decode(), "image": fields["a.png"]}


def test_recordings_are_as_the_processor_makes_them(tmp_path: Path) -> None:
    processor, waves = made.hearing(), [made.wav(0, 3000), made.wav(1, 1700, channels=2)]
    sample = {"0.wav": waves[0], "1.wav": waves[1], "png": made.png(0), "txt": b"a cat"}
    shards = Shards(made.write_shard(tmp_path / "0.tar", [sample]))
    model: Any = Hearer(["images", "audio", "sequence"])
    data: Any = ProcessedDataset(shards, processor).bind(model)
    outline, heard = data.load(0, "lm", (0,)), data.load(0, "audio", (1,))
    assert data.num_decoded == 1
    assert outline["input_features"].untyped_storage().nbytes() == 4
    assert not heard["input_features"][0].any()
    assert not heard["pixel_values"].any()
    both = data.load(0, "audio", (0, 1))
    blobs = data.source[0]
    said = [{"role": "user", "content": [{"type": "image"}, *[{"type": "audio"}] * 2]}]
    text = processor.apply_chat_template([*said, {"role": "assistant", "content": "a cat"}], tokenize=False)
    sounds = [decode_wave(blobs[f"{k}.wav"]) for k in range(2)]
    wanted = processor(text=[text], images=[decode(blobs["png"])], audio=sounds, return_tensors="pt")
    for name in set(wanted) - {"pixel_values"}:
        assert torch.equal(wanted[name].reshape(both[name].shape), both[name]), name
    assert torch.equal(both["input_features"][1], heard["input_features"][1])


def test_every_window_of_a_long_recording_is_heard(tmp_path: Path) -> None:
    import transformers

    words = made.tokenizer(chat=False)
    ears = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1, n_fft=400, hop_length=160)
    kind: Any = transformers.GlmAsrProcessor
    unchecked = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, given: type(given)})
    model: Any = Hearer(["images", "audio", "sequence"])
    # Seconds of the recording, and of the part that the processor keeps.
    for seconds, most in ((0.5, 9), (2.5, 9), (2.5, 2)):
        processor = unchecked(ears, words, audio_token="<video_pad>", max_audio_len=most)
        sound = made.wav(0, int(16000 * seconds))
        shards = Shards(made.write_shard(tmp_path / "0.tar", [{"wav": sound, "txt": b"a cat"}]))
        data: Any = ProcessedDataset(shards, processor).bind(model)
        wave = decode_wave(Blob("x.wav", data=sound))
        wanted = processor(text=["<video_pad>a cat<stop>"], audio=[wave], return_tensors="pt")
        have = data.load(0, "audio", (0,))
        for name in wanted:
            assert torch.equal(wanted[name].reshape(have[name].shape), have[name]), name
        assert data.preview(0).endswith(">>>a cat<stop><<<")


def test_contents_that_are_not_those_of_the_processor_are_refused(
    tmp_path: Path, folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = made.write_shard(tmp_path / "0.tar", [{"png": made.png(0), "txt": b"a"}])
    data = samples_of(shard, folder, model)
    assert ">>>a<stop>" in data.preview(0)
    zeros = torch.zeros_like(data.load(0, "vision", (0,))["pixel_values"])
    monkeypatch.setattr(data, "_contents", lambda *_: zeros)
    with pytest.raises(InputError, match="000: pixel_values: differ from what the processor gives"):
        data.preview(0)
    cut = samples_of(shard, folder, model)
    monkeypatch.setattr(cut._builder.sized["images"], "pieces", lambda size, passed: (size, size))
    with pytest.raises(CorruptSampleError, match=r"000: pixel_values: have shape .* one by one"):
        cut.sizes(0)


class Hearer:
    """What a data set asks of a model."""

    def __init__(self, reads: list[Any]) -> None:
        self.modules = [SimpleNamespace(reads=each) for each in reads]

    def module(self, name: str) -> Any:
        return self.modules[("vision", "audio", "lm").index(name)]

    def describe(self, sample: Any) -> dict[str, Any]:
        return {"id": sample["id"]}


@pytest.mark.parametrize(
    ("sound", "problem"),
    [
        (b"no sound", "cannot be read as a WAV file"),
        (made.wav(0, 300)[:-100], "its header says 600"),
        (made.wav(0, 300, rate=8000), "has 8000 samples a second, but the processor needs 16000"),
    ],
)
def test_recordings_that_cannot_be_heard_are_refused(tmp_path: Path, sound: bytes, problem: str) -> None:
    shards = Shards(made.write_shard(tmp_path / "0.tar", [{"wav": sound, "txt": b"a"}]))
    model: Any = Hearer(["images", "audio", "sequence"])
    with pytest.raises(InputError, match=problem):
        ProcessedDataset(shards, made.hearing()).bind(model).sizes(0)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        ({"png": b"no image", "txt": b"a"}, r"0.tar/000.png: cannot be read as an image \(Pillow does not know"),
        ({"png": made.png(0)[:-200], "txt": b"a"}, r"0.tar/000.png: cannot be read as an image \(.*truncated"),
        ({"jpg": made.png(0, kind="JPEG")[:-200], "txt": b"a"}, r"0.tar/000.jpg: cannot be read .*truncated"),
        ({"png": made.png(0), "txt": b"\xff\xfe"}, "is not UTF-8"),
        ({"png": made.png(0)}, "has no 'txt'"),
    ],
)
def test_a_damaged_sample_is_found_before_it_is_planned(
    tmp_path: Path, folder: Path, model: Any, sample: Any, problem: str
) -> None:
    # Another one, so that the fields are there.
    shard = made.write_shard(tmp_path / "0.tar", [sample, {"png": made.png(1), "txt": b"b"}])
    data = samples_of(shard, folder, model)
    with pytest.raises(CorruptSampleError, match=problem) as caught:
        data.sizes(0)
    assert "\n" not in str(caught.value)
    assert data.sizes(1)["targets"] == 3


def test_what_is_not_there_is_reported_before_training(tmp_path: Path, folder: Path) -> None:
    shard = made.write_shard(tmp_path / "0.tar", made.talks(2))
    with pytest.raises(InputError, match="no such file"):
        pl.WebDataset(tmp_path / "1*.tar", folder)
    with pytest.raises(InputError, match="is not a folder"):
        pl.WebDataset(shard, tmp_path / "nothing")
    with pytest.raises(InputError, match=r"text = 'txt': no sample of .* has it; there are 0.png, json"):
        pl.WebDataset(shard, folder, {"text": "txt"})
    with pytest.raises(InputError, match=r"fields\['picture'\]: is unknown"):
        pl.WebDataset(shard, folder, {"picture": "png"})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda whole: b"x" * 600, "is no tar file .*; give a WebDataset shard"),
        (lambda whole: b"", "is no tar file .*; give a WebDataset shard"),
        (gzip.compress, r"is compressed \(gzip\); unpack it: give plain tar files"),
        (bz2.compress, r"is compressed \(bzip2\); unpack it: give plain tar files"),
        (
            lambda whole: whole[:900],
            "is damaged: unexpected end of data, in a file of 900 bytes; copy or write it again",
        ),
        (lambda whole: whole[:512] + b"x" * 1024, "is damaged: .*; copy or write it again"),
    ],
)
def test_what_is_wrong_with_a_shard_is_said(tmp_path: Path, folder: Path, change: Any, problem: str) -> None:
    path = made.write_shard(tmp_path / "0.tar", [{"png": made.png(0), "txt": b"a"}])
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=f"0.tar: {problem}"):
        pl.WebDataset(path, folder)


@pytest.mark.parametrize("file", ["config.json", "processor_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_damaged_file_of_a_processor_is_named(tmp_path: Path, file: str) -> None:
    folder = made.save_processor(tmp_path / "p")
    (folder / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    (folder / file).write_text((folder / file).read_text()[:20])
    with pytest.raises(InputError, match=f"p/{file}: cannot be read as JSON .*; copy or save it again"):
        load_processor(folder)


def test_a_sample_that_the_processor_refuses_is_left_out(tmp_path: Path, folder: Path, model: Any, caplog: Any) -> None:
    thin = {"png": made.png(0, 2000, 5), "txt": b"a"}
    shard = made.write_shard(tmp_path / "0.tar", [thin, {"png": made.png(1), "txt": b"b"}])
    data = samples_of(shard, folder, model)
    with pytest.raises(
        CorruptSampleError, match=r"0.tar/000: .*aspect ratio.*; or skip_corrupt leaves damaged samples"
    ):
        list(pl.Batches(data, 2, shuffle=False))
    (batch,) = pl.Batches(data, 2, shuffle=False, skip_corrupt=True)
    assert [sample.id for sample in batch.metadata] == ["0.tar/001"]
    assert batch.num_skipped == 1
    assert "0.tar/000" in caplog.text


def test_headers_are_read_once_for_all_that_is_bound(tmp_path: Path, folder: Path, model: Any) -> None:
    shard = made.write_shard(tmp_path / "0.tar", [{"png": made.png(0), "txt": b"a"}])
    data = pl.WebDataset(shard, folder)
    sizes = data.bind(model).sizes(0)
    shard.unlink()
    assert data.bind(model).sizes(0) == sizes


def test_a_processor_that_breaks_its_promise_is_refused(tmp_path: Path, folder: Path, model: Any) -> None:
    shard = made.write_shard(tmp_path / "0.tar", [{"png": made.png(0), "txt": b"a"}])
    data = samples_of(shard, folder, model)
    data.sizes(0)
    sized = data._builder.sized["images"]
    real = sized.real
    sized.real = lambda images, **options: real([image.resize((90, 90)) for image in images], **options)
    with pytest.raises(InputError, match=r"0.tar/000.png: .*the processor gives .*, and promised"):
        data.load(0, "vision", (0,))


def test_what_only_decoding_shows_ends_training_and_can_be_excluded(tmp_path: Path, folder: Path, model: Any) -> None:
    broken = bytearray(made.png(0))
    # Inside the compressed pixels, of a file that is whole.
    broken[200:260] = bytes(60)
    shard = made.write_shard(
        tmp_path / "0.tar", [{"png": bytes(broken), "txt": b"a"}, {"png": made.png(1), "txt": b"b"}]
    )
    data = samples_of(shard, folder, model)
    assert data.sizes(0)["targets"] == 3
    with pytest.raises(InputError, match=r"0.tar/000.png: cannot be read .*; repair it, or set skip_corrupt") as caught:
        data.load(0, "vision", (0,))
    assert not isinstance(caught.value, CorruptSampleError)
    less = pl.Batches(samples_of(shard, folder, model, exclude=["0.tar/000"]), 2, skip_corrupt=True)
    (batch,) = less
    assert [sample.id for sample in batch.metadata] == ["0.tar/001"]
    assert batch.num_skipped == 1


def test_a_tile_is_decoded_with_its_image(tmp_path: Path, folder: Path) -> None:
    shard = made.write_shard(tmp_path / "0.tar", [{"png": made.png(0), "txt": b"a"}])
    model: Any = Hearer(["images", "audio", "sequence"])
    data: Any = pl.WebDataset(shard, folder).bind(model)
    blob = Blob("x", data=b"")
    # Two images of three tiles and of one.
    outline = _Outline(
        {}, {"images": _Media((blob, blob), tuple(Outline((rows, 2), torch.float32, {}) for rows in (3, 1)))}
    )
    model.describe = lambda _: {"id": "x", "image_tokens": [4, 4, 4, 4]}
    assert [data._to_decode(outline, "images", "vision", (k,)) for k in range(4)] == [{0}, {0}, {0}, {1}]
    # Two images of three patches and of one.
    model.describe = lambda _: {"id": "x", "image_tokens": [3, 1]}
    assert [data._to_decode(outline, "images", "vision", (k,)) for k in range(2)] == [{0}, {1}]
    assert data._to_decode(outline, "images", "lm", (0,)) == set()
    assert data._to_decode(outline, "images", "vision", ()) == set()
    # A model in one piece takes all with the sample.
    model.modules = [SimpleNamespace(reads="sequence")] * 3
    assert data._to_decode(outline, "images", "lm", (0,)) == {0, 1}


def refusal(tmp_path: Path, folder: Path, model: Any, example: dict[str, bytes], **options: Any) -> str:
    """Why an example can be left out; an image stands beside it, so that the data have a field for images."""
    shard = made.write_shard(
        tmp_path / "0.tar", [example, {"png": made.png(0), "json": said(("user", "x"), ("assistant", "y"))}]
    )
    with pytest.raises(CorruptSampleError) as caught:
        samples_of(shard, folder, model, **options).sizes(0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            "see <image_pad>?",
            r"0.tar/000: messages\[0\].content: has the processor's token for image, '<image_pad>', at",
        ),
        ("see <video_pad>?", "token for video, '<video_pad>', at character 4; change the text"),
        ("see <image>?", "0.tar/000: has 1 places for 0 of image; give as many"),
    ],
)
def test_a_user_who_writes_a_place_of_contents_loses_that_sample_alone(
    tmp_path: Path, folder: Path, model: Any, content: str, problem: str
) -> None:
    asked = {"json": said(("user", content), ("assistant", "no"))}
    assert re.search(problem, refusal(tmp_path, folder, model, asked))
    # Left out and counted, with the others trained on.
    data = pl.Batches(pl.WebDataset(tmp_path / "0.tar", folder), batch=2, shuffle=False, skip_corrupt=True)
    (batch,) = list(bound(data, model))
    assert (len(batch), batch.num_skipped) == (1, 1)


def test_words_that_place_nothing_in_the_data_are_words(tmp_path: Path, folder: Path, model: Any) -> None:
    shard = made.write_shard(tmp_path / "0.tar", [{"json": said(("user", "an <image> tag"), ("assistant", "yes"))}])
    assert samples_of(shard, folder, model).sizes(0)["text_tokens"] > 0


def test_a_description_that_does_not_fit_its_contents_is_a_damaged_sample(model: Any) -> None:
    ids = torch.tensor([1, 5, 2])
    with pytest.raises(
        CorruptSampleError, match=r"sample.input_ids: have 1 places for images, whose tokens are 0; remove"
    ):
        model.describe({"input_ids": ids, "labels": ids})


@pytest.mark.parametrize(
    ("example", "problem"),
    [
        ({"json": b"[" * 100_000}, "0.tar/000: has messages in too many brackets"),
        ({"json": said(("assistant", "a"), ("user", "b"))}, "0.tar/000: messages: begins with an assistant message"),
    ],
)
def test_what_the_processor_would_stumble_over_is_a_damaged_sample(
    tmp_path: Path, folder: Path, model: Any, example: dict[str, bytes], problem: str
) -> None:
    assert problem in refusal(tmp_path, folder, model, example)


def test_texts_that_are_empty_or_place_other_images_are_damaged(tmp_path: Path, folder: Path, model: Any) -> None:
    for text, problem in ((b"", "0.tar/000: has no text"), (b"a <image_pad>", "'<image_pad>', 1 times for 0 of them")):
        shard = made.write_shard(tmp_path / "0.tar", [{"txt": text}])
        with pytest.raises(CorruptSampleError, match=problem):
            samples_of(shard, folder, model).sizes(0)


def test_a_field_that_is_null_is_said_to_be() -> None:
    from pipeloom.integrations.data.examples import Fields, read_example

    source: Any = type("Rows", (), {"name": lambda _, i: f"rows[{i}]", "__getitem__": lambda _, i: {"text": None}})()
    with pytest.raises(CorruptSampleError, match=r"rows\[0\]: has nothing in 'text' \(text\); repair it"):
        read_example(source, 0, Fields(text="text"), None)
