"""A console of rich on which nothing but its own styles controls the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from pipeloom.errors import visible, visible_line
from pipeloom.printing import note_printed


class VisibleConsole(Console):
    """A console that shows control characters of any text as escapes."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert plain text, before it is measured and laid out."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render anything; segments that rich itself makes to move the cursor stay as they are."""
        note_printed()
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    def print_line(self, text: str, style: str = "") -> None:
        """Print one line, whatever the text holds."""
        self.print(visible_line(text), style=style, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Raise the `BrokenPipeError` again; rich would end the process with exit code 1."""
        raise
