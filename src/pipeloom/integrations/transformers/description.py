"""What is found out about models of the library, and how their samples are described."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from pipeloom.spec import Strategy

Sample = Mapping[str, Any]
LM = "lm"
"""Name of the module of the language model."""


@dataclass(frozen=True)
class Instance:
    """One image, video or recording that an encoder reads.

    Attributes
    ----------
    pixels : Tensor
        Pixel values, or the spectrum of a recording. Concatenated along dimension 0 with the other instances of a part.
    given : dict
        Further arguments of the library's function, concatenated in the same way.
    patches : int
        Rows of hidden state between layers.
    tokens : int
        Tokens in the sequence of the language model.
    """

    pixels: Tensor
    given: dict[str, Tensor]
    patches: int
    tokens: int
    is_video: bool = False


@dataclass(frozen=True)
class FoundEncoder:
    """What was found out about an encoder.

    Attributes
    ----------
    function : str
        Path of the library's method that returns its features.
    form : int
        Number of its form among those that its method's arguments allow.
    packs : bool
        Whether all instances go through the blocks in one call.
    lengths : bool
        Whether attention gets sequence lengths in place of a mask.
    crosses : bool
        Whether blocks of the language model attend to its features. A sample then has at most one instance, and one
        placeholder token for it. Otherwise, each feature takes the place of a token.
    video_function : str
        Path of the library's method that returns the features of videos. Empty: it reads no videos.
    video_place : str
        Field of the configuration with the id of a video's placeholder tokens.
    """

    name: str
    reads: Literal["images", "audio"]
    path: str
    function: str
    form: int
    place: str
    extras: int = 0
    packs: bool = False
    lengths: bool = False
    crosses: bool = False
    video_function: str = ""
    video_place: str = ""

    def function_of(self, is_video: bool) -> str:
        """Return the path of the library's method for a video, or for another instance."""
        return self.video_function if is_video else self.function

    @property
    def all_places(self) -> tuple[str, ...]:
        """Fields with the ids of placeholder tokens: of images or recordings, and then of videos."""
        return (self.place, self.video_place) if self.video_place else (self.place,)


@dataclass(frozen=True)
class Encoder:
    """What describes the samples of an encoder."""

    found: FoundEncoder
    images: Callable[[Sample], list[Instance]]
    """Returns the instances of a sample that the encoder reads."""
    blank: Callable[[int], dict[str, Tensor]]
    """Returns synthetic entries of a sample for profiling. A larger argument gives larger or more instances."""
    keys: tuple[str, ...]
    """Entries of a sample that the encoder reads."""

    def ids(self, config: Any) -> tuple[int, ...]:
        """Return the ids of the placeholder tokens, of images first and then of videos."""
        return tuple(getattr(config, name) for name in dict.fromkeys(self.found.all_places))


@dataclass(frozen=True)
class CarriedTensor:
    """A tensor that blocks of the language model pass on beside their state, such as keys that later blocks share.

    Attributes
    ----------
    axis : int
        Dimension of tokens.
    where : tuple
        Keys and indices that lead to it in the outputs and arguments of a block after its call.
    givers : frozenset
        Signatures of the blocks that compute it.
    taken : mapping
        Keys and indices that lead to it in the arguments of the blocks that take it, by their signature. They take what
        the last block before them computed.
    """

    axis: int
    where: tuple[Any, ...]
    givers: frozenset[str]
    taken: Mapping[str, tuple[int | str, ...]]


@dataclass(frozen=True)
class Family:
    """What was found out about a class with a configuration.

    Attributes
    ----------
    path : str
        Path of the blocks of its language model, relative to the model with the head.
    axis : int
        Dimension of tokens in the state of its language model.
    owners : mapping
        Part of each parameter outside of blocks: the name of an encoder, the same with ``between blocks``, ``first`` or
        ``last``. Numbers in the names of parameters are replaced by ``*``.
    extras : int
        Number of outputs of the blocks besides the state.
    alone : bool
        Whether the part behind the blocks runs on a state alone.
    packs : bool
        Whether the blocks of the language model are called once for all samples.
    typed : bool
        Whether masks of packed samples depend on the entries with one number per token.
    eager : bool
        Whether the model's own attention function runs. Sinks and soft caps, for example, need it.
    per_token : tuple of str
        Entries of a sample that the forward pass takes, with one number per token.
    shifts : bool
        Whether the library compares the logits of each token with the label of the next one.
    first, last : tuple of str
        Submodules and parameters that run before and after the blocks, of a language model whose blocks pass on nothing
        but their state. All samples of a part then run as one. Empty for all other models.
    excluded : mapping
        Memory strategies that the layers do not support, with the reason.
    """

    path: str
    axis: int
    encoders: tuple[FoundEncoder, ...] = ()
    owners: Mapping[str, frozenset[str]] = field(default_factory=dict)
    carried: tuple[CarriedTensor, ...] = ()
    extras: int = 0
    alone: bool = True
    packs: bool = False
    typed: bool = False
    eager: bool = False
    per_token: tuple[str, ...] = ()
    shifts: bool = True
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    excluded: Mapping[Strategy, str] = field(default_factory=dict)

    @property
    def trunk(self) -> str:
        """Path of the submodule that holds the blocks."""
        return self.path.rpartition(".")[0]

    def with_encoder(self, number: int, **changes: Any) -> Family:
        """Return a copy with a changed encoder."""
        changed = replace(self.encoders[number], **changes)
        return replace(self, encoders=(*self.encoders[:number], changed, *self.encoders[number + 1 :]))
