"""One JupyterLab server and one Chromium for the whole session; without them every test here says what is missing.

The server gets a home, settings and workspaces of its own, so that nobody's JupyterLab is touched and no stale
layout decides what a page shows. Chromium is the system's: playwright drives it and downloads nothing.
`CHROMIUM=/path` names another one, `SHOTS=/folder` keeps a screenshot of each test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

START_S, WAIT_MS = 60, 30_000
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {
        "autoStartDefaultKernel": True
    },  # else Run All may ask which kernel to use
}


@dataclass(frozen=True)
class Lab:
    """A running server: where notebooks lie, and how one is opened."""

    url: str
    token: str
    root: Path

    def address(self, notebook: str) -> str:
        """One notebook alone, in a fresh workspace."""
        return f"{self.url}/doc/tree/{notebook}?token={self.token}&reset"


def missing() -> str:
    """What this machine lacks for tests in a browser, as a sentence; empty if nothing."""
    lacks = [
        name for name in ("playwright", "jupyterlab", "ipywidgets") if importlib.util.find_spec(name) is None
    ]
    if CHROMIUM is None:
        lacks.append("chromium (apt install chromium, or CHROMIUM=/path)")
    return f"not tested in a browser: {', '.join(lacks)} missing" if lacks else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what lies here if something is missing; the summary (-ra) prints the reason."""
    reason = missing()
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab server on a free port of this machine."""
    root, home = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("home")
    for plugin, values in SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    served = Lab(f"http://127.0.0.1:{port}", secrets.token_hex(8), root)
    log = home / "lab.log"
    with log.open("w", encoding="utf-8") as out:
        server = subprocess.Popen(_command(served, port), env=_environment(home), stdout=out, stderr=out)
        try:
            _wait_for(served, server, log)
            yield served
        finally:
            server.terminate()
            server.wait(20)


def _command(served: Lab, port: int) -> list[str]:
    return [
        *(
            sys.executable,
            "-m",
            "jupyterlab",
            "--no-browser",
            "--allow-root",
            "--ip=127.0.0.1",
            f"--port={port}",
        ),
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={served.root}",
        f"--IdentityProvider.token={served.token}",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",
    ]


def _environment(home: Path) -> dict[str, str]:
    own = {
        "HOME": home,
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_DATA_DIR": home / "data",
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": home / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
        "IPYTHONDIR": home / "ipython",
    }
    return {**os.environ, **{name: str(path) for name, path in own.items()}}


def _wait_for(served: Lab, server: subprocess.Popen[bytes], log: Path) -> None:
    """Returns once the server answers. Raises: AssertionError, with its log, if it ends or takes too long."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{served.url}/api/status?token={served.token}", timeout=1)
            return
        except OSError:
            assert server.poll() is None, log.read_text(encoding="utf-8")
            time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not answer within {START_S} s:\n{log.read_text(encoding='utf-8')}")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium with an empty profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(tmp_path_factory.mktemp("profile")),
            executable_path=CHROMIUM,
            headless=True,
            args=list(FLAGS),
            viewport={"width": 1200, "height": 900},
        )
        context.set_default_timeout(WAIT_MS)
        yield context
        context.close()


@pytest.fixture()
def page(browser: Any, lab: Lab, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fresh page. Fails afterwards if it raised an error, or asked for anything outside this machine."""
    opened, errors, outside = browser.new_page(), [], []
    own = (lab.url, lab.url.replace("http", "ws", 1), "data:", "blob:")
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("request", lambda sent: None if sent.url.startswith(own) else outside.append(sent.url))
    yield opened
    if folder := os.environ.get("SHOTS"):
        opened.screenshot(path=Path(folder) / f"{request.node.name}.png")
    opened.close()
    assert not errors, errors
    assert not outside, outside
