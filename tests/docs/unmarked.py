"""Numbers in a page that are neither marked as a figure of `results/` nor, by a stated rule, something else.

What is no measurement: what stands in code, formulas and links; and, by the words around it, what `RULES` lists. A
number that no rule covers has to be marked, or its phrase has to be listed with a reason in `settings_of_pages.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Not prose: marks, other comments, pictures, code, targets of links, formulas in blocks of their own, numbers of items.
REMOVED = (
    r"(?m)(?<=\n\n)(?: {4}.*\n)+",  # first: what is blanked later may stand at the beginning of a line
    r"(?s)<!--= .*?<!--/-->",
    r"(?s)<!--.*?-->",
    r"(?s)<img[^>]*>",
    r"(?ms)^( *)```.*?^\1```",
    r"`[^`]*`",
    r"\]\([^)]*\)",
    r"(?m)^ *\d+\. ",
)
N = r"-?\d[\d,]*(?:\.\d+)*(?:e-?\d+)?(?<!,)"
MORE = rf"(?:(?:,| to| and| or|, and|, or) {N})*"
# A letter or Greek name with an index, the end of a term, or an option that a formula names.
TERM = r"(?:(?<![\w'])[A-Za-z](?:_\w+)?|[)|]|\b(?:mu|eta|rho|kappa|alpha|lambda|lr|dof|relax))"
THINGS = "samples?|images|pictures|seeds?|epochs|features|letters|classes|pixels|processes|threads|layers|rows|rates"
PLACES = r"Tables?|Figures?|Eq\.|[Ee]quations?|Algorithm|Section|[Ll]ines?|Proposition|Theorem|Lemma"
RULES = {
    "a term of a formula": (
        rf"[\w)|]\^-?\d+(?:/\d+)?(?: / \d+)?|(?<![\w.,/])-?1 ?/ ?\d+(?:\.\d+)?|(?<![\w.,/])\d+ ?/ ?[(A-Za-z]|"
        rf"{TERM} ?/ ?\d+|{TERM} [-+=<>]=? -?\d+(?:\.\d+)?|(?<![\w.,])\d+ [-+] [A-Za-z]+|"
        rf"(?<![\w.,])-?\d+(?:\.\d+)? \([A-Za-z](?:_\w+)? ?[-+^/*]|sqrt\(\d|_\{{?t ?[-+] ?\d\}}?"
    ),
    "a place in the paper": rf"(?:{PLACES}) \(?{N}[ab]?\)?{MORE}",
    "a year, or the number of a paper": r"\b(?:19[5-9]|20[0-2])\d\b|arXiv \d+\.\d+",
    "a version": r"\b0\.1\.0\b|(?:Python|torch) \d\.\d+(?:(?:,| to| and| or) (?:torch )?\d\.\d+)*",
    "the widths of a network, the size of a picture": r"\d+(?:-\d+){2,}|\d+ x \d+",
    "a batch, width or depth": rf"(?:[Bb]atch(?:es)?|widths?|depths?)(?: size)?(?: of)?(?: up to)? {N}{MORE}",
    "how many there are of what is chosen": rf"(?<!by ){N}{MORE} (?:{THINGS})\b",
    "how long a run is": rf"(?:after|of|first|every) {N}{MORE} steps",
    "an option": rf"(?:lr|[Rr]ates?|seeds?|damping|relax|dof|decay|[Mm]omentum|eps|best of)(?: of| from)? {N}{MORE}",
    "a layer, a dimension": rf"(?:[Ll]ayers?|dimension) {N}{MORE}",
}
TIMES = r"times as (?:long|fast|much|large)|times longer|times faster|times the time|points\b"
SMALL = "two|three|four|five|six|seven|eight|nine|ten|twelve|fifteen|twenty"
# Measurements in words: nothing but a phrase can excuse them.
WORDS = rf"\b(?:{SMALL})(?: (?:to|or) (?:{SMALL}))? (?:{TIMES})|\b(?:twice|half) (?:as (?:long|fast|much)|the time)"


# Columns of a table that say what was set, besides the first one.
SETTING_COLUMNS = {"processes", "machines", "samples per machine", "learning rate", "default"}


def without_names_of_cells(text: str) -> str:
    """Headings of tables, their first column, which names the row, and `SETTING_COLUMNS` are no measurements."""
    lines, settings = text.split("\n"), set[int]()
    for place, line in enumerate(lines):
        if not line.startswith("|"):
            continue
        if place + 1 < len(lines) and re.fullmatch(r"\|(?: *:?-+:? *\|)+", lines[place + 1].strip()):
            settings = {0} | {k for k, head in enumerate(line.split("|")[1:-1]) if head.strip() in SETTING_COLUMNS}
            lines[place] = _blank(line)
        else:
            cells = line.split("|")
            lines[place] = "|".join(_blank(cell) if k - 1 in settings else cell for k, cell in enumerate(cells))
    return "\n".join(lines)


def prose(text: str) -> str:
    """The words of a page in one line, without what is no prose; the numbers of names of cells are blanked."""
    for pattern in REMOVED:
        text = re.sub(pattern, lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    return " ".join(without_names_of_cells(text).split())


def unmarked(text: str, phrases: Iterable[str] = ()) -> list[str]:
    """The numbers of a page that nothing covers, each with the words around it."""
    text = prose(text)
    for phrase in phrases:
        text = text.replace(phrase, "§" * len(phrase))
    for pattern in RULES.values():
        text = re.sub(pattern, _blank, text)
    found = re.finditer(rf"(?<![\w.^-]){N}|{WORDS}", text)
    return [text[max(0, number.start() - 60) : number.end() + 40] for number in found]


def _blank(found: re.Match[str] | str) -> str:
    """As long as before, without digits, so that lines and words around it stay where they are."""
    return re.sub(r"\d", "§", found if isinstance(found, str) else found[0])
