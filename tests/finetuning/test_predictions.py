"Predictions keep every row in its order, agree with the module, and files are written as a whole."

import io
import json
import math
import sys
from functools import partial

import datasets
import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from test_finetuning import asked, data_for, module_for, predict, tagged, texts_of, tokenizer
from transformers import pipeline

from bertlab.finetuning import predictions
from bertlab.finetuning.data import FinetuningDataModule
from bertlab.finetuning.evaluation import Calibration, classification_table
from bertlab.finetuning.predictions import (
    check_output,
    evaluate,
    load_predictor,
    predict_file,
    read_input,
)
from bertlab.finetuning.runs import finetune
from bertlab.finetuning.task import load_task

pytestmark = pytest.mark.filterwarnings("ignore")
TASKS = ("classification", "token_classification", "question_answering")
PLAIN = {"precision": "32-true", "accelerator": "cpu"}


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    "For each task: the module, its data and the directory that was written for pipelines."
    runs = {}
    for task in TASKS:
        module, data = module_for(task), data_for(task)
        folder = tmp_path_factory.mktemp(task)
        run = finetune(module, data, folder / "run", num_epochs=1, limit_train_batches=4, **PLAIN)
        runs[task] = module, data, run.save_predictor(folder / "model")
    return runs


def rows_for(task):
    return {
        "classification": texts_of,
        "token_classification": tagged,
        "question_answering": asked,
    }[task](11, 2)


def test_labels_are_those_of_the_module(trained):
    module, data, directory = trained["classification"]
    predictor = load_predictor(directory)
    logits = torch.cat([batch["logits"] for batch in predict(module, data.test_dataloader())])
    rows = predictor.predict(texts_of(11, 2), all_probabilities=True).rows
    for row, shares in zip(rows, logits.softmax(-1).tolist()):
        assert list(row["probabilities"].values()) == pytest.approx(shares, abs=1e-4)
        assert row["predicted_label"] == data.id2label[int(np.argmax(shares))]
    classify = pipeline("text-classification", str(directory))
    for row, expected in zip(rows, classify([row["text"] for row in texts_of(11, 2)])):
        assert row["predicted_label"] == expected["label"]
        assert row["probability"] == pytest.approx(expected["score"], abs=1e-4)


@pytest.mark.parametrize("task", TASKS)
def test_order_and_batches_change_nothing(trained, task):
    predictor, rows = load_predictor(trained[task][2]), rows_for(task)
    order = np.random.default_rng(0).permutation(len(rows))
    once = predictor.predict(rows, batch_size=1).rows
    again = predictor.predict([rows[n] for n in order], batch_size=5).rows
    for n, row in zip(order, again):
        for key, value in once[n].items():
            if isinstance(value, float):
                assert row[key] == pytest.approx(value, abs=1e-4)
            elif key != "tag_probabilities":
                assert row[key] == value


@pytest.mark.parametrize("task", TASKS)
def test_the_evaluation_agrees_with_the_metrics(trained, tmp_path, task):
    module, data, directory = trained[task]
    evaluation = evaluate(module, data, "test")
    predictor = load_predictor(directory)
    scores = data.task.score(data.rows["test"], predictor.predict_rows([*data.rows["test"]]).rows)
    name = "exact_match" if task == "question_answering" else "accuracy"
    assert evaluation.numbers[name] == pytest.approx(scores[name], abs=1e-6)
    evaluation.write(tmp_path)
    assert json.loads((tmp_path / "evaluation.json").read_text())[name] == evaluation.numbers[name]
    with pytest.raises(ValueError, match="split='held'"):
        evaluate(module, data, "held")


def test_every_word_of_a_long_text_has_its_tag(trained):
    predictor = load_predictor(trained["token_classification"][2], max_sequence_length=16)
    words = ["the", "fig", "is", "in", "oslo"] * 12
    result = predictor.predict([words, ["the", "fig"]])
    assert [len(row["predicted_tags"]) for row in result.rows] == [60, 2] and result.num_long == 1
    assert None not in result.rows[0]["predicted_tags"]
    assert "1 too long: read in pieces" in result.describe(predictor.task)


def test_long_texts_are_cut_and_counted(trained):
    predictor = load_predictor(trained["classification"][2])
    room = predictor.max_sequence_length - 2
    texts = [" ".join(["fig"] * n) for n in (3, room, room + 1, 5 * room)]
    assert predictor.predict(texts).num_long == 2


