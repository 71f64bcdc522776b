"""Errors are one line that can be read, whatever the value is that they are about."""

from __future__ import annotations

from pipeloom.errors import InputError, printable_line


def test_an_error_is_one_line_whatever_it_is_about() -> None:
    error = InputError("a.tar", "cannot be read:\n- gz: no\n- xz: no", "give a shard")
    assert str(error) == "a.tar: cannot be read: - gz: no - xz: no; give a shard"
    assert error.problem == "cannot be read:\n- gz: no\n- xz: no"


def test_a_word_that_is_too_long_is_cut() -> None:
    message = str(InputError("layers." + "x" * 5000, "is not known", "remove it"))
    assert message.startswith("layers.xxx")
    assert message.endswith("xxx: is not known; remove it")
    assert len(message) < 400


def test_what_is_printed_is_one_short_line_without_control_characters() -> None:
    assert printable_line("a\n  b\x1b[31m [/x] \u00e9") == "a b\\x1b[31m [/x] \u00e9"
    many = printable_line("first " + "word " * 5000 + "last")
    assert many.startswith("first word")
    assert many.endswith("word last")
    assert len(many) <= 2000
    assert len(printable_line("x" * 5000)) < 400
