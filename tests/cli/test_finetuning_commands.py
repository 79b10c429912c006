"One command fine-tunes, repeats over seeds, compares and saves; a mistake costs one line and no file."

import csv
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from test_finetuning import CONFIG, asked, data_for, tagged, texts_of, tokenizer
from transformers import pipeline

from bertlab.finetuning.module import FinetuningModule
from bertlab.cli.finetune import GLUE, FinetuningRun
from bertlab.cli.main import main, run_command
from called import config_of, resumed_config  # noqa: E402
from bertlab.finetuning.runs import finetune
from bertlab.finetuning.predictions import evaluate, load_predictor
from bertlab.model.loading import read_state_dict

pytestmark = pytest.mark.filterwarnings("ignore")
CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = json.dumps(
    {key: value for key, value in CONFIG.items() if value is not None and key != "vocab_size"}
)
QUICK = ["--model.model_config_kwargs", MODEL, "--model.learning_rate", "0.003", "--run.progress", "none",
         "--data.train_batch_size", "8", "--trainer.accelerator", "cpu", "--trainer.precision", "32-true",
         "--trainer.limit_train_batches", "4", "--run.num_epochs", "1"]  # fmt: skip


def by_words(words):
    "`bertlab finetune`, and its exit status."
    return main(["finetune", *map(str, words)])


def conllu(rows):
    line = "{}\t{}\t_\t{}\t_\t_\t_\t_\t_\t_\n"
    return "".join("".join(line.format(n, w, t.removeprefix("B-").removeprefix("I-")) for n, (w, t) in
                           enumerate(zip(row["text"], row["label"]), 1)) + "\n" for row in rows)  # fmt: skip


def conll2003(rows):
    blocks = ("".join(f"{w} X X {t}\n" for w, t in zip(row["text"], row["label"])) for row in rows)
    return "-DOCSTART- -X- -X- O\n\n" + "\n".join(blocks)


def squad(rows):
    paragraphs = [{"context": row["context"], "qas": [{"id": str(n), "question": row["question"],
                   "answers": row["answers"]}]} for n, row in enumerate(rows)]  # fmt: skip
    return json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]})


def write_rows(folder, task):
    "Training, validation and test rows in a form of their own for each task."
    folder.mkdir()
    make, form = {"csv": (texts_of, "csv"), "conllu": (tagged, "conllu"), "conll": (tagged, "conll"),
                  "squad": (asked, "json")}[task]  # fmt: skip
    for split, number, seed in (("train", 48, 0), ("validation", 19, 1), ("test", 11, 2)):
        path = folder / f"{split}.{form}"
        if task == "csv":
            with open(path, "w", newline="") as file:
                table = csv.DictWriter(file, ["text", "label"])
                table.writeheader()
                table.writerows(make(number, seed))
        else:
            path.write_text(
                {"conllu": conllu, "conll": conll2003, "squad": squad}[task](make(number, seed))
            )
    return folder


