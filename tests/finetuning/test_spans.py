"Labelled spans that overlap, over documents of any length: read, cut, scored, merged, learned and told."

import functools
import math
import re
import warnings

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from bertlab.data.supervised import SpanClassificationCollator, read_spans
from bertlab.data.tokenizers import train_tokenizer
from bertlab.finetuning.baselines import compute_baselines
from bertlab.finetuning.data import FinetuningDataModule
from bertlab.finetuning.module import FinetuningModule
from bertlab.finetuning.predictions import evaluate, load_predictor
from bertlab.finetuning.runs import finetune
from bertlab.finetuning.spans import (
    _find_spans,
    global_pointer_loss,
    merge_spans,
    _span_tuples,
)
from bertlab.model.config import modernbert_tiny
from bertlab.model.task_heads import BertLabForSpanClassification, allowed_spans
from bertlab.train.trainer import make_trainer, seed_everything

warnings.filterwarnings("ignore", module="lightning")
pytestmark = pytest.mark.filterwarnings("ignore")
CITIES, KINDS = ["vienna", "oslo", "rome", "lima"], ["university", "bank", "museum"]
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)


@functools.cache
def tokenizer():
    return train_tokenizer([" ".join([*CITIES, *KINDS, "the of in is here and it"])] * 30, 120)


CONFIG = modernbert_tiny(vocab_size=120, **SIZES).to_diff_dict()


def text_of(*parts):
    "A text and its spans, from plain words and (label, parts) that nest."
    text, spans = "", []

    def add(part):
        nonlocal text
        if isinstance(part, str):
            text += (" " if text else "") + part
            return
        label, *inside = part
        start = len(text) + bool(text)
        for span in inside:
            add(span)
        spans.append({"start": start, "end": len(text), "label": label})

    for part in parts:
        add(part)
    return {"text": text, "spans": spans}


def rows_of(n, seed=0, filler=0):
    rng, rows = np.random.default_rng(seed), []
    for _ in range(n):
        city, noun, second_city = (
            str(rng.choice(CITIES)),
            str(rng.choice(KINDS)),
            str(rng.choice(CITIES)),
        )
        parts = ["the", ("ORG", noun, "of", ("LOC", city)), "is", "in", ("LOC", second_city)]
        rows.append(text_of(*["it is here and"] * int(rng.integers(0, filler + 1)), *parts))
    return rows


def data_for(train=None, val=None, test=None, **options):
    options = {
        "max_sequence_length": 16,
        "train_batch_size": 8,
        "val_batch_size": 8,
        "test_batch_size": 8,
        **options,
    }
    data = FinetuningDataModule("span_classification", tokenizer(), **options)
    data.set_datasets(train or rows_of(12), val or rows_of(12), test or rows_of(5, 2))
    return data


def module_for(**options):
    return FinetuningModule(
        "span_classification", model_config_kwargs=CONFIG, **{"learning_rate": 5e-3, **options}
    )


def fit(module, data, steps, **options):
    seed_everything(0)
    trainer = make_trainer(
        steps, **{"precision": "32-true", "accelerator": "cpu", "val_check_steps": steps, **options}
    )
    trainer.fit(module, data)
    return trainer


def logged(trainer):
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spans")
    data = data_for(
        rows_of(24, filler=4),
        rows_of(10, 1, 4),
        rows_of(9, 2, 4),
        collator_kwargs={"doc_stride": 6},
    )
    run = finetune(
        module_for(), data, folder / "run", num_epochs=25, precision="32-true", accelerator="cpu"
    )
    return run, data, run.save_predictor(folder / "model")


# --- rows and windows -----------------------------------------------------------------------------


def test_a_span_is_a_label_of_the_windows_that_hold_it():
    rng, words = np.random.default_rng(0), ["rome", "bank", "the"]
    for _ in range(60):
        size, room = int(rng.integers(1, 40)), int(rng.integers(2, 12))
        stride = int(rng.integers(0, room))
        text = " ".join(rng.choice(words, size))
        edges = [m.span() for m in re.finditer(r"\w+", text)]
        first = int(rng.integers(size))
        last = min(size - 1, first + int(rng.integers(stride + 1)))  # stride + 1 tokens at most
        start, end = edges[first][0], edges[last][1]
        collator = SpanClassificationCollator.from_tokenizer(
            tokenizer(), max_sequence_length=room + 2, doc_stride=stride
        )
        windows = collator.encode(
            [{"text": text, "spans": [{"start": start, "end": end, "label": 7}]}]
        )
        assert any(len(window["labels"]) for window in windows)
        for window in windows:
            shown = set(map(tuple, window["offsets"].tolist()))
            is_whole = set(edges[first : last + 1]) <= shown
            assert len(window["labels"]) == is_whole
            for a, b, label in window["labels"]:
                span = window["offsets"][a, 0], window["offsets"][b, 1], label
                assert span == (start, end, 7)


