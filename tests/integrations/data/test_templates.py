"""Tokens and targets of conversations are those of the processor's own chat template, whatever its structure."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from pipeloom.errors import InputError
from pipeloom.integrations.data.processed import ProcessedDataset
from pipeloom.integrations.data.processors import decode_wave
from pipeloom.integrations.data.sources import Shards
from pipeloom.runtime.data.dataset import CorruptSampleError

from . import made, templates

Message = dict[str, Any]


@pytest.fixture(scope="module", params=templates.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def processor(name: str) -> Any:
    return templates.processor(name)


def sample_of(
    tmp_path: Path, processor: Any, messages: Any, media: dict[str, bytes] | None = None, **options: Any
) -> Any:
    """Return the data set of a sample with these messages, and what it becomes."""
    shard = made.write_shard(tmp_path / "0.tar", [{**(media or {}), "json": json.dumps(messages).encode()}])
    data = ProcessedDataset(Shards(shard), processor, **options)
    return data, data._outline(0).sample


def typed(messages: list[Message], contents: list[Any], as_text: tuple[str, ...] = ()) -> list[Message]:
    """Messages with typed parts and contents in them, as the library's documentation writes them."""
    left, out = iter(contents), []
    for message in messages:
        parts = message["content"]
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        parts = [part if part["type"] == "text" else {**part, part["type"]: next(left)} for part in parts]
        text = "".join(part.get("text", "") for part in parts)
        out.append({**message, "content": text if message["role"] in as_text else parts})
    return out


def own(processor: Any, messages: list[Message], prompt: bool = False, mask: bool = False, **more: Any) -> Any:
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": prompt}
    found = processor.apply_chat_template(messages, return_assistant_tokens_mask=mask, **options, **more)
    return {key: torch.as_tensor(value).reshape(-1) for key, value in found.items() if key != "pixel_values"}


