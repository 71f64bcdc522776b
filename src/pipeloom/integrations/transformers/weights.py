"""Read the weights of a `transformers` model layer by layer from its folder, and write them back.

Keys in files differ from parameter names: the library renames them, and fuses some tensors. Its own rules are applied
in both directions, to a few tensors at a time. So a rank reads only the tensors of its own layers.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.runtime.checkpoint.safetensors_files import TensorFiles
from pipeloom.runtime.model.pretrained import Saved

KIND = "transformers"
CONFIG = "config.json"
_STEM = "model"
_BESIDE = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Files of processors and tokenizers, which are copied."""
_NOT_BESIDE = (CONFIG, "*.index.json")
_AT_ONCE_BYTES = 16 * 2**20
_SAVE_AGAIN = "fetch the folder again, or save the model there by its library"


def load_config(path: str | Path) -> Any:
    """Load the library's configuration from a folder. Raise `InputError` if it is missing, damaged or unknown."""
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "model", "is a folder of the transformers library", "pip install 'pipeloom[transformers]'"
        ) from error

    if not (Path(path) / CONFIG).is_file():
        raise InputError(str(path), "is not a folder with a config.json", "give a model, or the folder of a saved one")
    try:
        return transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:
        check_own_code(path, error)
        # The library does not wrap the errors of its classes: of JSON, of types, of validation.
        raise InputError(f"{path}/{CONFIG}", f"is not a configuration ({_described(error)})", _SAVE_AGAIN) from error


