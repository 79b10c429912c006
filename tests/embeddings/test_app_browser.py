"The search page in a real browser: it answers, links, stays legible and harmless, on a desktop and a phone."

import pytest
from app_cases import FILES, make_index, serving
from test_browser import CLIPPED, CONTRAST

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(300)]
REPORT = "             recall_10\nBM25         0.500 (0.400-0.600)\n" + "wide " * 60
LONG = {
    "deep/folder/" + "name" * 30 + ".md": "# "
    + "heading " * 30
    + "\n\n"
    + "long text of red things " * 30
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    index = make_index(tmp_path_factory.mktemp("page"), files=FILES | LONG)
    index.update()
    with serving(index, REPORT) as server:
        yield server


@pytest.fixture
def open_page(browser, server):
    contexts = []

    def open_page(query="", **options):
        context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.complaints, page.requests = [], []
        page.on("console", lambda m: page.complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda request: page.requests.append(request.url))
        page.goto(server.url + query)
        return page

    yield open_page
    for context in contexts:
        context.close()


def search(page, query):
    "Type and press Enter; wait for the answer."
    page.fill("#query", query)
    page.press("#query", "Enter")
    page.wait_for_function("() => / ms$/.test(document.getElementById('status').textContent)")


def test_a_question_finds_passages_with_their_place(open_page, server):
    page = open_page()
    assert page.evaluate("document.activeElement.id") == "query"
    search(page, "what is red?")
    first = page.locator("#hits li").first
    assert first.locator("h2").inner_text() == "what is red?"
    assert first.locator(".body").inner_text() == "a colour like blue"
    assert "faq.csv" in first.locator(".where").inner_text() and "line 2" in first.inner_text()
    assert first.locator("mark").all_inner_texts() == ["what"]
    assert page.url == server.url + "?q=what+is+red%3F"
    assert page.complaints == [] and all(url.startswith(server.url) for url in page.requests)


def test_an_address_with_a_question_can_be_kept(open_page):
    page = open_page("?q=mu+nu+xi")
    page.wait_for_selector("#hits li")
    assert page.input_value("#query") == "mu nu xi"
    search(page, "omega")
    page.go_back()
    page.wait_for_function("() => document.getElementById('query').value === 'mu nu xi'")


def test_passages_and_questions_are_text_and_never_run(open_page):
    page = open_page()
    search(page, "<img src=x onerror=alert(1)> (.*[ words")
    assert "<img src=x onerror=alert(1)>" in page.locator("#hits").inner_text()
    assert page.locator("main img").count() == 0 and page.complaints == []


def test_the_page_says_that_the_search_has_ended(open_page):
    page = open_page()
    page.route("**/search?*", lambda route: route.abort())
    page.fill("#query", "red")
    page.press("#query", "Enter")
    page.wait_for_selector("#status.mistake")
    assert "start bertlab embed app again" in page.locator("#status").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_it_is_legible_on_a_desktop_and_a_phone(open_page, width, scheme):
    page = open_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    search(page, "long red heading")
    page.click("summary")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(f"({CLIPPED})(document.body)") == []
    least, words = page.evaluate(f"({CONTRAST})(document.body)")
    assert least >= 4.5, words
    small = page.evaluate("""() => [...document.querySelectorAll('button, input, summary')].filter(e => {
        const box = e.getBoundingClientRect(); return box.height < 24 || box.width < 24 }).map(e => e.textContent)""")
    assert small == []


def test_the_keyboard_is_enough_and_roles_are_named(open_page):
    page = open_page()
    search(page, "red")
    page.keyboard.press("Tab")  # the button
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(
        "Copy the path of "
    )
    assert page.get_by_role("search").count() == 1 and page.get_by_role("status").count() == 1
    assert page.get_by_role("searchbox", name="What are you looking for?").count() == 1
    assert page.get_by_role("list", name="Passages found, the best first").count() == 1
    assert page.get_by_role("heading", level=1).count() == 1
