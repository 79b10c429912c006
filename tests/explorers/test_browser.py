"Every explorer in JupyterLab and a real browser: opens, reacts, stays legible; and its static form without a kernel."

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from explorer_cases import CASES, SETUP

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(300)]
STDERR, ERROR = "application/vnd.jupyter.stderr", "application/vnd.jupyter.error"
SETTINGS = {  # all cells stay in the page, to be looked at wherever it is scrolled to; nobody asks about news
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
HANDLES = (
    "[role=slider], .ui-slider-handle, input:not([type=hidden]), select"  # the second: ipywidgets 7
)

# The least contrast (WCAG 2.2, 1.4.3) of a text with what is painted behind it, inside an element.
CONTRAST = """root => {
    const parse = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
    const over = ([r, g, b, a = 1], below) => [r, g, b].map((c, i) => c * a + below[i] * (1 - a));
    const light = c => c.map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const parents = node => node ? [...parents(node.parentElement), node] : [];
    const behind = node => {
        let paint = matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18] : [255, 255, 255];
        for (const parent of parents(node)) paint = over(parse(getComputedStyle(parent).backgroundColor), paint);
        if (!node.closest('svg')) return paint;
        const box = node.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
        for (const shape of node.closest('svg').querySelectorAll('rect, circle')) {
            const s = shape.getBoundingClientRect(), style = getComputedStyle(shape);
            if (style.fill === 'none' || x < s.left || x > s.right || y < s.top || y > s.bottom) continue;
            paint = over([...parse(style.fill).slice(0, 3), Number(style.fillOpacity)], paint);
        }
        return paint;
    };
    let least = 21, words = '';
    const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const text = walk.currentNode, node = text.parentElement, style = getComputedStyle(node);
        if (!text.textContent.trim() || !node.getClientRects().length || node.closest('title, style')) continue;
        const below = behind(node), ink = parse(node.closest('svg') ? style.fill : style.color);
        const shade = parents(node).reduce((all, one) => all * getComputedStyle(one).opacity, 1);
        const [a, b] = [light(over([...ink.slice(0, 3), (ink[3] ?? 1) * shade], below)), light(below)];
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (contrast < least) [least, words] = [contrast, text.textContent.trim()];
    }
    return [least, words];
}"""

# What reaches beyond an element's right edge, unless a box around it scrolls on its own; and what a
# drawing cuts off of its letters.
CLIPPED = """root => {
    const edge = root.getBoundingClientRect().right + 1;
    const scrolls = node => node && node !== root.parentElement
        && (['auto', 'scroll'].includes(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
    const cut = node => {
        const letters = node.getBoundingClientRect(), drawing = node.closest('svg').getBoundingClientRect();
        return letters.right > drawing.right + 1 || letters.left < drawing.left - 1
            || letters.bottom > drawing.bottom + 3 || letters.top < drawing.top - 3;  // lines have room above
    };
    const beyond = node => node.getBoundingClientRect().right > edge && !scrolls(node);
    return [...root.querySelectorAll('*')]
        .filter(node => node.getClientRects().length && (node.tagName === 'text' ? cut(node) : beyond(node)))
        .map(node => `${node.tagName} ${node.textContent.slice(0, 40)}`);
}"""


def write_notebook(folder) -> None:
    "One notebook with a cell for each explorer; it also writes their static forms."
    show = "\nexplorer.add_class('case-{name}')\nwrite('{name}', explorer)\nexplorer"
    setup = SETUP + (
        "\nfrom pathlib import Path\n\n\n"
        "def write(name, explorer):\n"
        '    page = \'<!doctype html><html lang="en"><meta charset="utf-8"><title>static</title>\'\n'
        "    page += '<style>:root{color-scheme:light dark}</style>' + explorer.static_html\n"
        "    Path(f'{name}.html').write_text(page, encoding='utf-8')\n"
    )
    sources = [setup] + [case.source + show.format(name=name) for name, case in CASES.items()]
    cells = [
        {
            "cell_type": "code",
            "id": f"c{index}",
            "metadata": {},
            "outputs": [],
            "execution_count": None,
            "source": s,
        }
        for index, s in enumerate(sources)
    ]
    kernel = {"display_name": "python3", "language": "python", "name": "python3"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (folder / "explorers.ipynb").write_text(json.dumps(notebook))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder)
    for name, values in SETTINGS.items():
        file = (
            folder / f"JUPYTER_CONFIG_DIR/lab/user-settings/@jupyterlab/{name}.jupyterlab-settings"
        )
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def lab(folder) -> str:
    "The address of a JupyterLab that serves the notebook of all explorers."
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Settings and kernels of the person who runs the tests must not change what is tested.
    settings = {
        name: str(folder / name)
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    }
    # One thread: a kernel that takes every core would wait for the browser that waits for it.
    environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--expose-app-in-browser",
    ]
    command += [
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
    ]
    command += [f"--ServerApp.root_dir={folder}"]
    with open(folder / "lab.log", "w") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        for _ in range(240):
            if server.poll() is not None:
                pytest.fail((folder / "lab.log").read_text()[-3000:])
            with socket.socket() as knock:
                if knock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.25)
        yield f"http://127.0.0.1:{port}/lab/tree/explorers.ipynb?reset"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)


