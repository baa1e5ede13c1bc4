"""Console of rich for tables, progress and lines, as safe as standard output."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from titan_exp.config.command_line.output import visible
from titan_exp.config.secrets import concealed


class Terminal(Console):
    """Console of rich for tables, progress and lines."""

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(highlight=False, markup=markup, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Text of a string, safe before its width is measured."""
        return super().render_str(visible(concealed(text)), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of a renderable; control segments, such as movements of the cursor, are rich's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(concealed(segment.text)), segment.style)
