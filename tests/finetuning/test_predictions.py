"Predictions keep every row in its order, say what the module says, and nothing is written by halves."

import dataclasses
import io
import json
import math
import os
import shutil
import warnings
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from test_finetuning import (
    FRUIT,
    asked,
    data_for,
    long_answers,
    module_for,
    predict,
    tagged,
    texts_of,
    tokenizer,
)
from transformers import DistilBertConfig, DistilBertForSequenceClassification, pipeline

from bertlab.finetuning import evaluations as ev
from bertlab.finetuning.runs import finetune
from bertlab.data.rows import IGNORE_INDEX
from bertlab.finetuning.data import READING, write_reading
from bertlab.finetuning.metrics import score_decisions
from bertlab.finetuning.files import read_labelled
from bertlab.finetuning.predictions import (
    PredictionOptions,
    as_conllu,
    check_output,
    load_predictor,
    predict_file,
    predict_rows,
)
from bertlab.finetuning.predictions import read_input, write_predictions

pytestmark = pytest.mark.filterwarnings("ignore")
TASKS = ("classification", "token_classification", "question_answering")
PLAIN = {"precision": "32-true", "accelerator": "cpu"}
ALL = PredictionOptions(batch_size=4, all_probabilities=True)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    "For each task: the module, its data and the directory that was written for pipelines."
    made = {}
    for task in TASKS:
        module, data = module_for(task), data_for(task)
        folder = tmp_path_factory.mktemp(task)
        run = finetune(module, data, folder / "run", num_epochs=1, limit_train_batches=4, **PLAIN)
        made[task] = module, data, run.save_predictor(folder / "model")
    return made


def logits_of(module, data, name="logits"):
    return [row for batch in predict(module, data.test_dataloader()) for row in batch[name]]


def test_labels_are_those_of_the_module(trained):
    module, data, directory = trained["classification"]
    rows = data.records["test"].rows
    found = predict_rows(load_predictor(directory), rows, options=ALL).rows
    for one, logits in zip(found, logits_of(module, data), strict=True):
        shares = logits.softmax(-1).tolist()
        assert [one["probabilities"][name] for name in ("fruit", "tool")] == pytest.approx(
            shares, abs=1e-5
        )
        assert one["predicted_label"] == ("fruit", "tool")[int(np.argmax(shares))]
        assert one["probability"] == max(one["probabilities"].values())


def test_tags_are_those_of_the_module_at_first_sub_words(trained):
    module, data, directory = trained["token_classification"]
    rows = data.records["test"].rows
    found = predict_rows(load_predictor(directory), rows).rows
    names, logits = list(data.id2label.values()), logits_of(module, data)
    for row, one, scores, encoded in zip(
        rows, found, logits, data.datasets["test"].rows, strict=True
    ):
        firsts = [place for place, label in enumerate(encoded["labels"]) if label != -100]
        assert one["predicted_tags"] == [names[int(scores[place].argmax())] for place in firsts]
        assert len(one["predicted_tags"]) == len(row["text"])


def test_answers_are_those_of_the_module_and_stand_where_they_say(trained):
    module, data, directory = trained["question_answering"]
    rows = data.records["test"].rows
    options = PredictionOptions(null_threshold=math.inf, all_probabilities=True, num_best=7)
    # The same windows as the data module: 16 tokens, of which 4 are shared.
    found = predict_rows(load_predictor(directory, 16), rows, options=options).rows
    scores = ev.make_scores("question_answering", module.labels, data, "test")
    for batch in data.test_dataloader():
        with torch.no_grad():
            scores.update(module.run_model(batch), batch)
    theirs = scores.answers()
    for number, (row, one) in enumerate(zip(rows, found, strict=True)):
        assert one["predicted_answer"] == theirs[number]
        assert (
            row["context"][one["predicted_start"] : one["predicted_stop"]]
            == one["predicted_answer"]
        )
        assert "" not in [best["answer"] for best in one["n_best"]] and len(one["n_best"]) <= 7


def test_a_pipeline_of_transformers_says_the_same(trained):
    directory = trained["classification"][2]
    texts = ["the apple is here", "the saw saw drill is here"]
    ours = predict_rows(load_predictor(directory), texts).rows
    for one, other in zip(
        ours, pipeline("text-classification", str(directory), device="cpu")(texts)
    ):
        assert (one["predicted_label"], one["probability"]) == (
            other["label"],
            pytest.approx(other["score"], abs=1e-5),
        )