@pytest.fixture(scope="module")
def page(lab, browser):
    "The notebook, opened and run from top to bottom."
    page = browser.new_page(viewport={"width": 1200, "height": 1000})
    page.script_errors = []
    page.on("pageerror", lambda error: page.script_errors.append(str(error)))
    page.goto(lab)
    page.wait_for_function("window.jupyterapp && window.jupyterapp.commands", timeout=120_000)
    idle = """() => {
        const panel = window.jupyterapp.shell.currentWidget;
        return panel?.context?.sessionContext?.session?.kernel?.status === 'idle';
    }"""
    page.wait_for_function(idle, timeout=120_000)
    page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_timeout(500)  # until the kernel is busy
    page.wait_for_function(idle, timeout=120_000)
    return page


def find_explorer(page, name):
    explorer = page.locator(f".case-{name}").first
    explorer.wait_for(timeout=20_000)
    explorer.scroll_into_view_if_needed()
    return explorer


def drag(page, handle, share) -> None:
    "Take a slider by its handle and put it at a share of its length."
    track = handle.locator("xpath=ancestor::*[contains(@class, 'slider')][last()]")
    box, line = handle.bounding_box(), track.bounding_box()
    height = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, height)
    page.mouse.down()
    page.mouse.move(line["x"] + share * line["width"], height, steps=3)
    page.mouse.up()


def do(page, explorer, act) -> None:
    "Move one control as a hand does, by keys or by the mouse."
    if act.how == "play":
        return explorer.locator(".widget-play button").first.click()
    label = page.locator("> label, > .widget-label").get_by_text(act.control, exact=True)
    control = explorer.locator(".jupyter-widgets, .widget-toggle-buttons", has=label).last
    if act.how == "click":
        return control.get_by_role("button", name=act.what, exact=True).click()
    if act.how == "choose":
        return control.locator("select").select_option(label=act.what)
    handle = control.locator(HANDLES).first
    if act.how == "drag":
        return drag(page, handle, float(act.what))
    handle.focus()
    if act.how == "type":
        handle.fill(act.what)
        return handle.press("Enter")
    for key in act.what.split():
        page.keyboard.press(key)


def test_every_explorer_opens_without_an_error(page):
    errors = page.locator(
        f"[data-mime-type='{ERROR}'], [data-mime-type='{STDERR}']"
    ).all_text_contents()
    assert [text for text in errors if "Traceback" in text or "Error" in text] == []
    for name in CASES:
        assert find_explorer(page, name).is_visible()
    assert page.script_errors == []


