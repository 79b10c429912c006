"Explorers without a browser: messages for nonsense, static forms within their size, and ipywidgets of Colab's age."

import io
import json
import os
import re
import subprocess
from html.parser import HTMLParser

import ipywidgets
import numpy as np
import pytest
from conftest import ROOT
from explorer_cases import CASES, report_all
from PIL import Image

import bertlab.explorers.fill_mask as fill_mask_box
import bertlab.explorers.packing as packing_explorers
import bertlab.core.plots as plots
import bertlab.explorers.widgets as widgets
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM

# What ipywidgets 7.7.0 has: the traits of each of its widgets, and its functions. Colab stays with 7.7.
OLD = json.loads((ROOT / "tests/explorers/ipywidgets_7_7.json").read_text())
HANDS = {
    "press": "keys",
    "type": "keys",
    "click": "mouse",
    "drag": "mouse",
    "play": "mouse",
    "choose": "either",
}


RATES = ["chosen", "hidden", "replaced", "kept"]


@pytest.fixture(scope="module")
def report() -> dict:
    return report_all()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(
        ["the list of strings is sorted by the length of names"] * 9, vocab_size=120
    )


def check_messages(report: dict) -> None:
    for name, case in CASES.items():
        built = report["cases"][name]
        assert built["first"] and 'role="alert"' not in built["first"], name
        for (description, value, words), said in zip(case.messages, built["said"], strict=True):
            if words:
                assert 'role="alert"' in said, f"{name}: {description} = {value!r} shows no message"
                text = re.sub(r"&#x27;", "'", said)
                assert words in text and "Traceback" not in text, (name, description, value, text)


def test_wrong_input_shows_a_message(report):
    check_messages(report)
    for name, case in CASES.items():
        if case.messages:
            assert 'role="alert"' not in report["cases"][name]["last"], name


def test_every_explorer_has_two_forms(report):
    for name, built in report["cases"].items():
        assert built["live"] and built["static"], name
        assert {"keys", "mouse"} <= {HANDS[act.how] for act in CASES[name].acts}, name


def test_explorers_ask_ipywidgets_for_nothing_that_came_after_7_7(report):
    for names, traits in report[
        "asked"
    ].items():  # of a class and its bases: newer styles have older ones below
        known = next(OLD[name] for name in names.split() if name in OLD)
        assert set(traits) <= set(known), (
            f"{names.split()[0]}: {set(traits) - set(known)} came later"
        )
    kinds = {kind for built in report["cases"].values() for kind in built["kinds"]}
    assert kinds - {"Explorer"} <= set(OLD)
    for path in (ROOT / "bertlab").glob("*/*.py"):
        used = set(re.findall(r"\bipywidgets\.(\w+)", path.read_text(encoding="utf-8")))
        assert used <= {*OLD, *OLD["functions"]}, (
            f"{path.name}: {used - {*OLD, *OLD['functions']}} came later"
        )


def test_plots_and_explorers_share_one_palette():
    palette = {plots.BLUE, plots.ORANGE, plots.GREEN, plots.RED, plots.PURPLE, plots.GREY}
    for path in (ROOT / "bertlab").glob("*/*.py"):
        code = re.sub(
            r"^# %%.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE
        )  # ids of cells
        found = set(re.findall(r"#[0-9a-fA-F]{6}\b", code))
        assert found == (palette if path.stem == "plots" else set()), path.name
    assert {*widgets.CURVE_COLOURS, *widgets.RATE_COLOURS.values()} <= palette


def test_drawing_is_fast(report):
    for name, built in report["cases"].items():
        assert max(built["seconds"], default=0) < 0.5, (
            name,
            built["seconds"],
        )  # of one core, whoever else runs


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


def test_static_forms_are_whole_small_and_fetch_nothing(report):
    for name, built in report["cases"].items():
        read = Reader(built["static"])
        assert read.wrong == [] and len(read.ids) == len(set(read.ids)), (name, read.wrong)
        assert all(address.startswith("data:") for address in read.addresses), (
            name,
            read.addresses,
        )
        assert (
            "url(" not in built["static"].replace("url(data:", "")
            and "@import" not in built["static"]
        )
        assert len(built["static"].encode()) <= 150_000, name


def test_two_static_forms_on_a_page_share_no_name():
    first, second = (
        widgets.static_frames([f"<p>{n}</p>", "<p>x</p>"], "Title", ["a", "b"]) for n in (1, 2)
    )
    assert not set(Reader(first).ids) & set(Reader(second).ids)
    assert (
        widgets.static_frames(["<p>1</p>", "<p>x</p>"], "Title", ["a", "b"]) == first
    )  # the same in each run


