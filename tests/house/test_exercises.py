"Every exercise to predict or to investigate has a folded answer."

import json
import re

import pytest
import sync
from conftest import ROOT

KIND = re.compile(r"^(\d+)\. \*(Predict|Investigate|Implement)\b", re.MULTILINE)


def unanswered(text: str) -> list[str]:
    """Return the exercises of a page's prose without a fold of their own.

    The rule: after the question, and before the next exercise or heading, comes `<details>`.
    """
    parts = KIND.split(text)[1:]
    exercises = zip(parts[::3], parts[1::3], parts[2::3])
    return [
        f"{number}. {kind}"
        for number, kind, rest in exercises
        if kind != "Implement" and "<details>" not in re.split(r"^## ", rest, flags=re.MULTILINE)[0]
    ]


def test_the_rule_finds_an_exercise_without_a_fold():
    answered = "1. *Predict.* Why?\n\n<details><summary>Answer</summary>\n\nSo.\n</details>\n\n"
    assert unanswered(answered) == []
    assert unanswered(answered + "3. *Investigate.* How?\n\n## Recap\n\n<details>") == [
        "3. Investigate"
    ]
    assert unanswered("1. *Predict.* Why?\n2. *Implement.* `f`.\n\n<details>") == ["1. Predict"]


@pytest.mark.parametrize("chapter", [
    "core", "data", "model", "optim", "train", "finetuning", "embeddings", "explorers", "cli",
    "course",
])  # fmt: skip
def test_every_exercise_has_a_folded_answer(chapter):
    missing = {}
    for path in sync.notebooks(ROOT):
        if path.parent.relative_to(ROOT / "nbs").parts[:1] != (chapter,):
            continue
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n\n".join(sync.source_of(c) for c in cells if c["cell_type"] == "markdown")
        if exercises := unanswered(text):
            missing[path.stem] = exercises
    assert missing == {}
