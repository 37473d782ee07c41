"""The page as people meet it: in a browser, on a phone, on paper."""

import base64
import re

import pytest

from routepack.report.plan_page import write_report

WIDTHS = {"desktop": 1280, "tablet": 768, "phone": 390, "small phone": 320}
# What lies outside the window's width, or is cut by its own box. Text of a chart must lie inside its chart.
MISFITS = """(() => {
  const found = [], width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) found.push(`page exceeds ${width}`);
  for (const element of document.body.querySelectorAll('*')) {
    if (element.closest('defs')) continue;
    const box = element.getBoundingClientRect(), name = element.tagName + '.' + (element.getAttribute('class') || '');
    if (!box.width && !box.height) continue;
    if (box.right > width + 0.5 || box.left < -0.5) found.push(`${name} from ${box.left} to ${box.right} of ${width}`);
    const inline = element instanceof SVGElement || getComputedStyle(element).display === 'inline';
    if (!inline && element.clientWidth > 0 && element.scrollWidth > element.clientWidth + 1)
      found.push(`${name} holds ${element.scrollWidth} in ${element.clientWidth}`);
    const chart = element.ownerSVGElement;
    if (chart && ['text', 'circle', 'line', 'rect'].includes(element.tagName)) {
      const outer = chart.getBoundingClientRect();
      if (box.left < outer.left - 1 || box.right > outer.right + 1 || box.top < outer.top - 1 || box.bottom > outer.bottom + 1)
        found.push(`${name} leaves its chart: ${element.textContent}`);
    }
  }
  return found;
})()"""
SMALL_TEXT = """[...document.body.querySelectorAll('p,li,td,th,dd,dt,span,figcaption,text,h1,h2,h3,summary')]
  .filter(e => e.textContent.trim() && e.getBoundingClientRect().width && parseFloat(getComputedStyle(e).fontSize) < 11.9)
  .map(e => e.textContent)"""
CONTRAST = """(() => {
  const parts = text => text.match(/[0-9.]+/g).slice(0, 3).map(Number);
  const linear = value => value <= 0.03928 * 255 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
  const light = rgb => 0.2126 * linear(rgb[0]) + 0.7152 * linear(rgb[1]) + 0.0722 * linear(rgb[2]);
  const page = light(parts(getComputedStyle(document.body).backgroundColor));
  return [...document.body.querySelectorAll('p,li,td,th,dd,dt,span,figcaption')].filter(e => e.textContent.trim()).map(e => {
    const ink = light(parts(getComputedStyle(e).color));
    return (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05);
  }).reduce((a, b) => Math.min(a, b));
})()"""


@pytest.fixture(scope="module", params=["plan", "linked", "hostile", "no trace"])
def page(request, tmp_path_factory, window):
    out = tmp_path_factory.mktemp("report") / "report.html"
    name = "linked" if request.param == "linked" else "plan"
    plan, given = request.getfixturevalue(name), None if request.param == "no trace" else window
    if request.param == "hostile":
        plan, given = request.getfixturevalue("hostile")
        write_report(plan, out, given, plan_name="p" * 250, trace_name="<b>" + "t" * 250)
    else:
        write_report(plan, out, given, plan_name="plan.safetensors", trace_name="rollouts.safetensors")
    return out


def unfold(browser):
    browser.evaluate("document.querySelectorAll('details').forEach(element => element.open = true)")


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_nothing_overflows_or_is_cut(browser, page, width):
    browser.open(page, width=width, mobile=width < 500)
    assert browser.evaluate(MISFITS) == []
    unfold(browser)
    assert browser.evaluate(MISFITS) == []


def test_the_check_for_overflow_can_fail(browser, page):
    browser.open(page, width=390, mobile=True)
    browser.evaluate("document.querySelector('h1').style.cssText = 'white-space: nowrap; width: 2000px'")
    assert browser.evaluate(MISFITS)


def test_text_is_large_enough_to_read(browser, page):
    for width in WIDTHS.values():
        browser.open(page, width=width, mobile=width < 500)
        assert browser.evaluate(SMALL_TEXT) == []


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_the_page(browser, page, dark):
    browser.open(page, width=1280, dark=dark)
    assert browser.evaluate(CONTRAST) >= 4.5


def test_nothing_is_fetched_run_or_complained_about(browser, page):
    browser.open(page, width=1280)
    unfold(browser)
    asked = [event["params"]["request"]["url"] for event in browser.events if event["method"] == "Network.requestWillBeSent"]
    assert asked == [page.as_uri()]
    assert browser.evaluate("document.querySelectorAll('script,img,iframe,object,embed').length") == 0
    told = [event for event in browser.events if event["method"] in ("Log.entryAdded", "Page.javascriptDialogOpening")]
    assert told == []


def test_charts_have_names_for_those_who_do_not_see_them(browser, page):
    browser.open(page, width=1280)
    nameless = "[...document.querySelectorAll('svg[role=img]')].filter(e => !e.getAttribute('aria-label')).length"
    assert browser.evaluate(nameless) == 0
    assert browser.evaluate("document.querySelectorAll('svg[role=img]').length") >= 6


@pytest.mark.parametrize("paper", [(8.27, 11.69), (8.5, 11.0)], ids=["A4", "letter"])
def test_it_prints_without_losing_anything(browser, page, paper):
    width = int((paper[0] - 2 * 14 / 25.4) * 96)
    browser.open(page, width=width, media="print")
    assert browser.evaluate(MISFITS) == []
    browser.call("Emulation.setEmulatedMedia", media="")
    printed = base64.b64decode(browser.call("Page.printToPDF", paperWidth=paper[0], paperHeight=paper[1])["data"])
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 7


def test_paper_holds_what_is_open_and_keeps_tables_whole(browser, page):
    browser.open(page, width=700, media="print")
    style = "getComputedStyle(document.querySelector('{}')).{}"
    assert browser.evaluate(style.format("details", "display")) == "none"
    assert browser.evaluate(style.format("table", "breakInside")) == "avoid"
    browser.evaluate("document.querySelector('details').open = true")
    assert browser.evaluate(style.format("details", "display")) == "block"


def test_paper_is_light_even_where_the_screen_is_dark(browser, page):
    browser.open(page, width=700, media="print", dark=True)
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