def test_a_static_form_above_150_kb_is_refused():
    assert widgets.check_size("x" * 150_000)
    with pytest.raises(ValueError, match="150 KB at most, this one 161 KB: give fewer steps"):
        widgets.static_frames(["x" * 80_000] * 2, "Title", ["a", "b"])
    with pytest.raises(ValueError, match="150 KB at most"):
        widgets.check_size("é" * 75_001)  # bytes count, not letters
    with pytest.raises(ValueError, match="2 frames and 1 labels"):
        widgets.static_frames(["a", "b"], "Title", ["one"])


def test_large_static_forms_have_fewer_steps():
    control = ipywidgets.IntText(0)
    steps = {f"step {n}": {"n": n} for n in range(9)}
    explorer = widgets.explore(
        {"n": control}, lambda n: f"<p>{n}</p>" + "x" * 40_000, steps, "Steps"
    )
    assert "Steps (3 of 9 steps" in explorer.static_html and len(explorer.static_html) <= 150_000
    assert re.findall(r"<p>(\d)</p>", explorer.static_html) == ["0", "4", "8"]
    assert explorer.children[-1].value.startswith("<p>0</p>")
    one = widgets.explore(
        {"n": control}, lambda n: "x" * 200_000, steps, "Steps"
    )  # the live form is there all the same
    assert (
        'role="alert"' in one.static_html
        and "150 KB at most" in one.static_html
        and len(one.children[-1].value) == 200_000
    )
    small = widgets.explore({"n": control}, lambda n: f"<p>{n}</p>", steps, "Steps")
    assert (
        "<legend>Steps</legend>" in small.static_html and small.static_html.count("<figure>") == 9
    )


def test_the_dial_takes_a_text_of_the_length_it_names(tokenizer):
    dial = widgets.mask_dial(tokenizer, " ".join(["the list of strings is sorted"] * 100))
    assert (
        re.search(r"\(\d of 7 steps", dial.static_html)
        and len(dial.static_html.encode()) <= 150_000
    )


def test_what_can_never_be_hidden_is_not_counted(tokenizer):
    text = "the list \N{GRINNING FACE} of \N{GRINNING FACE} strings"
    drawn = widgets.masked_html(tokenizer, text, 0.3, 0, "enhanced_mlm")
    count = len(tokenizer(text)["input_ids"]) - 2 - 2
    assert tokenizer(text)["input_ids"].count(tokenizer.unk_token_id) == 2
    assert f"chosen</span> {count} of {count}: 100%, asked 100%" in drawn


def test_a_typed_mask_is_read_as_in_training():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from bertlab.data.tokenizers import tokenize_plain

    letters = [
        ("[PAD]", 0.0),
        ("[UNK]", 0.0),
        ("[MASK]", 0.0),
        *((one, -3.0) for one in "\u2581[MASK]catheo"),
    ]
    inner = Tokenizer(models.Unigram(letters, unk_id=1))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    )
    inputs, labels = widgets.mask_text(unigram, "the cat [MASK] the cat", 0.3, 0, "enhanced_mlm")
    assert (
        np.where(labels == -100, inputs, labels).tolist()
        == tokenize_plain(unigram, "the cat [MASK] the cat")["input_ids"]
    )
    assert unigram.mask_token_id not in labels


def test_a_checkpoint_whose_tokenizer_has_no_mask_is_named(tokenizer):
    bare = train_tokenizer(["the list of strings"] * 9, vocab_size=60)
    bare.mask_token = None
    shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    model = BertLabForMaskedLM(modernbert_tiny(vocab_size=len(tokenizer), **shape))
    with pytest.raises(ValueError, match="the tokenizer of 'two' has no mask token"):
        fill_mask_box.ask_checkpoints(
            {"one": (model, tokenizer), "two": (model, bare)}, "the [MASK]"
        )


def test_what_a_user_typed_is_text_and_never_markup():
    evil = "<img src=x onerror=alert(1)>"
    frame = plots.svg_figure([plots.svg_box(0, 0, 9, 9, text=evil, tip=evil)], 9, 9, alt=evil + '"')
    for text in (widgets.alert(evil), frame, widgets.static_frames(["a"], evil, [evil])):
        assert "<img" not in text and "&lt;img" in text
    assert Reader(frame).wrong == []
    assert "<img" not in fill_mask_box.guess_rows([(evil, 0.5)])
    assert "<img" not in widgets.draw_or_alert(
        packing_explorers.packed_html, text=evil, capacity=9, packer="padded"
    )


