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


def test_log_lines_have_one_format_and_go_only_to_stderr() -> None:
    ended = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, check=True)
    lines = ended.stderr.splitlines()
    form = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING) (\S+): (info|warning) of \2"
    assert not ended.stdout and all(re.fullmatch(form, line) for line in lines)
    assert len(lines) == 7 and "info of others" not in ended.stderr


def test_line_breaks_and_escapes_in_a_message_are_replaced() -> None:
    says = f"{SAYS}\nlogging.getLogger('workers.x').warning('%s is removed', 'a\\n2026 INFO forged\\x1b[31m')"
    ended = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    assert (
        "WARNING workers.x: a 2026 INFO forged\N{REPLACEMENT CHARACTER}[31m is removed" in ended.stderr.splitlines()[-1]
    )


def test_log_lines_of_rays_formatter_are_cleaned_too() -> None:
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


def test_a_fatal_signal_leaves_a_traceback() -> None:
    ends = "import os, signal; os.kill(os.getpid(), signal.SIGBUS)"
    ended = subprocess.run([sys.executable, "-c", f"{SAYS}\n{ends}"], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in ended.stderr and 'File "<string>", line' in ended.stderr


def test_traceback_lines_are_indented_and_cannot_forge_a_message() -> None:
    says = f"""{SAYS}
try:
    raise OSError("a name\\n2026-01-01 00:00:00 ERROR workers.api: forged\\x1b]0;x")
except OSError:
    logging.getLogger("workers").exception("it failed")"""
    ended = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    assert "\n  2026-01-01 00:00:00 ERROR" in ended.stderr and "\x1b" not in ended.stderr
    assert "\n2026-01-01" not in ended.stderr


def test_logging_works_on_a_stderr_without_a_file_descriptor() -> None:
    says = f"import io, sys\nsys.__stderr__ = io.StringIO()\n{SAYS}\nprint(sys.__stderr__.getvalue())"
    ended = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    assert "warning of others" in ended.stdout


def test_every_part_of_a_log_record_is_cleaned_once() -> None:
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