@pytest.mark.parametrize("name", CASES)
def test_an_explorer_reacts_to_keys_and_clicks(page, name):
    explorer = find_explorer(page, name)
    for act in CASES[name].acts:
        before = explorer.inner_text()
        assert not re.search(act.shows, before), f"{act.control} shows {act.shows!r} already"
        do(page, explorer, act)
        end = time.monotonic() + 10
        while not re.search(act.shows, text := explorer.inner_text()):
            assert time.monotonic() < end, f"{act} did not show {act.shows!r} but {text!r}"
            time.sleep(0.01)
        assert "Traceback" not in text and "a bug in this explorer" not in text
    assert page.script_errors == []


def test_every_control_is_reached_by_the_tab_key(page):
    for name in CASES:
        explorer = find_explorer(page, name)
        controls = explorer.locator(
            f":is({HANDLES}, textarea, button):not([disabled], [disabled] *):visible"
        )
        count = controls.evaluate_all(
            "all => all.map((node, number) => node.dataset.number = number).length"
        )
        controls.first.focus()
        reached = set()
        for _ in range(3 * count):  # drawings that scroll and readouts of sliders are stops, too
            reached.add(page.evaluate("document.activeElement.dataset.number"))
            page.keyboard.press("Tab")
        missed = {str(n) for n in range(count)} - reached
        assert count > 1 and not missed, (
            name,
            [controls.nth(int(index)).evaluate("n => n.outerHTML") for index in missed],
        )


def test_drawings_are_legible_in_both_themes_and_zoomed(page):
    page.set_viewport_size({"width": 640, "height": 480})  # what is left of a window at 200 %
    page.evaluate("window.jupyterapp.shell.collapseLeft()")
    for theme, is_light in (("JupyterLab Light", "true"), ("JupyterLab Dark", "false")):
        page.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme
        )
        page.wait_for_function(f"document.body.dataset.jpThemeLight === '{is_light}'")
        page.wait_for_timeout(500)  # for the layout
        for name in CASES:
            explorer = find_explorer(page, name)
            contrast, words = explorer.locator(".widget-html-content").last.evaluate(CONTRAST)
            assert contrast >= 4.5, f"{theme}, {name}: {words!r} has a contrast of {contrast:.1f}"
            assert explorer.evaluate(CLIPPED) == [], (theme, name)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_static_forms_work_without_network_or_script(page, folder, browser, scheme):
    # 200 %: half of the window's places, twice the pixels each.
    context = browser.new_context(
        viewport={"width": 600, "height": 450},
        device_scale_factor=2,
        color_scheme=scheme,
        offline=True,
    )
    alone, requests, errors = context.new_page(), [], []
    alone.on("request", lambda request: requests.append(request.url))
    alone.on("pageerror", lambda error: errors.append(str(error)))
    alone.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    for name, case in CASES.items():
        file = folder / f"{name}.html"
        assert file.stat().st_size <= 151_000 and "<script" not in file.read_text(encoding="utf-8")
        alone.goto(file.as_uri())
        labels, displayed = alone.locator("fieldset > label").all_inner_texts(), {}
        alone.keyboard.press("Tab")  # to the first button of the group
        for label in labels:
            figure = alone.locator("fieldset figure:visible")
            assert figure.count() == 1 and figure.locator("figcaption").inner_text() == label
            displayed[label] = figure.inner_text() + figure.inner_html()
            contrast, words = figure.evaluate(CONTRAST)
            assert contrast >= 4.5, f"{name}, {label}: {words!r} has a contrast of {contrast:.1f}"
            assert alone.locator("body").evaluate(CLIPPED) == [], (name, label)
            alone.keyboard.press("ArrowRight")
        assert len(set(displayed.values())) == len(labels), f"{name}: two steps show the same"
        if labels:  # after the last comes the first, and a click goes anywhere
            alone.locator("fieldset > label").last.click()
            assert alone.locator("fieldset figure:visible figcaption").inner_text() == labels[-1]
        for label, pattern in case.steps.items():
            assert re.search(pattern, displayed[label]), f"{name}, {label}: no {pattern!r}"
    context.close()
    assert {url.partition(":")[0] for url in requests} == {"file"} and errors == []