def test_a_family_that_bertlab_cannot_convert_works_as_transformers_wrote_it(tmp_path):
    config = DistilBertConfig(vocab_size=len(tokenizer()), dim=16, hidden_dim=32, n_layers=1, n_heads=2,
                              max_position_embeddings=32, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})  # fmt: skip
    model = DistilBertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    predictor = load_predictor(tmp_path)
    assert predictor.max_sequence_length == 32, "positions end before the tokenizer does"
    found = predict_rows(
        predictor, ["the apple", "the saw is here"], options=PredictionOptions(batch_size=1)
    ).rows
    for text, one in zip(("the apple", "the saw is here"), found):
        ids = tokenizer()(text, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            shares = model(**ids).logits.softmax(-1)[0]
        assert one["probability"] == pytest.approx(float(shares.max()), abs=1e-6)


@pytest.mark.parametrize("there, taken", [(["cuda", "mps"], "cuda"), (["mps"], "mps"), ([], "cpu")])
def test_a_model_goes_to_the_device_that_training_would_take(tmp_path, monkeypatch, there, taken):
    config = DistilBertConfig(
        vocab_size=len(tokenizer()), dim=16, hidden_dim=32, n_layers=1, n_heads=2
    )
    DistilBertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr(
        "bertlab.finetuning.predictions.num_devices", lambda kind: int(kind in [*there, "cpu"])
    )
    monkeypatch.setattr(
        DistilBertForSequenceClassification,
        "to",
        lambda model, device: asked.append(device) or model,
    )
    load_predictor(tmp_path)
    assert asked == [taken]


@settings(derandomize=True, deadline=None, max_examples=10)
@given(st.permutations(range(8)), st.integers(1, 9))
def test_order_and_batches_change_nothing(trained, order, size):
    predictor = load_predictor_once(trained["classification"][2])
    texts = [" ".join(FRUIT * n) for n in range(1, 8)] + ["  "]
    alone = [predict_rows(predictor, [text]).rows[0] for text in texts]
    found = predict_rows(
        predictor, [texts[n] for n in order], options=PredictionOptions(batch_size=size)
    )
    assert found.num_blank == 1
    for place, number in enumerate(order):
        assert found.rows[place]["predicted_label"] == alone[number]["predicted_label"]
        assert found.rows[place]["probability"] == pytest.approx(
            alone[number]["probability"], abs=1e-5
        )


LOADED = {}


def load_predictor_once(directory):
    return LOADED.setdefault(directory, load_predictor(directory))


def test_long_texts_are_cut_and_counted_exactly(trained):
    predictor = load_predictor(trained["classification"][2], 10)
    texts = [" ".join(["apple"] * n) for n in (7, 8, 9, 30)]  # [CLS] and [SEP] leave room for 8
    found = predict_rows(predictor, texts)
    assert found.num_long == 2 and found.rows[2] == found.rows[3]
    assert "2 too long: cut" in found.describe("classification")


def test_every_word_of_a_long_text_has_its_tag(trained):
    predictor = load_predictor(trained["token_classification"][2], 10)
    words = ["the", "apple", "is", "in"] * 6
    found = predict_rows(predictor, [words, words[:8], " ".join(words[:8])])
    assert [len(row["predicted_tags"]) for row in found.rows] == [24, 8, 8] and found.num_long == 1
    assert None not in found.rows[0]["predicted_tags"]
    # A piece is what the model would say of it alone: words 8 to 15 are the second piece.
    assert found.rows[0]["predicted_tags"][8:16] == found.rows[1]["predicted_tags"]
    assert found.rows[1] == found.rows[2], "a text is read as the words between its spaces"


def test_words_of_a_table_may_be_lists_that_pandas_wrote_and_no_arrays(trained, tmp_path):
    import pandas

    predictor, words = (
        load_predictor_once(trained["token_classification"][2]),
        ["the", "apple", "isn't", "here"],
    )
    expected = predict_rows(predictor, [words]).rows
    for shown in (words, json.dumps(words), " ".join(words)):
        pandas.DataFrame({"text": [shown]}).to_csv(tmp_path / "in.csv", index=False)
        told, _ = predict_file(predictor, tmp_path / "in.csv")
        assert told[0]["predicted_tags"] == expected[0]["predicted_tags"]
    pandas.DataFrame({"text": [words, np.array(words)]}).to_csv(tmp_path / "in.csv", index=False)
    with pytest.raises(
        ValueError,
        match="in.csv line 3: the column 'text' holds .*the text of a list: lists in tables are JSON",
    ):
        predict_file(predictor, tmp_path / "in.csv")
    (tmp_path / "in.txt").write_text("['the' apple]\n")  # a line of code, say
    assert len(predict_file(predictor, tmp_path / "in.txt")[0][0]["predicted_tags"]) == 2


def test_words_without_tokens_have_no_tag(trained):
    predictor = load_predictor_once(trained["token_classification"][2])
    found = predict_rows(predictor, [["the", "\u200b", "apple"], [], [" "]])
    assert (
        found.rows[0]["predicted_tags"][1] is None
        and None not in found.rows[0]["predicted_tags"][::2]
    )
    assert found.num_blank == 2 and found.rows[1]["predicted_tags"] == []


def test_an_answer_at_the_end_of_a_long_context_can_be_found(trained):
    predictor = load_predictor(trained["question_answering"][2], 16)
    context = "the file is here " * 40 + "the saw is in oslo"
    rows = [{"question": "where is the saw", "context": context}, {"question": "where " * 50, "context": context},
            {"question": "where", "context": "\n"}]  # fmt: skip
    found = predict_rows(
        predictor, rows, options=PredictionOptions(num_best=400, all_probabilities=True)
    )
    assert max(best["stop"] for best in found.rows[0]["n_best"]) > len(context) - 20
    assert (found.num_long, found.num_blank) == (1, 1) and found.rows[2]["predicted_answer"] is None


def test_no_answer_wins_by_more_than_the_threshold(trained):
    predictor = load_predictor_once(trained["question_answering"][2])
    row = asked(1)
    said = [predict_rows(predictor, row, options=PredictionOptions(null_threshold=t)).rows[0]["predicted_answer"]
            for t in (-math.inf, math.inf)]  # fmt: skip
    assert said[0] == "" and said[1] != ""


@pytest.mark.parametrize("unanswerable, threshold", [(False, math.inf), (True, 0.0)])
def test_questions_follow_the_rule_and_the_windows_of_training(
    trained, tmp_path, unanswerable, threshold
):
    data = data_for(
        "question_answering",
        *(asked(12, seed, unanswerable) for seed in range(3)),
        collator_kwargs={"doc_stride": 2},
    )
    data.setup()
    shutil.copytree(trained["question_answering"][2], tmp_path / "model")
    write_reading(data, tmp_path / "model")
    predictor = load_predictor(tmp_path / "model")
    assert (
        predictor.null_threshold
        == threshold
        == ev.make_scores("question_answering", None, data).null_threshold
    )
    assert (
        predictor.collate(["question", "context"]).doc_stride == 2
        and load_predictor(tmp_path / "model", 24).doc_stride is None
    )
    rows = data.records["test"].rows
    told, by_hand = (
        predict_rows(predictor, rows, options=PredictionOptions(null_threshold=t)).rows
        for t in (None, threshold)
    )
    assert told == by_hand
    never = dataclasses.replace(predictor, null_threshold=-math.inf)
    assert {one["predicted_answer"] for one in predict_rows(never, rows).rows} == {""}
    reading = json.loads((tmp_path / "model" / READING).read_text())
    old = {name: reading[name] for name in ("task", "text_columns", "max_sequence_length")}
    (tmp_path / "model" / READING).write_text(json.dumps(old))
    assert load_predictor(tmp_path / "model").null_threshold == 0.0, (
        "an old directory says nothing of it"
    )
    (tmp_path / "model" / READING).write_text(json.dumps({**reading, "always_answered": "yes"}))
    with pytest.raises(ValueError, match="is damaged"):
        load_predictor(tmp_path / "model")


def test_answers_are_as_long_as_training_has_shown_them(trained, tmp_path):
    options = {"max_sequence_length": 64, "collator_kwargs": {"doc_stride": 4}}
    data = data_for("question_answering", *(long_answers(3) for _ in range(3)), **options)
    data.setup()
    shutil.copytree(trained["question_answering"][2], tmp_path / "model")
    write_reading(data, tmp_path / "model")
    reading = json.loads((tmp_path / "model" / READING).read_text())
    del reading["max_answer_tokens"]

    def longest():
        every = PredictionOptions(all_probabilities=True, num_best=3000)
        found = predict_rows(load_predictor(tmp_path / "model"), long_answers(1), options=every)
        return max(len(best["answer"].split()) for best in found.rows[0]["n_best"])

    assert longest() == 40
    (tmp_path / "model" / READING).write_text(json.dumps(reading))
    assert longest() == 30, "an old directory says nothing of it"
    for damaged in (0, -3, "40", True, 2.5, None):
        (tmp_path / "model" / READING).write_text(
            json.dumps({**reading, "max_answer_tokens": damaged})
        )
        with pytest.raises(ValueError, match="is damaged"):
            load_predictor(tmp_path / "model")


def test_a_single_answer_that_is_told_is_the_one_that_won(trained):
    predictor = dataclasses.replace(
        load_predictor_once(trained["question_answering"][2]), null_threshold=math.inf
    )
    one, five = (
        predict_rows(predictor, asked(12), options=PredictionOptions(num_best=n)).rows
        for n in (1, 5)
    )
    assert [row["predicted_answer"] for row in one] == [
        row["predicted_answer"] for row in five
    ] and all(row["predicted_answer"] for row in one)


@pytest.mark.parametrize("threshold", [0.0, math.inf])
def test_the_probability_of_an_answer_does_not_depend_on_how_many_are_told(trained, threshold):
    predictor = dataclasses.replace(
        load_predictor_once(trained["question_answering"][2]), null_threshold=threshold
    )
    rows = [{**row, "context": f"{row['context']} and {row['context']}"} for row in asked(6)]
    told = {
        n: predict_rows(
            predictor, rows, options=PredictionOptions(num_best=n, all_probabilities=True)
        ).rows
        for n in (1, 5, 20, 100)
    }
    for one, *others in zip(*told.values()):
        assert all(other["probability"] == one["probability"] for other in others)
        few, twenty, many = (
            {(best["start"], best["stop"]): best["probability"] for best in row["n_best"]}
            for row in others
        )
        assert few.items() <= twenty.items() <= many.items() and len(few) < len(twenty) < len(many)
        shares = sorted(share for place, share in many.items() if place != (0, 0))[-20:] + [
            many.get((0, 0), 0)
        ]
        assert sum(shares) == pytest.approx(1) and ((0, 0) in many) == (threshold < math.inf)


def test_numbers_and_several_labels(tmp_path):
    for kind in ("number", "tags"):
        module = module_for()
        data = data_for(
            train=texts_of(48, 0, kind), val=texts_of(19, 1, kind), test=texts_of(11, 2, kind)
        )
        run = finetune(module, data, tmp_path / kind, num_epochs=1, limit_train_batches=2, **PLAIN)
        found = predict_rows(
            load_predictor(run.save_predictor(tmp_path / f"{kind}-model")),
            data.records["test"].rows,
        ).rows
        for one, logits in zip(found, logits_of(module, data), strict=True):
            if kind == "number":
                assert one == {"predicted_value": pytest.approx(logits.item(), abs=1e-5)}
            else:
                assert list(one["probabilities"].values()) == pytest.approx(
                    logits.sigmoid().tolist(), abs=1e-5
                )
                assert one["predicted_labels"] == [
                    n for n, x in zip(data.label2id, logits) if x > 0
                ]


def test_each_form_of_file_comes_back_as_it_went_in(trained, tmp_path):
    predictor = load_predictor_once(trained["classification"][2])
    rows = [
        {"text": 'the "apple", is\there', "n": "1"},
        {"text": "", "n": "2"},
        {"text": "the saw ünd", "n": "3"},
    ]
    for ending in ("csv", "tsv", "jsonl", "parquet"):
        write_predictions(rows, tmp_path / f"in.{ending}")
        told, found = predict_file(predictor, tmp_path / f"in.{ending}", tmp_path / f"out.{ending}")
        again, form = read_input(tmp_path / f"out.{ending}")
        assert form == ending and found.num_blank == 1 and len(again) == 3
        for row, before, now in zip(rows, told, again):
            assert {"text": now["text"], "n": now["n"]} == row
            assert (
                now["predicted_label"] == before["predicted_label"]
                or ending in ("csv", "tsv")
                and now["predicted_label"] == ""
            )
    assert [row["predicted_label"] for row in told] == [
        row["predicted_label"] for row in predict_rows(predictor, rows).rows
    ]


CONLLU = """# sent_id = 1
# text = the apple is
1\tthe\tthe\tDET\t_\t_\t2\tdet\t_\t_
2\tapple\tapple\tNOUN\t_\tNumber=Sing\t0\troot\t_\tSpaceAfter=No
3\tis\tbe\tAUX\t_\t_\t2\tcop\t_\t_

"""


def test_conllu_keeps_its_columns_and_gets_tags_in_misc(trained, tmp_path):
    (tmp_path / "in.conllu").write_text(CONLLU)
    predictor = load_predictor_once(trained["token_classification"][2])
    told, _ = predict_file(predictor, tmp_path / "in.conllu", tmp_path / "out.conllu")
    tags = told[0]["predicted_tags"]
    expected = CONLLU.replace("SpaceAfter=No", f"SpaceAfter=No|Predicted={tags[1]}")
    expected = expected.replace("det\t_\t_", f"det\t_\tPredicted={tags[0]}").replace(
        "cop\t_\t_", f"cop\t_\tPredicted={tags[2]}"
    )
    assert (tmp_path / "out.conllu").read_text() == expected and IGNORE_INDEX not in told[0]["FORM"]
    with pytest.raises(ValueError, match="CoNLL-U"):
        write_predictions([{"text": ["a"], "predicted_tags": ["O"]}], tmp_path / "no.conllu")
    assert (
        "lines" in told[0] and "lines" not in predict_file(predictor, tmp_path / "in.conllu")[0][0]
    )


WITH_ALL = """# newdoc id = weblog
# sent_id = a-1
# text = Vámonos al mar.
1-2\tVámonos\t_\t_\t_\t_\t_\t_\t_\tSpaceAfter=No
1\tVamos\tir\tVERB\t_\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\t_\t_\t1\tobj\t_\t_
2.1\tgran\tgrande\tADJ\t_\t_\t_\t_\t1:amod\t_
3\tmar\tmar\tNOUN\t_\t_\t1\tobl\t_\t_

"""


@pytest.mark.parametrize(
    "multiword, tagged", [("split", ["1\t", "2\t", "3\t"]), ("join", ["1-2\t", "3\t"])]
)
def test_conllu_keeps_comments_ranges_and_empty_nodes(multiword, tagged, tmp_path):
    (tmp_path / "in.conllu").write_text(WITH_ALL * 2, encoding="utf-8")
    rows = read_labelled([tmp_path / "in.conllu"], multiword=multiword)
    told = [{**row, "predicted_tags": [f"T{n}" for n in range(len(tagged))]} for row in rows]
    written = as_conllu(told).splitlines()
    bare = [line.replace("|Predicted", "\tPredicted").split("\tPredicted=")[0] for line in written]
    assert bare == [
        line.removesuffix("\t_") if line.startswith(tuple(tagged)) else line
        for line in (WITH_ALL * 2).splitlines()
    ]
    assert [line.split("\t")[-1].split("|")[-1] for line in written if "Predicted" in line] == [
        f"Predicted=T{n}" for n in range(len(tagged))] * 2  # fmt: skip
    plain = as_conllu([{key: cells for key, cells in told[0].items() if key != "lines"}])
    assert (
        plain.startswith("# sent_id = a-1\n# text = Vámonos al mar.\n1")
        and plain.count("\n") == 2 + len(tagged) + 1
    )


def test_a_model_that_has_learned_joined_words_reads_joined_words(trained, tmp_path, monkeypatch):
    directory = shutil.copytree(trained["token_classification"][2], tmp_path / "model")
    reading = json.loads((directory / READING).read_text())
    (directory / READING).write_text(json.dumps({**reading, "multiword": "join"}))
    (tmp_path / "in.conllu").write_text(WITH_ALL, encoding="utf-8")
    predictor = load_predictor(directory)
    (row,), _ = predict_file(predictor, tmp_path / "in.conllu", tmp_path / "out.conllu")
    assert predict_file(predictor, tmp_path / "in.conllu")[0][0]["XPOS"] == ["_+_", "_"], (
        "as it stands in the file"
    )
    assert row["FORM"] == ["Vámonos", "mar"]
    assert (
        len(row["predicted_tags"]) == 2
    )  # of the words, and not of the comment that is called text
    for task, columns in (("token_classification", "text"), ("classification", None)):
        with pytest.raises(ValueError, match="no.conllu: CoNLL-U takes a tag for each.*'text'"):
            predict_file(
                load_predictor_once(trained[task][2]),
                tmp_path / "in.conllu",
                tmp_path / "no.conllu",
                columns,
            )
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(WITH_ALL.encode())))
    assert predict_file(predictor, "-")[0][0]["FORM"] == ["Vámonos", "mar"]
    written = [
        line.split("\t")[0]
        for line in (tmp_path / "out.conllu").read_text().splitlines()
        if "Predicted=" in line
    ]
    assert written == ["1-2", "3"]


