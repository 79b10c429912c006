"""The rendered site in a browser: in _docs, or in the folder that BERTLAB_SITE names.

`make docs` renders it with Quarto. With AXE, the path of axe-core's axe.min.js, the accessibility of pages is tested, too.
"""

import functools
import gzip
import html.parser
import http.server
import os
import re
import threading
from pathlib import Path

import pytest
from conftest import ROOT
from test_site import check_answers

SITE = Path(os.environ.get("BERTLAB_SITE", ROOT / "_docs"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (SITE / "index.html").is_file(),
        reason="there is no rendered site: make docs, with Quarto",
    ),
]
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html")
               if path.relative_to(SITE).parts[0] not in ("live", "site_libs"))  # fmt: skip


class Reader(html.parser.HTMLParser):
    "Text outside code, formulas and scripts; what is loaded, where links lead, which anchors there are."

    QUIET = ("script", "style", "code", "pre", "math")

    def __init__(self, text: str):
        super().__init__()
        self.text, self.loaded, self.links, self.anchors, self.inside = [], [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag in self.QUIET:
            self.inside.append(tag)
        self.anchors.update(filter(None, [values.get("id"), values.get("name")]))
        loads = tag in ("script", "img", "iframe", "source") or (
            tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload")
        )
        if loads and (values.get("src") or values.get("href")):
            self.loaded.append(values.get("src") or values.get("href"))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])

    def handle_endtag(self, tag):
        if self.inside and tag == self.inside[-1]:
            self.inside.pop()

    def handle_data(self, data):
        if not self.inside:
            self.text.append(data)


@pytest.fixture(scope="module")
def read() -> dict[str, Reader]:
    return {name: Reader((SITE / name).read_text(encoding="utf-8")) for name in PAGES}


def test_pages_show_no_markup_and_load_nothing_from_elsewhere(read):
    raw = re.compile(
        r"\$\$|\\(?:frac|text|sum|mathbf|begin)\b|\]\(https?:|\]\([\w./]+\.(?:ipynb|qmd)"
    )
    elsewhere = re.compile(r"(?:https?:)?//")
    problems = {
        name: raw.findall("".join(page.text)) + list(filter(elsewhere.match, page.loaded))
        for name, page in read.items()
    }
    assert not any(problems.values()), problems


def test_links_and_anchors_lead_somewhere(read):
    problems = []
    for name, page in read.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:|//|javascript", link) or name == "404.html":
                continue
            path = SITE / target_of(name, link)
            path = path / "index.html" if path.is_dir() else path
            linked = (
                read.get(path.relative_to(SITE).as_posix()) if path.is_relative_to(SITE) else None
            )
            if not path.is_file() or anchor and linked and anchor not in linked.anchors:
                problems.append(f"{name}: {link}")
    assert problems == []


# What a newcomer looks for, and the pages from the first page to it.
TASKS = {
    "resume a run": ["guides/resume.html"],
    "fine-tune a CSV": ["guides/finetune_csv.html"],
    "save and share": ["guides/save_and_share.html"],
    "diagnose a run": ["guides/diagnose.html"],
    "make a run fit": ["guides/out_of_memory.html"],
    "install an extra": ["guides/install.html"],
    "serve a model": ["guides/serve.html"],
    "use several machines": ["guides/several_machines.html"],
    "learn how a model is trained": ["course/index.html", "course/three_minutes.html"],
    "find what a flag of a command means": ["api.html", "reference/commands/pretrain.html"],
}


def target_of(name: str, link: str) -> str:
    "The page, relative to the site, to which a link on a page leads."
    path = link.partition("#")[0].partition("?")[0]
    return os.path.normpath((Path(name).parent / path).as_posix()) if path else name


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_within_two_clicks_of_the_first_page(task, read):
    here = "index.html"
    assert len(TASKS[task]) <= 2
    for page in TASKS[task]:
        assert page in {target_of(here, link) for link in read[here].links}, (
            f"{here} has no link to {page}"
        )
        here = page


class Handler(http.server.SimpleHTTPRequestHandler):
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript",
                      ".wasm": "application/wasm", ".woff2": "font/woff2"}  # fmt: skip

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    handler = functools.partial(Handler, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def visit(browser, address: str, name: str, width: int, scheme: str):
    "Open a page in a window of a width; return it with its errors and its requests to other hosts."
    page = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme
    ).new_page()
    errors: list[str] = []
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    page.on("pageerror", lambda error: errors.append(str(error)))
    result = (address, "data:", "blob:")
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith(result) else errors.append(f"asked for {request.url}")
        ),
    )
    page.goto(address + name, timeout=60_000)
    return page, errors