@pytest.mark.parametrize("text, marked", [
    ("يقع متحف روما في روما", ["متحف روما", "روما"]),  # right to left
    ("东京大学在东京。", ["东京大学", "东京", "大学"]),
    ("Cafe\u0301 au lait 🙂 🇦🇹 e\u0301te\u0301 नमस्ते", ["Cafe\u0301", "🙂", "🇦🇹", "e\u0301te\u0301", "नमस्ते"]),
])  # fmt: skip
def test_offsets_are_exact_in_every_script(text, marked):
    tokenizer = train_tokenizer([text] * 20, 200)
    spans = [(text.index(word), text.index(word) + len(word), n) for n, word in enumerate(marked)]
    row = {"text": text, "spans": [dict(zip(("start", "end", "label"), word)) for word in spans]}
    collator = SpanClassificationCollator.from_tokenizer(tokenizer, max_sequence_length=64)
    encoded = collator.encode([row])[0]
    back = {
        (encoded["offsets"][a, 0], encoded["offsets"][b, 1], c) for a, b, c in encoded["labels"]
    }
    assert back == set(spans), [text[a:b] for a, b, _ in back]


SPAN = {"start": 4, "end": 8, "label": "LOC"}


@pytest.mark.parametrize("spans, words", [
    ([{**SPAN, "end": 99}], "4 to 99.* 13"), ([{**SPAN, "start": -1}], "-1 to 8.*13"),
    ([{**SPAN, "end": 4}], "4 to 4"), ([{**SPAN, "start": 3, "end": 4}], "3 to 4.*' '"),
    ([{**SPAN, "label": None}], "None"), ([{"start": 4, "label": "LOC"}], "start, end, label"),
    ([{**SPAN, "start": 4.5}], "4.5"), ("LOC", "LOC"), (None, "None"),
])  # fmt: skip
def test_a_bad_span_is_refused_by_its_row(spans, words):
    bad = {"text": "the rome bank", "spans": spans}
    with pytest.raises(ValueError, match=f"train row 3: .*'spans'.*{words}"):
        data_for([*rows_of(3), bad]).setup()
    data = data_for([*rows_of(3), bad], bad_rows="skip")
    data.setup()
    assert len(data.rows["train"]) == 3 and "train: 1 rows left out" in data.describe()


def test_a_span_that_no_window_holds_is_refused_with_what_to_raise():
    long = text_of("it is here and", ("LONG", *["rome"] * 16), "is here")
    ids = len(tokenizer()("rome " * 16, add_special_tokens=False)["input_ids"])
    with pytest.raises(
        ValueError,
        match=f"train row 2: .*{ids} tokens.*doc_stride to {ids - 1}.*max_sequence_length to {ids + 2}",
    ):
        data_for([*rows_of(2), long]).setup()
    skipping = data_for([*rows_of(2), long], bad_rows="skip")
    skipping.setup()
    assert len(skipping.rows["train"]) == 2
    enough = data_for(
        [*rows_of(2), long], max_sequence_length=ids + 2, collator_kwargs={"doc_stride": ids - 1}
    )
    enough.setup()
    assert enough.label2id == {"LOC": 0, "LONG": 1, "ORG": 2}


def test_a_column_that_datasets_keeps_is_read_with_its_names(tmp_path):
    import datasets

    rows = [
        {
            **row,
            "spans": [{**one, "label": ["LOC", "ORG"].index(one["label"])} for one in row["spans"]],
        }
        for row in rows_of(8)
    ]
    spans = datasets.List({"start": datasets.Value("int32"), "end": datasets.Value("int32"),
                           "label": datasets.ClassLabel(names=["LOC", "ORG"])})  # fmt: skip
    dataset = datasets.Dataset.from_list(
        rows, features=datasets.Features({"text": datasets.Value("string"), "spans": spans})
    )
    dataset.to_parquet(str(tmp_path / "train.parquet"))
    data = FinetuningDataModule(
        "span_classification", tokenizer(), str(tmp_path / "train.parquet"), max_sequence_length=16
    )
    data.setup()
    assert data.label2id == {"LOC": 0, "ORG": 1}
    data.set_datasets(train=dataset, val=dataset)
    data.setup()
    assert data.label2id == {"LOC": 0, "ORG": 1} and data.rows["train"][0]["spans"]
    reordered = datasets.List({**spans.feature, "label": datasets.ClassLabel(names=["ORG", "LOC"])})
    held = datasets.Dataset.from_list(
        rows, features=datasets.Features({"text": datasets.Value("string"), "spans": reordered})
    )
    data.set_datasets(train=dataset, val=held)
    data.setup()
    names = [
        {span["label"] for row in data.rows[split] for span in row["spans"]} for split in data.rows
    ]
    assert names[0] == names[1] == {"LOC", "ORG"}


