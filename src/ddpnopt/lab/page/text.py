"""The simple markup that captions, notes and tables use: `code`, **strong** and line breaks."""

from __future__ import annotations

import re
import unicodedata

from markupsafe import Markup, escape

_CODE = re.compile(r"`([^`]+)`")
_STRONG = re.compile(r"\*\*([^*]+)\*\*")


def inline(text: object) -> Markup:
    """Escaped text with its code and strong parts marked."""
    safe = str(escape(str(text)))
    safe = _CODE.sub(r"<code>\1</code>", safe)
    return Markup(_STRONG.sub(r"<strong>\1</strong>", safe))


def plain(text: object) -> str:
    """The same without marks, for labels that cannot have any."""
    return _STRONG.sub(r"\1", _CODE.sub(r"\1", str(text)))


def anchor(*parts: str) -> str:
    """A name for links, of letters, digits and dashes."""
    flat = unicodedata.normalize("NFKD", "-".join(parts)).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", flat).strip("-") or "part"
