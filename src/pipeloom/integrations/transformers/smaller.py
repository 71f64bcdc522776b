"""Make a small model of a configuration, with fewer and narrower layers but at least one layer of each kind."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeloom.errors import InputError
from pipeloom.integrations.tracing.fitting import error_line
from pipeloom.integrations.transformers.reference import twin

_ENOUGH, _MOST = 2_000_000, 40_000_000
"""Numbers of parameters. Models below the first are not made smaller. Models above the second are not tested, because
that would take more than some seconds on one core."""
_WIDE, _WIDE_DIVISOR = 128, 4
"""Widths that belong to no tower are divided by the second number, if they are at least the first."""
_NUM_WORDS = 128
_LARGE_IMAGE = 1000
"""Pixels along a side. Above it, attention over all patches takes seconds."""
_FEW_PATCHES = 4
"""Patches along a side of a tile."""
_WINDOW = 3
_EXTENTS = re.compile(r"window|chunk|block_(size|len)|index_topk|local_att|compress|stride|segment|bucket")
"""Fields whose value is a number of tokens, such as windows."""
_WIDTHS = re.compile(r"(size|dim|width|inner|embd|intermediate|rank|channels|d_ssm$)")
_NO_WIDTHS = re.compile(
    r"(vocab|head_dim|window|chunk|image_size|patch|kernel|conv|state_size|d_state|rope|rotary|v_head|cache|batch|pos_emb|position)"
)

_TAPS = re.compile(r"feature_layers?$|visual_indexes$|layers?_ind(ices|exes)$|global_attn_indexes$")
"""Fields with the numbers of encoder layers whose output is used."""
_CHOSEN = re.compile(r"_per_tok(en)?$|top_?k|moe_k$")
"""Fields with the number of experts of a token."""


_NO_SWITCHES = re.compile(r"^_|^training$|^seed$|^(layer|block)_(idx|index|id|num|number)$")
"""Attributes of a module that do not change what it computes, such as its place among its neighbors."""


def _is_width(name: str) -> bool:
    return _WIDTHS.search(name) is not None and _NO_WIDTHS.search(name) is None


def smaller(kind: type, config: Any, runs: Callable[[Any], object]) -> tuple[Any, list[str], bool]:
    """Return a small model with random weights that has a layer of each kind of the configuration.

    The other results are the paths of its lists of layers, and whether a few tokens reach beyond all of its windows.
    ``runs`` is called with each candidate, which is skipped if it raises. Raise `InputError` if no candidate works.
    """
    shapes = _shapes(kind, config)
    # Of the model, because a decoder's class changes the configuration of its encoder-decoder model.
    if shapes.config.is_encoder_decoder:
        raise InputError("model", "has an encoder whose output every block of its decoder takes")
    whole = tower_lists(shapes, config)
    wanted = {path: [signature(block) for block in blocks] for path, blocks in whole.items()}
    if not wanted:
        raise InputError("model", "has no list of layers that could be found")
    counts = {len(each) for each in wanted.values()}
    fewest = {n: max(1 + e.index(kind) for e in wanted.values() if len(e) == n for kind in set(e)) for n in counts}
    cuts = [{n: min(n, max(2, fewest[n]) + more) for n in counts} for more in (0, 1, max(counts))]
    reason = "all of its forms are large"
    for reach in (True, False):
        for cut in cuts:
            sized, why = _sized(kind, _candidates(config, cut, reach), wanted)
            reason = why or reason
            for candidate in sized:
                try:
                    model = _random(kind, candidate)
                    runs(copy.deepcopy(model))
                    return model, list(wanted), not _extends(candidate.get_text_config())
                except Exception as error:
                    reason = line(error)
            if sized:
                break
    raise InputError("model", f"cannot be tested on a small model: {reason}")


def _extends(given: Any, name: str = "") -> bool:
    """Return whether a window or the like is longer than the test samples."""
    if hasattr(given, "to_dict"):
        given = vars(given)
    if name == "quantization_config":
        return False
    if isinstance(given, Mapping):
        return any(_extends(value, str(key)) for key, value in given.items() if not str(key).startswith("_"))
    if isinstance(given, (list, tuple)):
        return any(_extends(each, name) for each in given)
    return type(given) is int and given > _WINDOW and _EXTENTS.search(name) is not None


def _sized(kind: type, makers: Sequence[Callable[[], Any]], wanted: dict[str, list[Any]]) -> tuple[list[Any], str]:
    """Return configurations with all kinds of layers, best first, and why the last rejected one was rejected."""
    sized: list[tuple[int, int, Any]] = []
    reason = ""
    for number, make in enumerate(makers):
        try:
            candidate = make()
            shapes = _shapes(kind, candidate)
        except Exception as error:
            reason = line(error)
            continue
        size = sum(p.numel() for p in shapes.parameters())
        if any({signature(b) for b in shapes.get_submodule(path)} != set(each) for path, each in wanted.items()):
            reason = "a smaller configuration has other kinds of layers"
        elif size <= _MOST:
            sized.append((max(size, _ENOUGH), number, candidate))
    return [each[2] for each in sorted(sized, key=lambda each: each[:2])], reason


def line(error: Exception) -> str:
    """Return an error in one line."""
    if isinstance(error, InputError):
        return error.problem
    return error_line(error)


_COUNTS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers", "decoder_layers", "layers", "n_layers")


def _parts(config: Any) -> list[Any]:
    """Return the configurations with a width: of the language model first, then of encoders and what is between."""
    found = {id(each): each for each in (config.get_text_config(), *_nested(config))}
    return [each for each in found.values() if type(_get(each, "hidden_size")) is int]


def _nested(config: Any) -> list[Any]:
    inner = [each for name, each in vars(config).items() if hasattr(each, "to_dict") and not name.startswith("_")]
    return [each for one in inner for each in (one, *_nested(one))]


def _get(config: Any, name: str) -> Any:
    """Return a field of a configuration, or None. Fields that differ between layers cannot be read by ``getattr``."""
    return vars(config).get(_name(config, name))


def _name(config: Any, name: str) -> str:
    """Return the name that a configuration has for a field."""
    return str(config.attribute_map.get(name, name))


def _num_heads(config: Any) -> int | None:
    """Return the number of attention heads; None if a configuration has none."""
    names = ("num_attention_heads", "num_heads", "encoder_attention_heads")
    return next((value for name in names if (value := _get(config, name))), None)


def _count_names(config: Any) -> list[str]:
    names = dict.fromkeys(_name(config, name) for name in _COUNTS)
    return [name for name in names if type(vars(config).get(name)) is int]


def _layer_counts(config: Any) -> list[int]:
    """Return the numbers of layers of a configuration, which may only list their kinds."""
    kinds = [
        len(value)
        for name, value in vars(config).items()
        if "layer" in name and isinstance(value, (list, tuple)) and value and isinstance(value[0], str)
    ]
    return [vars(config)[name] for name in _count_names(config)] or sorted(kinds)[-1:]


def tower_lists(model: nn.Module, config: Any) -> dict[str, nn.ModuleList]:
    """Return the outermost module lists that are as long as a tower has layers, by path."""
    counts = {count for each in _parts(config) for count in _layer_counts(each)}
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{other}.") for other in found)
        if isinstance(module, nn.ModuleList) and len(module) in counts and not inside:
            found[path] = module
    return found


def signature(block: nn.Module) -> str:
    """Return a digest of what distinguishes a block from other kinds: its submodules and their switches, not sizes.

    A number is a switch that is on unless it is 0.
    """
    parts = []
    for name, module in block.named_modules():
        switches = tuple(
            (key, value if isinstance(value, (bool, str)) else (value is None, value == 0))
            for key, value in sorted(vars(module).items())
            if isinstance(value, (bool, str, int, float, type(None))) and not _NO_SWITCHES.search(key)
        )
        own = tuple((key, p.dim()) for key, p in module.named_parameters(recurse=False))
        parts.append((name, type(module), switches, own))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def check_as_configured(model: Any) -> None:
    """Raise `InputError` if the parameters of a model differ from its configuration, for example due to adapters."""
    wanted = {name for name, _ in _shapes(type(model), model.config).named_parameters()}
    odd = sorted(wanted ^ {name for name, _ in model.named_parameters()})
    if isinstance(getattr(model, "lm_head", None), nn.Identity):
        # Prompts of diffusion models take the states behind the last block.
        odd = [name for name in odd if not name.startswith("lm_head.")]
    if odd:
        what = "lacks" if odd[0] in wanted else "has"
        raise InputError("model", f"{what} {odd[0]!r}, unlike a {type(model).__name__} of its configuration")


def _shapes(kind: Any, config: Any) -> Any:
    with torch.device("meta"):
        return kind._from_config(_copied(config))


def _copied(config: Any) -> Any:
    new = copy.deepcopy(config)
    # Let the library choose: GPU kernels do not run here.
    new._attn_implementation = None
    return new


def _random(kind: Any, config: Any) -> Any:
    """Return the model on the CPU in double precision, with noise on all weights so that none is zero or one."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        model = twin(kind._from_config(_copied(config)))
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 0.1 if parameter.dim() < 2 else 0.5 * parameter[0].numel() ** -0.5
                parameter.add_(torch.randn_like(parameter) * scale)
    return model


