"""Texts that are neither prose nor code, such as logs and tables, generated identically on every machine.

`python -m bench.accuracy long --texts odd` measures all of them. Nothing in csattn was tuned to them.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

_NOVEL = Path(__file__).parent.parent / "texts" / "novel.txt"
_NUM_CHARS = 24_000  # at least 4200 tokens of every kind
_FIRST = "Anna", "Boris", "Chloe", "Dmitri", "Elena", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Keiko", "Liam"
_LAST = "Abbott", "Becker", "Castillo", "Dubois", "Eriksen", "Fischer", "Gupta", "Hassan", "Ivanova", "Jansen"
_UNITS = "nginx.service", "postgresql.service", "cron.service", "ssh.service", "backup.timer"
_EMOJI = "😀", "😂", "🥲", "😍", "🤔", "🙌", "🔥", "🚀", "🎉", "👍🏽", "🇧🇷", "🇯🇵", "🐍", "🍕", "🌍", "💡", "✅"
_SCANNED = {"m": "rn", "l": "1", "o": "0", "e": "c", "h": "li", "s": "5", "d": "cl"}
_BREAK = "\nThe secret number of the red door is 4821.\n"


def _csv(random: Random) -> Iterator[str]:
    yield "time,station,temperature_c,pressure_hpa,wind_ms,flow_l_s"
    temperature, pressure = 15.0, 1013.0
    for hour in range(10_000):
        temperature, pressure = temperature + random.gauss(0, 0.3), pressure + random.gauss(0, 0.4)
        day, station, wind = hour // 24 % 31 + 1, random.randrange(1, 9), abs(random.gauss(4, 2))
        row = f"2024-03-{day:02d}T{hour % 24:02d}:00,S{station},{temperature:.2f},{pressure:.1f},{wind:.1f}"
        yield f"{row},{abs(random.gauss(3, 1)):.3f}"


def _json_lines(random: Random) -> Iterator[str]:
    for second in range(10_000):
        path = f"/v1/{random.choice(('users', 'orders', 'items'))}/{random.randrange(9999)}"
        user = {"id": random.randrange(500), "plan": random.choice(("free", "pro"))}
        said = {
            "ts": f"2024-05-02T10:{second // 60 % 60:02d}:{second % 60:02d}Z",
            "id": f"{random.getrandbits(64):016x}",
        }
        yield json.dumps(said | {"path": path, "status": random.choice((200, 200, 201, 404)), "user": user})


def _journal(random: Random) -> Iterator[str]:
    for second in range(10_000):
        unit, port = random.choice(_UNITS), random.randrange(30_000, 60_000)
        events = (
            f"systemd[1]: Started {unit}.",
            f"systemd[1]: {unit}: Main process exited, code=exited, status={random.randrange(1, 130)}/FAILURE",
            f"sshd[{random.randrange(9999)}]: Accepted publickey for {random.choice(_FIRST).lower()} port {port} ssh2",
        )
        yield f"May 02 10:{second // 60 % 60:02d}:{second % 60:02d} web{random.randrange(3)} {random.choice(events)}"


def _sql(random: Random) -> Iterator[str]:
    yield "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer VARCHAR(80), total NUMERIC(10, 2));"
    for number in range(10_000):
        name = f"{random.choice(_FIRST)} {random.choice(_LAST)}"
        yield f"INSERT INTO orders VALUES ({1000 + number}, '{name}', {random.randrange(100, 99_999) / 100:.2f});"


def _clauses(random: Random) -> Iterator[str]:
    for number in range(10_000):
        who, days = random.choice(("Lessee", "Licensee", "Supplier")), random.choice(("ten (10)", "thirty (30)"))
        clause, euros = random.randrange(1, 20), random.randrange(100, 9000)
        yield (
            f"{number // 8 + 1}.{number % 8 + 1}. The {who} shall, within {days} days of receipt of written notice "
            f"under Clause {clause}, pay to the other party the sum of EUR {euros} without prejudice to any other "
            f"right or remedy, save as provided in Schedule {random.randrange(1, 7)}."
        )


def _numbers(random: Random) -> Iterator[str]:
    while True:
        digits = f"{random.randrange(1, 99)} {random.randrange(100, 999)} {random.randrange(1000, 9999)}"
        yield f"{random.choice(_FIRST)} {random.choice(_LAST)}: +{digits}"


def _hex_dump(random: Random) -> Iterator[str]:
    return (f"{at:08x}  {random.randbytes(16).hex(' ')}" for at in range(0, 16 * _NUM_CHARS, 16))


def _dna(random: Random) -> Iterator[str]:
    return ("".join(random.choices("ACGT", (3, 2, 2, 3), k=60)) for _ in range(_NUM_CHARS))


def _bytes(random: Random) -> Iterator[str]:
    return (random.randbytes(64).decode("latin-1") for _ in range(_NUM_CHARS))


def _emoji(random: Random) -> Iterator[str]:
    return (" ".join(random.choices(_EMOJI, k=random.randrange(2, 7))) for _ in range(_NUM_CHARS))


def _scanned(random: Random) -> Iterator[str]:
    novel = _NOVEL.read_text(encoding="utf-8")
    yield "".join(_SCANNED.get(letter, "~") if random.random() < 0.12 else letter for letter in novel)


def _pages(random: Random) -> Iterator[str]:
    page = _NOVEL.read_text(encoding="utf-8")[3000:5000]
    return (f"{page}\nOn page {number} the clerk counted {random.randrange(99)} boats." for number in range(99))


def _one_token(random: Random) -> Iterator[str]:
    """One word for half of 4096 tokens, interrupted twice, and then the novel."""
    yield " the" * 400 + _BREAK + " the" * 1400 + _BREAK + " the" * 250 + _NOVEL.read_text(encoding="utf-8")


ODD: dict[str, Callable[[Random], Iterator[str]]] = {
    "csv": _csv, "json-lines": _json_lines, "journal": _journal, "sql": _sql, "clauses": _clauses, "numbers": _numbers,
    "hex-dump": _hex_dump, "dna": _dna, "bytes": _bytes, "emoji": _emoji, "scanned": _scanned,
    "pages": _pages, "one-token": _one_token,
}  # fmt: skip


def odd_text(name: str) -> str:
    """Return the text with that name in `ODD`: its lines until there are _NUM_CHARS characters."""
    lines, text = ODD[name](Random(name)), ""
    while len(text) < _NUM_CHARS:
        text += next(lines) + "\n"
    return text
