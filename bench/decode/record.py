"""Records the demo model reading a novel: the file that the decode benchmarks take by default."""

from pathlib import Path

from bench.accuracy.attending.context import read_context
from bench.accuracy.attending.recording import record
from bench.accuracy.long import read_text
from bench.decode.recording import save_recording
from csattn.models import load_model

TEXT, CONTEXT_LEN, NUM_STEPS = "novel", 7680, 256
LAYERS = (3, 10, 17, 24)  # of 30


def record_demo(path: Path) -> None:
    """Run the demo model and write the file. This takes minutes on two cores."""
    loaded = load_model()
    ids, sha256 = read_text(TEXT, loaded.tokenizer, CONTEXT_LEN, NUM_STEPS)
    context = read_context(loaded, ids[:CONTEXT_LEN], ids[CONTEXT_LEN:])
    save_recording(record(context, LAYERS, 1.0, sha256), path)
