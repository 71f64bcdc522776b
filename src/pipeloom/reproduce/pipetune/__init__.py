"""PipeTune's evaluation: its parts, in the order of the paper."""

from pipeloom.reproduce.part import Part

PARTS: tuple[Part, ...] = ()
