"""Escaping of text from files for HTML pages."""

from __future__ import annotations

import html

from pipeloom.errors import visible

_BOKEH_SPECIAL = str.maketrans({character: f"&#{ord(character)};" for character in "@${}[]\\`"})


def page_text(text: str) -> str:
    """Escape text for an HTML element, a quoted attribute, or a template of Bokeh.

    This escapes HTML's special characters, and those that start a placeholder (``@name{safe}``) or a formula in Bokeh.
    Characters that change the order or the appearance of other text are shown as escape sequences.
    """
    return html.escape(visible(text, keep="\n\t")).translate(_BOKEH_SPECIAL)
