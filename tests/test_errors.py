"""Errors are one line that can be read, whatever the value is that they are about."""

from __future__ import annotations

from pipeloom.errors import InputError


def test_an_error_is_one_line_whatever_it_is_about() -> None:
    error = InputError("a.tar", "cannot be read:\n- gz: no\n- xz: no", "give a shard")
    assert str(error) == "a.tar: cannot be read: - gz: no - xz: no; give a shard"
    assert error.problem == "cannot be read:\n- gz: no\n- xz: no"


def test_a_word_that_is_too_long_is_cut() -> None:
    message = str(InputError("layers." + "x" * 5000, "is not known", "remove it"))
    assert message.startswith("layers.xxx")
    assert message.endswith("xxx: is not known; remove it")
    assert len(message) < 400