def test_lines_stay_lines_and_blank_ones_keep_their_place(trained, tmp_path):
    (tmp_path / "a.txt").write_text("the apple is here\n\nthe saw is here\n")
    told, found = predict_file(
        load_predictor_once(trained["classification"][2]), tmp_path / "a.txt"
    )
    assert [row["text"] for row in told] == ["the apple is here", "", "the saw is here"]
    assert found.num_blank == 1 and told[1]["predicted_label"] is None


@pytest.mark.parametrize("line, warned", [
    ("张三在北京大学", True), ("张 三 在 北京", False), ("the apple is here", False), ("apple", False), ("京", False),
])  # fmt: skip
def test_a_line_without_spaces_that_gets_a_single_tag_is_warned_about(
    trained, tmp_path, line, warned
):
    (tmp_path / "a.txt").write_text(f"{line}\n\n", encoding="utf-8")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        told, _ = predict_file(
            load_predictor_once(trained["token_classification"][2]), tmp_path / "a.txt"
        )
    assert len(told[0]["predicted_tags"]) == len(line.split())
    assert any("1 lines have no space" in str(one.message) for one in seen) == warned


def test_labels_that_the_font_lacks_are_numbers_in_pictures_and_warn_of_nothing():
    names, rows = ["正面", "good", "負面" * 9, "x" * 20], []
    for number, name in enumerate(names):
        rows.append({"label": name, "precision": 1.0, "recall": 0.5, "support": number})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figures = ev.plot_confusion(np.eye(4, dtype=int), names), ev.plot_spans(rows)
        for figure in figures:
            figure._repr_png_()
    shown = [[label.get_text() for label in figure.axes[0].get_xticklabels()] for figure in figures]
    assert shown[0] == ["label 0", "good", "label 2", "x" * 15 + "…"]
    assert shown[1] == ["x" * 15 + "… (3)", "label 2 (2)", "good (1)", "label 0 (0)"]
    assert all("counts from 0" in figure.axes[0].get_title(loc="left") for figure in figures)
    assert ev.plot_confusion(np.eye(2, dtype=int), ["a", "b"]).axes[0].get_title(loc="left") == ""


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("old\n")
    with pytest.raises(ValueError, match="must end in"):
        write_predictions([], tmp_path / "p.doc")
    rows = [{"a": "\ud800"}]  # half a character cannot be encoded
    with pytest.raises(UnicodeEncodeError):
        write_predictions(rows, path)
    assert path.read_text() == "old\n" and os.listdir(tmp_path) == ["p.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": "txet"}, "did you mean 'text'"),
        ({"source": "missing.csv"}, "no file missing.csv"),
        ({"output": "x.doc"}, "must end in"),
        ({"output": "nowhere/x.csv"}, "there is no directory"),
        ({"output": "x.csv.gz"}, "must end in"),
        ({"file_format": "xml"}, "none of lines"),
    ],
)
def test_a_mistake_is_found_before_the_model_is_asked(trained, tmp_path, options, message):
    (tmp_path / "there.csv").write_text("id,text\n1,the apple\n")
    predictor = load_predictor_once(trained["classification"][2])
    with pytest.raises(ValueError, match=message):
        predict_file(predictor, **{"source": tmp_path / "there.csv", **options})


