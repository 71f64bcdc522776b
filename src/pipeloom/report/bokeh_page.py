"""A Bokeh model as one offline page, equal to the byte whenever it is made from the same numbers."""

from __future__ import annotations

import re
from typing import Any

from bokeh.core.templates import FILE
from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.resources import INLINE

from pipeloom.errors import visible_line

_RANDOM = re.compile(
    r"getElementById\('([^']+)'\)\.textContent;\s*"
    r'const render_items = \[\{"docid":"([^"]+)","roots":\{"[^"]+":"([^"]+)"\}'
)
"""What Bokeh names at random in every page: the script that holds the document, the document, and its root."""


def bokeh_page(root: Any, title: str, template: str = "", **variables: str) -> str:
    """Write a page with everything that it needs.

    Parameters
    ----------
    root : bokeh.model.Model
        What is shown. Its models, and those inside them, get new numbers: Bokeh counts all that a process makes.
    template : str
        Blocks that take the place of those in Bokeh's own template.
    variables
        Of the template.
    """
    document = Document()
    models = root.references() | document.config.references()
    for number, model in enumerate(sorted(models, key=lambda model: (len(model.id), model.id))):
        model._id = f"p{number}"
    document.add_root(root)
    page: str = file_html(
        document, INLINE, visible_line(title), template=template or FILE, template_variables=variables
    )
    found = _RANDOM.search(page)
    for number, name in enumerate(found.groups() if found else ()):
        page = page.replace(name, f"pipeloom-{number}")
    return page
