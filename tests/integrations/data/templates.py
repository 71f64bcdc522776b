"""Processors of the library with chat templates of the structures that published ones have, all made here."""

from __future__ import annotations

from typing import Any

import transformers as hf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from . import made

MARKS = ("<end>", "<s>", "</s>", "<turn>", "<stop>", "<see>", "<seen>", "<image>", "<hear>", "<sound>", "<heard>")
MARKS += ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>", "<soi>", "<eoi>", "<part>")
PIECES = ("answer", "ing", "\n\n", ". ", "  ")
LETTERS = "\n .,:?!/<>[]{}'\"#-_" + "".join(map(chr, range(97, 123))) + "".join(map(chr, range(65, 91))) + "0123456789"

# Images first, then text, in each message; the assistant's words lie in a generation block.
IMAGES_FIRST = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ c['text'] + ' ' }}{% endgeneration %}"
    "{% else %}{{ c['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# Brackets around what a user says; no generation prompt, and the system's words by their place.
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ '<<SYS>>\n' + m['content'][0]['text'] + '\n<</SYS>>\n\n' }}"
    "{% elif m['role'] == 'user' %}{{ '[INST] ' }}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}{{ ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'][0]['text'] + '</s>' }}"
    "{% else %}{{ raise_exception('only user, system and assistant') }}{% endif %}{% endfor %}"
)
# Turns of typed parts only.
TYPED_TURNS = (
    "{% for m in messages %}{{ '<turn>' + m['role'] + ' ' }}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ '\n' + c['text'] }}{% endgeneration %}{% else %}{{ '\n' + c['text'] }}{% endif %}{% endfor %}"
    "{{ '<stop>' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>assistant\n' }}{% endif %}"
)
# What follows the role depends on the first part.
UTTERANCES = (
    "<turn>{% for m in messages %}{{ m['role'].capitalize() }}"
    "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}"
    "{% elif c['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# Text or parts, with a system's turn of its own where there is none.
EITHER = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<turn>system\nbe kind<stop>\n{% endif %}"
    "<turn>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}<stop>\n{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' or 'image' in c or 'image_url' in c %}<see><image><seen>"
    "{% elif c['type'] == 'audio' or 'audio' in c %}<hear><sound><heard>\n"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}<stop>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
# Begins with the tokenizer's first token; trims; roles must alternate; the system's words join the first user's.
ALTERNATING = (
    "{{ bos_token }}{% set first = '' %}{% set rest = messages %}{% if messages[0]['role'] == 'system' %}"
    "{% if messages[0]['content'] is string %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% else %}{% set first = messages[0]['content'][0]['text'] + '\n\n' %}{% endif %}"
    "{% set rest = messages[1:] %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ first if loop.first else '' }}"
    "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}PLACE{% else %}{{ c['text'] | trim }}{% endif %}{% endfor %}{% endif %}<stop>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
# The system's words as text, all others as parts.
MIXED = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}<turn>system\n{{ messages[0]['content'] | trim }}<stop>"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}<turn>{{ m['role'] }}\n\n"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% elif c['type'] == 'text' %}{{ c['text'] }}"
    "{% endif %}{% endfor %}<stop>{% endfor %}{% if add_generation_prompt %}<turn>assistant\n\n{% endif %}"
)
# Text alone, as language models have it, with tools.
TEXT = (
    "{% if tools %}<turn>tools\n{{ tools | tojson }}<stop>\n{% endif %}"
    "{% for m in messages %}{{ '<turn>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}{{ '<stop>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
# The same with a block whose end is inside of the turn.
MARKED_TEXT = (
    "{% for m in messages %}<turn>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<stop>{% endgeneration %}{% else %}{{ m['content'] }}<stop>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def tokenizer(template: str | None, begins: bool = False) -> Any:
    """Letters and a few longer pieces are tokens; ``begins`` puts a token before every text."""
    words = {word: i for i, word in enumerate((*MARKS, *PIECES, *LETTERS, "<unk>"))}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    longer = "|".join(p.replace(".", "\\.") for p in PIECES)
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{longer}|[\s\S]"), "isolated")
    tokens.add_special_tokens(list(MARKS))
    tokens.decoder = decoders.Fuse()
    if begins:
        tokens.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", words["<s>"])])
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<end>", "unk_token": "<unk>"}
    extra = {"image_token": "<image>", "audio_token": "<sound>", "video_token": "<video>"}
    extra |= {"audio_bos_token": "<hear>", "audio_eos_token": "<heard>"}
    extra |= {"vision_bos_token": "<see>", "vision_eos_token": "<seen>", "boi_token": "<soi>", "eoi_token": "<eoi>"}
    extra |= {"start_image_token": "<see>", "end_image_token": "<seen>", "context_image_token": "<part>"}
    out = hf.PreTrainedTokenizerFast(tokenizer_object=tokens, **special, extra_special_tokens=extra)
    out.chat_template = template
    return out


def _unchecked(kind: Any) -> Any:
    """A class of processors that takes parts of any class: those that the library wants may need torchvision."""
    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, given: type(given)})