def test_spans_that_nest_and_cross_come_back_to_the_letter():
    text = "The bank of Rome, and Lima."
    spans = [(4, 16, 0), (12, 16, 1), (12, 16, 2), (4, 26, 3), (9, 21, 4), (22, 26, 1)]
    row = {"text": text, "spans": [dict(zip(("start", "end", "label"), span)) for span in spans]}
    assert read_spans(row, "spans", text) == spans
    collator = SpanClassificationCollator.from_tokenizer(tokenizer(), max_sequence_length=64)
    batch = collator([row])
    offsets, labels = batch["offsets"][0].tolist(), batch["labels"][0].tolist()
    assert {(offsets[a][0], offsets[b][1], c) for a, b, c in labels if c >= 0} == {*spans}
    assert batch["labels"].shape == (1, 8, 3) and batch["labels"].dtype == torch.int64
    wrong = {"spans": [{"start": 4, "end": 8, "label": 0, "text": "Bank"}]}
    with pytest.raises(ValueError, match="'Bank'"):
        read_spans(wrong, "spans", text)
    assert read_spans({"spans": [{**wrong["spans"][0], "text": "bank "}]}, "spans", text)
    row["spans"] = [{"start": 5, "end": 7, "label": 0}]  # within "bank": widened to its tokens
    [window] = collator.encode([row])
    first, last, _ = window["labels"][0]
    assert window["offsets"][first, 0] <= 5 and window["offsets"][last, 1] >= 7


# --- the model and its loss -----------------------------------------------------------------------


def loss_by_hand(scores_BCLL, labels, documents_BL, special_BL):
    "Cell by cell: for each document and label, log(1 + wrong) + log(1 + right)."
    total, count = 0.0, 0
    for b, documents in enumerate(documents_BL.tolist()):
        for document in sorted(set(documents) - {0}):
            at = [
                i
                for i, number in enumerate(documents)
                if number == document and not special_BL[b, i]
            ]
            for c in range(scores_BCLL.shape[1]):
                spans = {(i, j) for i, j, label in labels[b].tolist() if label == c and i >= 0}
                cells = [(i, j) for i in at for j in at if i <= j]
                wrong = sum(
                    math.exp(scores_BCLL[b, c, i, j]) for i, j in cells if (i, j) not in spans
                )
                right = sum(math.exp(-scores_BCLL[b, c, i, j]) for i, j in cells if (i, j) in spans)
                total, count = total + math.log1p(wrong) + math.log1p(right), count + 1
    return total, count


def test_the_loss_is_that_of_a_plain_loop_and_so_is_its_gradient():
    torch.manual_seed(0)
    scores = (3 * torch.randn(4, 2, 8, 8, dtype=torch.float64)).requires_grad_()
    documents = torch.tensor([[1] * 8, [1] * 6 + [0] * 2, [1] * 8, [0] * 8])
    special = torch.tensor([[1, 0, 0, 0, 0, 0, 0, 1], [0] * 8, [0, 0, 1, 0, 0, 0, 0, 0], [0] * 8])
    labels = torch.full((4, 3, 3), -100)
    labels[0, :3] = torch.tensor([[1, 6, 0], [2, 3, 0], [2, 3, 1]])
    labels[1, :2] = torch.tensor([[0, 1, 0], [3, 5, 0]])
    loss = global_pointer_loss(scores, labels, allowed_spans(documents, special))
    expected, count = loss_by_hand(scores.detach(), labels, documents, special)
    assert loss[0].item() == pytest.approx(expected, rel=1e-12) and loss[1].item() == count == 2 * 3
    assert torch.autograd.gradcheck(
        lambda s: global_pointer_loss(s, labels, allowed_spans(documents, special))[0],
        scores,
    )


# --- windows are merged ---------------------------------------------------------------------------