def test_a_column_of_a_prediction_is_not_written_over(trained, tmp_path):
    (tmp_path / "in.csv").write_text("text,probability\nthe apple,0.3\n")
    with pytest.raises(ValueError, match="in.csv has the columns .'probability'.*rename"):
        predict_file(
            load_predictor_once(trained["classification"][2]),
            tmp_path / "in.csv",
            tmp_path / "out.csv",
        )
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_carriage_return_stays_in_its_cell(tmp_path, ending):
    rows = [{"text": "one\rtwo", "n": "1"}, {"text": "three", "n": "2"}]
    again, _ = read_input(write_predictions(rows, tmp_path / f"out.{ending}"))
    assert [row["n"] for row in again] == ["1", "2"] and again[0]["text"].split() == ["one", "two"]
    assert (tmp_path / f"out.{ending}").read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_line_ends_of_a_table_are_the_same_on_windows(tmp_path, monkeypatch, ending):
    "Text mode has its own there, in cells as well."
    monkeypatch.setattr(
        "pathlib.Path.write_text",
        lambda path, text, **_: path.write_bytes(text.replace("\n", "\r\n").encode()),
    )
    rows = [{"text": "one\ntwo"}, {"text": "one\r\ntwo"}]
    again, _ = read_input(write_predictions(rows, tmp_path / f"out.{ending}"))
    assert [row["text"] for row in again] == [row["text"] for row in rows]