def processor(name: str) -> Any:
    """The processor of a family, with images of at most 56 x 56 pixels."""
    return _MAKERS[name]()


def _llava(template: str, begins: bool) -> Any:
    images = hf.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)
    given = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return _unchecked(hf.LlavaProcessor)(images, tokenizer(template, begins), chat_template=template, **given)


def _llava_next(template: str) -> Any:
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    images = hf.LlavaNextImageProcessorPil(size={"shortest_edge": 28}, crop_size=28, image_grid_pinpoints=pinpoints)
    given = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return _unchecked(hf.LlavaNextProcessor)(images, tokenizer(template, True), chat_template=template, **given)


def _onevision() -> Any:
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    images = hf.LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints)
    given = {"num_image_tokens": 4, "vision_feature_select_strategy": "full"}
    kind = _unchecked(hf.LlavaOnevisionProcessor)
    return kind(images, tokenizer(TYPED_TURNS), None, chat_template=TYPED_TURNS, **given)


def _idefics(images: Any, split: bool) -> Any:
    sizes = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}, "do_image_splitting": split}
    kind = _unchecked(hf.Idefics3Processor)
    return kind(images(**sizes), tokenizer(UTTERANCES), image_seq_len=4, chat_template=UTTERANCES)


def _qwen(kind: Any) -> Any:
    images = made.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 4)
    return _unchecked(kind)(images, tokenizer(EITHER), None, chat_template=EITHER)


def _gemma() -> Any:
    template = ALTERNATING.replace("PLACE", "<soi>")
    images = hf.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    return _unchecked(hf.Gemma3Processor)(images, tokenizer(template, True), chat_template=template, image_seq_length=4)


def _internvl() -> Any:
    sizes = {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "max_patches": 4}
    images = hf.GotOcr2ImageProcessorPil(**sizes)
    template = EITHER.replace("<see><image><seen>", "<part>\n")
    kind = _unchecked(hf.InternVLProcessor)
    return kind(images, tokenizer(template), None, image_seq_length=4, chat_template=template)


def _audio() -> Any:
    ears = hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1, n_fft=400, hop_length=160)
    return _unchecked(hf.Qwen2AudioProcessor)(ears, tokenizer(EITHER), chat_template=EITHER)


_MAKERS: dict[str, Any] = {
    "llava": lambda: _llava(IMAGES_FIRST, begins=True),
    "llava_next": lambda: _llava_next(BRACKETS),
    "llava_onevision": _onevision,
    "idefics3": lambda: _idefics(hf.Idefics3ImageProcessorPil, split=True),
    "smolvlm": lambda: _idefics(hf.SmolVLMImageProcessorPil, split=False),
    "qwen2_vl": lambda: _qwen(hf.Qwen2VLProcessor),
    "qwen2_5_vl": lambda: _qwen(hf.Qwen2_5_VLProcessor),
    "qwen3_vl": lambda: _qwen(hf.Qwen3VLProcessor),
    "gemma3": _gemma,
    "internvl": _internvl,
    "mixed": lambda: _llava(MIXED, begins=True),
    "qwen2_audio": _audio,
    "text": lambda: tokenizer(TEXT),
    "marked_text": lambda: tokenizer(MARKED_TEXT),
}
NAMES = tuple(_MAKERS)
