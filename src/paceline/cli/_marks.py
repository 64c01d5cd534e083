"""Marked spans of a text: green where the console has colour, between {+ and +} where it has none.

It knows no reason for a mark; `mask` marks what is trained on, `generate` what the draft wrote.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

OPEN, CLOSE = "{+", "+}"
STYLE = "bold green"


class Marks:
    """Turns the pieces of a text, one after the other, into what a console shows; `end` closes the last span.

    rest: style of what is not marked.
    """

    def __init__(self, console: "Console", *, rest: str = "") -> None:
        self.has_colour = console.color_system is not None and not console.no_color
        self.rest = rest
        self._is_open = False

    def piece(self, text: str, *, is_marked: bool) -> "Text":
        """The next piece; neighbours that are marked alike share a span."""
        from rich.text import Text

        if self.has_colour:
            return Text(text, style=STYLE if is_marked else self.rest)
        if not text or is_marked == self._is_open:
            return Text(text)
        self._is_open = is_marked
        return Text((OPEN if is_marked else CLOSE) + text)

    def end(self) -> "Text":
        """What closes the last span; "" where none is open."""
        from rich.text import Text

        closing = CLOSE if self._is_open else ""
        self._is_open = False
        return Text(closing)