def test_lengths_and_sizes_that_cannot_be_are_refused(trained, tmp_path):
    with pytest.raises(ValueError, match="reads 8 to"):
        load_predictor(trained["classification"][2], 99999)
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_predictor(tmp_path)
    with pytest.raises(ValueError, match="batch_size"):
        PredictionOptions(batch_size=0)


def test_nothing_is_written_over_unless_asked_and_the_input_never(trained, tmp_path):
    predictor, source = load_predictor_once(trained["classification"][2]), tmp_path / "in.csv"
    source.write_text("text\nthe apple\n")
    (tmp_path / "out.csv").write_text("mine")
    for output, overwrite, message in (
        (tmp_path / "out.csv", False, "is there already"),
        (source, True, "is the file that is read"),
    ):
        with pytest.raises(ValueError, match=message):
            predict_file(predictor, source, output, overwrite=overwrite)
    assert (
        source.read_text() == "text\nthe apple\n" and (tmp_path / "out.csv").read_text() == "mine"
    )
    predict_file(predictor, source, tmp_path / "out.csv", overwrite=True)
    assert "predicted_label" in (tmp_path / "out.csv").read_text()
    os.symlink(source, tmp_path / "link.csv")
    with pytest.raises(ValueError, match="is the file that is read"):
        check_output(tmp_path / "link.csv", source, overwrite=True)