@pytest.mark.timeout(3600)  # with axe, every page takes seconds
@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1400, "light")])
def test_no_page_is_wider_than_its_window_or_has_errors(browser, address, width, scheme):
    axe = Path(os.environ["AXE"]).read_text(encoding="utf-8") if os.environ.get("AXE") else None
    problems = {}
    for name in PAGES:
        if name == "404.html":  # its addresses are those of the published site
            continue
        page, errors = visit(browser, address, name, width, scheme)
        page_width = page.evaluate("document.documentElement.scrollWidth")
        problems[name] = errors + [page_width] * (page_width > width)
        if axe:
            page.evaluate(axe)
            result = page.evaluate("axe.run({runOnly: ['wcag2a', 'wcag2aa']})")
            problems[name] += [violation["id"] for violation in result["violations"]]
        page.context.close()
    assert not any(problems.values()), problems


def test_search_answers_questions_and_knows_every_option(browser, address):
    page, errors = visit(browser, address, "index.html", 1400, "light")
    page.get_by_role("button", name="Search").first.click()
    ask = """async (queries) => {
        const docs = await (await fetch("search.json")).json();
        return queries.map((query) => siteSearch(query, docs, 8).map(({ item }) => item.href));
    }"""
    check_answers(lambda queries: page.evaluate(ask, queries))
    assert errors == []


def test_the_code_of_names_is_on_their_page_and_not_in_the_index():
    page = (SITE / "data/packing.html").read_text(encoding="utf-8")
    assert '<span class="kw">def</span> split_into_windows(' in page
    assert "def split_into_windows(" not in (SITE / "search.json").read_text(encoding="utf-8")


def test_the_first_view_is_small(browser, address):
    page = browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
    responses: list = []
    page.on("response", lambda response: responses.append(response))
    page.goto(f"{address}index.html")
    page.wait_for_load_state("networkidle")
    sizes = {response.url: len(gzip.compress(response.body())) for response in responses}
    assert sum(sizes.values()) < 200_000, sizes


needs_model = pytest.mark.skipif(
    not (SITE / "live/page.json").is_file(), reason="the site was made without a model"
)


@needs_model
def test_the_model_is_loaded_on_demand(browser, address):
    page, errors = visit(browser, address, "index.html", 1400, "light")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.reload()
    assert not [url for url in requests if "/live/" in url] and errors == []
    page.get_by_role("button", name="Fill the gaps").click()
    page.get_by_role("status").get_by_text("Filled in").wait_for(timeout=120_000)
    assert [url for url in requests if url.endswith(".onnx")] and errors == []


@needs_model
def test_the_glass_encoder_shows_attention_and_swaps(browser, address):
    page, errors = visit(browser, address, "glass.html", 390, "dark")
    assert page.locator(".static").is_visible() and page.locator(".guesses table").count() >= 1
    page.get_by_role("button", name="Fill the gaps").click()
    pieces = page.locator("button.piece")
    pieces.first.wait_for(timeout=120_000)
    shares = [float(text.rstrip(" %")) for text in page.locator(".piece .share").all_inner_texts()]
    assert sum(shares) == pytest.approx(100, abs=0.6 * len(shares))
    assert page.locator(".picture path").count() and page.locator(".picture text.gap").count()
    page.get_by_role("button", name="Layer 1, head 2").click()
    assert page.locator("#glass-head").input_value() == "1"
    shared, said = page.url, page.locator(".said").inner_text()
    assert "layer=0&head=1" in shared and "#text=" in shared
    other, _ = visit(browser, "", shared, 1400, "light")  # what the address of the page keeps
    other.get_by_role("button", name="Fill the gaps").click()
    other.locator(".said").get_by_text(said).wait_for(timeout=120_000)
    before = said
    page.locator("button.piece[aria-pressed=true]").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "text => document.querySelector('.said').textContent !== text", arg=before
    )
    page.locator("#glass-word").fill("number")
    page.get_by_role("button", name="Swap").click()
    page.locator(".changed").get_by_text("became").wait_for(timeout=60_000)
    assert errors == [] and page.evaluate("document.documentElement.scrollWidth") <= 390


@needs_model
def test_the_glass_encoder_writes_the_surest_guess_first(browser, address):
    page, errors = visit(browser, address, "glass.html", 390, "light")
    sentence = page.get_by_role("textbox", name="Sentence")
    sentence.fill("Return True if the object is a string, and False otherwise.")
    page.get_by_role("button", name="Fill the gaps").click()
    page.get_by_role("button", name="Hide every second word").click()
    page.wait_for_function("document.querySelectorAll('.guesses table').length > 3")
    gaps = page.locator(".guesses table").count()
    for step in range(gaps):
        first = page.locator(".guesses tbody tr:first-child").all()
        share = lambda row: float(row.locator("td.number").inner_text().rstrip(" %"))
        word = max(first, key=share).locator("th").inner_text()
        page.get_by_role("button", name="Keep the surest guess").click()
        count = "count => document.querySelectorAll('.kept li').length === count"
        page.wait_for_function(count, arg=step + 1)
        assert page.locator(".kept li").last.inner_text().startswith(f"{word}, ")
    assert "___" not in sentence.input_value() and errors == []
