"The folded solutions of the pages on optimizers pass the checks beside them."

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

NOTEBOOKS = Path(__file__).parents[2] / "nbs"


@pytest.mark.parametrize(
    "notebook, task, wrong",
    [
        ("optim/03_groups", "layer_rates", "lambda n, peak, factor: {f'encoder.blocks.{i}*': {'lr': peak} for i in range(n)}"),
        ("optim/04_muon", "cubic", "lambda sigma, rounds: 1.5 * sigma - 0.5 * sigma**3"),
        ("optim/05_quantized", "block_scales", "lambda x, block: x[: len(x) // block * block].view(-1, block).abs().amax(1)"),
    ],
)
def test_the_folded_solution_passes_its_check_and_a_likely_mistake_does_not(notebook, task, wrong):
    cells = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    exercise = next(text for text in sources if f"def check_{task}" in text)
    folded = next(text for text in sources if "<summary>Solution</summary>" in text)
    names = {**vars(importlib.import_module(f"bertlab.optim.{notebook[9:]}")), "np": np, "torch": torch}
    exec(exercise, names)
    assert names[f"check_{task}"]() == "not attempted"
    exec(folded.split("```python")[1].split("```")[0], names)
    assert names[f"check_{task}"]() == "right"
    names[task] = eval(wrong, names)
    assert names[f"check_{task}"]() not in ("right", "not attempted")