@pytest.fixture(scope="session")
def tok(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tok")
    tokenizer().save_pretrained(folder)
    return folder


def words_for(tok, source, output, *more):
    return ["--data.dataset_name_or_path", str(source), "--data.pretrained_tokenizer_name_or_path", str(tok),
            "--run.output", str(output), *QUICK, *more]  # fmt: skip


KINDS = {"csv": ("classification", "text-classification"), "conllu": ("token_classification", "token-classification"),
         "conll": ("token_classification", "token-classification"), "squad": ("question_answering", None)}  # fmt: skip


@pytest.mark.parametrize("form", KINDS)
def test_each_task_goes_from_a_file_to_predictions_of_a_file(tok, tmp_path, capsys, form):
    source, output = write_rows(tmp_path / "rows", form), tmp_path / "run"
    more = ["--model.task", KINDS[form][0]]
    if form == "squad":
        more += ["--data.max_sequence_length", "16", "--data.collator_kwargs", '{"doc_stride": 4}']
    assert by_words(words_for(tok, source, output, *more)) == 0
    held = {path.name for path in output.iterdir()}
    assert {
        "run.yaml",
        "metrics.json",
        "evaluation.json",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    } <= held
    assert (
        held & {"calibration.png", "answers.png"}
        and "test rows, best seed" in capsys.readouterr().out
    )
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["deviation"] == {} and metrics["mean"] == metrics["runs"][0]
    file = next(source.glob("test.*"))
    told = tmp_path / "told.jsonl"
    assert main(["predict", str(output), str(file), "--output", str(told)]) == 0
    rows = [json.loads(line) for line in told.read_text().splitlines()]
    assert len(rows) == 11
    evaluation = json.loads((output / "evaluation.json").read_text())
    if form == "csv":
        right = np.mean([row["predicted_label"] == row["label"] for row in rows])
        assert right == pytest.approx(evaluation["accuracy"]) == metrics["runs"][0]["test_accuracy"]
    elif form != "squad":
        gold = "UPOS" if form == "conllu" else "ner"
        right = np.concatenate([np.array(row["predicted_tags"]) == row[gold] for row in rows])
        assert right.mean() == pytest.approx(evaluation["accuracy"])
    if KINDS[form][1]:
        assert pipeline(KINDS[form][1], str(output), device="cpu")("the apple is here")


def test_seeds_are_the_runs_that_they_are_alone_and_the_best_is_kept(tok, tmp_path):
    source = write_rows(tmp_path / "rows", "csv")
    more = ["--run.seeds", "[1,2,3]", "--run.monitor", "val_loss"]
    assert by_words(words_for(tok, source, tmp_path / "run", *more)) == 0
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert found["seeds"] == [1, 2, 3] and found["monitor"] == "val_loss"
    losses = [run["val_loss"] for run in found["runs"]]
    assert found["mean"]["val_loss"] == pytest.approx(np.mean(losses))
    assert found["deviation"]["val_loss"] == pytest.approx(np.std(losses, ddof=1))
    assert found["best_seed"] == (1, 2, 3)[int(np.argmin(losses))]
    ids = {
        f"{name}_token_id": getattr(tokenizer(), f"{name}_token_id")
        for name in ("pad", "cls", "sep", "mask")
    }
    ids["vocab_size"] = len(tokenizer())
    alone = finetune(FinetuningModule("classification", model_config_kwargs=CONFIG | ids, learning_rate=0.003), data_for(),
                     tmp_path / "alone", 1, monitor="val_loss", seed=found["best_seed"], limit_train_batches=4,
                     precision="32-true", accelerator="cpu")  # fmt: skip
    # The same rows from memory instead of a file.
    assert alone.metrics["val_loss"] == pytest.approx(min(losses), abs=1e-5)
    rows = texts_of(11, 2)
    said = [row["predicted_label"] for row in load_predictor(tmp_path / "run").predict(rows).rows]
    accuracy = np.mean([one == row["label"] for one, row in zip(said, rows)])
    assert accuracy == pytest.approx(
        evaluate(alone.module, alone.module.data, "test").numbers["accuracy"]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["csv", "squad"])
def test_a_gpu_evaluates_as_it_has_validated(tok, tmp_path, form):
    more = ["--model.task", KINDS[form][0], "--trainer.accelerator", "gpu"]
    assert (
        by_words(words_for(tok, write_rows(tmp_path / "rows", form), tmp_path / "run", *more)) == 0
    )
    (metrics,) = json.loads((tmp_path / "run" / "metrics.json").read_text())["runs"]
    name = "accuracy" if form == "csv" else "f1"
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())[name]
    assert found == pytest.approx(metrics[f"test_{name}"], abs=1e-3)


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_the_average_of_a_run_is_the_mean_of_the_seeds_that_it_has_finished(
    tok, tmp_path, capsys, adapter
):
    source, output = write_rows(tmp_path / "rows", "csv"), tmp_path / "run"
    more = ["--run.seeds", "[0,1]", *(["--model.adapter", adapter] if adapter else [])]
    assert by_words(words_for(tok, source, output, *more)) == 0
    seeds = [
        read_state_dict(path)["task_head.classifier.weight"]
        for path in sorted(output.glob("seed-*/best.ckpt"))
    ]
    shutil.copytree(
        output / "seed-1", output / "seed-2"
    )  # as a run leaves it that was killed in its third seed
    output = output.rename(tmp_path / "moved")
    written = (output / "run.yaml").read_text()
    (output / "run.yaml").write_text(
        written.replace("accelerator: cpu", "accelerator: gpu")
    )  # of another machine
    assert (output / "run.yaml").read_text() != written
    assert main(["average", str(output), "--output", str(tmp_path / "mean")]) == 0
    assert "seed-2     left out" in capsys.readouterr().out
    mean = load_predictor(tmp_path / "mean").model.task_head.classifier.weight
    assert not torch.equal(*seeds)
    torch.testing.assert_close(mean, (seeds[0] + seeds[1]) / 2)
    note = json.loads((tmp_path / "mean" / "average.json").read_text())
    runs = json.loads((output / "metrics.json").read_text())["runs"]
    assert note["average_of"] == list(note["singles"]) == ["seed-0", "seed-1"]
    assert list(note["singles"].values()) == pytest.approx([run[note["monitor"]] for run in runs])