def test_a_table_without_a_header_is_predicted_by_numbers(trained, tmp_path):
    (tmp_path / "in.csv").write_text("1,the apple is here\n2,the saw\n")
    told, _ = predict_file(
        load_predictor_once(trained["classification"][2]),
        tmp_path / "in.csv",
        columns=2,
        header=False,
    )
    expected = predict_rows(
        load_predictor_once(trained["classification"][2]), ["the apple is here", "the saw"]
    ).rows
    assert [row["predicted_label"] for row in told] == [row["predicted_label"] for row in expected]


def test_a_table_is_predicted_with_the_delimiter_of_its_training(trained, tmp_path, monkeypatch):
    rows = texts_of(24)
    (tmp_path / "train.csv").write_text(
        "said;label\n" + "".join(f"{row['text']};{row['label']}\n" for row in rows)
    )
    data = data_for()
    data.given, data.source, data.reader_kwargs = (
        {},
        (tmp_path / "train.csv", None),
        {"delimiter": ";"},
    )
    data.columns_given = "said", None
    run = finetune(module_for(), data, tmp_path / "run", num_epochs=1, **PLAIN)
    predictor = load_predictor(run.save_predictor(tmp_path / "model"))
    expected = [
        {"said": row["text"], **one}
        for row, one in zip(rows, predict_rows(predictor, [row["text"] for row in rows]).rows)
    ]
    said = lambda told: [
        {name: value for name, value in row.items() if name not in ("label", "more")}
        for row in told
    ]  # noqa: E731
    assert said(predict_file(predictor, tmp_path / "train.csv")[0]) == expected
    for mark in ",|":  # the usual one is known by the first line, another is asked for
        text = "".join(f"{row['said']}{mark}1\n" for row in expected)
        (tmp_path / "other.csv").write_text(f"said{mark}more\n{text}")
        told, _ = predict_file(
            predictor, tmp_path / "other.csv", delimiter=None if mark == "," else mark
        )
        assert said(told) == expected
    (tmp_path / "alone.csv").write_text("said\nthe apple, the saw\n")  # a single column
    assert predict_file(predictor, tmp_path / "alone.csv")[0][0]["said"] == "the apple, the saw"
    with pytest.raises(ValueError, match="no column 'text'; its columns are|there is no column"):
        predict_file(load_predictor_once(trained["classification"][2]), tmp_path / "train.csv")
    piped = (tmp_path / "train.csv").read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped)))
    assert said(predict_file(predictor, "-", file_format="csv")[0]) == expected
    (tmp_path / "in.jsonl").write_text('{"said": "the apple"}\n')
    with pytest.raises(
        ValueError, match="delimiter=';' is for tables, .*in.jsonl is read as jsonl: leave it out"
    ):
        predict_file(predictor, tmp_path / "in.jsonl", delimiter=";")


