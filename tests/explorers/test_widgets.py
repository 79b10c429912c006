"Explorers without a browser: messages for wrong input, and static forms within their size."

import re
from html.parser import HTMLParser

import ipywidgets
import numpy as np
import pytest
from conftest import ROOT
from explorer_cases import CASES, find_widgets, make_room
from IPython.core.formatters import DisplayFormatter

import bertlab.core.plots as plots
import bertlab.explorers.fill_mask as fill_mask_box
import bertlab.explorers.packing as packing_explorers
import bertlab.explorers.widgets as widgets
from bertlab.data.tokenizers import train_tokenizer

# Core widgets that ipywidgets 7.7, the version on Colab, does not have.
NEW_WIDGETS = {
    "ColorsInput",
    "DatetimePicker",
    "FloatsInput",
    "IntsInput",
    "Stack",
    "TagsInput",
    "TimePicker",
}
RATES = ["chosen", "hidden", "replaced", "kept"]


@pytest.fixture(scope="module")
def room() -> dict:
    return make_room()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(
        ["the list of strings is sorted by the length of names"] * 9, vocab_size=120
    )


@pytest.mark.parametrize("name", CASES)
def test_an_explorer_explains_wrong_input_and_has_a_static_form(name, room):
    exec(CASES[name].source, room)
    explorer = room["explorer"]
    controls = {getattr(widget, "description", ""): widget for widget in find_widgets(explorer)}
    drawing = lambda: explorer.children[-1].value
    assert drawing() and 'role="alert"' not in drawing()
    for description, value, words in CASES[name].messages:
        before = controls[description].value
        controls[description].value = value
        if words:
            message = re.sub("&#x27;", "'", drawing())
            assert 'role="alert"' in message and words in message and "Traceback" not in message
            controls[description].value = before
    bundle = DisplayFormatter().format(explorer)[0]
    assert any("widget-view" in mime_type for mime_type in bundle)
    static = Reader(bundle["text/html"])
    assert static.wrong == [] and len(static.ids) == len(set(static.ids))
    assert all(address.startswith("data:") for address in static.addresses)
    assert len(explorer.static_html.encode()) <= 150_000


def test_explorers_use_widgets_that_colab_has():
    for path in (ROOT / "bertlab").glob("*/*.py"):
        names = set(re.findall(r"\bipywidgets\.(\w+)", path.read_text(encoding="utf-8")))
        assert not names & NEW_WIDGETS, path.name


class Reader(HTMLParser):
    "Tags that are left open or closed twice, addresses, and ids."

    EMPTY = {"input", "br", "hr", "img", "meta", "wbr", "col"}

    def __init__(self, text):
        super().__init__()
        self.open, self.wrong, self.ids, self.addresses = [], [], [], []
        self.feed(text)
        self.wrong += self.open

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.addresses += [values[key] for key in ("src", "href", "xlink:href") if values.get(key)]
        if tag == "script" or any(key.startswith("on") for key in values):
            self.wrong.append(f"a script: {tag} {values}")
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.EMPTY:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}>")


def test_a_static_form_above_150_kb_is_refused():
    assert widgets.check_size("x" * 150_000)
    with pytest.raises(ValueError, match="161 KB"):
        widgets.static_frames(["x" * 80_000] * 2, "Title", ["a", "b"])


def test_large_static_forms_have_fewer_steps():
    control = ipywidgets.IntText(0)
    steps = {f"step {n}": {"n": n} for n in range(9)}
    explorer = widgets.explore(
        {"n": control}, lambda n: f"<p>{n}</p>" + "x" * 40_000, steps, "Steps"
    )
    assert "Steps (3 of 9 steps" in explorer.static_html and len(explorer.static_html) <= 150_000
    assert re.findall(r"<p>(\d)</p>", explorer.static_html) == ["0", "3", "6"]
    assert explorer.children[-1].value.startswith("<p>0</p>")


def test_typed_markup_is_escaped():
    evil = "<img src=x onerror=alert(1)>"
    frame = plots.svg_figure([plots.svg_box(0, 0, 9, 9, text=evil, tip=evil)], 9, 9, alt=evil + '"')
    for text in (widgets.alert(evil), frame, widgets.static_frames(["a"], evil, [evil])):
        assert "<img" not in text and "&lt;img" in text
    assert Reader(frame).wrong == []
    assert "<img" not in fill_mask_box._guess_rows([(evil, 0.5)])
    assert "<img" not in widgets.draw_or_alert(
        packing_explorers.packed_html, text=evil, capacity=9, packer="padded"
    )