def test_windows_merged_equal_one_window():
    "A field of scores that depends on the tokens alone is cut, found, shuffled and merged."
    torch.manual_seed(0)
    L, room, shared = 50, 14, 5
    field = torch.randn(1, 3, L, L).triu()
    offsets = torch.stack([torch.arange(L), torch.arange(L) + 1], 1)
    inside = torch.ones(L, L, dtype=torch.bool)
    field.masked_fill_(~inside.triu() | inside.triu(shared + 1), -1.0)
    lists = lambda found: [part.tolist() for part in found]  # noqa: E731
    full = merge_spans(*lists(_find_spans(field, offsets[None], torch.tensor([4]))))
    starts = [*range(0, L - shared, room - shared)]
    for order in (starts, starts[::-1]):
        parts = []
        for a in order:
            window = slice(a, a + room)
            parts.append(
                _find_spans(field[..., window, window], offsets[None, window], torch.tensor([4]))
            )
        spans, scores = (sum((x[i].tolist() for x in parts), []) for i in (0, 1))
        assert len(spans) > len(full), "some spans are seen twice"
        assert merge_spans(spans, scores) == full
    assert merge_spans([(0, 3, 5, 1), (0, 3, 5, 1)], [0.5, 2.0]) == {(0, 3, 5, 1): 2.0}


# --- trained, saved, predicted ------------------------------------------------------------------------


def test_the_evaluation_agrees_with_the_metrics(trained):
    run, data, _ = trained
    numbers = evaluate(run.module, data, "test").numbers
    assert run.metrics["test_span_f1"] > 0.9 and run.module.monitor == "val_span_f1"
    for name in ("precision", "recall", "f1"):
        assert numbers[name] == pytest.approx(run.metrics[f"test_span_{name}"], abs=1e-6)
    assert [row["label"] for row in numbers["table"]] == ["LOC", "ORG", "all spans"]
    assert "72 spans in" in data.describe() and "LOC: 48 (67%)" in data.describe()


def test_a_dictionary_knows_what_is_always_the_same():
    rows = [
        text_of("the", ("ORG", "bank of", ("LOC", "rome")), "and rome"),
        text_of(("LOC", "rome")),
        text_of("it is here"),
    ]
    data = data_for(rows * 2, rows, rows)
    data.setup()
    scores = compute_baselines(data)
    # Twice in three rome is a place, so the third is wrong: four of four found, three of them right.
    assert scores["bag of words"]["test_span_recall"] == 1.0
    assert scores["bag of words"]["test_span_precision"] == pytest.approx(3 / 4)
    assert scores["majority"]["test_span_f1"] == 0.0


def test_a_saved_head_is_kept_for_the_same_labels(trained, tmp_path):
    classifier = ["task_head.classifier.bias", "task_head.classifier.weight"]
    for names, new in ((["LOC", "ORG"], []), (["LOC", "PER"], classifier)):
        module = FinetuningModule("span_classification", str(trained[2]), id2label=names)
        module.configure_model()
        assert module.new_weights == new
    BertForMaskedLM(BertConfig(vocab_size=120, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                               intermediate_size=48, max_position_embeddings=64)).save_pretrained(tmp_path / "bert")  # fmt: skip
    tokenizer().save_pretrained(tmp_path / "bert")
    module = FinetuningModule("span_classification", str(tmp_path / "bert"), num_labels=2)
    module.configure_model()
    assert module.new_weights == classifier
    assert isinstance(module.model, BertLabForSpanClassification)


def test_a_directory_predicts_as_its_module(trained):
    run, data, folder = trained
    predictor = load_predictor(folder)
    assert predictor.task.labels.names == ("LOC", "ORG") and predictor.task.doc_stride == 6
    rows = [*data.rows["test"]]
    alone = predictor.predict([{"text": row["text"]} for row in rows], batch_size=1)
    many = predictor.predict([{"text": row["text"]} for row in rows[::-1]], batch_size=7)
    assert alone.num_long == many.num_long > 0
    assert predictor.task.score(rows, alone.rows)["span_f1"] == pytest.approx(
        run.metrics["test_span_f1"], abs=1e-6
    )
    for row, row_alone, row_in_batch in zip(rows, alone.rows, many.rows[::-1]):
        spans = row_alone["predicted_spans"]
        assert _span_tuples(spans) == _span_tuples(row_in_batch["predicted_spans"])
        assert all(
            row["text"][s["start"] : s["end"]] == s["text"] and s["score"] > 0 for s in spans
        )
