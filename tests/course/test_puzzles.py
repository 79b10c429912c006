"The twenty puzzles: right answers pass, usual mistakes get their names, and every answer can be drawn."

import json
import re
import subprocess
import sys
from functools import partial

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
PROSE = "\n\n".join(source for kind, source in CELLS if kind == "markdown")
ANSWERS: dict = {"np": np}
for code in solutions(PROSE):
    exec(code, ANSWERS)

index = np.arange  # short, for the table below
# What readers write, each written another way than in the package, and words of the name that it must get.
WRONG = {
    "real_tokens": [
        (lambda lengths, L: index(L)[None] < lengths[:, None] + 1, "off by one: the first cell of padding"),
        (lambda lengths, L: index(1, L + 1) < lengths[:, None], "off by one: the last token"),
        (lambda lengths, L: ~(index(L) < lengths[:, None]), "wrong way round"),
        (lambda lengths, L: index(L)[:, None] < lengths, "row and column are swapped"),
    ],
    "left_only": [
        (lambda L: np.triu(np.ones((L, L))), "row and column are swapped"),
        (lambda L: np.tril(np.ones((L, L)), -1) > 0, "nobody sees itself"),
        (lambda L: np.tri(L, k=1) > 0, "one token of the future"),
        (lambda L: np.full((L, L), True), "everybody sees everybody"),
    ],
    "near": [
        (lambda L, reach: np.abs(np.subtract.outer(index(L), index(L))) < reach, "exactly `reach` away"),
        (lambda L, reach: np.tri(L, k=reach) > 0, "sign of the distance"),
        (lambda L, reach: (np.tri(L) - np.tri(L, k=-reach - 1)) > 0, "to the left alone"),
        (lambda L, reach: np.abs(np.subtract.outer(index(L), index(L))) * 2 <= reach, "whole window"),
    ],
    "same_document": [
        (lambda d: np.equal.outer(d, d), "padding attends to padding"),
        (lambda d: np.outer(d, d) > 0, "attends across documents"),
        (lambda d: (d[:, None] >= d) & (d > 0), "before its own"),
    ],
    "padding_share": [
        (lambda n: n.sum() / (len(n) * max(n)), "share of tokens"),
        (lambda n: len(n) * max(n) / n.sum() - 1, "by the tokens"),
        (lambda n: np.mean(max(n) - n), "by the rows"),
    ],
    "boundaries": [
        (np.cumsum, "0 where the first document begins"),
        (lambda n: np.append(0, np.cumsum(n)[:-1]), "end of the last"),
        (lambda n: np.append(0, np.cumsum(n) - 1), "off by one"),
    ],
    "document_numbers": [
        (lambda n, L: np.pad(np.repeat(index(len(n)), n), (0, L - n.sum())), "begins at 0"),
        (lambda n, L: np.pad(np.repeat(index(1, len(n) + 1), n), (0, L - n.sum()), "edge"), "last document"),
        (lambda n, L: np.repeat(index(1, len(n) + 1), n), "padding is missing"),
        (lambda n, L: np.searchsorted(np.cumsum(n), index(L), "right") + 1, "number of its own"),
    ],
    "best_fit": [
        (lambda free, n: max([(-f, -i, i) for i, f in enumerate(free) if f > n] or [(0, 0, -1)])[2], "exactly enough"),
        (lambda free, n: next((i for i, f in enumerate(free) if f >= n), -1), "first fit"),
        (lambda free, n: -1 if max(free) < n else int(np.argmax(free)), "worst fit"),
    ],
    "distances": [
        (lambda L: np.subtract.outer(index(L), index(L)), "row and column are swapped"),
        (lambda L: abs(index(L) - index(L)[:, None]), "sign is lost"),
        (lambda L: index(1, L + 1) - index(L)[:, None], "off by one"),
    ],
    "restart": [
        (lambda n: index(sum(n)), "does not begin anew"),
        (lambda n: np.concatenate([index(1, one + 1) for one in n]), "begins at 1"),
        (lambda n: np.repeat(index(len(n)), n), "numbers of documents"),
    ],
    "restart_by_number": [
        (lambda d: index(len(d)) - np.array([list(d).index(one) for one in d]), "padding is counted"),
        (lambda d: np.where(d > 0, index(len(d)), 0), "does not begin anew"),
        (lambda d: np.array([(d[: i + 1] == one).sum() * (one > 0) for i, one in enumerate(d)]), "begins at 1"),
    ],
    "turning_angles": [
        (lambda L, K, base: index(L)[:, None] / base ** (index(K // 2) / K), "half as large"),
        (lambda L, K, base: index(L)[:, None] * base ** (index(0, K, 2) / K), "not faster"),
        (lambda L, K, base: index(1, L + 1)[:, None] / base ** (index(0, K, 2) / K), "position 0"),
        (lambda L, K, base: (index(L)[:, None] / base ** (index(0, K, 2) / K)).T, "swapped"),
    ],
    "rise": [
        (lambda s, W: np.clip(s / W, 0, 1), "starts at zero"),
        (lambda s, W: np.minimum((s + 1) / (1 + W), 1.0), "update late"),
        (lambda s, W: (1 + s) / W, "does not stop"),
    ],
    "cosine_to_floor": [
        (lambda s, T, f: f + 0.5 + 0.5 * np.cos(s * np.pi / T), "added on top"),
        (lambda s, T, f: np.clip(0.5 + 0.5 * np.cos(s * np.pi / T), f, 1), "cut off"),
        (lambda s, T, f: f + (1 - f) * np.cos(s * np.pi / T / 2) ** 2 * 2, "half is missing"),
        (lambda s, T, f: f + (1 - f) * (1 + np.cos(2 * np.pi * s / T)) / 2, "whole wave"),
    ],
    "inverse_sqrt": [
        (lambda s, W: np.where(s < W - 1, (s + 1) / W, (s + 1.0) ** -0.5), "jumps down"),
        (lambda s, W: np.minimum((s + 1) / W, W / (s + 1)), "root is missing"),
        (lambda s, W: (W / (s + 1)) ** 0.5, "warmup is missing"),
    ],
    "rise_stay_fall": [
        (lambda s, W, C, T: np.clip(s / W, 0, 1) * (1 - np.clip((s - T + C) / C, 0, 1) ** 0.5), "starts at zero"),
        (lambda s, W, C, T: np.minimum(1, (s + 1) / W) * np.clip((T - s) / C, 0, 1), "straight line"),
        (lambda s, W, C, T: np.minimum(1, (s + 1) / W) * np.clip((T - s) / C, 0, 1) ** 0.5, "one minus the root"),
        (lambda s, W, C, T: np.minimum(1, (s + 1) / W) * (1 - np.sqrt((s - T + C) / C)), "NaN"),
    ],
    "mean_loss": [
        (lambda x, y: x.sum() / len(x), "mean over padding"),
        (lambda x, y: np.where(y == -100, 0, x).mean(), "wrong count"),
        (lambda x, y: x[y >= 1].mean(), "label 0"),
    ],
    "joined_loss": [
        (lambda m, n: sum(m) / len(m), "each batch counts the same"),
        (lambda m, n: m @ n, "not yet a mean"),
        (lambda m, n: m @ n / len(n), "by the batches"),
    ],
    "bits_per_byte": [
        (lambda x, n: sum(x) / sum(n), "these are nats"),
        (lambda x, n: np.mean(x / np.log(2)), "by the tokens"),
        (lambda x, n: np.mean(x / n / np.log(2)), "mean of ratios"),
    ],
    "cross_entropy": [
        (lambda s, a: np.log(np.sum(np.exp(s), 1)) - np.take_along_axis(s, a[:, None], 1)[:, 0], "overflows"),
        (lambda s, a: -np.log((np.exp(s) / np.exp(s).sum(1)[:, None])[index(len(a)), a]), "overflows"),
        (lambda s, a: np.logaddexp.reduce(s, 0)[a] - s[index(len(a)), a], "row and column are swapped"),
        (lambda s, a: np.logaddexp2.reduce(s / np.log(2), 1) - s[index(len(a)), a] / np.log(2), "bits"),
    ],
}  # fmt: skip
PAIRS = [(name, number) for name, wrong in WRONG.items() for number in range(len(wrong))]


def test_there_are_four_puzzles_on_each_of_five_themes():
    themes = [puzzle.theme for puzzle in PUZZLES.values()]
    assert (
        len(PUZZLES) == 20
        and all(themes.count(theme) == 4 for theme in set(themes))
        and len(set(themes)) == 5
    )
    assert set(WRONG) == set(PUZZLES) and all(len(wrong) >= 2 for wrong in WRONG.values())


@pytest.mark.parametrize("name", PUZZLES)
def test_the_page_has_question_stub_and_answer(name):
    stub = next(n for n, (kind, source) in enumerate(CELLS) if kind == "code" and f"try_puzzle({name})" in source
                and "NotImplementedError" in source)  # fmt: skip
    assert re.match(r"### \d+\. .*\?\n", CELLS[stub - 1][1])
    folded = CELLS[stub + 1][1]
    assert folded.startswith("<details>") and f"def {name}(" in folded
    assert len(re.sub(r"```.*?```", "", folded, flags=re.DOTALL).split()) > 10, "no reason is given"
    body = re.search(rf"def {name}\(.*\n((?:    .*\n)+)", folded)[1]
    assert len(body.splitlines()) == 1 and body.strip().startswith("return"), "one line"
    assert check_puzzle(ANSWERS[name]) == "right"


@pytest.mark.parametrize("name, number", PAIRS)
def test_a_wrong_answer_gets_the_name_of_its_mistake(name, number):
    answer, words = WRONG[name][number]
    verdict = check_puzzle(answer, name)
    assert words in verdict and "for " in verdict, verdict


@pytest.mark.parametrize("name", PUZZLES)
def test_every_known_mistake_is_noticed_and_called_by_its_own_name(name):
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
        (lambda documents: "positions", "no array of numbers"),
        (lambda documents: documents[:0], "shape"),
        (lambda documents: documents * np.nan, "NaN"),
        (lambda documents: ANSWERS["restart_by_number"](documents) + 3, "off by the same +3"),
        (lambda documents: (documents == 3) * 5, "at [1] it gives 0, where 1 is right"),
    ],
)
def test_what_is_wrong_in_its_own_way_is_described(answer, words):
    assert words in check_puzzle(answer, "restart_by_number")


def test_a_factor_is_said_where_all_values_share_it():
    assert "100 times" in check_puzzle(
        lambda s, T, f: 100 * ANSWERS["cosine_to_floor"](s, T, f), "cosine_to_floor"
    )


@pytest.mark.parametrize(
    "name, answer, gives, right",
    [
        (
            "bits_per_byte",
            lambda x, n: x.sum() / 0.69315 / n.sum(),
            "1.00988",
            "1.00989",
        ),  # 7 / ln 2 / 10
        (
            "cosine_to_floor",
            lambda s, T, f: f + (1 - f) * (1 + np.cos(3.14159 * s / T)) / 2,
            "0.550001",
            "0.55",
        ),
        (
            "turning_angles",
            lambda L, K, b: np.float16(index(L)[:, None] / b ** (index(0, K, 2) / K)),
            "0.09998",
            "0.1",
        ),
    ],
)
def test_nearly_right_answers_are_located(name, answer, gives, right):
    verdict = check_puzzle(answer, name)
    assert f"it gives {gives}, where {right} is right" in verdict and "nearly right" in verdict
    assert red_frames(draw_puzzle(answer, name)) > 0


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda n, L: np.full(L, np.inf), "NaN or infinity"),
        (lambda n, L: np.full(L, -np.inf), "NaN or infinity"),
        (lambda n, L: np.arange(L) * 1j, "complex"),
        (lambda n, L: np.arange(L).astype(str), "no array of numbers"),
        (lambda n, L: np.arange(L) > 1, "at [0] it gives False, where 1 is right"),
    ],
)
def test_what_is_no_real_number_is_named_and_can_be_drawn(answer, words):
    assert words in check_puzzle(answer, "document_numbers")
    draw_puzzle(answer, "document_numbers")


