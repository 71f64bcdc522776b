"""Headless Chromium, driven over its DevTools protocol: pages are opened, and the pointer goes over what they draw."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tornado.websocket import websocket_connect

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
    "--window-size=1200,2400",
)
_START_S = 60.0

# Pixels of the first box or point of every name in every plot, once all are drawn; null before.
BOXES = """
(() => {
  if (!window.Bokeh || !Bokeh.documents.length || !Bokeh.documents[0].is_idle) return null
  const views = []
  const visit = view => { views.push(view); for (const child of view.child_views ?? []) visit(child) }
  for (const view of Bokeh.index.roots ?? Object.values(Bokeh.index)) visit(view)
  const points = []
  for (const plot of views.filter(view => view.model.type == "Figure")) {
    const place = plot.el.getBoundingClientRect()
    for (const renderer of plot.model.renderers) {
      const data = renderer.data_source?.data
      if (!data?.name) continue
      const xs = data.middle ?? data.x, ys = data.rank ?? data.y, names = data.module ?? data.name
      for (let i = 0; i < xs.length; i++)
        if (names.indexOf(names[i]) == i) points.push([
          place.x + plot.frame.x_scale.compute(xs[i]), place.y + plot.frame.y_scale.compute(ys[i])])
    }
  }
  return points
})()
"""
# What every tooltip shows, in whatever shadow it lies.
TOOLTIPS = """
(() => {
  const found = []
  const visit = root => {
    for (const each of root.querySelectorAll("*")) {
      if (each.classList.contains("bk-Tooltip")) found.push((each.shadowRoot ?? each).textContent)
      if (each.shadowRoot) visit(each.shadowRoot)
    }
  }
  visit(document)
  return found
})()
"""


def find_chromium() -> str | None:
    """Path of the browser; None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """An open page."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._numbers = socket, itertools.count(1)

    async def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and wait for its answer."""
        number = next(self._numbers)
        await self._socket.write_message(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            said = json.loads(await asyncio.wait_for(self._socket.read_message(), 60))
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]

    async def run(self, code: str) -> Any:
        """Value of an expression in the page."""
        said = await self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def wait(self, code: str) -> Any:
        """Value of an expression, once it is one."""
        until = time.monotonic() + 60
        while (value := await self.run(code)) is None:
            assert time.monotonic() < until, f"not in 60 s: {code}"
            await asyncio.sleep(0.05)
        return value

    async def point(self, x: float, y: float) -> None:
        """Move the pointer."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


class Browser:
    """A running browser."""

    def __init__(self, port: int) -> None:
        self._port = port

    def tooltips(self, file: Path, *, drawn: bool = True) -> list[str]:
        """Open a page, move the pointer over all that it draws, and return what tooltips showed.

        The page fails the test where a script of its text ran: such scripts set ``window.ran`` or the page's title.
        """
        return asyncio.run(self._tooltips(file, drawn))

    async def _tooltips(self, file: Path, drawn: bool) -> list[str]:
        address = f"http://127.0.0.1:{self._port}/json/new?{file.as_uri()}"
        with urllib.request.urlopen(urllib.request.Request(address, method="PUT")) as answer:
            target = json.load(answer)
        socket = await websocket_connect(target["webSocketDebuggerUrl"], max_message_size=1 << 28)
        page = Page(socket)
        # An empty page stands there first.
        await page.wait('location.protocol == "file:" && document.readyState == "complete" ? true : null')
        title = await page.run("document.title")
        seen: list[str] = []
        for x, y in await page.wait(BOXES) if drawn else ():
            await page.point(x, y)
            await asyncio.sleep(0.01)
            seen += await page.run(TOOLTIPS)
        # An image that cannot be loaded says so a moment later.
        await asyncio.sleep(0.2)
        assert await page.run("window.ran ?? null") is None, "a script in a page's text ran"
        assert await page.run("document.title") == title
        assert await page.run("document.querySelectorAll('main img, main script, [onerror]').length") == 0
        await page.call("Page.close")
        socket.close()
        while await socket.read_message() is not None:
            pass
        return seen


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start the browser with an empty profile in this folder."""
    found = find_chromium()
    assert found is not None
    profile = folder / "profile"
    process = subprocess.Popen(
        [found, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(folder)},
    )
    try:
        reported, until = profile / "DevToolsActivePort", time.monotonic() + _START_S
        while not (reported.is_file() and "\n" in reported.read_text()):
            assert process.poll() is None, "chromium ended"
            assert time.monotonic() < until, "chromium did not start"
            time.sleep(0.05)
        yield Browser(int(reported.read_text().split()[0]))
    finally:
        process.terminate()
        process.wait(30)


def needs_chromium(config: pytest.Config) -> None:
    """Skip where there is no browser; fail where all tests are to run, as ``make test-all`` asks."""
    if find_chromium() is None:
        if config.getoption("--cold"):
            pytest.fail("chromium is missing; all tests need Debian's package chromium")
        pytest.skip("chromium is missing: no page was opened in a browser")
