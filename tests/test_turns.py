from __future__ import annotations

import sys
from contextlib import ExitStack

from pipeloom.turns import short_turns


def test_turns_are_short_until_the_last_that_asked_has_ended() -> None:
    before = sys.getswitchinterval()
    first, second = ExitStack(), ExitStack()
    first.enter_context(short_turns())
    second.enter_context(short_turns())
    assert sys.getswitchinterval() < before
    first.close()
    assert sys.getswitchinterval() < before
    second.close()
    assert sys.getswitchinterval() == before
