"""`csattn serve` as a process, and clients of it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-c", "from workers.cli import main; main()", "serve"]
READY_S, END_S = 120.0, 60.0
BUILT_S = 400.0  # builds have a low priority, so other processes slow them down
PLAIN: Any = {"verify": False}  # for clients: there is no TLS here, and setting it up takes longer than a reply


@dataclass
class Service:
    process: "subprocess.Popen[str]"
    url: str

    def client(self) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(**PLAIN)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=http)

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(f"{self.url}{path}", timeout=30.0, **PLAIN)

    def register(self, name: str, text: str) -> dict[str, Any]:
        """Register a context, and return it once it is built."""
        body = {"name": name, "text": text}
        httpx2.post(f"{self.url}/v1/contexts", json=body, timeout=30.0, **PLAIN).raise_for_status()
        until = time.monotonic() + BUILT_S
        while (context := self.get(f"/v1/contexts/{name}").json())["state"] == "building":
            assert time.monotonic() < until, f"the context is not built: {context}"
            time.sleep(0.1)
        assert context["state"] == "ready", context
        return dict(context)

    def ask(self, context: str, question: str, max_tokens: int) -> Generator[str, None, None]:
        """Yield the pieces of an answer as they arrive. Raises openai.APIError if the service reports an error."""
        messages: list[Any] = [{"role": "user", "content": question}]
        with (
            self.client() as client,
            client.chat.completions.create(
                model=context, messages=messages, max_tokens=max_tokens, stream=True
            ) as stream,
        ):
            for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    yield chunk.choices[0].delta.content

    def wait_until_ready(self, timeout_s: float) -> float:
        """Wait until the service reports that it is ready, and return the seconds that this took."""
        since = time.monotonic()
        while time.monotonic() - since < timeout_s:
            try:
                if self.get("/ready").status_code == 200:
                    return time.monotonic() - since
            except httpx2.HTTPError:
                pass
            time.sleep(0.02)
        raise AssertionError(f"the service is not ready after {timeout_s} s")


def run(*options: str) -> "subprocess.CompletedProcess[str]":
    """Run `csattn serve` with options with which it is expected to end by itself."""
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=READY_S, env=_environment())


@contextmanager
def serving(*options: str) -> Iterator[Service]:
    """Run a service on a free port, in its own process group, until the block ends."""
    command = [*COMMAND, "--port", "0", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment(), process_group=0)
    try:
        assert process.stdout is not None
        ready = json.loads(next((line for line in process.stdout if line.startswith("{")), "{}"))
        assert "url" in ready, f"the service ended with {process.wait()} before it was ready: {ready}"
        yield Service(process, ready["url"])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            assert process.stdout is not None
            process.stdout.close()


def _environment() -> dict[str, str]:
    set_here = "CSATTN_SERVER", "RAY_worker_niceness"  # the service has to choose these itself
    kept = {name: value for name, value in os.environ.items() if not name.startswith(set_here)}
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}