def test_a_batch_is_padded_to_its_longest_text_and_no_further(trained):
    predictor, widths = load_predictor(trained["classification"][2]), []
    predictor.model.register_forward_pre_hook(
        lambda m, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    predict_rows(predictor, ["the apple", "the saw is here"])
    assert widths == [8]


def test_a_directory_remembers_the_length_and_the_columns_of_its_training(trained, tmp_path):
    data = data_for()
    data.max_sequence_length = 16
    rows = [{"said": row["text"], "label": row["label"]} for row in texts_of(24)]
    data.columns_given = "said", None
    data.set_datasets(train=rows, val=rows[:6])
    run = finetune(module_for(), data, tmp_path / "run", num_epochs=1, **PLAIN)
    predictor = load_predictor(run.save_predictor(tmp_path / "model"))
    assert predictor.max_sequence_length == 16 and predictor.text_columns == ("said",)
    assert (
        predict_rows(predictor, rows[:3]).rows
        == predict_rows(predictor, [row["said"] for row in rows[:3]]).rows
    )
    assert load_predictor(tmp_path / "model", 20).max_sequence_length == 20


def test_a_model_of_pairs_refuses_single_texts(trained, tmp_path):
    rows = [{"a": row["text"], "b": "the saw", "label": row["label"]} for row in texts_of(24)]
    data = data_for()
    data.columns_given, data.collator_kwargs["text_pair_column"] = ("a", None), "b"
    data.set_datasets(train=rows, val=rows[:6])
    run = finetune(module_for(), data, tmp_path / "run", num_epochs=1, **PLAIN)
    predictor = load_predictor(run.save_predictor(tmp_path / "model"))
    for rows_given, columns in ((["the apple"], None), ([{"a": "the apple"}], None), (rows, "a")):
        with pytest.raises(ValueError, match="pairs of texts, from the columns"):
            predict_rows(predictor, rows_given, columns)
    told = predict_rows(predictor, rows[:4]).rows
    assert (
        told
        == predict_rows(
            predictor, [{"x": row["a"], "y": row["b"]} for row in rows[:4]], ["x", "y"]
        ).rows
    )


def test_a_row_without_text_is_named_by_its_line(trained, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "the apple"}\n{"text": 3}\n')
    with pytest.raises(ValueError, match="a.jsonl line 2.*must hold a text, got 3"):
        predict_file(load_predictor_once(trained["classification"][2]), tmp_path / "a.jsonl")


def test_what_is_piped_in_is_known_by_its_first_lines(trained, monkeypatch):
    predictor = load_predictor_once(trained["classification"][2])
    for piped in (
        '{"text": "the apple is here", "id": 7}\n{"text": " ", "id": 8}\n',
        "the apple is here\n\n",
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped.encode())))
        told, found = predict_file(predictor, "-")
        assert [row["text"].strip() for row in told] == ["the apple is here", ""] and told[1][
            "predicted_label"
        ] is None
        assert "2 rows, 1 blank" in found.describe(predictor.task)


def test_a_model_without_a_head_is_refused(tmp_path):
    from transformers import BertConfig, BertForMaskedLM

    BertForMaskedLM(BertConfig(vocab_size=120, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                               intermediate_size=16)).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(ValueError, match="BertForMaskedLM, which has no head"):
        load_predictor(tmp_path)


def test_positions_after_padding_are_not_read(tmp_path):
    from transformers import RobertaConfig, RobertaForSequenceClassification

    shape = RobertaConfig(vocab_size=len(tokenizer()), max_position_embeddings=34, pad_token_id=1, hidden_size=16,
                          num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)  # fmt: skip
    RobertaForSequenceClassification(shape).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert load_predictor(tmp_path).max_sequence_length == 32


# Evaluations


def test_a_table_has_a_row_a_label_and_means_without_labels_that_nobody_names():
    rows = ev.classification_table([0, 0, 1], [0, 1, 1], ["a", "b", "never"])
    assert [row["f1"] for row in rows] == pytest.approx([2 / 3, 2 / 3, 0, 2 / 3, 2 / 3])
    assert [row["support"] for row in rows] == [2, 1, 0, 3, 3]
    several = ev.classification_table([[1, 0], [1, 1]], [[1, 1], [0, 1]], ["a", "b"])
    assert [row["precision"] for row in several[:2]] == [1, 0.5] and [
        row["recall"] for row in several[:2]
    ] == [0.5, 1]


def test_the_mean_over_several_labels_a_text_is_the_metrics_macro():
    gold = said = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0]])  # nobody names the third
    mean = ev.classification_table(gold, said, ["a", "b", "never"])[3]
    metric = score_decisions(3)["f1_macro"]
    metric.update(torch.tensor(said), torch.tensor(gold))
    assert mean["label"] == "mean of labels" and mean["f1"] == pytest.approx(
        2 / 3
    ) == pytest.approx(float(metric.compute()))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=2, max_size=60))
def test_reliability_is_scikit_learns_calibration_curve(pairs):
    confidence, right = map(np.array, zip(*pairs))
    found = ev.Calibration.of(confidence, right)
    filled = np.array(found.counts) > 0
    if right.any() and not right.all():  # scikit-learn wants both
        true, mean = calibration_curve(right.astype(int), confidence.astype(float), n_bins=10)
        assert np.array(found.accuracy)[filled] == pytest.approx(true)
        assert np.array(found.confidence)[filled] == pytest.approx(mean)
    assert sum(found.counts) == len(pairs)


def test_the_calibration_error_by_hand():
    "Two bins: two at 0.9 of which one is right, and two at 0.6 that are both right."
    found = ev.Calibration.of([0.9, 0.9, 0.6, 0.6], [1, 0, 1, 1])
    assert found.error() == pytest.approx((2 * abs(0.9 - 0.5) + 2 * abs(0.6 - 1.0)) / 4)
    assert ev.Calibration.of([0.5, 0.5], [1, 0]).error() == pytest.approx(0)


def test_an_edge_belongs_to_the_bin_below_it():
    assert ev.Calibration.of([0.2, 1.0, 0.0], [1, 1, 0], 5).counts == (2, 0, 0, 0, 1)


def test_labels_with_dollars_are_drawn_as_they_stand(tmp_path):
    names = ["$0_$10", "$10_$20", r"a\b$^$"]
    gold, shares = np.array([0, 1, 2, 2]), np.eye(3)[[0, 1, 1, 2]]
    spans = torch.tensor([[0, 0, 2, 0], [0, 3, 4, 1], [1, 0, 1, 2]])
    for found in (ev.evaluate_labels(gold, shares, names), ev.evaluate_spans(spans, spans, names)):
        found.write(tmp_path)
        for name, figure in found.figures.items():
            assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
            if name != "calibration":
                assert {
                    one.get_text().split(" (")[0] for one in figure.axes[0].get_xticklabels()
                } == {*names}


