"""Sample metadata from WebDataset shards."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from pipeloom.errors import InputError
from pipeloom.integrations.data.sources import Shards
from pipeloom.io import read_samples


def shard(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_json_members_are_read_and_pixels_are_not(tmp_path: Path, name: str) -> None:
    one = {"text_tokens": 7, "image_tokens": [4, 4], "image_patches": [16, 16]}
    path = shard(
        tmp_path / name,
        {
            "train/0001.jpg": b"\xff" * 5000,
            "train/0001.json": json.dumps(one).encode(),
            "train/0002.json": json.dumps({"id": "own", "text_tokens": 3}).encode(),
            "train/0002.caption.txt": b"words",
        },
    )
    first, second = read_samples(path)
    assert (first.id, first.text_tokens, first.image_tokens, first.patches) == ("train/0001", 7, (4, 4), (16, 16))
    assert (second.id, second.text_tokens) == ("own", 3)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"1.jpg": b"x"}, "sample 1: has no .json member; write its sizes into one"),
        ({"1.json": b"[1]"}, "1.json"),
        ({"1.json": b"\xff\xfe"}, "is not UTF-8 text"),
        ({"1.json": b'{"text_tokens": -1}'}, "sample 1.*text_tokens: -1 is negative"),
        ({"1.json": b'{"id": "a"}', "2.json": b'{"id": "a"}'}, "'a' is also in sample 1"),
        ({}, "has no sample"),
    ],
)
def test_broken_shards_are_refused_by_name(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_samples(shard(tmp_path / "a.tar", members))


def test_files_that_belong_to_no_sample_are_skipped(tmp_path: Path) -> None:
    others = ("__epoch__", "__shard__/0.json", "README", ".DS_Store", "a/._1.json", "__MACOSX/a/._1.json")
    path = shard(tmp_path / "a.tar", {"a/1.jpg": b"x", **dict.fromkeys(others, b"{}"), "a/1.json": b"{}"})
    assert [sample.id for sample in read_samples(path)] == ["a/1"]
    shards = Shards(path)
    assert [shards.name(i) for i in range(len(shards))] == ["a.tar/a/1"]
    assert shards.fields == ("jpg", "json")


def test_names_that_are_not_utf8_cannot_be_ids(tmp_path: Path) -> None:
    named = {"a\udcff.json": b'{"id": "a"}', "b\udcff.jpg": b"x", "b\udcff.json": b'{"id": "b"}'}
    assert [sample.id for sample in read_samples(shard(tmp_path / "a.tar", named))] == ["a", "b"]
    with pytest.raises(InputError, match=r"a\\udcff.json: has a name that is not UTF-8"):
        read_samples(shard(tmp_path / "b.tar", {"a\udcff.json": b"{}"}))


@pytest.mark.parametrize("data", [b"", b"no tar", b"\x1f\x8b broken"])
def test_what_is_no_tar_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    with pytest.raises(InputError, match="cannot be read as a tar file"):
        read_samples(path)
    with pytest.raises(InputError, match="cannot be read as a tar file"):
        read_samples(tmp_path / "missing.tar")
