"""A Bokeh model as one offline page. The same model gives the same bytes."""

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
"""Random names in Bokeh's pages: the script with the document, the document, and its root."""


def bokeh_page(root: Any, title: str, template: str = "", **variables: str) -> str:
    """Write a self-contained page.

    Parameters
    ----------
    root : bokeh.model.Model
        Model to show. It and its references get new ids, since Bokeh's ids count all models of a process.
    template : str
        Blocks that replace those of Bokeh's template.
    variables
        Variables of the template.
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