def test_an_answer_at_the_end_of_a_long_context_can_be_found(trained):
    predictor = load_predictor(trained["question_answering"][2])
    context = "the file is here " * 20 + "the saw is in rome"
    [row] = predictor.predict([{"question": "where is the saw", "context": context}]).rows
    assert context[row["predicted_start"] : row["predicted_stop"]] == row["predicted_answer"] != ""
    with_none = predictor.predict([{"question": "where", "context": context}], null_threshold=-99.0)
    assert with_none.rows[0]["predicted_answer"] == ""


def test_probabilities_of_answers_do_not_depend_on_how_many_are_listed(trained):
    predictor, rows = load_predictor(trained["question_answering"][2]), asked(4, 3)
    few, many = (predictor.predict(rows, all_probabilities=True, num_best=n).rows for n in (1, 9))
    assert [row["probability"] for row in few] == [row["probability"] for row in many]
    assert all(len(row["n_best"]) <= 2 for row in few) and len(many[0]["n_best"]) > 2


@pytest.mark.parametrize("problem_type", ["tags", "number"])
def test_several_labels_and_numbers_are_predicted_and_evaluated(tmp_path, problem_type):
    data = data_for(
        train=texts_of(32, 0, problem_type),
        val=texts_of(9, 1, problem_type),
        test=texts_of(9, 2, problem_type),
    )
    run = finetune(module_for(), data, tmp_path / "run", num_epochs=1, **PLAIN)
    predictor = load_predictor(run.save_predictor(tmp_path / "model"))
    rows = predictor.predict(texts_of(9, 2, problem_type)).rows
    scores = data.task.score(data.rows["test"], rows)
    for name, value in scores.items():
        # Predictions that are equal but for rounding share a rank in one batch and not in another.
        tolerance = 0.02 if name == "spearman" else 1e-3
        assert value == pytest.approx(run.metrics[f"test_{name}"], abs=tolerance), name
    assert set(rows[0]) == set(predictor.task.blank())
    assert evaluate(run.module, data, "test").numbers


# --- what is remembered and refused ---------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_a_model_that_is_not_finite_predicts_nothing(trained, task):
    predictor = load_predictor(trained[task][2])
    next(predictor.model.task_head.parameters()).data.fill_(math.nan)
    with pytest.raises(ValueError, match="not finite"):
        predictor.predict(rows_for(task))


def test_a_directory_remembers_columns_length_and_windows(trained):
    predictor = load_predictor(trained["question_answering"][2])
    assert predictor.max_sequence_length == 16 and predictor.task.doc_stride == 4
    assert predictor.columns == {"question": "question", "context": "context"}
    assert load_predictor(trained["question_answering"][2], 32).task.doc_stride == 8
    assert math.isinf(predictor.task.null_threshold)


@pytest.mark.parametrize("task, rows, options, message", [
    ("classification", [{"other": "x"}], {}, "'text'"), ("classification", [{"text": 3}], {}, "input row 0.*'text'"),
    ("classification", ["x"], {"text_column": ["a", "b", "c"]}, "text_column"), ("classification", ["x"], {"batch_size": 0}, "batch_size"),
    ("token_classification", [{"text": ["a", 3]}], {}, "input row 0"),
    ("question_answering", [{"question": "q"}], {}, "context"),
])  # fmt: skip
def test_rows_and_options_that_do_not_fit_are_refused(trained, task, rows, options, message):
    with pytest.raises(ValueError, match=message):
        load_predictor(trained[task][2]).predict(rows, **options)


def test_a_model_without_a_head_and_a_wrong_length_are_refused(trained, tmp_path):
    from bertlab.model.heads import BertLabForMaskedLM
    from bertlab.model.huggingface import save_model

    save_model(BertLabForMaskedLM(module_config()), tokenizer(), tmp_path)
    with pytest.raises(ValueError, match="no head for a task"):
        load_predictor(tmp_path)
    for length in (4, 10**6):
        with pytest.raises(ValueError, match=f"max_sequence_length={length}"):
            load_predictor(trained["classification"][2], length)


def module_config():
    from test_finetuning import CONFIG

    from bertlab.model.config import BertLabConfig

    return BertLabConfig(**CONFIG)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv", "parquet"])
