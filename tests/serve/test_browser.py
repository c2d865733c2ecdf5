"""The playground in a real browser: draw, stream, compare, read the numbers."""

import re
import shutil
import time

import pytest

from tests.serve.conftest import Server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium")
playwright = pytest.importorskip("playwright.sync_api")
playwright.expect.set_options(timeout=60_000)

# As root there is no sandbox; nothing outside this machine is asked for anything.
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync"]
TOKEN = "a-token-of-thirty-two-characters"
DESK, PHONE = {"width": 1200, "height": 1000}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("states") / "states.db", model="umbc+set-transformer") as started:
        yield started


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser, server):
    """Open the page; afterwards, nothing may have gone wrong in it, and nothing may have been asked of another host."""
    contexts, problems, hosts = [], [], set()

    def open_page(address=None, ready=True, **options):
        context = browser.new_context(**({"viewport": DESK} | options))
        context.set_default_timeout(30_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if line.type == "error" and "401" not in line.text else None)
        page.on("request", lambda request: hosts.add(re.match(r"\w+://([^/]*)", request.url).group(1)))
        page.goto(address or server.url)
        if ready:
            page.wait_for_selector("body[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
    assert {host.partition(":")[0] for host in hosts} <= {"127.0.0.1"}


def number(page, id):
    return float(page.locator(f"[id='{id}']").inner_text())


def has_text(page, selector, text):
    playwright.expect(page.locator(selector)).to_have_text(text)


def test_stream_a_set_and_read_the_numbers(visit):
    page = visit()
    page.select_option("#size", "64")
    page.click("#draw")
    has_text(page, "#total", "64")
    page.fill("#speed", "100")
    page.click("#play")
    has_text(page, "#count", "64")
    has_text(page, "#play", "Stream")
    oracle = number(page, "oracle")
    for name in ("umbc+em", "umbc+set-transformer", "deepsets", "sse", "set-transformer"):
        assert number(page, f"nll-{name}") > oracle - 1
    page.click("#compare")
    rows = page.locator("#ends tbody tr")
    playwright.expect(rows).to_have_count(5)
    cells = {row[0]: row[1:] for row in (rows.nth(i).locator("td").all_inner_texts() for i in range(5))}
    for name in ("UMBC + two steps of EM", "UMBC + Set Transformer"):
        assert float(cells[name][-1]) < 1e-3
    assert len(set(cells["UMBC + Set Transformer"][:-1])) == 1
    assert float(cells["Set Transformer on chunks"][-1]) > 0.1
    assert page.locator("#panels .verdict").all_inner_texts()[0].startswith("one answer for all orders")
    assert float(cells["UMBC + Set Transformer"][0]) == number(page, "nll-umbc+set-transformer")


def test_pause_and_rewind(visit):
    page = visit()
    page.fill("#speed", "50")
    page.click("#play")
    playwright.expect(page.locator("#count")).not_to_have_text("0")
    page.click("#play")
    has_text(page, "#play", "Stream")
    page.wait_for_timeout(200)
    stood = number(page, "count")
    page.wait_for_timeout(500)
    assert number(page, "count") == stood < 256
    page.click("#rewind")
    has_text(page, "#count", "0")


def test_paint_with_the_pointer_and_with_the_keyboard(visit):
    page = visit()
    page.click("#clear")
    has_text(page, "#total", "0")
    box = page.locator("#board").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 150, steps=10)
    page.mouse.up()
    playwright.expect(page.locator("#total")).not_to_have_text("0")
    page.wait_for_timeout(500)
    painted = number(page, "total")
    assert painted >= 5
    has_text(page, "#count", str(int(painted)))  # they arrived at once
    page.focus("#board")
    page.keyboard.press("2")
    assert page.locator("[name=brush]:checked").get_attribute("value") == "1"
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press(" ")
    has_text(page, "#total", str(int(painted) + 1))
    assert number(page, "nll-umbc+set-transformer") < 100


def test_everything_can_be_reached_by_keyboard(visit):
    page = visit()
    page.focus("#tab-clusters")
    page.keyboard.press("ArrowRight")
    assert page.locator("#pictures").is_visible()
    assert page.evaluate("document.activeElement.id") == "tab-pictures"
    page.keyboard.press("ArrowLeft")
    seen = []
    for _ in range(20):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.name"))
    assert {"board", "brush", "draw", "clear", "size", "order", "speed", "play", "rewind", "compare"} <= set(seen)


def test_pixels_complete_a_picture(visit):
    page = visit()
    page.click("#tab-pictures")
    page.fill("#pixel-speed", "100")
    page.click("#stream-pixels")
    playwright.expect(page.locator("[id='pixel-nll-umbc+set-transformer']")).not_to_have_text("–")
    first = number(page, "pixel-nll-umbc+set-transformer")
    has_text(page, "#known", "1024")
    has_text(page, "#stream-pixels", "Stream pixels in")
    assert number(page, "pixel-nll-umbc+set-transformer") < first
    page.check("[name=tool][value=erase]")
    page.locator("#easel").click(position={"x": 50, "y": 50})
    has_text(page, "#known", "1023")
    page.select_option("#hidden", "blank")
    has_text(page, "#known", "0")
    page.locator("#easel").click(position={"x": 50, "y": 50})
    has_text(page, "#known", "1")
    page.set_input_files("#file", {"name": "no.png", "mimeType": "image/png", "buffer": b"this is no picture"})
    has_text(page, "#status", "no.png is no picture that this browser can read")


