"""A headless Chromium driven through the DevTools protocol over a pipe: no package, no port, no network."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # a test machine's user may be root; the page is our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-pipe",
)
ALT, CTRL, SHIFT = 1, 2, 8
# it reads from 3 and writes to 4
WIRED = (
    "import os, sys; a, b = map(int, sys.argv[1:3]); os.dup2(a, 3); os.dup2(b, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
CODES = {"Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
CODES |= {"ArrowDown": 40, "[": 219, "]": 221}
TYPED = {"Enter": "\r", " ": " ", "[": "[", "]": "]"}


def binary() -> str | None:
    """The browser's file, where there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


needs_browser = pytest.mark.skipif(
    binary() is None, reason=f"no browser ({', '.join(NAMES)}): `apt-get install chromium` runs this test"
)


class Page:
    """One tab. `errors` are console errors and uncaught exceptions; `requests` is every address that was asked for."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._last = read, write, 0
        self._rest = b""
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = next(one for one in self.send("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setFocusEmulationEnabled", enabled=True)  # a headless tab is never in front

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer; raises AssertionError where the browser refuses."""
        self._last += 1
        asked = {"id": self._last, "method": method, "params": params}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        while (said := self._next()).get("id") != self._last:
            self._note(said)
        assert "error" not in said, said
        return said["result"]

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file, and wait until it is whole."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url=path.resolve().as_uri())
        while (said := self._next()).get("method") != "Page.loadEventFired":
            self._note(said)

    def js(self, expression: str) -> Any:
        """A JavaScript expression's value; raises AssertionError where it throws."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, *keys: str, shift: bool = False, modifiers: int = 0) -> None:
        """Keys, one after the other, as a keyboard sends them; `modifiers` are those of `ALT`, `CTRL` and `SHIFT`."""
        for key in keys:
            held = modifiers | (SHIFT if shift else 0)
            more = {"key": key, "windowsVirtualKeyCode": CODES[key], "modifiers": held}
            typed = {"text": TYPED[key]} if key in TYPED else {}
            self.send("Input.dispatchKeyEvent", type="keyDown" if typed else "rawKeyDown", **more, **typed)
            self.send("Input.dispatchKeyEvent", type="keyUp", **more)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is in sight, or of the whole page."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._read, 1 << 16)
            assert read, "the browser ended"
            self._rest += read
        said, _, self._rest = self._rest.partition(b"\0")
        return json.loads(said)

    def _note(self, said: dict[str, Any]) -> None:
        method, params = said.get("method"), said.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextmanager
def page() -> Iterator[Page]:
    """A browser's tab; the browser ends with it."""
    found = binary()
    assert found is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        ends = (to_browser[0], from_browser[1])
        process = subprocess.Popen(
            [sys.executable, "-c", WIRED, *map(str, ends), found, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in ends:
            os.close(end)
        try:
            yield Page(from_browser[0], to_browser[1])
        finally:
            process.terminate()
            process.wait(timeout=20)
            os.close(to_browser[1])
            os.close(from_browser[0])
