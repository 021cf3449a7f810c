"""What a process of the service logs. Each test uses a subprocess, because logging is set up once per process."""

import re
import signal
import subprocess
import sys

SAYS = """
import logging
from workers.service.log_lines import log_to_stderr

log_to_stderr()
for name in ("csattn.api", "workers.serving.contexts", "offload.blocks", "others"):
    logging.getLogger(name).info("info of %s", name)
    logging.getLogger(name).warning("warning of %s", name)
"""


def test_lines_of_one_form_on_stderr_alone() -> None:
    ended = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, check=True)
    lines = ended.stderr.splitlines()
    form = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING) (\S+): (info|warning) of \2"
    assert not ended.stdout and all(re.fullmatch(form, line) for line in lines)
    assert len(lines) == 7 and "info of others" not in ended.stderr


def test_a_name_of_several_lines_writes_one() -> None:
    says = f"{SAYS}\nlogging.getLogger('workers.x').warning('%s is removed', 'a\\n2026 INFO forged\\x1b[31m')"
    ended = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    assert (
        "WARNING workers.x: a 2026 INFO forged\N{REPLACEMENT CHARACTER}[31m is removed" in ended.stderr.splitlines()[-1]
    )


def test_what_another_form_writes_is_cleaned_too() -> None:
    """Handlers of Ray Serve have formatters of their own."""
    form = "handler.setFormatter(ServeFormatter('replica', 'x')); logging.getLogger().handlers[:] = [handler]"
    says = f"""{SAYS}
from ray.serve._private.logging_utils import ServeFormatter
handler = logging.StreamHandler(); {form}
try:
    raise OSError("a name\\n2026 forged\\x1b]0;x")
except OSError:
    logging.getLogger("ray.serve").exception("%s failed", "a\\nb\\x07")"""
    ended = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    assert "a b\N{REPLACEMENT CHARACTER} failed\n  Traceback" in ended.stderr
    assert "\n  2026 forged\N{REPLACEMENT CHARACTER}]0;x" in ended.stderr


def test_a_signal_that_ends_it_leaves_a_trace() -> None:
    ends = "import os, signal; os.kill(os.getpid(), signal.SIGBUS)"
    ended = subprocess.run([sys.executable, "-c", f"{SAYS}\n{ends}"], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in ended.stderr and 'File "<string>", line' in ended.stderr


def test_no_line_of_a_trace_looks_like_another_message() -> None:
    says = f"""{SAYS}
try:
    raise OSError("a name\\n2026-01-01 00:00:00 ERROR workers.api: forged\\x1b]0;x")
except OSError:
    logging.getLogger("workers").exception("it failed")"""
    ended = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    assert "\n  2026-01-01 00:00:00 ERROR" in ended.stderr and "\x1b" not in ended.stderr
    assert "\n2026-01-01" not in ended.stderr


def test_a_stream_without_a_descriptor_is_logged_to() -> None:
    says = f"import io, sys\nsys.__stderr__ = io.StringIO()\n{SAYS}\nprint(sys.__stderr__.getvalue())"
    ended = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    assert "warning of others" in ended.stdout


def test_records_are_made_as_before_and_cleaned_in_every_part_once() -> None:
    """Ray's record factory, which adds a timestamp that Ray's formatter needs, stays in effect."""
    says = """
import logging
from ray._private.log import INTERNAL_TIMESTAMP_LOG_KEY, _setup_log_record_factory
from workers.service.log_lines import log_to_stderr

_setup_log_record_factory()
log_to_stderr()
made = logging.getLogRecordFactory()
log_to_stderr()
assert logging.getLogRecordFactory() is made, "it is set once"
logging.getLogger().handlers[0].setFormatter(
    logging.Formatter(f"%(name)s %(msg)s %(args)s: %(message)s {{%({INTERNAL_TIMESTAMP_LOG_KEY})d}}")
)
logging.getLogger("a\\nname").warning("%s\\x1b", "b\\nc", stack_info=True)
logging.getLogger("workers").warning("100 %")
logging.getLogger("workers").warning("%d", "none")
logging.makeLogRecord({"msg": "as sent by another process"}).getMessage()
"""
    ended = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    lines = ended.stderr.splitlines()
    assert re.fullmatch(r"a name b c\ufffd None: b c\ufffd \{\d{15,}\}", lines[0])
    assert lines[1] == "  Stack (most recent call last):" and lines[2].startswith("    ")
    assert any(line.startswith("workers 100 % None: 100 % {") for line in lines)
    assert "--- Logging error ---" in lines and "TypeError: %d format: a real number is required, not str" in lines