def test_the_saved_configuration_repeats_the_run(tok, tmp_path):
    source = write_rows(tmp_path / "rows", "csv")
    assert by_words(words_for(tok, source, tmp_path / "one")) == 0
    saved = tmp_path / "one" / "run.yaml"
    assert by_words(["--config", str(saved), "--run.output", str(tmp_path / "two")]) == 0
    texts = [(tmp_path / name / "metrics.json").read_text() for name in ("one", "two")]
    assert texts[0] == texts[1]
    assert by_words(["--config", str(saved)]) == 2, "a run does not land on another"
    assert by_words(["--config", str(saved), "--overwrite"]) == 0
    assert (tmp_path / "one" / "previous-1" / "metrics.json").read_text() == texts[0]


def test_a_built_in_task_brings_rows_kind_tokenizer_and_baselines(tmp_path, capsys):
    output = tmp_path / "run"
    words = ["--run.task", "code-tokens", "--run.task_sizes", '{"train": 60, "validation": 20, "test": 30}',
             "--data.vocab_size", "300", "--run.output", str(output), *QUICK]  # fmt: skip
    assert by_words(words) == 0
    found = json.loads((output / "metrics.json").read_text())
    assert set(found["baselines"]) == {"majority", "bag of words"}
    assert set(found["baselines"]["majority"]) <= set(found["runs"][0]), (
        "the same metrics, by the same names"
    )
    said = capsys.readouterr().out
    assert "bag of words" in said and "PSF License" in said
    assert (
        yaml.safe_load((output / "run.yaml").read_text())["model"]["task"] == "token_classification"
    )
    assert load_predictor(output).task.name == "token_classification"


def write_glue(folder, name):
    "A copy of one task of GLUE, in hub form: configurations, splits, and -1 for hidden labels."
    from datasets import ClassLabel, Dataset

    for split, number in (("train", 40), ("validation", 12), ("test", 6)):
        rows = texts_of(number, 0)
        columns = {column: [row["text"] for row in rows] for column in GLUE[name][0]}
        labels = [-1 if split == "test" else int(row["label"] == "tool") for row in rows]
        data = Dataset.from_dict(
            {**columns, "label": [max(-1.0, x * 2.5) for x in labels] if name == "stsb" else labels}
        )
        if name != "stsb":
            data = data.cast_column("label", ClassLabel(names=["no", "yes"]))
        suffix = "_matched" if name == "mnli" and split != "train" else ""
        data.to_parquet(str(folder / name / f"{split}{suffix}-00000-of-00001.parquet"))
    files = {split: f"{name}/{split}-*" for split in ("train", "validation", "test")}
    if name == "mnli":
        files = {
            split: f"{name}/{split}-*" for split in ("train", "validation_matched", "test_matched")
        }
    card = {
        "configs": [
            {"config_name": name, "data_files": [{"split": s, "path": p} for s, p in files.items()]}
        ]
    }
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")


@pytest.mark.parametrize(("name", "metric"), [("mrpc", "val_accuracy"), ("cola", "val_mcc"), ("stsb", "val_spearman"),
                                              ("mnli", "val_accuracy")])  # fmt: skip
def test_a_glue_task_is_read_by_its_name(tok, tmp_path, monkeypatch, name, metric):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "glue").mkdir()
    write_glue(tmp_path / "glue", name)
    words = words_for(tok, tmp_path / "glue", tmp_path / "run", "--run.glue", name)
    assert by_words(words) == 0
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert found["monitor"] == metric and not any(
        key.startswith("test_") for key in found["runs"][0]
    )
    assert load_predictor(tmp_path / "run").task.problem_type == (
        "regression" if name == "stsb" else "single_label_classification"
    )


