"""Orders that all ranks have: each is broadcast once, and later steps name it by its number."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.integrations.steps.control import StepMessage
from pipeloom.integrations.steps.planning import MOST_KNOWN, Order, single_packing
from pipeloom.integrations.steps.shapes import Signature
from pipeloom.packing import Packing
from pipeloom.spec import Layout

Signatures = tuple[Signature, ...]
"""Signatures of the inputs of all microbatches of a step."""


@dataclass(slots=True)
class KnownOrder:
    """An order that all ranks have."""

    order: Order
    packing: Packing
    signatures: Signatures


class KnownOrders:
    """Orders by number, the same on all ranks."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[int, KnownOrder] = {}
        self._numbers: dict[int, int] = {}
        """On the rank that broadcasts: numbers of the known orders, by their identity."""
        self._num_orders = 0

    def message(
        self, order: Order, signatures: Signatures, measures: bool, widths: tuple[float, ...] | None
    ) -> StepMessage:
        """Return the message of a step, with what the other ranks do not have yet. Call it on the rank that broadcasts.

        For the parameters, see `StepMessage`.
        """
        number = self._numbers.get(id(order))
        if number is None or number not in self._known:
            # A step that failed before its order was received has a number, too.
            self._num_orders += 1
            number = self._numbers[id(order)] = self._num_orders
            return StepMessage(number, measures, order, signatures, widths)
        same = signatures == self._known[number].signatures
        return StepMessage(number, measures, None, None if same else signatures, widths)

    def receive(self, message: StepMessage) -> KnownOrder:
        """Return the order of a step from its message."""
        if message.order is not None:
            assert message.signatures is not None
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
                self._numbers.clear()
            order = message.order
            self._known[message.number] = KnownOrder(
                order, single_packing(order.sizes, order.samples, self._layout), message.signatures
            )
        known = self._known[message.number]
        if message.signatures is not None:
            known.signatures = message.signatures
        return known