def test_answers_are_grouped_by_the_words_of_the_shortest():
    rows = ev.answer_lengths(
        [["in oslo", "oslo"], [], ["a b c d e"], ["rome"]], ["oslo", "x", "b c", ""]
    )
    assert [(row["words"], row["support"]) for row in rows] == [
        ("none", 1),
        ("1", 2),
        ("4 to 7", 1),
    ]
    assert rows[1]["exact_match"] == 0.5 and rows[0]["f1"] == 0.0
    assert rows[2]["f1"] == pytest.approx(2 * 2 / (2 + 4)), "an article is no word"


@pytest.mark.parametrize("task", TASKS)
def test_the_evaluation_of_a_split_agrees_with_its_metrics(trained, tmp_path, task):
    from bertlab.finetuning.runs import evaluate_run

    module, data, _ = trained[task]
    metrics = evaluate_run(module, data, PLAIN)
    found = ev.evaluate(module, data, "test")
    found.write(tmp_path)
    numbers = json.loads((tmp_path / "evaluation.json").read_text())
    names = ("exact_match", "f1") if task == "question_answering" else ("accuracy",)
    for name in names:
        assert numbers[name] == pytest.approx(metrics[f"test_{name}"], abs=1e-6)
    if task != "question_answering":
        assert numbers["table"][-2]["f1"] == pytest.approx(metrics["test_f1_macro"], abs=1e-6)
    for picture in found.figures:
        assert (tmp_path / f"{picture}.png").read_bytes()[:4] == b"\x89PNG"
    pictures = {"answers"} if task == "question_answering" else {"confusion", "calibration"}
    assert set(found.figures) == pictures and "support" in found.table()


def test_several_labels_and_numbers_are_evaluated():
    gold, probability = (
        np.array([[1, 0], [1, 1], [0, 0]]),
        np.array([[0.9, 0.2], [0.8, 0.3], [0.6, 0.1]]),
    )
    found = ev.evaluate_decisions(gold, probability, ["a", "b"]).numbers
    assert found["exact_match"] == pytest.approx(1 / 3) and found["table"][0][
        "precision"
    ] == pytest.approx(2 / 3)
    values = ev.evaluate_values([1.0, 2.0], [2.0, 0.0]).numbers
    assert values["mean_absolute_error"] == 1.5 and values[
        "root_mean_squared_error"
    ] == pytest.approx(math.sqrt(2.5))


def test_parquet_keeps_lists(trained, tmp_path):
    told = predict_rows(load_predictor_once(trained["token_classification"][2]), tagged(2)).rows
    write_predictions(told, tmp_path / "t.parquet")
    again = datasets.load_dataset(
        "parquet",
        data_files=str(tmp_path / "t.parquet"),
        split="train",
        cache_dir=str(tmp_path / "c"),
    )
    assert again[0]["predicted_tags"] == told[0]["predicted_tags"]


@pytest.mark.parametrize("task", TASKS)
def test_a_blank_first_row_takes_no_column_from_the_others(trained, tmp_path, task):
    predictor = load_predictor_once(trained[task][2])
    rows = {"classification": [{"text": ""}, {"text": "the apple is here", "id": 7}], "token_classification":
            [{"text": []}, {**tagged(1)[0], "id": 7}], "question_answering": [{"question": "", "context": "a"}, {**asked(1)[0], "id": 7}]}[task]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told, _ = predict_file(predictor, tmp_path / "in.jsonl", tmp_path / "out.parquet", options=ALL)
    assert set(told[0]) == set(told[1]) - {*rows[1]} | {*rows[0]}, (
        "a blank row has the columns of the others"
    )
    again, _ = read_input(tmp_path / "out.parquet")
    assert [row["id"] for row in again] == [None, 7] and set(again.columns) == set(told[1])
    name = "n_best" if task == "question_answering" else "probabilities"
    assert again[1][name] == told[1][name] and not again[0][name]


def test_parquet_takes_a_column_of_several_kinds_as_texts(tmp_path):
    rows = [
        {"text": "a", "code": 7, "tags": ["x"]},
        {"text": "b", "code": "x7", "tags": None},
        {"text": "c", "tags": {"y": 1}},
    ]
    write_predictions(rows, tmp_path / "out.parquet")
    back = datasets.Dataset.from_parquet(
        str(tmp_path / "out.parquet"), cache_dir=str(tmp_path)
    ).to_list()
    assert [row["code"] for row in back] == ["7", "x7", None] and [row["text"] for row in back] == [
        "a",
        "b",
        "c",
    ]
    assert [row["tags"] for row in back] == ['["x"]', None, '{"y": 1}']


def test_what_a_file_cannot_hold_is_written_as_text_or_refused_before_the_model_is_asked(
    trained, tmp_path, monkeypatch
):
    import datetime

    predictor = load_predictor_once(trained["classification"][2])
    rows = [{"text": "the apple is here", "day": datetime.date(2026, 11, 26), "meta": {}}]
    datasets.Dataset.from_list(
        [{key: row[key] for key in ("text", "day")} for row in rows]
    ).to_parquet(str(tmp_path / "in.parquet"))
    predict_file(predictor, tmp_path / "in.parquet", tmp_path / "out.csv")
    assert "2026-11-26" in (tmp_path / "out.csv").read_text()
    write_predictions(rows, tmp_path / "out.parquet")
    assert datasets.Dataset.from_parquet(str(tmp_path / "out.parquet"))[0]["meta"] == "{}"
