"""Numbers as people read them."""


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
