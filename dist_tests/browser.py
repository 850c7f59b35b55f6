# SPDX-License-Identifier: Apache-2.0
"""Pages in a headless Chromium, over its DevTools pipe; needs no package.

Source: https://chromedevtools.github.io/devtools-protocol and `--remote-debugging-pipe`: messages
are JSON that end in a zero byte, in on descriptor 3 and out on descriptor 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VARIABLE = "FSDP_QUANT_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT = 60.0  # seconds per answer


def find() -> str | None:
    """The browser that `FSDP_QUANT_BROWSER` names, else one on PATH, else None."""
    named = os.environ.get(VARIABLE)
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of one browser process: `with Page(find()) as page: page.open(path)`.

    errors:  texts of uncaught exceptions, console errors and warnings, and requests other than for
             the page itself.
    """

    def __init__(self, executable: str):
        self.errors: list[str] = []
        self._buffer, self._count, self._session = b"", 0, None
        reads, self._to = os.pipe()
        self._from, writes = os.pipe()
        # Shells of any kind pass descriptors 3 and 4 on, so a wrapper script may start the browser.
        command = (
            f'exec "$0" "$@" 3<&{reads} 4>&{writes}',
            executable,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
        )
        self._process = subprocess.Popen(
            ["bash", "-c", *command],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)

    def __enter__(self) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """The result of a DevTools command. Raises RuntimeError for an error or no answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda got: got.get("id") == message["id"], method)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _until(self, is_it, what: str) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT
        while True:
            head, found, rest = self._buffer.partition(b"\0")
            if found:
                self._buffer, message = rest, json.loads(head)
                self._note(message)
                if is_it(message):
                    return message
                continue
            left = max(end - time.monotonic(), 0.0)
            more = (
                os.read(self._from, 1 << 20)
                if select.select([self._from], [], [], left)[0]
                else b""
            )
            if not more:
                raise RuntimeError(
                    f"{what}: the browser gave no answer in {TIMEOUT:.0f} s, or ended"
                )
            self._buffer += more

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent" and params.get("type") != "Document":
            self.errors.append(f"request of {params['request']['url']}")

    def open(self, path: Path, width: int, height: int = 900) -> None:
        """Load a file in a viewport of `width` x `height` CSS pixels; return once it is loaded."""
        self.resize(width, height)
        self.call("Page.navigate", url=path.absolute().as_uri())
        self._until(lambda got: got.get("method") == "Page.loadEventFired", "load")

    def resize(self, width: int, height: int = 900) -> None:
        """Change the viewport; return once the page drew a frame of that size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value, in JSON's types, of a JavaScript expression or of its promise."""
        options = {"returnByValue": True, "awaitPromise": True}
        got = self.call("Runtime.evaluate", expression=script, **options)
        if "exceptionDetails" in got:
            raise RuntimeError(f"{script}: {json.dumps(got['exceptionDetails'])}")
        return got["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Move the mouse to a point of the viewport."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """Write a PNG of the page, or of the viewport alone."""
        got = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(got["data"]))


def main(arguments: list[str]) -> None:
    """Write a picture of a page: `python -m dist_tests.browser PAGE PNG [WIDTH [HEIGHT]]`.

    WIDTH, HEIGHT: CSS pixels, default 1000 and the whole page.
    """
    source, picture, *size = arguments
    executable = find()
    if executable is None:
        raise SystemExit(f"no Chromium on PATH: set {VARIABLE}")
    with Page(executable) as page:
        page.open(Path(source), *(map(int, size) if size else (1000,)))
        page.screenshot(Path(picture), whole=len(size) < 2)


if __name__ == "__main__":
    main(sys.argv[1:])
