"The twenty puzzles: right answers pass, common mistakes are named, and every answer can be drawn."

import json
import re
from collections import Counter

import numpy as np
import pytest
import sync
import torch
from conftest import ROOT
from matplotlib.colors import to_rgba
from test_notebooks import solutions

from bertlab.core.plots import RED
from bertlab.course.progress import progress
from bertlab.course.puzzles import PUZZLES, check_puzzle, draw_puzzle, try_puzzle
from bertlab.model.attention import document_mask
from bertlab.model.losses import bits_per_byte
from bertlab.optim.schedulers import Schedule

PAGE = ROOT / "nbs/course/puzzles.ipynb"
CELLS = [
    (cell["cell_type"], sync.source_of(cell))
    for cell in json.loads(PAGE.read_text("utf-8"))["cells"]
]
PROSE = "\n\n".join(source for cell_type, source in CELLS if cell_type == "markdown")
ANSWERS: dict = {"np": np}
for code in solutions(PROSE):
    exec(code, ANSWERS)

index = np.arange  # short, for the table below
# Wrong answers of readers, written in another way than in the package, and words of the name of the mistake.
WRONG = {
    "real_tokens": [
        (lambda lengths, L: index(L)[None] < lengths[:, None] + 1, "off by one: the first cell of padding"),
        (lambda lengths, L: index(1, L + 1) < lengths[:, None], "off by one: the last token"),
    ],
    "left_only": [
        (lambda L: np.triu(np.ones((L, L))), "row and column are swapped"),
        (lambda L: np.tril(np.ones((L, L)), -1) > 0, "no token sees itself"),
    ],
    "near": [
        (lambda L, reach: np.abs(np.subtract.outer(index(L), index(L))) < reach, "exactly `reach` away"),
        (lambda L, reach: np.tri(L, k=reach) > 0, "sign of the distance"),
    ],
    "same_document": [
        (lambda d: np.equal.outer(d, d), "padding attends to padding"),
        (lambda d: np.outer(d, d) > 0, "attends across documents"),
    ],
    "padding_share": [
        (lambda n: n.sum() / (len(n) * max(n)), "share of tokens"),
        (lambda n: len(n) * max(n) / n.sum() - 1, "by the tokens"),
    ],
    "boundaries": [
        (np.cumsum, "0 where the first document begins"),
        (lambda n: np.append(0, np.cumsum(n)[:-1]), "end of the last"),
    ],
    "document_numbers": [
        (lambda n, L: np.pad(np.repeat(index(len(n)), n), (0, L - n.sum())), "begins at 0"),
        (lambda n, L: np.pad(np.repeat(index(1, len(n) + 1), n), (0, L - n.sum()), "edge"), "last document"),
    ],
    "best_fit": [
        (lambda free, n: max([(-f, -i, i) for i, f in enumerate(free) if f > n] or [(0, 0, -1)])[2], "exactly enough"),
        (lambda free, n: next((i for i, f in enumerate(free) if f >= n), -1), "first fit"),
    ],
    "distances": [
        (lambda L: np.subtract.outer(index(L), index(L)), "row and column are swapped"),
        (lambda L: abs(index(L) - index(L)[:, None]), "sign is lost"),
    ],
    "restart": [
        (lambda n: index(sum(n)), "does not restart"),
        (lambda n: np.concatenate([index(1, length + 1) for length in n]), "begins at 1"),
    ],
    "restart_by_number": [
        (lambda d: index(len(d)) - np.array([list(d).index(document) for document in d]), "padding is counted"),
        (lambda d: np.where(d > 0, index(len(d)), 0), "does not restart"),
    ],
    "turning_angles": [
        (lambda L, K, base: index(L)[:, None] / base ** (index(K // 2) / K), "half as large"),
        (lambda L, K, base: index(L)[:, None] * base ** (index(0, K, 2) / K), "not faster"),
    ],
    "rise": [
        (lambda s, W: np.clip(s / W, 0, 1), "starts at zero"),
        (lambda s, W: np.minimum((s + 1) / (1 + W), 1.0), "update late"),
    ],
    "cosine_to_floor": [
        (lambda s, T, f: f + 0.5 + 0.5 * np.cos(s * np.pi / T), "added on top"),
        (lambda s, T, f: np.clip(0.5 + 0.5 * np.cos(s * np.pi / T), f, 1), "cut off"),
    ],
    "inverse_sqrt": [
        (lambda s, W: np.where(s < W - 1, (s + 1) / W, (s + 1.0) ** -0.5), "jumps down"),
        (lambda s, W: np.minimum((s + 1) / W, W / (s + 1)), "root is missing"),
    ],
    "rise_stay_fall": [
        (lambda s, W, C, T: np.clip(s / W, 0, 1) * (1 - np.clip((s - T + C) / C, 0, 1) ** 0.5), "starts at zero"),
        (lambda s, W, C, T: np.minimum(1, (s + 1) / W) * np.clip((T - s) / C, 0, 1), "straight line"),
    ],
    "mean_loss": [
        (lambda x, y: x.sum() / len(x), "mean over padding"),
        (lambda x, y: np.where(y == -100, 0, x).mean(), "wrong count"),
    ],
    "joined_loss": [
        (lambda m, n: sum(m) / len(m), "each batch counts the same"),
        (lambda m, n: m @ n, "not yet a mean"),
    ],
    "bits_per_byte": [
        (lambda x, n: sum(x) / sum(n), "these are nats"),
        (lambda x, n: np.mean(x / np.log(2)), "by the tokens"),
    ],
    "cross_entropy": [
        (lambda s, a: np.log(np.sum(np.exp(s), 1)) - np.take_along_axis(s, a[:, None], 1)[:, 0], "overflows"),
        (lambda s, a: -np.log((np.exp(s) / np.exp(s).sum(1)[:, None])[index(len(a)), a]), "overflows"),
    ],
}  # fmt: skip
PAIRS = [(name, *case) for name, cases in WRONG.items() for case in cases]


def test_there_are_four_puzzles_on_each_of_five_themes():
    themes = Counter(puzzle.theme for puzzle in PUZZLES.values())
    assert len(themes) == 5 and set(themes.values()) == {4} and set(WRONG) == set(PUZZLES)


@pytest.mark.parametrize("name", PUZZLES)
def test_the_page_has_question_stub_and_answer(name):
    stub = next(n for n, (cell_type, source) in enumerate(CELLS) if cell_type == "code" and f"try_puzzle({name})" in source
                and "NotImplementedError" in source)  # fmt: skip
    assert re.match(r"### \d+\. .*\?\n", CELLS[stub - 1][1])
    folded = CELLS[stub + 1][1]
    assert folded.startswith("<details>") and f"def {name}(" in folded
    assert len(re.sub(r"```.*?```", "", folded, flags=re.DOTALL).split()) > 10, "no reason is given"
    body = re.search(rf"def {name}\(.*\n((?:    .*\n)+)", folded)[1]
    assert len(body.splitlines()) == 1 and body.strip().startswith("return"), "one line"
    assert check_puzzle(ANSWERS[name]) == "right"


@pytest.mark.parametrize("name, answer, words", PAIRS)
def test_a_wrong_answer_gets_the_name_of_its_mistake(name, answer, words):
    verdict = check_puzzle(answer, name)
    assert words in verdict and "for " in verdict, verdict


@pytest.mark.parametrize("name", PUZZLES)
def test_every_listed_mistake_gets_its_own_name(name):
    for mistake, make in PUZZLES[name].mistakes.items():
        assert check_puzzle(make, name).startswith(f"{mistake} ("), mistake


def does_nothing(documents):
    raise NotImplementedError


def edits(documents):
    documents[:] = 0
    return documents


@pytest.mark.parametrize(
    "answer, words",
    [
        (does_nothing, "not attempted"),
        (lambda documents: None, "return"),
        (lambda documents: documents + "a", "it stops with"),
        (lambda documents, more: documents, "TypeError"),
        (edits, "changes its arguments"),
        (lambda documents: "positions", "not an array of numbers"),
        (lambda documents: documents[:0], "shape"),
        (lambda documents: documents * np.nan, "NaN"),
        (lambda documents: ANSWERS["restart_by_number"](documents) + 3, "off by the same +3"),
        (lambda documents: (documents == 3) * 5, "at [1] it gives 0, where 1 is right"),
    ],
)
def test_an_unlisted_mistake_is_described(answer, words):
    assert words in check_puzzle(answer, "restart_by_number")


def test_the_loops_agree_with_the_library():
    documents = PUZZLES["same_document"].cases[0][0]
    mask = document_mask(torch.tensor(documents)[None]).squeeze().numpy()
    np.testing.assert_array_equal(PUZZLES["same_document"].loop(documents), mask)
    steps = np.arange(20)
    np.testing.assert_allclose(PUZZLES["rise"].loop(steps, 7), Schedule(warmup_steps=7).curve(20))
    nats, num_bytes = np.array([1.0, 2.5]), np.array([3, 1])
    assert PUZZLES["bits_per_byte"].loop(nats, num_bytes) == pytest.approx(
        bits_per_byte(nats.sum(), num_bytes.sum())
    )
    for scores, answers in PUZZLES["cross_entropy"].cases:
        losses = torch.nn.functional.cross_entropy(
            torch.tensor(scores), torch.tensor(answers), reduction="none"
        )
        np.testing.assert_allclose(
            PUZZLES["cross_entropy"].loop(scores, answers), losses.numpy(), atol=1e-9
        )


def red_frames(figure) -> int:
    red = to_rgba(RED)
    return sum(
        patch.get_edgecolor() == red and patch.get_linewidth() > 0
        for patch in figure.axes[0].patches
    )


@pytest.mark.parametrize("name", PUZZLES)
def test_a_drawing_frames_only_wrong_cells(name):
    assert red_frames(draw_puzzle(name=name)) == red_frames(draw_puzzle(ANSWERS[name], name)) == 0
    for answer, _ in WRONG[name]:
        figure = draw_puzzle(answer, name)
        with np.errstate(all="ignore"):
            shapes = {
                np.shape(answer(*case)) == np.shape(PUZZLES[name].loop(*case))
                for case in PUZZLES[name].cases
            }
        assert red_frames(figure) > 0 or shapes != {True}
    draw_puzzle(does_nothing, name)


def left_only(L):
    return np.tri(L) > 0


def test_only_a_right_answer_is_recorded_by_a_puzzle(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BERTLAB_PROGRESS", str(tmp_path / "p.json"))
    wrong = lambda L: np.full((L, L), True)  # noqa: E731
    wrong.__name__ = "left_only"
    try_puzzle(wrong)
    assert "every token" in capsys.readouterr().out and progress() == {}
    try_puzzle(left_only)
    assert capsys.readouterr().out == "left_only: right\n" and list(
        progress()["course/puzzles"]
    ) == ["left_only"]
