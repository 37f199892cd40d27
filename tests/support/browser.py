"""A headless Chromium that tests talk to over its debugging pipe; nothing needs to be installed."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page in a headless Chromium.

    Args:
        folder: for its profile.
    """

    def __init__(self, folder: Path) -> None:
        read_end, self._out = os.pipe()
        self._in, write_end = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        moved = f'exec "$@" 3<&{read_end} 4>&{write_end}'
        self.process = subprocess.Popen(
            [
                *("bash", "-c", moved, "bash", CHROMIUM),
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--remote-debugging-pipe",
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(read_end, write_end),
        )
        for end in (read_end, write_end):
            os.close(end)
        self._buffer = b""
        self._number = 0
        self.events: list[dict] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **params: object) -> dict:
        """Send a command and return its result."""
        self._number += 1
        message: dict = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict:
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 16)
            assert part, "Chromium has left"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def open(self, url: str, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a page at a width, light or dark, and wait until it is loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not self.heard("Page.loadEventFired"):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> object:
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def heard(self, *methods: str) -> list[dict]:
        """Return what the browser told of some kinds of events since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def errors(self) -> list[dict]:
        """Return what went wrong in the page: exceptions, and errors in its log."""
        return self.heard("Runtime.exceptionThrown", "Log.entryAdded")

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for."""
        return [event["request"]["url"] for event in self.heard("Network.requestWillBeSent")]

    def screenshot(self, path: Path) -> bytes:
        """Take a picture of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
        return path.read_bytes()

    def close(self) -> None:
        """End the browser."""
        self.process.kill()
        self.process.wait()
        os.close(self._in)
        os.close(self._out)
