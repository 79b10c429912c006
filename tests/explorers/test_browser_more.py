"The training monitor in JupyterLab and a real browser: curves grow while a cell trains, and a click ends it."

import json
import re
import time

import pytest
from test_browser import ERROR, SETTINGS, lab  # noqa: F401 (fixtures)

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(300)]

PREPARE = """
import warnings; warnings.filterwarnings("ignore")
import torch
from bertlab.model.config import modernbert_tiny
from bertlab.train.modules import PretrainingModule
from bertlab.train.trainer import make_trainer
from bertlab.explorers.training_monitor import TrainingMonitor

class Data(torch.utils.data.Dataset):
    def __len__(self): return 10**7
    def __getitem__(self, i):
        ids = torch.randint(5, 50, (64,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "attention_mask": torch.ones(64, dtype=torch.long), "labels": ids.clone()}

shape = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1)
module = PretrainingModule(modernbert_tiny(vocab_size=50, pad_token_id=0, **shape).to_diff_dict())
"""
TRAIN = """
monitor = TrainingMonitor(every_seconds=0.3, checkpoint="stopped.ckpt")
trainer = make_trainer(10**6, "32-true", "cpu", callbacks=[monitor])
trainer.fit(module, torch.utils.data.DataLoader(Data(), batch_size=4))
kept = torch.load("stopped.ckpt", weights_only=False)["global_step"]
print(f"ended at {trainer.global_step}, checkpoint of {kept}, {len(monitor.rows)} rows")
"""
AFTER = "print('the next cell ran')"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    cells = [
        {
            "cell_type": "code",
            "id": f"c{n}",
            "metadata": {},
            "outputs": [],
            "execution_count": None,
            "source": source,
        }
        for n, source in enumerate((PREPARE, TRAIN, AFTER))
    ]
    kernel = {"display_name": "python3", "language": "python", "name": "python3"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (folder / "explorers.ipynb").write_text(json.dumps(notebook))
    for name, values in SETTINGS.items():
        file = (
            folder / f"JUPYTER_CONFIG_DIR/lab/user-settings/@jupyterlab/{name}.jupyterlab-settings"
        )
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(values))
    return folder


def wait_for(read, condition, seconds):
    "Read until the condition holds; give what was read."
    end = time.monotonic() + seconds
    while not condition(value := read()):
        assert time.monotonic() < end, f"not within {seconds} s: {value!r}"
        time.sleep(0.05)
    return value


def test_a_click_ends_a_run_whose_curves_grow(lab, browser):  # noqa: F811
    page = browser.new_page(viewport={"width": 1200, "height": 1000})
    page.goto(lab)
    page.wait_for_function("window.jupyterapp && window.jupyterapp.commands", timeout=60_000)
    idle = "() => window.jupyterapp.shell.currentWidget?.context?.sessionContext?.session?.kernel?.status === 'idle'"
    page.wait_for_function(idle, timeout=60_000)
    # In braces: a promise that is given back would be waited for, and the cell ends only by the click.
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
    drawing = page.locator(".widget-html-content").first
    drawing.wait_for(timeout=120_000)
    step = lambda: int(
        (re.search(r"step ([\d,]+) of", drawing.inner_text()) or [0, "0"])[1].replace(",", "")
    )
    first = wait_for(step, lambda n: n > 0, 60)
    later = wait_for(step, lambda n: n > first, 30)
    assert drawing.locator("svg").count() == 4 and later < 10**6
    curve = lambda: drawing.evaluate(
        "node => node.querySelector('svg [stroke=\"#0072B2\"]').outerHTML"
    )
    before = curve()
    wait_for(curve, lambda now: now != before, 30)
    # Another cell is run meanwhile: it must wait, and must not get lost.
    meanwhile = "print('meanwhile')"
    kernel = "window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel"
    page.evaluate(f"code => {{ window.waited = ''; const cell = {kernel}.requestExecute({{code}});"
                  "cell.onIOPub = said => { window.waited += said.content.text || '' } }", meanwhile)  # fmt: skip
    button = page.get_by_role("button", name="stop after this step")
    button.click()
    outputs = wait_for(page.locator(".jp-OutputArea-output").all_inner_texts,
                    lambda texts: any("the next cell ran" in text for text in texts), 60)  # fmt: skip
    assert page.locator(f"[data-mime-type='{ERROR}']").count() == 0
    ended = re.search(r"ended at (\d+), checkpoint of (\d+), (\d+) rows", "\n".join(outputs))
    assert ended and later <= int(ended[1]) == int(ended[2]) == int(ended[3]) < 10**6
    assert page.get_by_role("button", name=f"stopped after step {ended[1]}").is_disabled()
    wait_for(lambda: page.evaluate("window.waited"), lambda text: text == "meanwhile\n", 10)
    page.close()