def expected(processor: Any, messages: list[Message], **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets: by the processor's mask, or as what each message of the assistant adds."""
    if "{% generation %}" in processor.chat_template:
        found = own(processor, messages, mask=True, **more)
        return found["input_ids"], found["assistant_masks"].bool()
    ids = own(processor, messages, **more)["input_ids"]
    said = torch.zeros_like(ids, dtype=torch.bool)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            begin = len(own(processor, messages[:i], prompt=True, **more)["input_ids"])
            said[begin : len(own(processor, messages[: i + 1], **more)["input_ids"])] = True
    return ids, said


AS_TEXT = {"mixed": ("system",), "text": ("system", "user", "assistant", "tool")}
AS_TEXT["marked_text"] = AS_TEXT["text"]


def drawn(draw: random.Random, kind: str, count: int) -> list[Message]:
    """A conversation of several turns, whose contents are strings, lists of parts, or both."""
    turns = draw.randint(1, 4)
    places = [draw.randrange(turns) for _ in range(count)]
    said = [
        "a cat",
        "4",
        "",
        "answering. ",
        " two  words\n\nand a line",
        "[1, 2] {'type': 'text'}",
        "<stop> it",
        "</s>",
    ]
    messages: list[Message] = []
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": draw.choice(["be kind", "answer."])})
    for turn in range(turns):
        question, answer = draw.choice(["what?", "", "tell me\n", "is it <b>?"]), draw.choice(said)
        content: Any = question
        if turn in places or draw.random() < 0.5:
            content = [{"type": kind}] * places.count(turn) + [{"type": "text", "text": question}]
            draw.shuffle(content)
        messages.append({"role": "user", "content": content})
        typed = [{"type": "text", "text": answer}]
        messages.append({"role": "assistant", "content": answer if draw.random() < 0.5 else typed})
    if all(not _text(m).strip() for m in messages if m["role"] == "assistant"):
        messages[-1]["content"] = "yes"
    return messages


def _text(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


@pytest.mark.parametrize("seed", range(12))
def test_tokens_and_targets_are_the_processors_own(tmp_path: Path, name: str, processor: Any, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    kind = {"text": "", "marked_text": "", "qwen2_audio": "audio"}.get(name, "image")
    # LLaVA-OneVision makes fewer tokens of an image beside others.
    most = {"llava_onevision": 1}.get(name, 3) if kind else 0
    count = draw.randint(0, most)
    messages = drawn(draw, kind, count)
    if kind == "audio":
        media = {f"{i}.wav": made.wav(i, draw.randint(800, 8000)) for i in range(count)}
        contents: list[Any] = [wave_of(each) for each in media.values()]
    else:
        media = {f"{i}.png": made.png(i, draw.randint(20, 90), draw.randint(20, 90)) for i in range(count)}
        contents = [Image.open(io.BytesIO(each)).convert("RGB") for each in media.values()]
    data, sample = sample_of(tmp_path, processor, messages, media)
    ids, said = expected(processor, typed(messages, contents, AS_TEXT.get(name, ())))
    assert torch.equal(sample["input_ids"], ids)
    assert torch.equal(sample["labels"] != -100, said)
    assert torch.equal(sample["labels"][said], ids[said])
    text = data.preview(0)
    assert ">>>" in text
    assert "\n" not in text


def wave_of(data: bytes) -> Any:
    from pipeloom.integrations.data.blobs import Blob

    return decode_wave(Blob("x.wav", data=data))


def decoded(processor: Any, sample: Any) -> str:
    tokenizer = getattr(processor, "tokenizer", processor)
    return str(tokenizer.decode(sample["input_ids"][sample["labels"] != -100]))


def test_tools_and_their_answers_reach_the_template(tmp_path: Path) -> None:
    processor = templates.processor("text")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    _, sample = sample_of(tmp_path, processor, {"messages": messages, "tools": tools})
    ids, said = expected(processor, messages, tools=tools)
    assert torch.equal(sample["input_ids"], ids)
    assert torch.equal(sample["labels"] != -100, said)
    assert "two<stop>" in decoded(processor, sample)
    assert '"add"' in decoded(processor, sample)


def test_tools_of_their_own_field_reach_the_template(tmp_path: Path) -> None:
    processor = templates.processor("text")
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "two"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    files = {"messages.json": json.dumps(messages).encode(), "tools.json": json.dumps(tools).encode()}
    data = ProcessedDataset(Shards(made.write_shard(tmp_path / "0.tar", [files])), processor)
    ids, _ = expected(processor, messages, tools=tools)
    assert torch.equal(data._outline(0).sample["input_ids"], ids)


def test_tools_of_their_own_field_join_a_conversation_that_is_an_object(tmp_path: Path) -> None:
    processor = templates.processor("text")
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "two"}]
    of_file, of_object = ([{"type": "function", "function": {"name": name, "parameters": {}}}] for name in "ab")
    for talk, tools in (({}, of_file), ({"tools": []}, of_file), ({"tools": of_object}, of_object)):
        files = {"json": {"messages": messages, **talk}, "tools.json": of_file}
        sample = {name: json.dumps(value).encode() for name, value in files.items()}
        data = ProcessedDataset(Shards(made.write_shard(tmp_path / "0.tar", [sample])), processor)
        ids, _ = expected(processor, messages, tools=tools)
        assert torch.equal(data._outline(0).sample["input_ids"], ids)


def test_of_several_templates_that_of_tools_is_taken_with_tools(tmp_path: Path) -> None:
    processor = templates.processor("text")
    with_tools = processor.chat_template
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "two"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    ids, said = expected(processor, messages, tools=tools)
    plain = "{% for m in messages %}{{ m.role + ' ' + m.content }}{% endfor %}"
    processor.chat_template = {"default": plain, "tool_use": with_tools}
    _, sample = sample_of(tmp_path, processor, {"messages": messages, "tools": tools})
    assert torch.equal(sample["input_ids"], ids)
    assert torch.equal(sample["labels"] != -100, said)
    assert decoded(processor, sample_of(tmp_path, processor, messages)[1]) == "assistant two"


def test_prefixes_that_see_what_they_predict_are_refused(tmp_path: Path) -> None:
    processor = templates.processor("llava_next")
    processor.chat_template = processor.tokenizer.chat_template = None
    processor.__class__ = type("PaliGemmaProcessor", (type(processor),), {})
    data = ProcessedDataset(Shards(made.write_shard(tmp_path / "0.tar", [{"txt": b"a cat"}])), processor)
    with pytest.raises(InputError, match="makes prefixes, of which every token attends to those after it"):
        data._outline(0)


def test_a_role_that_the_template_does_not_write_is_refused(tmp_path: Path) -> None:
    processor = templates.processor("llava_next")
    processor.chat_template = templates.BRACKETS.replace("{{ raise_exception('only user, system and assistant') }}", "")
    messages = [{"role": "user", "content": "1+1?"}, {"role": "tool", "content": "2"}]
    messages.append({"role": "assistant", "content": "two"})
    with pytest.raises(CorruptSampleError, match="000: messages: the chat template omits the contents of role 'tool'"):
        sample_of(tmp_path, processor, messages)


def test_parts_that_the_template_does_not_write_are_refused(tmp_path: Path) -> None:
    # It reads the first part alone.
    messages = [{"role": "user", "content": "what?"}]
    messages.append({"role": "assistant", "content": [{"type": "text", "text": each} for each in ("a", "cat")]})
    with pytest.raises(CorruptSampleError, match="omits the contents of role 'assistant'"):
        sample_of(tmp_path, templates.processor("llava_next"), messages)


def test_what_the_template_raises_is_said(tmp_path: Path) -> None:
    messages = [{"role": role, "content": "x"} for role in ("user", "user", "assistant")]
    with pytest.raises(CorruptSampleError, match="TemplateError: roles must alternate"):
        sample_of(tmp_path, templates.processor("gemma3"), messages)


def test_images_have_no_place_in_a_template_of_text(tmp_path: Path) -> None:
    processor = templates.processor("llava")
    processor.chat_template = templates.TEXT
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a cat"}]
    with pytest.raises(CorruptSampleError, match="supports only text, but a message has an image"):
        sample_of(tmp_path, processor, messages, {"png": made.png(0)})


def test_a_template_that_writes_earlier_turns_anew_is_refused(tmp_path: Path) -> None:
    template = templates.TEXT.replace("(m['content'] or '')", "('(think)' if loop.last else '') + m['content']")
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]
    with pytest.raises(InputError, match="renders the first messages differently without those that follow"):
        sample_of(tmp_path, templates.tokenizer(template), messages)
    _, sample = sample_of(tmp_path, templates.tokenizer(template), messages, train_on="all")
    assert torch.equal(sample["labels"], sample["input_ids"])