# ------------------------------------------------------------------ configurations


def _candidates(config: Any, layers: dict[int, int], reach: bool) -> list[Callable[[], Any]]:
    """Return functions that make smaller configurations, the least changed first."""
    ways = [(few, head_dim, False) for few in (False, True) for head_dim in (None, 32, 16)]
    ways += [(True, head_dim, True) for head_dim in (None, 32, 16)]
    return [partial(_cut, config, layers, reach), *(partial(_narrow_all, config, layers, reach, *way) for way in ways)]


def _cut(config: Any, layers: dict[int, int], reach: bool) -> Any:
    """Reduce layers and vocabulary, and shorten windows so that a few tokens reach beyond them."""
    new = copy.deepcopy(config)
    for part in _parts(new):
        counts = [count for count in _layer_counts(part) if count in layers]
        if not counts:
            continue
        for name, value in list(vars(part).items()):
            if isinstance(value, (list, tuple)) and len(value) in counts and not name.startswith("_"):
                setattr(part, name, value[: layers[len(value)]])
        for name in _count_names(part):
            setattr(part, name, layers.get(vars(part)[name], vars(part)[name]))
        few = layers[counts[0]]
        for name, value in list(vars(part).items()):
            if name.endswith("shared_layers") and type(value) is int and value:
                # The last layers share keys with the ones before them.
                setattr(part, name, max(1, value - (counts[0] - few)))
        between = [each for each in _nested(new) if not _layer_counts(each)]
        for each in (part, new, *between) if part is not new.get_text_config() else ():
            _move_taps(each, few)
        _change_layers(part, partial(_below, few))
    for each in _nested(new):
        size, patch = (vars(each).get(name) for name in ("image_size", "patch_size"))
        if type(size) is int and size > _LARGE_IMAGE:
            each.image_size = size // 2
        elif type(size) is int and type(patch) is int and "max_num_tiles" in vars(each):
            # Attention is over the patches of all tiles.
            each.image_size = min(size, _FEW_PATCHES * patch)
    text = new.get_text_config()
    for name, value in list(vars(text).items()):
        if reach and _EXTENTS.search(name) and type(value) is int and value > _WINDOW:
            setattr(text, name, _WINDOW)
        elif "vocab_size" in name and name != "vocab_size" and type(value) is int:
            setattr(text, name, min(value, _NUM_WORDS))
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Longer samples get other frequencies. This length makes some of the test samples longer.
        rope["original_max_position_embeddings"] = _WINDOW
    if text.vocab_size > _NUM_WORDS:
        text.vocab_size = _NUM_WORDS
        for each in {id(new): new, id(text): text}.values():
            _renumber(each)
    return new


