"""Plans to report on, and a browser to open the reports in, spoken to over its DevTools pipe."""

import json
import os
import select
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from routepack import testing
from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.core.plans import Certificate, Topology
from routepack.cost.links import WindowNormalizedLinks
from routepack.planning.planner import Planner

BINARIES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60.0
EVIL = '</style></title></pre><script>alert(1)</script><img src="http://evil.example/x" onerror=alert(1)>\'"{{7*7}}'


def plan_of(window, *, data=4, expert=2, cap=512, **options):
    topology = Topology(data_parallel_degree=data, expert_parallel_degree=expert, ranks_per_node=options.pop("node", 8))
    packer = AttentionAwarePacker(max_tokens=cap)
    return Planner(topology=topology, packer=packer, num_proposals=2000, **options).plan(window)


@pytest.fixture(scope="session")
def window():
    return testing.synthetic_batch(num_sequences=48, max_length=256, num_experts=16, num_layers=5, skew=1.5)


@pytest.fixture(scope="session")
def plan(window):
    return plan_of(window)


@pytest.fixture(scope="session")
def linked(window):
    """A plan with links in its cost, groups that wait for one another, and nodes."""
    return plan_of(window, expert=4, data=8, sync="layer", links=WindowNormalizedLinks(across_share=0.3), node=2)


def resealed(plan, **changes):
    """The plan with other words, and a digest that fits them: what a hostile tool would write."""
    return replace(plan, **changes, digest="")


def hostile(plan, window):
    long = "x" * 100_000
    changed = resealed(
        plan,
        cost=plan.cost | {"model": EVIL, "options": {EVIL: [EVIL, long]}, EVIL: {"deep": [[[EVIL]]]}},
        versions={EVIL: EVIL, "routepack": EVIL + "\ud800\x00\u202e", "long": long},
        certificate=Certificate(num_microbatches=plan.num_microbatches, lower_bound=1, method=EVIL + long),
        unit=EVIL,
        parts=plan.parts | {EVIL: 1.0},
    )
    return changed, replace(window, source=EVIL + "\x1b\n" + long, weights_version=EVIL)


@pytest.fixture(scope="session", name="plan_of")
def plan_of_fixture():
    return plan_of


@pytest.fixture(scope="session", name="resealed")
def resealed_fixture():
    return resealed


@pytest.fixture(scope="session")
def evil():
    return EVIL


@pytest.fixture(scope="session", name="hostile")
def hostile_fixture(plan, window):
    return hostile(plan, window)


class Browser:
    """Headless Chromium with one page. Messages are JSON, each ended by a zero byte, on file descriptors 3 and 4."""

    def __init__(self, binary: str, folder: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def connect() -> None:
            # By way of high numbers, lest one of the four is in the other's place.
            os.dup2(to_read, 103)
            os.dup2(to_write, 104)
            os.dup2(103, 3)
            os.dup2(104, 4)

        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        # Nothing that the browser asks for on its own account may be taken for the page's.
        options += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}"]
        self._process = subprocess.Popen(
            [binary, *options, "--remote-debugging-pipe", "about:blank"],
            preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._number, self._buffer, self._session = 0, b"", None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._until(lambda got: got.get("id") == self._number)["result"]

    def open(self, page: Path, *, width: int, mobile: bool = False, media: str = "", dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        if not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._until(lambda got: got.get("method") == "Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        self._process.wait(timeout=SECONDS)
        os.close(self._write)
        os.close(self._read)

    def _until(self, wanted) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while True:
            while b"\0" not in self._buffer:
                assert select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0], "the browser does not answer"
                got = os.read(self._read, 1 << 20)
                assert got, "the browser is gone"
                self._buffer += got
            line, _, self._buffer = self._buffer.partition(b"\0")
            message = json.loads(line)
            assert "error" not in message, message
            if "method" in message:
                self.events.append(message)
            if wanted(message):
                return message


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    binary = next((path for name in BINARIES if (path := shutil.which(name))), None)
    if binary is None:
        pytest.skip(f"no browser to open the report in: install one of {', '.join(BINARIES)}")
    opened = Browser(binary, tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()