@pytest.mark.parametrize("messages", [[("user", "what?")], [("user", "what?"), ("user", "why?")]])
def test_a_sample_without_a_target_is_refused(tmp_path: Path, name: str, processor: Any, messages: Any) -> None:
    if name == "gemma3" and len(messages) > 1:
        pytest.skip("its roles must alternate")
    with pytest.raises(CorruptSampleError, match="000: has no target; add assistant text"):
        sample_of(tmp_path, processor, [{"role": role, "content": content} for role, content in messages])


def test_no_token_is_cut_off(tmp_path: Path) -> None:
    processor = templates.processor("qwen2_vl")
    processor.tokenizer.init_kwargs |= {"truncation": True, "max_length": 8}
    processor.tokenizer.model_max_length = 8
    messages = [{"role": "user", "content": "what? " * 9}, {"role": "assistant", "content": "a cat"}]
    _, sample = sample_of(tmp_path, processor, messages)
    assert decoded(processor, sample) == "a cat<stop>\n"


def test_no_token_of_a_text_without_a_chat_is_cut_off(tmp_path: Path) -> None:
    for name in ("qwen2_vl", "text"):
        processor = templates.processor(name)
        tokenizer = getattr(processor, "tokenizer", processor)
        processor.chat_template = tokenizer.chat_template = None
        tokenizer.init_kwargs |= {"truncation": True, "max_length": 8}
        tokenizer.model_max_length = 8
        data = ProcessedDataset(Shards(made.write_shard(tmp_path / "0.tar", [{"txt": b"a cat " * 9}])), processor)
        assert decoded(processor, data._outline(0).sample) == "a cat " * 9 + "</s>"


def test_all_tokens_are_targets_with_a_template_that_marks_answers(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a cat"}]
    _, sample = sample_of(tmp_path, templates.processor("marked_text"), messages, train_on="all")
    assert torch.equal(sample["labels"], sample["input_ids"])
    assert "assistant_masks" not in sample


def test_a_token_that_joins_with_the_generation_prompt_is_a_target(tmp_path: Path) -> None:
    # The line break of the prompt and that of the answer are one token.
    processor = templates.processor("text")
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "\na cat"}]
    _, sample = sample_of(tmp_path, processor, messages)
    assert decoded(processor, sample) == "\n\na cat<stop>\n"


def test_a_processor_that_looks_at_contents_is_found_before_training(tmp_path: Path) -> None:
    processor = templates.processor("qwen2_vl")
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a cat"}]
    data, _ = sample_of(tmp_path, processor, messages, {"png": made.png(0, 90, 90)})
    assert data.preview(0).endswith(">>>a cat<stop>\\n<<<")
    processor.image_processor.size["longest_edge"] = 28 * 28
    with pytest.raises(InputError, match=r"000: input_ids: differs from what .* gives"):
        data.preview(0)
