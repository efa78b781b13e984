"""The page in a real browser: Debian's Chromium, driven by Playwright, and whatever it complains about."""

import functools
import http.server
import importlib.util
import shutil
import threading
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
WAIT = 240_000  # milliseconds until a test gives up; nothing depends on how long an answer takes
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs Chromium and Playwright (make test-page; Debian: apt-get install chromium, pip install 'dpcert[page]')",
)


class Visit:
    """One page, with everything that must not happen: complaints in the console, failed files, requests to other origins."""

    def __init__(self, page, address):
        self.page, self.address, self.origin = page, address, "{0.scheme}://{0.netloc}".format(urlsplit(address))
        self.complaints, self.left = [], []
        page.set_default_timeout(WAIT)
        page.on("console", lambda message: message.type in ("error", "warning") and self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on(
            "response", lambda response: response.status >= 400 and self.complaints.append(f"{response.status} {response.url}")
        )
        page.on("request", lambda request: self._asked(request.url))

    def _asked(self, url):
        if not url.startswith((self.origin, "data:", f"blob:{self.origin}")):
            self.left.append(url)

    def open(self):
        self.page.goto(self.address)
        self.page.wait_for_selector("#main:not([hidden])")
        self.page.wait_for_load_state("networkidle")
        return self

    def draw(self, points):
        """Draw a line with the mouse; `points` in [0, 1]^2 of the drawing area."""
        box = self.page.locator("#pad").bounding_box()
        places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
        self.page.mouse.move(*places[0])
        self.page.mouse.down()
        for place in places[1:]:
            self.page.mouse.move(*place, steps=8)
        self.page.mouse.up()

    def answered(self):
        """Wait for the answer: class (-1: none), radius, votes by class."""
        self.page.wait_for_selector("#radius:not([data-radius=''])")
        self.page.wait_for_selector("#stop", state="hidden")
        votes = [int(row.get_attribute("data-votes")) for row in self.page.locator(".bar-row").all()]
        return (
            int(self.page.get_attribute("#answer", "data-class")),
            float(self.page.get_attribute("#radius", "data-radius")),
            votes,
        )

    def ask(self, n=None):
        if n is not None:
            self.page.select_option("#count", str(n))
        self.page.click("#ask")
        return self.answered()

    def attack(self):
        self.page.click("#find")
        self.page.wait_for_selector("#attack-stage:not([hidden])")

    def state(self):
        """What the page says about the place of the slider: inside the certificate, and the sentence."""
        return self.page.get_attribute("#attack-state", "data-inside") == "true", self.page.inner_text("#attack-state")


SEVEN = [(0.3, 0.25), (0.7, 0.25), (0.62, 0.45), (0.52, 0.65), (0.46, 0.85)]


@contextmanager
def launched():
    """A browser with a new profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visiting(browser, address, *, complaints=(), **options):
    """A page at `address`. Afterwards: no request left the origin, and nobody complained but about what is listed."""
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
    try:
        visit = Visit(context.new_page(), address)
        yield visit
        unexpected = [said for said in visit.complaints if not any(known in said for known in complaints)]
        assert unexpected == [] and visit.left == []
    finally:
        context.close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def web_host(folder):
    """A plain web server for the files of a folder, on a free port of this machine."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
