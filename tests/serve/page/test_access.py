"""Everyone at the page: with a keyboard only, a finger, a phone, in the dark, with a screen reader, without motion."""

import pytest

from tests.serve.page.browsing import SEVEN, needs_browser, visiting

pytestmark = [pytest.mark.slow, needs_browser]


def test_keyboard_only(browser, address):
    with visiting(browser, address) as visit:
        page = visit.open().page
        page.keyboard.press("Tab")  # the skip link
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "pad"
        page.keyboard.press("ArrowUp")
        for _ in range(8):
            page.keyboard.press("ArrowUp")
        page.keyboard.press("Space")
        assert page.inner_text("#said") == "pen down"
        for _ in range(17):
            page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        label, radius, _ = visit.answered()
        assert label == 1 and radius > 0
        for _ in range(80):
            if page.evaluate("document.activeElement.id") == "find":
                break
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector("#attack-stage:not([hidden])")
        assert page.evaluate("document.activeElement.id") == "strength"
        before = float(page.inner_text("#distance"))
        page.keyboard.press("End")
        assert float(page.inner_text("#distance")) > before and visit.state()[0] is False
        page.keyboard.press("Home")
        assert visit.state()[0] is True
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector("#asked li")


UNNAMED = """() => [...document.querySelectorAll("button, input, select, canvas, [role=img], img")]
  .filter((e) => e.offsetParent && !(e.textContent.trim() || e.ariaLabel || e.labels?.length || e.getAttribute("alt") !== null && e.tagName === "IMG"
    || e.parentElement.ariaLabel))
  .map((e) => e.outerHTML.slice(0, 80))"""
SMALL = """() => [...document.querySelectorAll("button, .button, select, input[type=range]")]
  .filter((e) => e.offsetParent).map((e) => [e.id || e.className, e.getBoundingClientRect()])
  .filter(([name, box]) => Math.min(box.height, box.width) < 40).map(([name]) => name)"""
CONTRAST = """() => {
  const parts = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (color) => parts(color).map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)|transparent/.test(c)) return c; } return "rgb(255,255,255)"; };
  return Math.min(...[...document.querySelectorAll("p, dt, dd, button:not(:disabled), h1, h2, h3, span, li, figcaption, label")]
    .filter((e) => e.offsetParent && e.textContent.trim() && !e.closest(".unseen")).map((e) => {
      const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05);
    }));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_light_and_dark(browser, demo, scheme):
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
    with visiting(browser, demo, color_scheme=scheme, **phone) as visit:
        page = visit.open().page
        visit.draw(SEVEN)
        visit.ask()
        visit.attack()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate(SMALL) == []
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate(CONTRAST) >= 4.5
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


def test_a_finger_draws(browser, demo):
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with visiting(browser, demo, **phone) as visit:
        page = visit.open().page
        page.locator("#pad").scroll_into_view_if_needed()
        box = page.locator("#pad").bounding_box()
        hand = page.context.new_cdp_session(page)
        for number, (x, y) in enumerate([*SEVEN, SEVEN[-1]]):
            kind = "touchStart" if number == 0 else "touchEnd" if number == len(SEVEN) else "touchMove"
            points = [] if kind == "touchEnd" else [{"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]}]
            hand.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        assert page.is_enabled("#ask") and visit.ask()[0] == 7


def test_nothing_moves_for_those_who_asked_for_it(browser, demo):
    for wish, expected in (("reduce", 0), ("no-preference", 1)):
        with visiting(browser, demo, reduced_motion=wish) as visit:
            page = visit.open().page
            page.evaluate(
                """() => { window.moved = 0; for (const kind of ["animationstart", "transitionstart"])
                     document.addEventListener(kind, () => (window.moved += 1)); }"""
            )
            visit.draw(SEVEN)
            visit.ask()
            page.wait_for_timeout(300)  # animations begin with a frame
            assert min(1, page.evaluate("window.moved")) == expected