def check_own_code(path: str | Path, error: Exception) -> None:
    """Raise `InputError` if the library failed to load a folder because the folder's own code is not run."""
    files = Path(path).glob("*config.json")
    asks = "Unrecognized" in str(error) and any(b'"auto_map"' in file.read_bytes() for file in files)
    if asks or "trust_remote_code" in str(error):
        problem = "requires its own Python code (auto_map), which is never run"
        raise InputError(str(path), problem, "give a folder whose classes the transformers library has") from error


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def load(path: str | Path, check: Callable[[type, Any], object], device: torch.device | str | None, dtype: Any) -> Any:
    """Load the library's model from a folder in training mode. (The library loads in evaluation mode.)

    ``check`` is called with the class and the configuration before weights are read. With the device ``"meta"``, only
    shapes and buffers are created. None is the CPU, or torch's default dtype.
    """
    config = load_config(path)
    import transformers

    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        problem = f"has architectures {names}, which transformers does not know"
        raise InputError(f"{path}/{CONFIG}", problem, _SAVE_AGAIN)
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(f"{path}/{CONFIG}", "has quantized weights", "give the folder of the unquantized model")
    dtype = dtype or torch.get_default_dtype()
    try:
        with torch.device("meta"):
            model = kind._from_config(config, dtype=dtype)
    except Exception as error:
        problem = f"does not describe a {kind.__name__} ({_described(error)})"
        raise InputError(f"{path}/{CONFIG}", problem, _SAVE_AGAIN) from error
    check(kind, config)
    if torch.device(device or "cpu").type == "meta":
        return _with_buffers(_with_plan(model, dtype))
    try:
        model, info = kind.from_pretrained(
            str(path), config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:
        # For example a pickle file that is damaged or contains more than tensors.
        remedy = "save the model there as safetensors with its library"
        raise InputError(str(path), f"has weights that cannot be read ({_described(error)})", remedy) from error
    for name in sorted(info["missing_keys"]):
        # The library gives it random values, and only logs this.
        raise InputError(str(path), f"has no weights of {name!r}", _SAVE_AGAIN)
    return model.to(device or "cpu").train()


def _with_plan(model: Any, dtype: torch.dtype) -> Any:
    """Give parameters the dtypes in which the library loads them. Some stay in single precision."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if not plan:
        return model
    search, patterns, _ = build_glob_alternation(list(plan))
    for name, tensor in model.state_dict(keep_vars=True).items():
        match = search.search(name)
        if match is not None:
            tensor.data = tensor.data.to(plan[patterns[match.lastgroup]])
    return model


def _with_buffers(model: Any) -> Any:
    """Initialize the buffers of a model on the meta device, because positions and masks are computed from them."""
    for module in model.modules():
        module._is_hf_initialized = False
        for name, buffer in module.named_buffers(recurse=False):
            persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, torch.zeros_like(buffer, device="cpu"), persistent=persistent)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model.initialize_weights()
    return model


@dataclass(frozen=True)
class _Load:
    """Tensors of files that become parameters together.

    ``target`` is the library's name of the first parameter, and ``targets`` are those of all. Without a ``converter``,
    one tensor is one parameter. ``sources`` has each key, in the library's order, behind the converter's pattern that
    it is for.
    """

    target: str
    converter: Any
    sources: tuple[tuple[str, str], ...]
    targets: tuple[str, ...]

    def convert(self, model: Any, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the parameters that become of the sources' tensors."""
        converter = copy.deepcopy(self.converter)
        for (pattern, key), tensor in zip(self.sources, tensors, strict=False):
            converter.add_tensor(self.target, key, pattern, tensor)
        found = converter.convert(self.target, model=model, config=model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in found.items()}


class TransformersWeights:
    """Implement `Pretrained` for a model of the library.

    ``names`` maps ``module.layer.name`` to the library's name, for all that is saved of layers. ``folder`` is the one
    that the model came from. If ``is_loaded``, the library has loaded the weights itself, and none are read here.
    """

    def __init__(self, model: Any, names: Mapping[str, str], folder: Path | None, *, is_loaded: bool) -> None:
        self.model, self.names, self.folder = model, dict(names), folder
        self.origin = f"{KIND}:{'' if folder is None else folder.resolve()}"
        self._alias = _aliases(model)
        self._files = None if folder is None or is_loaded else TensorFiles(folder, _STEM)
        if self._files is not None:
            held = {self._alias[theirs] for theirs in names.values()}
            self._loads = _Planner(model, self._files, self._alias).loads(held)

    # ------------------------------------------------------------------ reading

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """As `Pretrained`."""
        if self._files is None:
            remedy = "give pl.from_transformers a folder"
            raise InputError(f"parameter {next(iter(tensors))!r}", "is on meta, and belongs to no folder", remedy)
        wanted: dict[str, dict[int, Tensor]] = {}
        for name, tensor in tensors.items():
            wanted.setdefault(self._alias[self.names[name]], {})[id(tensor)] = tensor
        for each in self._loads:
            here = {name: [*wanted[self._alias[name]].values()] for name in each.targets if self._alias[name] in wanted}
            if here:
                self._fill(self._files, each, here)
        self._check_tied(self._files, wanted)

    def _fill(self, files: TensorFiles, each: _Load, targets: Mapping[str, Sequence[Tensor]]) -> None:
        first = next(iter(targets.values()))[0]
        if each.converter is None:
            (_, key), *_ = each.sources
            files.read_into(key, first)
            found = {each.target: first}
        elif _stacks(each, first, len(targets)):
            self._fill_in_turn(files, each, first)
            found = {each.target: first}
        else:
            found = each.convert(self.model, [files.read(key, first.dtype) for _, key in each.sources])
        for name, places in targets.items():
            for place in places:
                if place is not found[name]:
                    place.detach().copy_(found[name])

    def _fill_in_turn(self, files: TensorFiles, each: _Load, target: Tensor) -> None:
        """Stack a few entries of dimension 0 at a time, to limit memory: an entry may be an expert."""
        by_pattern: dict[str, list[str]] = {}
        for pattern, key in each.sources:
            by_pattern.setdefault(pattern, []).append(key)
        step = max(1, _AT_ONCE_BYTES // max(1, target[0].nbytes))
        for begin in range(0, len(target), step):
            rows = slice(begin, begin + step)
            sources = tuple((pattern, key) for pattern, keys in by_pattern.items() for key in keys[rows])
            some = _Load(each.target, each.converter, sources, each.targets)
            tensors = [files.read(key, target.dtype) for _, key in sources]
            target.detach()[rows].copy_(some.convert(self.model, tensors)[each.target])

    def _check_tied(self, files: TensorFiles, wanted: Mapping[str, Mapping[int, Tensor]]) -> None:
        """Raise `InputError` if tied parameters have different values: the library would not tie them."""
        by_name: dict[str, list[_Load]] = {}
        for each in self._loads:
            by_name.setdefault(self._alias[each.target], []).append(each)
        for name, loads in by_name.items():
            keys = [each.sources[0][1] for each in loads if each.converter is None]
            if name in wanted and len(keys) > 1 and not torch.equal(files.read(keys[0]), files.read(keys[1])):
                raise InputError(
                    f"{files.folder}: {keys[1]}",
                    f"differs from {keys[0]}, but config.json ties them",
                    "set tie_word_embeddings to false there",
                )

    # ------------------------------------------------------------------ writing

    def pieces(self) -> Sequence[tuple[str, ...]]:
        """As `Pretrained`."""
        ours: dict[str, str] = {}
        for name, theirs in self.names.items():
            ours.setdefault(theirs, name)
        together: dict[str, list[str]] = {}
        for theirs in self._kept:
            if theirs in ours:
                together.setdefault(self._together(theirs), []).append(ours[theirs])
        return [tuple(names) for names in together.values()]

    def saved(self, piece: Mapping[str, Tensor]) -> Saved:
        """As `Pretrained`."""
        return {_STEM: self._reverted({self.names[name]: tensor for name, tensor in piece.items()})}

    def others(self) -> Iterator[Saved]:
        """As `Pretrained`."""
        held = {self._alias[theirs] for theirs in self.names.values()}
        rest = [name for name in self._kept if self._alias[name] not in held]
        if self._files is None:
            state = self.model.state_dict()
            for name in rest:
                if state[name].is_meta:
                    remedy = "give the folder that the model came from"
                    raise InputError(f"parameter {name!r}", "is in no layer, so that no checkpoint has it", remedy)
                yield {_STEM: self._reverted({name: state[name]})}
            return
        for each in self._loads:
            if set(each.targets) <= set(rest):
                # Copied unchanged from the files.
                for _, key in each.sources:
                    yield {_STEM: {key: self._files.read(key)}}

    def write_beside(self, folder: Path, dtypes: Mapping[str, torch.dtype]) -> None:
        """As `Pretrained`."""
        beside = (
            [] if self.folder is None else [each for pattern in _BESIDE for each in sorted(self.folder.glob(pattern))]
        )
        for file in beside:
            if file.is_file() and not any(file.match(each) for each in _NOT_BESIDE):
                shutil.copyfile(file, folder / file.name)
        self._config(dtypes[_STEM]).save_pretrained(str(folder))
        if self.model.can_generate() and not (folder / "generation_config.json").exists():
            self.model.generation_config.save_pretrained(str(folder))

    def kept(self) -> Mapping[str, str]:
        """As `Pretrained`."""
        return {CONFIG: self._config(self.model.dtype).to_json_string()}

    def _config(self, dtype: torch.dtype) -> Any:
        """Return the configuration as the library writes it."""
        config = copy.deepcopy(self.model.config)
        for each in (config, *(getattr(config, key, None) for key in config.sub_configs)):
            if each is not None:
                each.dtype = str(dtype).removeprefix("torch.")
        config.architectures = [type(self.model).__name__]
        return config

    @cached_property
    def _kept(self) -> list[str]:
        """The library's names of all tensors that it saves, with one name per group of tied parameters."""
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        ignored = self.model._keys_to_ignore_on_save or ()
        state = {name: tensor for name, tensor in self.model.state_dict().items() if name not in ignored}
        # Parameters of other ranks are on the meta device, so tied parameters are recognized by name only.
        shapes = {name: self.model.get_parameter_or_buffer(name) for name in state}
        return list(remove_tied_weights_from_state_dict(shapes, self.model))

    @cached_property
    def _twin(self) -> Any:
        """The model with its conversions as an attribute, so that the library does not search them for each tensor."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        twin = copy.copy(self.model)
        if getattr(twin, "_weight_conversions", None) is None:
            # The library does the same for a model that it has not loaded.
            found = get_model_conversion_mapping(twin, add_legacy=False)
            twin._weight_conversions = [each for each in found if not isinstance(each, PrefixChange)]
        return twin

    def _reverted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        with torch.no_grad():
            found: dict[str, Tensor] = revert_weight_conversion(self._twin, tensors)
        return found

    @cached_property
    def _reversed_converters(self) -> list[Any]:
        from transformers.core_model_loading import WeightConverter

        found = [each.reverse_transform() for each in self._twin._weight_conversions[::-1]]
        return [each for each in found if isinstance(each, WeightConverter)]

    def _together(self, name: str) -> str:
        """Return a key that is equal for parameters that are saved in common tensors."""
        from transformers.core_model_loading import apply_converters

        renamed, pattern = apply_converters(name, self._reversed_converters)
        return name if pattern is None else f"{renamed} of several"


def _stacks(each: _Load, target: Tensor, num_targets: int) -> bool:
    """Return whether each entry of dimension 0 is made of exactly one tensor for each pattern."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *rest = each.converter.operations
    patterns = [pattern for pattern, _ in each.sources]
    return (
        num_targets == len(each.targets) == 1
        and isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in rest)
        and all(patterns.count(pattern) == len(target) for pattern in set(patterns))
    )


def _aliases(model: Any) -> dict[str, str]:
    """Map each name of a state dict to the first name of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


class _Planner:
    """Assigns tensors of files to parameters by the library's rules."""

    def __init__(self, model: Any, files: TensorFiles, alias: Mapping[str, str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.model, self.files, self.alias = model, files, alias
        self.state = model.state_dict()
        self.mapping = get_model_conversion_mapping(model)
        self.renamings = [each for each in self.mapping if isinstance(each, WeightRenaming)]
        self.converters = [each for each in self.mapping if isinstance(each, WeightConverter)]

    def loads(self, held: set[str]) -> list[_Load]:
        """Return the loads that fill all parameters.

        ``held`` has the names of parameters that the files must have; tied parameters have their name in ``alias``.
        Raise `InputError` if a key is unexpected or missing, or a shape differs from the model's.
        """
        from transformers.core_model_loading import dot_natural_key

        patterns = {pattern: each for each in self.converters for pattern in each.source_patterns}
        sources: dict[str, list[tuple[str, str]]] = {}
        unexpected: set[str] = set()
        for key in sorted(self.files.tensors, key=dot_natural_key):
            renamed, pattern = self._renamed(key)
            if renamed in self.state:
                sources.setdefault(renamed, []).append((pattern or "", key))
            else:
                unexpected.add(key)
        self._check_unexpected(unexpected)
        loads = []
        for target, found in sources.items():
            converter = patterns.get(found[0][0])
            if converter is None and len(found) > 1:
                where = f"{self.files.folder}: {found[1][1]}"
                raise InputError(where, f"is the same parameter as {found[0][1]}", "remove one of them")
            names = [target]
            if converter is not None:
                names = [target.replace(converter.target_patterns[0], each) for each in converter.target_patterns]
            loads.append(_Load(target, converter, tuple(found), tuple(names)))
        for each in loads:
            self._check_shapes(each)
        there = {self.alias[name] for each in loads for name in each.targets}
        for name in self.state:
            if self.alias[name] in held and self.alias[name] not in there:
                remedy = "fetch it again, or let the library make it: load the model and give that"
                raise InputError(f"{self.files.folder}: parameter {name!r}", "is in none of the files", remedy)
        # As in the library, conversions that were not used are not reverted when the model is saved.
        self.model._weight_conversions = [each for each in self.mapping if each.was_used()]
        return loads

    def _renamed(self, key: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        prefix = self.model.base_model_prefix
        found: tuple[str, str | None] = rename_source_key(key, self.renamings, self.converters, prefix, self.state)
        if found[0] not in self.state and key in self.state:
            found = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=self.state)
        return found

    def _check_unexpected(self, keys: set[str]) -> None:
        from transformers.utils.loading_report import LoadStateDictInfo

        info = LoadStateDictInfo(set(), {self._renamed(key)[0] for key in keys}, set(), [], {}, set())
        # The library has a list of keys that are in some folders but in no model.
        self.model._adjust_missing_and_unexpected_keys(info)
        for key in sorted(keys):
            if self._renamed(key)[0] in info.unexpected_keys:
                raise InputError(
                    f"{self.files.tensors[key].file}: {key}",
                    f"is not a parameter of {type(self.model).__name__}",
                    "give a folder of this architecture, or remove the tensor",
                )

    def _check_shapes(self, each: _Load) -> None:
        """Convert tensors on the meta device, and compare shapes."""
        files, state = self.files, self.state
        where = f"{files.tensors[each.sources[0][1]].file}: {each.sources[0][1]}"
        for _, key in each.sources:
            kind, wanted = files.tensors[key].dtype, state[each.target].dtype
            if wanted.is_floating_point and not kind.is_floating_point:
                problem = f"has dtype {str(kind).removeprefix('torch.')}, but the parameter is floating-point"
                raise InputError(f"{files.tensors[key].file}: {key}", problem, "quantized weights cannot be trained")
        given = [torch.empty(files.tensors[key].shape, device="meta") for _, key in each.sources]
        try:
            found = {each.target: given[0]} if each.converter is None else each.convert(self.model, given)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            reason = str(error).partition("\n")[0]
            raise InputError(where, f"and its like make no {each.target} ({reason})", "fetch them again") from error
        if set(found) != set(each.targets):
            wanted = ", ".join(each.targets)
            raise InputError(where, f"becomes {', '.join(found)}, not {wanted}", "this form is not supported")
        for name, tensor in found.items():
            if name not in state or tensor.shape != state[name].shape:
                shape = f"{tuple(state[name].shape)}" if name in state else "nothing"
                raise InputError(
                    where,
                    f"gives {name} the shape {tuple(tensor.shape)}, the model's is {shape}",
                    "use config.json and weights of the same model",
                )
