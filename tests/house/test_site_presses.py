"""A newcomer with a phone reaches each of the ten tasks by pressing what the screen shows, three times at most.

A press opens a menu or follows a link. Chromium presses only what is in sight, stands still and is covered by nothing.
"""

from pathlib import Path

import pytest
from test_site_rendered import TASKS, address, browser, pytestmark, visit  # noqa: F401

PHONE = 390


def leading_to(page, wanted: str):
    return page.locator(f'a[href$="/{Path(wanted).name}"]')


def in_sight(links) -> list:
    return [link for link in links.all() if link.is_visible()]


def open_menu_over(page, links) -> None:
    "Press the button of the closed menu that holds one of the links."
    for button in in_sight(page.locator("button[data-bs-toggle=collapse][aria-expanded=false]")):
        menu = page.locator(button.get_attribute("data-bs-target"))
        if menu.locator(links).count():
            button.click()
            links.locator("visible=true").first.wait_for()
            return
    raise AssertionError(f"{page.url}: no menu in sight holds a link to what is wanted")


def press_through(page, wanted: str) -> int:
    "Go on to a page by pressing; the number of presses."
    links, presses = leading_to(page, wanted), 1
    assert links.count(), f"{page.url} has no link to {wanted}"
    if not in_sight(links):
        open_menu_over(page, links)
        presses += 1
    in_sight(links)[0].click()
    page.wait_for_url(lambda url: url.partition("#")[0].endswith(f"/{wanted}"))
    return presses


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_reached_by_three_presses_on_a_phone(task, browser, address):  # noqa: F811
    page, said = visit(browser, address, "index.html", PHONE, "light")
    page.set_default_timeout(10_000)
    presses = sum(press_through(page, wanted) for wanted in TASKS[task])
    assert page.locator("h1").first.is_visible() and said == []
    page.context.close()
    print(f"{task}: {presses} presses")
    assert presses <= 3
