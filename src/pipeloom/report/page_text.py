"""The one way of text from files into an HTML page."""

from __future__ import annotations

import html

from pipeloom.errors import visible

_MEANT_FOR_OTHERS = str.maketrans({character: f"&#{ord(character)};" for character in "@${}[]\\`"})


def page_text(text: str) -> str:
    """Return text as it stands anywhere in a page: in an element, in a quoted attribute, in a template of Bokeh.

    HTML's own characters are escaped, and so are those that start a placeholder of Bokeh's templates (``@name{safe}``)
    or a formula that Bokeh would typeset. Characters that would change the order or the look of other text are shown as
    escapes.
    """
    return html.escape(visible(text, keep="\n\t")).translate(_MEANT_FOR_OTHERS)