def test_a_file_comes_back_with_its_rows(trained, tmp_path, ending):
    source = tmp_path / "in.csv"
    source.write_text('id,text\n1,"the fig, here"\n2,\n3,"the\nsaw"\n')
    predictor, output = load_predictor(trained["classification"][2]), tmp_path / f"out.{ending}"
    _, result = predict_file(predictor, source, output)
    rows, _ = predict_file(predictor, source)
    assert result.num_blank == 1 and rows[1]["predicted_label"] is None
    if ending == "parquet":
        back = datasets.Dataset.from_parquet(
            str(output), cache_dir=str(tmp_path / "cache")
        ).to_list()
    else:
        back = [*read_input(output)]
    assert [row["text"] for row in back] == ["the fig, here", "", "the\nsaw"]
    assert [row["predicted_label"] or None for row in back] == [
        row["predicted_label"] for row in rows
    ]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "-"])
def test_a_long_file_is_read_and_written_in_blocks(trained, tmp_path, monkeypatch, capsys, ending):
    "The label of the first block is unknown, and a column begins in the second."
    rows = [{"text": text, "label": None} for text in ("", "", "")]
    rows += [{"text": "the fig", "label": "fruit", "id": n} for n in range(5)]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(json.dumps(row) for row in rows))
    predictor = load_predictor(trained["classification"][2])
    expected, once = predict_file(predictor, source)
    sizes, predict_table = [], predictions.Predictor.predict_table

    def count(self, table, *arguments):
        sizes.append(len(table))
        return predict_table(self, table, *arguments)

    monkeypatch.setattr(predictions.Predictor, "predict_table", count)
    monkeypatch.setattr(predictions, "_read_blocks", partial(predictions._read_blocks, size=3))
    output = ending if ending == "-" else tmp_path / f"out.{ending}"
    written, result = predict_file(predictor, source, output)
    assert sizes == [3, 3, 2] and not written
    assert (result.num_read, result.num_blank, result.num_scored) == (8, 3, 5)
    assert result.scores == once.scores
    if ending == "-":
        output = tmp_path / "printed.jsonl"
        output.write_text(capsys.readouterr().out)
    for row, known in zip(read_input(output), expected, strict=True):
        assert str(row.get("id") or 0) == str(known.get("id") or 0)
        assert (row["predicted_label"] or None) == known["predicted_label"]


CONLLU = """\
# text = the figsaw is
1-2\tfigsaw\t_\t_\t_\t_\t_\t_\t_\t_
1\tfig\t_\tNOUN\t_\t_\t0\t_\t_\tGloss=x
2\tsaw\t_\tNOUN\t_\t_\t0\t_\t_\t_
2.1\tgap\t_\t_\t_\t_\t_\t_\t_\t_

"""


def test_conllu_keeps_its_lines_and_gets_tags_in_misc(trained, tmp_path):
    source, output = tmp_path / "in.conllu", tmp_path / "out.conllu"
    source.write_text(CONLLU)
    predictor = load_predictor(trained["token_classification"][2])
    predict_file(predictor, source, output)
    rows, _ = predict_file(predictor, source)
    before, after = CONLLU.split("\n"), output.read_text().split("\n")
    tagged_lines = [2, 3]
    for n, (old, new) in enumerate(zip(before, after, strict=True)):
        assert new == old if n not in tagged_lines else "Predicted=" in new.split("\t")[-1]
    assert len(rows[0]["predicted_tags"]) == len(tagged_lines)


@pytest.mark.parametrize("task", TASKS)
def test_a_file_with_labels_is_scored(trained, tmp_path, task):
    module, data, directory = trained[task]
    write = datasets.Dataset.from_list(rows_for(task)).to_json
    write(str(tmp_path / "in.jsonl"))
    _, result = predict_file(load_predictor(directory), tmp_path / "in.jsonl")
    name = "exact_match" if task == "question_answering" else "accuracy"
    assert result.scores[name] == pytest.approx(evaluate(module, data, "test").numbers[name])
    assert result.num_scored == 11 and f"{name} " in result.describe(data.task)


def test_labels_that_the_model_does_not_have_are_left_out_of_the_score(trained, tmp_path):
    (tmp_path / "in.csv").write_text("text,label\nthe fig,fruit\nthe saw,\nthe fig,unheard\n")
    _, result = predict_file(load_predictor(trained["classification"][2]), tmp_path / "in.csv")
    assert result.num_scored == 1
    (tmp_path / "none.csv").write_text("text\nthe fig\n")
    _, result = predict_file(load_predictor(trained["classification"][2]), tmp_path / "none.csv")
    assert not result.scores


