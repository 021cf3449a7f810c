"""Lengths of the FlashInfer contest's workloads (MLSys 2026), as far as they are public.

Of the indexer's 128 workloads, those with some known lengths are listed with their numbers; an unknown length is drawn
log-uniformly between 1 and 1024. Of the attention's 23 workloads, the numbers of tokens are known.
"""

from dataclasses import dataclass
from random import Random

INDEXER_PAGES = 11923
ATTENTION_PAGES = 8462
ATTENTION_TOKENS = (1, 2, 6, 7, 8)
MOST_OF_UNKNOWN = 1024


@dataclass(frozen=True, slots=True)
class IndexerWorkload:
    """One call of the indexer."""

    number: int
    known: tuple[int, ...]  # lengths, in no particular order
    batch_size: int

    @property
    def seq_lens(self) -> list[int]:
        """Return known lengths, then drawn ones, which are the same in every run."""
        random = Random(self.number)
        drawn = [round(MOST_OF_UNKNOWN ** random.random()) for _ in range(self.batch_size - len(self.known))]
        return [*self.known, *drawn]


INDEXER_WORKLOADS = (
    IndexerWorkload(1, (2,), 1),
    IndexerWorkload(12, (33, 52, 72, 1037), 4),
    IndexerWorkload(14, (18, 11, 2161, 20), 4),
    IndexerWorkload(24, (123, 69, 2753, 272), 4),
    IndexerWorkload(64, (5194,), 12),
    IndexerWorkload(79, (1721, 5761), 15),
    IndexerWorkload(104, (2112, 1758, 1746, 1439, 1312), 30),
    IndexerWorkload(127, (1766, 5806), 27),
)