def test_an_unknown_puzzle_is_refused_with_the_near_name():
    with pytest.raises(ValueError, match="left_onyl.*left_only"):
        check_puzzle(lambda L: None, "left_onyl")


def test_loops_of_the_puzzles_agree_with_the_library():
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
def test_a_drawing_frames_what_is_wrong_and_nothing_else(name):
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


def test_a_drawing_shows_the_first_case_that_is_wrong():
    overflow = WRONG["cross_entropy"][0][0]
    texts = {text.get_text() for text in draw_puzzle(overflow, "cross_entropy").axes[0].texts}
    assert {"2000", "inf", "expected", "found"} <= texts


def left_only(L):
    return np.tri(L) > 0


def test_a_right_answer_is_remembered_and_a_wrong_one_is_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BERTLAB_PROGRESS", str(tmp_path / "p.json"))
    wrong = lambda L: np.full((L, L), True)  # noqa: E731
    wrong.__name__ = "left_only"
    try_puzzle(wrong)
    assert "everybody" in capsys.readouterr().out and progress() == {}
    try_puzzle(left_only)
    assert capsys.readouterr().out == "left_only: right\n" and list(
        progress()["course/puzzles"]
    ) == ["left_only"]


def test_the_puzzles_need_no_torch():
    code = "import bertlab.course.puzzles, sys; print('torch' in sys.modules or 'lightning' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
    imports = [
        source for kind, source in CELLS if kind == "code" and re.match(r"(?:import|from) ", source)
    ]
    assert "torch" not in "".join(imports)


def test_a_stand_in_for_no_room_that_real_rows_exceed_is_a_mistake():
    wrong = lambda free, n: (
        int(np.where(free >= n, free, 100).argmin()) if (free >= n).any() else -1
    )  # noqa: E731
    assert check_puzzle(wrong, "best_fit") != "right"
    with pytest.raises(ValueError, match="puzzle"):
        check_puzzle(partial(wrong, n=1))
