"""One of the policies of list scheduling changes."""

from __future__ import annotations

from pipeloom.compiled import callee
from pipeloom.compiled.random import draw
from pipeloom.search.kernels.codes import LOOKAHEAD, POLICY, RULE, UNLIMITED, URGENT, WEIGHTS
from pipeloom.search.moves.group_order import GroupOrder
from pipeloom.search.moves.move import Move


class ChangePolicy(Move):
    """Change which kind runs first, when weight gradients run, the lookahead, or how many backwards are urgent."""

    name = "change the policy"
    weight = 8

    @staticmethod
    @callee
    def propose(now: GroupOrder) -> None:
        """Change one entry of the choice."""
        choice, random = now.choice, now.random
        what = draw(random) % 4
        if what == 0 and now.has_weights:
            choice[WEIGHTS] = 1 - choice[WEIGHTS]
        elif what == 1 and choice[RULE] != UNLIMITED:
            choice[LOOKAHEAD] = 1 + draw(random) % 4
        elif what == 1:
            num_backward = len(now.order) - now.num_forward
            # The change is mostly small.
            urgent = min(choice[URGENT], num_backward) + draw(random) % 17 - 8
            if draw(random) % 8 == 0:
                urgent = draw(random) % (num_backward + 1)
            choice[URGENT] = min(max(urgent, 0), num_backward)
        else:
            choice[POLICY] = (choice[POLICY] + 1 + draw(random) % 2) % 3
