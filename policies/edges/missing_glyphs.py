"""Names as a figure can show them: whatever its fonts have no glyph for stands there as its escape.

It lies here because more than one folder draws, and policies/ is the one that all of them may import; the fonts are
handed in, so that nothing but the standard library is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any


def drawable(text: str, fonts: Any, families: Sequence[str]) -> str:
    r"""`text` with each letter that none of the font families has as `\u653f`, as terminals do that lack a letter.

    An empty box for every such letter would make names alike. fonts: matplotlib.font_manager; families: as
    `rcParams["font.family"]` lists them.
    """
    if text.isascii():
        return text
    glyphs = _glyphs(fonts, tuple(families))
    return "".join(
        letter if ord(letter) in glyphs or letter.isspace() else letter.encode("ascii", "backslashreplace").decode()
        for letter in text
    )


@lru_cache(maxsize=8)
def _glyphs(fonts: Any, families: tuple[str, ...]) -> frozenset[int]:
    """Code points of all letters that these families have between them; one that is not installed has none."""
    found: set[int] = set()
    for family in families:
        try:
            file = fonts.findfont(fonts.FontProperties(family=[family]), fallback_to_default=False)
        except ValueError:
            continue
        found.update(fonts.get_font(file).get_charmap())
    return frozenset(found)
