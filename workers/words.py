"""Numbers formatted for people, and texts made safe to show."""

# C0 and C1 control characters, except tab and newline (below); and overrides of the writing direction, which no
# language needs and which make the rest of a line read backwards
_CODES = *range(32), *range(127, 160), 0x202D, 0x202E
_REPLACEMENTS = {code: "\N{REPLACEMENT CHARACTER}" for code in _CODES if chr(code) not in "\t\n"}


def size(num_bytes: float) -> str:
    """Return a number of bytes with its binary unit: 1.5 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number and its noun: 1 artifact, 2 artifacts."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def last_line(error: Exception) -> str:
    """Return the last line of an error's text: what was raised, if the text is a traceback, as in Ray's errors."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def printable(text: str) -> str:
    """Replace a terminal's control characters: text may come from strangers, as an artifact's notes or an answer."""
    return text.translate(_REPLACEMENTS)
