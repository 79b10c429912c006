"The widgets notebook in JupyterLab and a real browser: it runs, and a slider changes what is drawn."

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

STDERR, ERROR = "application/vnd.jupyter.stderr", "application/vnd.jupyter.error"


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> str:
    "The address of a JupyterLab that serves a copy of the widgets notebook."
    folder = tmp_path_factory.mktemp("lab")
    shutil.copy2(ROOT / "nbs/50_widgets.ipynb", folder / "widgets.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Settings and kernels of the person who runs the tests must not change what is tested.
    own = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
    environment = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
    command += ["--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token="]
    command += [f"--ServerApp.root_dir={folder}"]
    with open(folder / "lab.log", "w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(240):
            if server.poll() is not None:
                pytest.fail((folder / "lab.log").read_text()[-3000:])
            with socket.socket() as knock:
                if knock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.25)
        yield f"http://127.0.0.1:{port}/lab/tree/widgets.ipynb?reset"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)


@pytest.fixture
def page(lab, chromium):
    "The notebook, opened and run from top to bottom."
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        page.goto(lab)
        page.wait_for_function("window.jupyterapp && window.jupyterapp.commands", timeout=60_000)
        idle = """() => {
            const panel = window.jupyterapp.shell.currentWidget;
            return panel?.context?.sessionContext?.session?.kernel?.status === 'idle';
        }"""
        page.wait_for_function(idle, timeout=60_000)
        page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        page.wait_for_timeout(500)  # until the kernel is busy
        page.wait_for_function(idle, timeout=120_000)
        yield page
        browser.close()


def test_typing_and_turning_a_slider_change_what_the_explorer_draws(page):
    said = page.locator(f"[data-mime-type='{ERROR}'], [data-mime-type='{STDERR}']").all_text_contents()
    assert [text for text in said if "Traceback" in text] == []
    explorer = page.locator(".widget-vbox", has=page.locator(".widget-slider")).first
    explorer.scroll_into_view_if_needed()
    drawn = explorer.locator(".widget-html-content").first

    def wait_until_redrawn(before: str) -> str:
        changed = "([node, text]) => node.innerText !== text"
        page.wait_for_function(changed, arg=[drawn.element_handle(), before], timeout=30_000)
        return drawn.inner_text()

    before = drawn.inner_text()
    explorer.locator("input[type=text]").first.fill("Return the name of the file.")
    typed = wait_until_redrawn(before)
    assert (asked := re.search(r"asked (\d+)%", typed)), typed
    explorer.locator("[role=slider]").first.focus()
    page.keyboard.press("ArrowLeft")
    turned = wait_until_redrawn(typed)
    assert int(re.search(r"asked (\d+)%", turned)[1]) < int(asked[1])
