"""Numbers as people read them, and texts as they may be shown."""

# C0 and C1, the terminal's own, but for what ends a line or a column; and overrides of the direction, which no language
# needs, and behind which all of a line reads backwards
_CODES = *range(32), *range(127, 160), 0x202D, 0x202E
_ORDERS = {code: "\N{REPLACEMENT CHARACTER}" for code in _CODES if chr(code) not in "\t\n"}


def size(num_bytes: float) -> str:
    """A number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def counted(number: int, one: str, many: str | None = None) -> str:
    """1 artifact, 2 artifacts."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def last_line(error: Exception) -> str:
    """Of an error whose text is a trace, as Ray's are: what was raised."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def harmless(text: str) -> str:
    """Without what a terminal takes for orders: what is shown may be a stranger's, an artifact's notes or an answer."""
    return text.translate(_ORDERS)