def test_a_window_slides_over_events(visit):
    page = visit()
    page.click("#tab-events")
    has_text(page, "#until-text", "20 to 40 s")  # of the first forty seconds
    has_text(page, "#call-python", "window.predict(20)")
    page.fill("#event-speed", "100")
    page.click("#stream-events")
    has_text(page, "#until-text", "100 to 120 s")
    has_text(page, "#stream-events", "Stream")
    has_text(page, "#arrived", page.locator("#all-events").inner_text())
    has_text(page, "#slid", re.compile(r"^the same to \de-([7-9]|1\d)$"))
    for name in ("attention", "maximum", "mean"):
        has_text(page, f"#scratch-{name}", re.compile(r"^\d+ events, (exactly the same|the same to \de-([7-9]|1\d))$"))
    page.fill("#length", "10")
    page.fill("#until", "80")
    has_text(page, "#until-text", "70 to 80 s")
    has_text(page, "#call-route", "GET /sets/id/prediction?since=70&until=80")
    has_text(page, "#subtracted-attention", "refused: mostly rounding errors would be left")
    has_text(page, "#subtracted-maximum", "refused: a maximum does not know the value below it")
    assert not page.is_checked("#follow")
    page.check("#follow")
    has_text(page, "#until-text", "110 to 120 s")
    page.click("#stream-events")  # the same again
    playwright.expect(page.locator("#arrived")).not_to_have_text(page.locator("#all-events").inner_text())
    page.click("#new-events")  # in the midst of it
    has_text(page, "#arrived", "0")
    has_text(page, "#status", re.compile("^stream the events"))
    has_text(page, "#until-text", "–")
    has_text(page, "#load-maximum", "–")


def test_events_by_pointer_and_keyboard(visit):
    page = visit()
    page.click("#tab-events")
    has_text(page, "#until-text", "20 to 40 s")
    box = page.locator("#timeline").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 80, steps=5)
    page.mouse.up()
    has_text(page, "#until-text", "14 to 34 s")  # its middle is where the pointer is
    page.focus("#until")
    page.keyboard.press("ArrowLeft")
    has_text(page, "#until-text", "13 to 33 s")
    page.focus("#length")
    page.keyboard.press("ArrowRight")
    has_text(page, "#until-text", "12 to 33 s")
    page.focus("#timeline")
    page.keyboard.press("3")
    for _ in range(4):
        page.keyboard.press("Shift+ArrowUp")
        page.keyboard.press("Shift+ArrowLeft")
    all_events = number(page, "all-events")
    page.keyboard.press(" ")  # an event of machine 3 at second 28
    has_text(page, "#all-events", str(int(all_events) + 1))
    has_text(page, "#status", "late, and counted in their seconds: 1 event")
    has_text(page, "#slid", re.compile(r"^the same to \de-([7-9]|1\d)$"))
    page.keyboard.press("0")
    page.keyboard.press(" ")
    has_text(page, "#until-text", "18 to 39 s")
    page.focus("#tab-events")
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.name"))
    assert {"timeline", "length", "until", "follow", "stream-events", "new-events", "event-speed", "pointer"} <= set(seen)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_hangs_over_the_edge(visit, scheme):
    page = visit(viewport=PHONE, color_scheme=scheme, has_touch=True)
    for tab in ("clusters", "pictures", "events", "service"):
        page.click(f"#tab-{tab}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
    ink, paper = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    dark = [sum(map(int, re.findall(r"\d+", own))) < 384 for own in (ink, paper)]
    assert dark == ([True, False] if scheme == "light" else [False, True])


def test_a_server_with_tokens_asks_for_one(visit, tmp_path):
    environment = {"SETSTREAM_TOKENS": TOKEN}
    with Server(tmp_path / "states.db", model="umbc+set-transformer", environment=environment) as guarded:
        page = visit(guarded.url, ready=False)
        page.fill("[name=token]", "a-wrong-token-of-enough-length")
        page.keyboard.press("Enter")
        has_text(page, "#status", "the server does not know this token")
        page.fill("[name=token]", TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_selector("body[data-ready]")
        page.click("#tab-service")
        has_text(page, "#model-name", "umbc+set-transformer")


def test_when_the_server_ends_the_page_says_so_and_goes_on_when_it_is_back(visit, tmp_path):
    own = {"model": "umbc+set-transformer", "environment": {"TMPDIR": str(tmp_path)}}  # killed, it cannot clean up
    with Server(tmp_path / "states.db", **own) as ending:
        page = visit(ending.url)
        page.click("#tab-events")
        has_text(page, "#until-text", "20 to 40 s")
        page.click("[name=pointer][value='2']")
        page.locator("#timeline").click(position={"x": 300, "y": 20})
        has_text(page, "#status", "late, and counted in their seconds: 1 event")
        has_text(page, "#inside", "91")
        before = page.locator("#load-attention").inner_text()
        page.click("#tab-clusters")
        page.fill("#speed", "0")
        page.click("#play")
        playwright.expect(page.locator("#count")).not_to_have_text("0")
        ending.stop()
        has_text(page, "#status", "the connection to the server is gone")
        has_text(page, "#play", "Stream")
        with Server(tmp_path / "states.db", "--port", str(ending.port), **own):
            page.fill("#speed", "100")
            page.click("#play")
            has_text(page, "#count", "256")  # of the set that it had before
            page.click("#tab-events")
            page.fill("#until", "30")
            playwright.expect(page.locator("#inside")).not_to_have_text("91")
            page.fill("#until", "40")  # with the event of before
            has_text(page, "#inside", "91")
            has_text(page, "#load-attention", before)


@pytest.mark.slow
def test_the_page_is_ready_soon(visit):
    visit()  # the models have been read
    began = time.perf_counter()
    visit()
    taken = time.perf_counter() - began
    print(f"ready after {taken:.2f} s")
    assert taken < 2