def test_a_bug_in_a_drawing_is_shown_and_raised():
    control = ipywidgets.IntText(1)
    explorer = widgets.explore({"n": control}, lambda n: str(1 // n), {"two": {"n": 2}}, "Shares")
    assert explorer.children[-1].value == "1"
    with pytest.raises(ZeroDivisionError):
        control.value = 0
    assert "a bug in this explorer: ZeroDivisionError" in explorer.children[-1].value


def test_static_steps_equal_the_live_form():
    control, another = ipywidgets.IntText(1), ipywidgets.IntText(7)
    steps = {"two": {"n": 2}, "zero": {"n": 0}}
    draw = lambda n, m: f"<p>{m} and {n}</p>" if n else widgets.alert("nothing")  # noqa: E731
    explorer = widgets.explore({"n": control, "m": another}, draw, steps, "Numbers")
    assert "7 and 2" in explorer.static_html and 'role="alert"' in explorer.static_html
    assert explorer.children[-1].value == "<p>7 and 1</p>" and control.value == 1


def test_a_typed_number_may_exceed_its_slider():
    typed = ipywidgets.FloatText(0.3)
    slider = widgets.link_slider(typed, min=0.0, max=1.0, step=0.1, description="p")
    for value, expected in ((0.5, 0.5), (2.0, 0.5), (-1.0, 0.5), (float("nan"), 0.5), (0.0, 0.0)):
        typed.value = value
        assert slider.value == expected and (typed.value == value or value != value)
    slider.value = 0.7
    assert typed.value == 0.7
    slider.value = (
        0.1 + 0.2
    )  # a hair above 0.3: an answer from the kernel would stop the mouse that drags it
    assert typed.value == 0.3 and slider.value == 0.1 + 0.2 != 0.3


def test_missing_values_break_a_curve():
    nan = float("nan")
    drawn = widgets.svg_chart(
        {"rate": ([0, 1, 2, 3], [0.0, 1.0, nan, 2.0])}, "steps", "rate", "a curve"
    )
    path = re.search(r'd="([^"]*)" fill="none" stroke="#0072B2"', drawn)[1]
    assert path == "M64 216L207.33 126M494 36"  # x from 64 to 494, y from 216 up to 36
    with pytest.raises(ValueError, match="no finite point"):
        widgets.svg_chart({"rate": ([0, 1], [nan, nan])}, "steps", "rate", "nothing")


@pytest.mark.parametrize("packer", packing_explorers.PACKERS)
def test_packers_place_every_document_once(packer):
    lengths, capacity = [3, 0, 7, 7, 1, 10, 2, 4, 4, 0, 9], 10
    deals = packing_explorers.deal_documents(lengths, capacity, packer)
    assert sorted(document for document, _ in deals) == [0, 2, 3, 4, 5, 6, 7, 8, 10]
    rows = [row for _, row in deals]
    assert set(rows) == set(range(max(rows) + 1))
    assert all(sum(lengths[d] for d, row in deals if row == r) <= capacity for r in set(rows))


def test_the_packers_fill_rows_as_by_hand():
    lengths = [60, 50, 40, 50]
    deal = packing_explorers.deal_documents
    assert deal(lengths, 100, "padded") == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert deal(lengths, 100, "next-fit") == [(0, 0), (1, 1), (2, 1), (3, 2)]
    assert deal([60, 40, 50, 50], 100, "next-fit") == [
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 1),
    ]  # to the last position
    assert deal(lengths, 100, "best-fit") == [(0, 0), (1, 1), (3, 1), (2, 0)]  # 60 + 40, 50 + 50


def test_a_window_stays_in_its_document():
    documents = [1, 1, 1, 1, 2, 2, 0]
    reach = packing_explorers.visible_positions
    assert reach(documents, 3).tolist() == [0, 1, 2, 3]
    assert reach(documents, 3, "window", 2).tolist() == [
        1,
        2,
        3,
    ]  # 4 and 5 are near, in another document
    assert reach(documents, 4, "window", 0).tolist() == [4]
    assert reach(documents, 6).tolist() == []


@pytest.mark.parametrize("objective, unit", [("mlm", "token"), ("mlm", "word"), ("mlm", "span"),
                                             ("diffusion", "token"), ("enhanced_mlm", "token")])  # fmt: skip
def test_observed_rates_approach_expected_rates(tokenizer, objective, unit):
    text, draws = " ".join(["the list of strings is sorted by the length of names"] * 8), range(40)
    observed, expected = [], []
    for draw in draws:
        inputs, labels = widgets.mask_text(tokenizer, text, 0.3, draw, objective, unit)
        states = widgets.token_states(inputs, labels, tokenizer.mask_token_id)
        chosen = len(states) - states.count("plain")
        observed.append(
            [chosen / (len(states) - 2), *(states.count(state) / chosen for state in RATES[1:])]
        )
        rates = widgets.expected_rates(tokenizer, 0.3, draw, objective)
        assert list(rates) == RATES and sum(rates.values()) - rates["chosen"] == pytest.approx(1)
        expected.append(list(rates.values()))
    # 40 draws of 80 tokens or more, half of which may be chosen: four standard errors are 0.03, of whole words 0.05.
    assert np.abs(np.mean(observed, axis=0) - np.mean(expected, axis=0)).max() < 0.05
    if objective == "diffusion":  # each draw has a time of its own
        assert np.std([rates[0] for rates in expected]) > 0.1
        assert (
            np.corrcoef([rates[0] for rates in observed], [rates[0] for rates in expected])[0, 1]
            > 0.9
        )