def _below(count: int, number: int, fields: dict[str, Any]) -> dict[str, Any] | None:
    return fields if number < count else None


def _move_taps(config: Any, count: int) -> None:
    """Let the fields with numbers of the encoder's layers name some of the first or last ``count``.

    Not the last one from the front: the language model may be as short, and features are added between its layers.
    """
    for name, value in list(vars(config).items()):
        if not _TAPS.search(name) or name.startswith("_"):
            continue
        if type(value) is int:
            setattr(config, name, max(-count, min(value, count)))
        elif isinstance(value, (list, tuple)) and all(type(each) is int for each in value):
            # Numbers of states count the input of the first layer as 0.
            most = count - 1 if "feature" in name else max(0, count - 2)
            moved = [max(each, -count) if each < 0 else min(each, most) for each in value]
            setattr(config, name, type(value)(moved))


def _change_layers(config: Any, change: Callable[[int, dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change the fields that differ between layers. A layer for which ``change`` returns None has none."""
    spec = vars(config).get("_heterogeneity_spec")
    if spec is None:
        return
    changed = {number: change(number, fields) for number, fields in spec.per_layer_overrides.items()}
    kept = {number: fields for number, fields in changed.items() if fields}
    vars(config)["_heterogeneity_spec"] = replace(spec, per_layer_overrides=kept)


def _narrow_all(
    config: Any, layers: dict[int, int], reach: bool, few_experts: bool, head_dim: int | None, every_width: bool
) -> Any:
    """Also reduce the widths of the towers, and of the projector between them; ``every_width``: and all others."""
    config = _cut(config, layers, reach)
    parts = _parts(config)
    others = {id(each): each for each in (config, *parts)}.values()
    same = [
        (each, name, sources)
        for each in others
        for name, value in vars(each).items()
        if (_WIDTHS.search(name) or name.endswith("hidden"))
        # The width of a tower follows from its own heads, even if another tower is as wide.
        and not (name == _name(each, "hidden_size") and _num_heads(each) and not _has_other_width(each))
        and any(sources := _sources(value, each, parts, config))
    ]
    for part in parts:
        _narrow(part, head_dim)
    for each, name, sources in same:
        numbers = _numbers(vars(each)[name])
        widths = [at[0].hidden_size * at[1] if at else number for number, at in zip(numbers, sources, strict=True)]
        _set_numbers(each, name, widths)
    if every_width:
        known = [(each, name) for each, name, _ in same] + [(part, name) for part in parts for name in vars(part)]
        _divide_widths(config, {(id(each), name) for each, name in known})
    for each in _nested(config):
        # Some default configurations contradict themselves here; the model itself is checked when it is converted.
        if type(_get(each, "out_hidden_size")) is int:
            each.out_hidden_size = parts[0].hidden_size
    if few_experts:
        _lessen(config.get_text_config())
    return config


def _has_other_width(part: Any) -> bool:
    """Return whether ``hidden_size`` is not the width of a tower, but of its output (Qwen2-VL)."""
    width = _get(part, "embed_dim")
    return type(width) is int and width != part.hidden_size


def _sources(value: Any, owner: Any, parts: Sequence[Any], config: Any) -> list[tuple[Any, int] | None]:
    """Return, for each width of a field, the other part that is as wide, and 4 if it is the width of four patches."""
    times = (1, 4) if owner is config else (1,)
    return [
        next(((part, n) for part in parts for n in times if part is not owner and number == n * part.hidden_size), None)
        for number in _numbers(value)
    ]


def _numbers(value: Any) -> list[int]:
    """Return the integers of a field that is one or a list of them; none for other fields."""
    numbers = list(value) if isinstance(value, (list, tuple)) else [value]
    return numbers if all(type(number) is int for number in numbers) else []


def _set_numbers(config: Any, name: str, numbers: Sequence[int]) -> None:
    """Set the integers of a field."""
    value = vars(config)[name]
    setattr(config, name, type(value)(numbers) if isinstance(value, (list, tuple)) else numbers[0])


def _divide_widths(config: Any, known: Collection[tuple[int, str]]) -> None:
    """Divide all large widths of a configuration by the same number, except the known fields of its parts."""
    for each in (config, *_nested(config)):
        for name, value in list(vars(each).items()):
            if (id(each), name) in known or not _is_width(name) or max(_numbers(value), default=0) < _WIDE:
                continue
            _set_numbers(each, name, [number // _WIDE_DIVISOR for number in _numbers(value)])


def _renumber(config: Any) -> None:
    """Give special tokens ids within the reduced vocabulary."""
    last = _NUM_WORDS - 1
    for name, value in _special_ids(config).items():
        if type(value) is int and value > last:
            setattr(config, name, last)
            last -= 1
        elif isinstance(value, list):
            setattr(config, name, [min(each, last) for each in value])


def _special_ids(config: Any) -> dict[str, Any]:
    """Return the fields with ids of special tokens, by the name or an alias."""
    names = (*vars(config), *config.attribute_map)
    found = {_name(config, name) for name in names if name.endswith(("_token_id", "_token_index"))}
    return {name: value for name, value in vars(config).items() if name in found}


def _narrow(config: Any, head_dim: int | None) -> None:
    """Reduce the number of heads, keep grouped-query attention, and reduce all else in proportion."""
    width = config.hidden_size
    heads = _num_heads(config) or 1
    keys = _get(config, "num_key_value_heads") or heads
    before = _get(config, "head_dim") or width // heads
    after = min(before, head_dim or before)
    few_keys = min(keys, 2)
    few = few_keys * (1 if heads == keys else 2)
    factor = heads * before / (few * after)
    for name, value in list(vars(config).items()):
        if name.startswith("_") or not _numbers(value):
            continue
        if _is_width(name) and min(_numbers(value)) >= 64:
            _set_numbers(config, name, [max(8, 8 * round(each / factor / 8)) for each in _numbers(value)])
        if type(value) is not int:
            continue
        if re.fullmatch(r"((num|n|encoder)_)?(attention_)?heads?", name) and value == heads:
            setattr(config, name, few)
        elif re.fullmatch(r"(num|n)_(key_value|kv)_heads|n_head_kv", name) and value == keys:
            setattr(config, name, few_keys)
        elif name == "head_dim":
            setattr(config, name, after)
        elif not _is_width(name) and "heads" in name and value > 2 and not hasattr(config, "mamba_headdim"):
            setattr(config, name, max(2, round(value * few / heads)))
        elif name.endswith("n_groups"):
            setattr(config, name, min(value, 2))
    config.hidden_size = max(8, round(width / factor))
    _change_layers(
        config, lambda _, fields: {k: v * after // before if k == "head_dim" else v for k, v in fields.items()}
    )
    for rope in (_get(config, "rope_parameters"), _get(config, "rope_scaling")):
        if isinstance(rope, dict) and isinstance(rope.get("mrope_section"), list):
            rope["mrope_section"] = [each * after // before for each in rope["mrope_section"]]


def _lessen(config: Any) -> None:
    """Reduce the number of experts."""
    groups = getattr(config, "n_group", None) or 1
    chosen = max([v for k, v in vars(config).items() if _CHOSEN.search(k) and type(v) is int], default=2)
    for name, value in list(vars(config).items()):
        if re.search(r"(num|n)_.*experts$", name) and "shared" not in name and type(value) is int and value > 8:
            setattr(config, name, min(value, groups * max(2, -(-2 * chosen // groups))))


def words_of(config: Any) -> list[int]:
    """Return the ids of ordinary tokens."""
    special: set[int] = set()
    for each in (config, config.get_text_config()):
        for value in _special_ids(each).values():
            special |= {v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)}
    return [word for word in range(min(_NUM_WORDS, config.get_text_config().vocab_size)) if word not in special]