def test_standard_input_is_known_by_its_first_lines(monkeypatch):
    for text, file_format, rows in (
        ("one\n\ntwo\n", "lines", ["one", "", "two"]),
        ('{"text": "one"}\n{"text": "two"}\n', "jsonl", ["one", "two"]),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        table = read_input("-")
        assert (table.file_format, [row["text"] for row in table]) == (file_format, rows)


@pytest.mark.parametrize("encoding", ["cp1252", "utf-8"])  # of the new file; training's was cp1252
def test_new_files_are_read_as_that_of_training(encoding, tmp_path):
    (tmp_path / "a.csv").write_bytes(
        "\n".join(f"caf\xe9 {n};{n % 2}" for n in range(40)).encode("cp1252")
    )
    reading = {"delimiter": ";", "encoding": "cp1252"}
    data = FinetuningDataModule("classification", dataset_name_or_path=str(tmp_path / "a.csv"), text_column="1",
                                label_column="2", header=False, reader_kwargs=reading)  # fmt: skip
    data.read()
    data.save_task(tmp_path)
    (tmp_path / "b.csv").write_bytes("th\xe9, tr\xe8s;1\nna\xefve;0\n".encode(encoding))
    table = read_input(tmp_path / "b.csv", None, load_task(tmp_path)["reader"])
    assert [row["1"] for row in table] == ["th\xe9, tr\xe8s", "na\xefve"]
    (tmp_path / "b.csv").write_text("th\xe9|0\nna|1\n", encoding="latin-1")
    options = {"delimiter": "|", "encoding": "latin-1"}  # are over those of training
    assert read_input(tmp_path / "b.csv", None, reading, **options).columns == ["th\xe9", "0"]


def test_malformed_rows_are_skipped_where_asked_for(trained, tmp_path):
    data = tmp_path / "in.data"
    data.write_text(
        '{"text": "the fig", "label": "fruit"}\n{"text": 3\n{"text": "the saw", "label": "tool"}\n'
    )
    predictor, reading = load_predictor(trained["classification"][2]), {"file_format": "jsonl"}
    with pytest.raises(ValueError, match="in.data line 2.*on_error"):
        predict_file(predictor, data, reader_kwargs=reading)
    with pytest.warns(UserWarning, match="in.data line 2"):
        rows, _ = predict_file(predictor, data, reader_kwargs={**reading, "on_error": "skip"})
    assert [row["text"] for row in rows] == ["the fig", "the saw"]
    options = {"label_column": "label", "validation_fraction": 0}
    reading = {**reading, "on_error": "skip"}
    data = FinetuningDataModule("classification", None, str(data), reader_kwargs=reading, **options)
    data.read()
    assert len(data.rows["train"]) == 2


def test_mistakes_are_found_before_the_model_runs(trained, tmp_path):
    (tmp_path / "in.csv").write_text("text,probability\nfig,1\n")
    predictor = load_predictor(trained["classification"][2])
    predictor.model = None
    source = tmp_path / "in.csv"
    for output, options, message in (
        ("out.txt", {}, "out.txt.*conllu"), ("no/out.csv", {}, "no directory"), ("in.csv", {"overwrite": True}, "is read"),
        ("out.conllu", {}, "CoNLL-U"), ("out.csv", {}, "probability"), ("out.csv", {"file_format": "xml"}, "xml"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            predict_file(predictor, source, tmp_path / output, **options)
    (tmp_path / "out.csv").write_text("kept")
    with pytest.raises(ValueError, match="overwrite"):
        check_output(tmp_path / "out.csv", source)


# --- evaluation -----------------------------------------------------------------------------------


def test_a_table_has_a_row_a_label_and_means_over_labels_that_occur():
    table = classification_table([0] * 8 + [1, 1], [0] * 10, ["a", "b", "never"])
    assert [row["label"] for row in table] == [
        "a",
        "b",
        "never",
        "mean of labels",
        "mean by support",
    ]
    assert table[0]["recall"] == 1 and table[3]["recall"] == 0.5 and table[4]["support"] == 10


def test_calibration_is_scikit_learns():
    rng = np.random.default_rng(0)
    confidence = rng.random(500)
    right = rng.random(500) < confidence**2
    calibration = Calibration.of(confidence, right, 10)
    accuracy, mean = calibration_curve(right, confidence, n_bins=10)
    np.testing.assert_allclose(calibration.accuracy, accuracy)
    np.testing.assert_allclose(calibration.confidence, mean)
    assert Calibration.of([0.9, 0.9, 0.6, 0.6], [1, 0, 1, 1]).error() == pytest.approx(0.4)