@pytest.mark.parametrize("name", ["sst2", "mnli"])
def test_a_glue_task_may_lie_in_plain_files(tok, tmp_path, name):
    columns = GLUE[name][0]
    for split, number in (("train", 40), ("dev", 12), ("test", 6)):
        lines = [
            "\t".join([*[row["text"]] * len(columns), *[row["label"]] * (split != "test")])
            for row in texts_of(number, 0)
        ]
        (tmp_path / f"{split}.tsv").write_text(
            "\n".join(["\t".join([*columns, *["label"] * (split != "test")]), *lines])
        )
    run = FinetuningRun(
        config_of("finetune", words_for(tok, tmp_path, tmp_path / "run", "--run.glue", name))
    )
    run.build()
    assert {split: len(rows) for split, rows in run.data.rows.items()} == {
        "train": 40,
        "validation": 12,
        "test": 6,
    }
    assert [run.data.columns[role] for role in run.data.task.text_columns][
        : len(columns)
    ] == columns and run.monitor == "val_accuracy"


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("finetune-*.yaml")), ids=lambda path: path.stem
)
def test_each_configuration_parses_and_names_what_exists(path, tmp_path):
    words = ["--config", str(path), "--run.output", str(tmp_path / "run")]
    run = FinetuningRun(config_of("finetune", words))
    written = yaml.safe_load(path.read_text())
    for part, values in written.items():
        for name, value in values.items():
            if name not in ("output", "task"):
                assert run.config[part][name] == value, f"{part}.{name}"
    kinds = {
        "code-tokens": "token_classification",
        "doc-words": "token_classification",
        "api-questions": "question_answering",
    }
    assert run.config["model"]["task"] == kinds.get(
        path.stem.removeprefix("finetune-"), "classification"
    )
    FinetuningModule(**run.config["model"])  # checks its arguments
    assert not (tmp_path / "run").exists()


