"""A loaded context, and the choice of those that leave when others wait for room."""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from csattn.artifact import Artifact
from workers.serving.drafts import Ngrams
from workers.serving.messages import Held

TURN_S, TURN_LOADS = 2.0, 8.0  # a context's turn while others wait: at least TURN_S, TURN_LOADS times its loading time
MAX_NAMES = 64  # routing keys that are remembered for each context
Files = Mapping[Path, tuple[int, int]]  # inode and size


@dataclass(slots=True, eq=False)
class Resident:
    """A context in the engine; artifact None stands for no context."""

    context_id: int
    artifact: Artifact | None
    num_bytes: int = 0
    num_users: int = 0
    last_used: int = 0
    released_at: float = field(default_factory=time.monotonic)  # when its last user left
    stays_until: float = 0.0
    is_leaving: bool = False  # takes no new requests: it has had its turn, and others wait
    is_gone: bool = False
    files: "Files" = field(default_factory=dict)  # the artifact's, if its rows are memory-mapped
    checked_at: float = field(default_factory=time.monotonic)  # when the files were last checked
    fault: str = ""  # which file has lost bytes since it was loaded
    ngrams: Ngrams | None = None  # of the artifact's tokens, made for the first request with drafts
    routing_keys: dict[str, None] = field(default_factory=dict)  # an ordered set, the newest last

    def begin_turn(self, now: float, loading_s: float) -> None:
        self.is_leaving = False
        self.stays_until = now + max(TURN_S, TURN_LOADS * loading_s)

    def remember(self, routing_key: str) -> None:
        """Record the routing key of a request that uses the context."""
        self.routing_keys.pop(routing_key, None)
        if routing_key:
            self.routing_keys[routing_key] = None
        if len(self.routing_keys) > MAX_NAMES:
            del self.routing_keys[next(iter(self.routing_keys))]

    def snapshot(self, path: str, now: float) -> Held:
        idle_s = 0.0 if self.num_users else now - self.released_at
        return Held(path, tuple(self.routing_keys), self.num_bytes, self.num_users, idle_s)


def files_of(path: Path) -> Files:
    """Inodes and sizes of the files in an artifact's directory; none if it is gone: mapped files stay as they were."""
    try:
        with os.scandir(path) as entries:
            return {Path(entry.path): (of.st_ino, of.st_size) for entry in entries for of in [entry.stat()]}
    except FileNotFoundError:
        return {}


def lost_bytes(files: Files) -> str:
    """Say which file has been truncated; empty: none. A file that was removed or replaced stays mapped as it was."""
    for path, (inode, size) in files.items():
        try:
            now = path.stat()
        except OSError:
            continue
        if now.st_ino == inode and now.st_size < size:
            return f"{path.name} has {now.st_size} bytes instead of {size}"
    return ""


def choose_leaving(residents: Iterable[Resident], num_bytes: int, now: float) -> float | None:
    """Mark contexts that have had their turn as leaving, the earliest first, until they make up num_bytes.

    Returns when the next context's turn ends, if the marked ones are not enough; else None.
    """
    in_order = sorted(residents, key=lambda resident: resident.stays_until)
    leaving = sum(resident.num_bytes for resident in in_order if resident.is_leaving)
    for resident in in_order:
        if leaving >= num_bytes:
            return None
        if not resident.is_leaving:
            if resident.stays_until > now:
                return resident.stays_until
            resident.is_leaving = True
            leaving += resident.num_bytes
    return None