def test_what_a_user_typed_runs_as_its_own_script_does(tokenizer):
    assert '<td dir="auto" style="text-align:left">قط</td>' in fill_mask_box.guess_rows(
        [("قط", 0.5)]
    )
    drawn = widgets.masked_html(tokenizer, "the cat sat on the mat", 0.9)
    paragraph = drawn[: drawn.index("</p>")]
    assert (
        paragraph.startswith('<p dir="auto"')
        and "[CLS]</span>" not in paragraph
        and "[CLS]</bdi>" in paragraph
    )
    assert "[MASK]</span>" not in paragraph, "it would say that the sentence runs to the right"


def test_as_many_guesses_are_shown_as_were_asked_for(tokenizer):
    config = modernbert_tiny(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    checkpoints = {"one": (BertLabForMaskedLM(config), tokenizer)}
    explorer = fill_mask_box.compare_guesses(checkpoints, ["the [MASK]"], top_k=20)
    assert explorer.children[1].value == 20 and explorer.children[-1].value.count("<tr>") == 20
    with pytest.raises(ValueError, match="top_k must be 1 or more, got 0"):
        fill_mask_box.compare_guesses(checkpoints, ["the [MASK]"], top_k=0)


def test_a_bug_in_a_drawing_is_shown_and_not_swallowed():
    control = ipywidgets.IntText(1)
    explorer = widgets.explore({"n": control}, lambda n: str(1 // n), {"two": {"n": 2}}, "Shares")
    assert explorer.children[-1].value == "1"
    with pytest.raises(ZeroDivisionError):
        control.value = 0
    assert "a bug in this explorer: ZeroDivisionError" in explorer.children[-1].value


def test_static_steps_equal_the_live_form():
    control, other = ipywidgets.IntText(1), ipywidgets.IntText(7)
    steps = {"two": {"n": 2}, "zero": {"n": 0}}
    draw = lambda n, m: f"<p>{m} and {n}</p>" if n else widgets.alert("nothing")  # noqa: E731
    explorer = widgets.explore({"n": control, "m": other}, draw, steps, "Numbers")
    assert "7 and 2" in explorer.static_html and 'role="alert"' in explorer.static_html
    assert explorer.children[-1].value == "<p>7 and 1</p>" and control.value == 1


def test_a_typed_number_may_exceed_its_slider():
    typed = ipywidgets.FloatText(0.3)
    slider = widgets.link_slider(typed, min=0.0, max=1.0, step=0.1, description="p")
    for value, place in ((0.5, 0.5), (2.0, 0.5), (-1.0, 0.5), (float("nan"), 0.5), (0.0, 0.0)):
        typed.value = value
        assert slider.value == place and (typed.value == value or value != value)
    slider.value = 0.7
    assert typed.value == 0.7
    slider.value = (
        0.1 + 0.2
    )  # a hair above 0.3: an answer from the kernel would stop the mouse that drags it
    assert typed.value == 0.3 and slider.value == 0.1 + 0.2 != 0.3


def test_what_is_zero_but_for_rounding_is_written_as_zero():
    drawn = widgets.svg_chart({"lead": ([1, 2], [-2.8e-17, 0.1])}, "tried", "lead", "a curve")
    assert ">0<" in drawn and "e-17" not in drawn
    assert "1e-12" in widgets.svg_chart(
        {"tiny": ([1, 2], [1e-12, 3e-12])}, "tried", "lead", "small, and no rounding"
    )


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


def test_the_packers_fill_rows_as_worked_out_by_hand():
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


@pytest.mark.parametrize("lengths, says", [([], "type the lengths"), ([0, 0], "no row is open yet"),
                                           ([7, 500], "lengths[1] = 500 is outside 0 to 128"), ([64] * 199, "efficiency 99.5%"),
                                           ([1] * 201, "201 lengths are too many")])  # fmt: skip
def test_a_visualiser_takes_any_lengths(lengths, says):
    explorer = packing_explorers.packing_visualiser(lengths)
    assert says in explorer.children[-1].value and len(explorer.static_html.encode()) <= 150_000


@pytest.mark.parametrize("text", ["40 12 60 30", "40,12,60,30", "40 , 12 ,60;30"])
def test_the_slider_reaches_every_document(text):
    explorer = packing_explorers.packing_visualiser([5, 5])
    controls = {
        child.description: child for child in explorer.children if hasattr(child, "description")
    }
    controls["lengths"].value = text
    assert controls["documents"].max == controls["deal"].max == 4
    assert "4 of 4 documents: 142 of 256" in explorer.children[-1].value  # 60 + 40 + 12, and 30
    controls["lengths"].value = "40, many"
    assert "is not a length" in explorer.children[-1].value and controls["documents"].max == 4


def test_a_window_stays_in_its_document():
    documents = [1, 1, 1, 1, 2, 2, 0]
    reach = packing_explorers.visible_positions
    assert reach(documents, 3).tolist() == [0, 1, 2, 3]
    assert reach(documents, 3, "window", 2).tolist() == [1, 2, 3]  # 4 and 5 are near, and strangers
    assert reach(documents, 4, "window", 0).tolist() == [4]
    assert reach(documents, 6).tolist() == []
    with pytest.raises(ValueError, match="from 0 to 6, got 7"):
        reach(documents, 7)


def test_a_figure_of_matplotlib_is_kept_with_a_palette_and_looks_the_same():
    figure, axes = plots.new_axes("step", "loss (nats)")
    axes.plot([3, 1, 2], color=plots.RED)
    figure.savefig(full := io.BytesIO(), format="png")
    small = figure._repr_png_()
    assert len(small) < 0.6 * len(full.getvalue())
    drawn, kept = (
        np.asarray(Image.open(file).convert("RGB"), float) for file in (full, io.BytesIO(small))
    )
    assert drawn.shape == kept.shape and (abs(drawn - kept).max(axis=2) > 32).mean() < 0.001
    assert [0xD5, 0x5E, 0x00] in kept.astype(int).reshape(
        -1, 3
    ).tolist()  # the palette's red, untouched


def test_a_notebook_keeps_a_figure_with_twice_the_pixels_of_the_size_at_which_it_shows_it():
    from IPython.core.formatters import DisplayFormatter

    figure, axes = plots.new_axes("step", "loss (nats)", size=(5, 2.5))
    axes.plot([3, 1, 2])
    data, metadata = DisplayFormatter().format(figure)
    assert Image.open(io.BytesIO(data["image/png"])).size == (1000, 500)
    assert metadata["image/png"] == {"width": 500, "height": 250}
    assert Image.open(io.BytesIO(figure._repr_png_())).size == (500, 250)  # files and widgets


@pytest.mark.parametrize("objective, unit", [("mlm", "token"), ("mlm", "word"), ("mlm", "span"),
                                             ("diffusion", "token"), ("enhanced_mlm", "token")])  # fmt: skip
def test_observed_rates_approach_expected_rates(tokenizer, objective, unit):
    text, draws = " ".join(["the list of strings is sorted by the length of names"] * 8), range(40)
    observed, asked = [], []
    for draw in draws:
        inputs, labels = widgets.mask_text(tokenizer, text, 0.3, draw, objective, unit)
        fates = widgets.token_states(inputs, labels, tokenizer.mask_token_id)
        chosen = len(fates) - fates.count("plain")
        observed.append(
            [chosen / (len(fates) - 2), *(fates.count(fate) / chosen for fate in RATES[1:])]
        )
        rates = widgets.expected_rates(tokenizer, 0.3, draw, objective)
        assert list(rates) == RATES and sum(rates.values()) - rates["chosen"] == pytest.approx(1)
        asked.append(list(rates.values()))
    # 40 draws of 80 tokens or more, half of which may be chosen: four standard errors are 0.03, of whole words 0.05.
    assert np.abs(np.mean(observed, axis=0) - np.mean(asked, axis=0)).max() < 0.05
    if objective == "diffusion":  # each draw has a time of its own
        assert np.std([one[0] for one in asked]) > 0.1
        assert np.corrcoef([one[0] for one in observed], [one[0] for one in asked])[0, 1] > 0.9


def test_a_masked_sentence_tells_its_counts_in_words_and_in_bars():
    drawn = widgets.rates_html(
        {"chosen": (9, 18), "hidden": (0, 0)}, {"chosen": 0.25, "hidden": 0.8}
    )
    assert (
        "chosen</span> 9 of 18: 50%, asked 25%" in drawn
        and "hidden</span> 0 of 0: 0%, asked 80%" in drawn
    )
    assert re.findall(r'width="(\d+)" height="16"', drawn) == ["150", "0"]  # of 300 units
    assert [float(x) for x in re.findall(r'd="M([\d.]+) [\d.]+L\1 ', drawn)] == [
        155,
        320,
    ]  # 80 + 300 of them


def test_every_explorer_is_built_and_answers_nonsense_under_an_older_ipywidgets():
    python = os.environ.get("BERTLAB_LAB_PYTHON")
    if not python:
        pytest.skip("needs BERTLAB_LAB_PYTHON: the Python of an environment with ipywidgets 7.7")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests/explorers"])),
    }
    script = "import json, explorer_cases; print(json.dumps(explorer_cases.report_all()))"
    command = [python, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    old = json.loads(done.stdout.splitlines()[-1])
    check_messages(old)
    assert all(built["live"] and built["static"] for built in old["cases"].values())