def test_whole_numbers_are_regressed_where_the_model_is_asked_to(tok, tmp_path):
    (tmp_path / "prices.csv").write_text(
        "text,label\n" + "".join(f"the apple costs {n},{n}\n" for n in range(40))
    )
    words = words_for(
        tok, tmp_path / "prices.csv", tmp_path / "run", "--model.problem_type", "regression"
    )
    run = FinetuningRun(config_of("finetune", words))
    run.build()
    assert run.data.collator.problem_type == "regression" and run.monitor == "val_spearman"
    assert len(run.data.rows["validation"]) == 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--run.sedes", "[1]"], "did you mean 'run.seeds'"),
        (["--model.lerning_rate", "1"], "learning_rate"),
        (["--run.seeds", "[1,1]"], "run.seeds"),
        (["--run.num_epochs", "0"], "run.num_epochs"),
        (["--run.patience", "-1"], "run.patience"),
        (["--run.average", "2"], "run.average"),
        (
            ["--run.average", "0.9", "--model.optimizer_class", "splus"],
            "the optimizer (splus) keeps averages of its own",
        ),
        (["--run.validations_per_epoch", "0"], "run.validations_per_epoch"),
        (["--run.seeds", "[-1]"], "run.seeds"),
        (["--data.validation_fraction", "1.5"], "validation_fraction"),
        (["--data.val_batch_size", "0"], "val_batch_size"),
        (["--data.train_batch_size", "0"], "train_batch_size"),
        (["--data.max_sequence_length", "2"], "max_sequence_length"),
        (["--data.text_column", '["text", "label", "text"]'], "text_column"),
        (["--data.reader_kwargs", '{"delimiter": ";;"}'], "delimiter"),
        (["--data.train_split", "null"], "no training split"),
        (["--data.val_split", "null", "--data.validation_fraction", "0"], "no validation split"),
        (["--run.task", "docstring-area"], "leave run.glue"),
        (["--run.glue", "sst3"], "run.glue='sst3' is unknown"),
        (["--run.progress", "loud"], "progress"),
        (["--run.monitor", "val_bleu"], "val_accuracy"),
        (["--data.text_column", "txet"], "did you mean 'text'"),
        (["--data.train_batch_size", "900"], "lower it"),
        (["--model.num_labels", "7"], "num_labels=7"),
        (["--model.optimizer_class", "adamx"], "adamx"),
        (["--model.optimizer_kwargs", '{"bates": 1}'], "bates"),
        (["--model.optimizer_kwargs", '{"betas": 0.9}'], "optimizer_kwargs: adamw cannot be built"),
        (
            ["--model.optimizer_kwargs", '{"weight_decay": 0.1}'],
            "weight_decay=0.1",
        ),
        (["--model.warmup_steps", "5000", "--model.scheduler_type", "linear"], "warmup"),
        (["--model.task", "translation"], "translation"),
        (
            [
                "--model.pretrained_model_name_or_path",
                "nowhere/at/all",
                "--model.model_config_kwargs",
                "null",
            ],
            "nowhere/at/all",
        ),
        (["--model.pretrained_model_name_or_path", "somebody/model"], "not both"),
        (["--trainer.max_steps", "3"], "max_steps"),
        (["--trainer.precision", "fp17"], "precision='fp17'"),
        (["--trainer.limit_train_batches", "1.5"], "1.5 for limit_train_batches"),
        (["--trainer.limit_val_batches", "0"], "limit_val_batches=0"),
        (["--trainer.accumulate_grad_batches", "0"], "accumulate_grad_batches=0"),
        (["--trainer.devices", "2"], "one process, and trainer.devices and num_nodes make 2"),
        (["--trainer.devices", "[0, 1]"], "devices"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_written(tok, tmp_path, capsys, more, message):
    source = write_rows(tmp_path / "rows", "csv")
    capsys.readouterr()
    assert by_words(words_for(tok, source, tmp_path / "run", *more)) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert message in said[-1] and said[-1].startswith("bertlab finetune: ")
    assert not (tmp_path / "run").exists()


def test_sophia_under_a_scaler_of_float16_is_refused_before_anything_is_written(
    tok, tmp_path, capsys, monkeypatch
):
    import bertlab.cli.finetune as command

    made = command.make_trainer

    def scaled(*args, **options):  # as on a GPU; a CPU refuses 16-mixed
        trainer = made(*args, **options)
        trainer.precision_plugin.scaler = torch.amp.GradScaler("cpu")
        return trainer

    monkeypatch.setattr(command, "make_trainer", scaled)
    source = write_rows(tmp_path / "rows", "csv")
    assert (
        by_words(words_for(tok, source, tmp_path / "run", "--model.optimizer_class", "sophiah"))
        == 2
    )
    assert "16-mixed" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_nothing_to_learn_from_lists_what_there_is(tmp_path, capsys):
    assert by_words(["--run.output", str(tmp_path / "run")]) == 2
    assert "docstring-area" in capsys.readouterr().err
    assert by_words(["--run.output", str(tmp_path / "run"), "--run.task", "areas"]) == 2
    assert "docstring-area" in capsys.readouterr().err


def test_ctrl_c_saves_and_resume_goes_on_to_the_same_result(tok, tmp_path, capsys):
    source, handler = write_rows(tmp_path / "rows", "csv"), signal.getsignal(signal.SIGINT)
    more = ["--run.seeds", "[0,1]", "--run.num_epochs", "6", "--run.checkpoint_every_steps", "3"]
    assert by_words(words_for(tok, source, tmp_path / "whole", *more)) == 0
    run = tmp_path / "run"

    def interrupt():
        while not list((run / "seed-1" / "checkpoints").glob("*.ckpt")):
            stop.wait(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    stop = threading.Event()
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    assert by_words(words_for(tok, source, run, *more)) == 130
    assert f"bertlab finetune --resume {run}" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is handler and not (run / "model.safetensors").exists()
    first = (run / "seed-0" / "best.ckpt").stat().st_mtime_ns
    assert by_words(["--resume", run]) == 0
    assert (run / "seed-0" / "best.ckpt").stat().st_mtime_ns == first, (
        "a finished seed is not run again"
    )
    texts = [(tmp_path / name / "metrics.json").read_text() for name in ("whole", "run")]
    assert texts[0] == texts[1]


def test_a_resume_that_is_another_run_is_refused_and_leaves_the_run_as_it_was(
    tok, tmp_path, capsys
):
    source, output = write_rows(tmp_path / "rows", "csv"), tmp_path / "run"
    assert by_words(words_for(tok, source, output)) == 0
    other = tokenizer()
    other.add_tokens(["sickle"])
    other.save_pretrained(tmp_path / "other")
    before = {
        path: path.read_bytes()
        for path in (output / "run.yaml", output / "tokenizer" / "tokenizer.json")
    }
    rows = (source / "train.csv").read_text()
    for more, named, text in ((["--data.max_sequence_length", "16"], "max_sequence_length", rows),
                              (["--data.train_batch_size", "4"], "train_batch_size", rows),
                              (["--data.pretrained_tokenizer_name_or_path", str(tmp_path / "other")], "tokenizer", rows),
                              ([], "number of rows", rows + "an apple,fruit\n"),
                              ([], "train rows", rows.replace("the", "an"))):  # fmt: skip
        (source / "train.csv").write_text(text)
        assert by_words(["--resume", output, *more]) == 2, named
        assert named in capsys.readouterr().err.splitlines()[-1]
        assert before == {path: path.read_bytes() for path in before}, named


def test_seeds_that_are_scored_on_other_rows_are_not_mixed(tok, tmp_path, capsys):
    source, output = write_rows(tmp_path / "rows", "csv"), tmp_path / "run"
    assert by_words(words_for(tok, source, output)) == 0
    more = ["--resume", output, "--run.seeds", "[0, 1]"]
    for split in ("validation", "test"):
        path = source / f"{split}.csv"
        rows = path.read_text()
        path.write_text(rows + "an apple,fruit\n")
        capsys.readouterr()
        assert by_words(more) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert (
            f": {split} rows is " in said
            and "Put it back, or start a new run" in said
            and "seed-0" in said
        )
        path.write_text(rows)


def test_a_seed_does_not_begin_anew_where_its_checkpoint_is_damaged_and_a_finished_one_needs_none(
    tok, tmp_path, capsys
):
    output = tmp_path / "run"
    assert by_words(words_for(tok, write_rows(tmp_path / "rows", "csv"), output)) == 0
    (kept,) = (output / "seed-0" / "checkpoints").glob("*.ckpt")
    kept.write_bytes(kept.read_bytes()[:-30])
    other = output / "seed-1" / "checkpoints" / kept.name
    other.parent.mkdir(parents=True)
    other.write_bytes(kept.read_bytes())
    capsys.readouterr()
    assert by_words(["--resume", output, "--run.seeds", "[0, 1]"]) == 2
    assert (
        "no checkpoint in " in (told := capsys.readouterr().err)
        and "seed-1" in told
        and "seed-0" not in told
    )
    other.unlink()  # a seed that was not begun begins
    assert by_words(["--resume", output, "--run.seeds", "[0, 1]"]) == 0
    assert json.loads((output / "metrics.json").read_text())["seeds"] == [0, 1]


def test_a_resume_with_other_seeds_keeps_the_numbers_of_each(tok, tmp_path):
    output = tmp_path / "run"
    read = lambda: json.loads((output / "metrics.json").read_text())
    more = ["--run.seeds", "[0,1]", "--run.baselines", "false", "--run.monitor", "val_loss"]
    assert by_words(words_for(tok, write_rows(tmp_path / "rows", "csv"), output, *more)) == 0
    first = read()
    assert by_words(["--resume", output, "--run.seeds", "[1,0]"]) == 0
    assert read() == {**first, "seeds": [1, 0], "runs": first["runs"][::-1]}
    assert by_words(["--resume", output, "--run.seeds", "[2,1]"]) == 0
    assert read()["seeds"] == [2, 1] and read()["runs"][1] == first["runs"][1] != read()["runs"][0]


def test_predict_never_writes_over_a_file(tok, tmp_path, capsys):
    (tmp_path / "in.csv").write_text("text\nhello\n")
    for more, part in (
        (["--output", tmp_path / "in.csv"], "is the file that is read"),
        (["--output", tmp_path / "in.txt"], "must end in"),
    ):
        assert main(["predict", "nowhere", *map(str, [tmp_path / "in.csv", *more])]) == 2
        assert part in capsys.readouterr().err
    (tmp_path / "out.csv").write_text("mine")
    assert (
        main(
            ["predict", "nowhere", str(tmp_path / "in.csv"), "--output", str(tmp_path / "out.csv")]
        )
        == 2
    )
    assert "--overwrite" in capsys.readouterr().err and (tmp_path / "out.csv").read_text() == "mine"


def test_a_defect_is_not_taken_for_a_mistake():
    with pytest.raises(KeyError):
        run_command("devices", lambda: {}["a"])


def test_a_resume_with_other_settings_is_refused_where_a_seed_is_finished(tok, tmp_path, capsys):
    source, output = write_rows(tmp_path / "rows", "csv"), tmp_path / "run"
    assert by_words(words_for(tok, source, output)) == 0
    kept = (output / "run.yaml").read_text()
    for more, said in (
        (["--run.num_epochs", "10"], "run.num_epochs"),
        (["--model.learning_rate", "0.5"], "model.learning_rate=0.003"),
    ):
        capsys.readouterr()
        assert main(["finetune", "--resume", str(output), *more]) == 2
        assert (
            f"seed 0 of {output} was trained with {said}" in (error := capsys.readouterr().err)
            and "another --run.output" in error
        )
        assert (output / "run.yaml").read_text() == kept
    assert main(["finetune", "--resume", str(output), "--run.seeds", "[0, 1]"]) == 0
    assert json.loads((output / "metrics.json").read_text())["seeds"] == [0, 1]


def test_a_resume_may_change_what_no_result_follows_from_and_a_named_precision_is_not_of_that_kind(
    tok, tmp_path
):
    source, output = write_rows(tmp_path / "rows", "csv"), tmp_path / "run"
    assert by_words(words_for(tok, source, output, "--run.baselines", "false")) == 0

    def refusal(*more):
        run = FinetuningRun(resumed_config("finetune", more, str(output)), resume=True)
        run.monitor = "val_accuracy"
        try:
            run._check_settings()
        except ValueError as error:
            return str(error)

    free = {"log_every_n_steps": 1, "detect_anomaly": "true", "benchmark": "true", "default_root_dir": tmp_path, "profiler": "simple",
            "logger": "true"}  # fmt: skip
    assert refusal(*(f"--trainer.{name}={value}" for name, value in free.items()),
                   "--model.compile_model=null", "--model.gradient_checkpointing=true") is None  # fmt: skip
    assert refusal("--trainer.precision=null") is None, "the precision of another device"
    assert "trainer.precision='32-true', and now it is 'bf16-mixed'" in refusal(
        "--trainer.precision=bf16-mixed"
    )
    assert "trainer.gradient_clip_val=1.0" in refusal("--trainer.gradient_clip_val=0.5")


def test_a_run_does_not_move_its_own_beginning_aside(tok, tmp_path, capsys):
    source, output = write_rows(tmp_path / "rows", "csv"), tmp_path / "run"
    assert by_words(words_for(tok, source, output)) == 0
    capsys.readouterr()
    assert main(["finetune", "--data.dataset_name_or_path", str(source), "--run.output", str(output), "--overwrite",
                 "--model.pretrained_model_name_or_path", str(output)]) == 2  # fmt: skip
    assert (
        "--overwrite would move it aside" in capsys.readouterr().err
        and (output / "config.json").exists()
    )


def test_seeds_are_not_averaged_over_rows_that_they_have_not_seen(tok, tmp_path, capsys):
    source, output = write_rows(tmp_path / "rows", "csv"), tmp_path / "run"
    assert by_words(words_for(tok, source, output, "--run.seeds", "[0, 1]")) == 0
    assert main(["average", str(output), "--output", str(tmp_path / "mean")]) == 0
    with open(next(source.glob("train*")), "a") as file:
        file.write("another apple is here,fruit\n")
    capsys.readouterr()
    assert main(["average", str(output), "--output", str(tmp_path / "other")]) == 2
    assert "there and" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_an_unfinished_seed_does_not_go_on_under_another_monitor(tok, tmp_path, capsys):
    output = tmp_path / "run"
    assert by_words(words_for(tok, write_rows(tmp_path / "rows", "csv"), output)) == 0
    (output / "metrics.json").unlink()  # as if it had been killed before its numbers were written
    kept = (output / "run.yaml").read_text()
    capsys.readouterr()
    assert by_words(["--resume", output, "--run.monitor", "val_loss"]) == 2
    assert (
        "val_accuracy" in (message := capsys.readouterr().err) and "monitor is val_loss" in message
    )
    assert (output / "run.yaml").read_text() == kept
    assert by_words(["--resume", output, "--run.monitor", "val_accuracy"]) == 0, (
        "the task's own, by its name"
    )


def test_a_picture_that_fails_costs_no_model(tok, tmp_path, monkeypatch):
    from bertlab.finetuning.evaluation import Evaluation

    def fail(evaluation, directory):
        raise RuntimeError("no picture")

    monkeypatch.setattr(Evaluation, "write", fail)
    with pytest.raises(RuntimeError, match="no picture"):
        by_words(words_for(tok, write_rows(tmp_path / "rows", "csv"), tmp_path / "run"))
    assert len(load_predictor(tmp_path / "run").predict(texts_of(3)).rows) == 3
    assert (tmp_path / "run" / "task.json").exists()
