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
from called import config_of
from test_finetuning import CONFIG, asked, data_for, tagged, texts_of, tokenizer
from transformers import pipeline

from bertlab.cli import finetune as finetuning
from bertlab.cli.finetune import build_finetuning, resolve_task
from bertlab.cli.main import main, run_command
from bertlab.finetuning.config import GLUE
from bertlab.finetuning.module import FinetuningModule
from bertlab.finetuning.predictions import evaluate, load_predictor
from bertlab.finetuning.runs import finetune
from bertlab.model.loading import read_state_dict
from bertlab.train.export import FILES

pytestmark = pytest.mark.filterwarnings("ignore")
CONFIGS = Path(__file__).parents[2] / "bertlab/configs"
MODEL = json.dumps(
    {key: value for key, value in CONFIG.items() if value is not None and key != "vocab_size"}
)
QUICK = ["--model.model_config_kwargs", MODEL, "--model.learning_rate", "0.003", "--run.progress", "none",
         "--data.train_batch_size", "8", "--trainer.accelerator", "cpu", "--trainer.precision", "32-true",
         "--trainer.limit_train_batches", "4", "--run.num_epochs", "1"]  # fmt: skip
TASKS = {"csv": "classification", "conllu": "token_classification", "conll": "token_classification",
         "squad": "question_answering"}  # fmt: skip
PIPELINES = {
    "classification": "text-classification",
    "token_classification": "token-classification",
}


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


def write_table(path, rows):
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, ["text", "label"])
        table.writeheader()
        table.writerows(rows)


def write_rows(folder, form="csv"):
    "Write training, validation and test rows in a file format."
    folder.mkdir()
    suffix = "json" if form == "squad" else form
    for split, count, seed in (("train", 48, 0), ("validation", 19, 1), ("test", 11, 2)):
        path = folder / f"{split}.{suffix}"
        if form == "csv":
            write_table(path, texts_of(count, seed))
        elif form == "squad":
            path.write_text(squad(asked(count, seed)))
        else:
            write = conllu if form == "conllu" else conll2003
            path.write_text(write(tagged(count, seed)))
    return folder


@pytest.fixture(scope="session")
def tok(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tok")
    tokenizer().save_pretrained(folder)
    return folder


def words_for(tok, source, output, *more):
    return ["--data.dataset_name_or_path", str(source), "--data.pretrained_tokenizer_name_or_path", str(tok),
            "--run.output", str(output), *QUICK, *more]  # fmt: skip


def run(*words):
    "The exit status of `bertlab finetune`."
    return main(["finetune", *map(str, words)])


def metrics_of(output):
    return json.loads((output / "metrics.json").read_text())


def build(words):
    return build_finetuning(resolve_task(config_of("finetune", words)) | {"seed_everything": 0})


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows")


@pytest.fixture
def output(tmp_path):
    return tmp_path / "run"


@pytest.fixture(scope="module")
def finished(tok, tmp_path_factory):
    "A folder with rows and a run of one seed."
    folder = tmp_path_factory.mktemp("finished")
    write_rows(folder / "rows")
    assert run(*words_for(tok, folder / "rows", folder / "run")) == 0
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    "A copy of the finished run, whose rows are those of the original."
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("form", TASKS)
def test_a_task_goes_from_a_file_to_predictions(tok, tmp_path, output, form):
    source = write_rows(tmp_path / "rows", form)
    words = ["--model.task", TASKS[form]]
    if form == "squad":
        words += ["--data.max_sequence_length", "16", "--data.collator_kwargs.doc_stride", "4"]
    assert run(*words_for(tok, source, output, *words)) == 0
    names = {path.name for path in output.iterdir()}
    assert names >= {
        "run.yaml",
        "evaluation.json",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    metrics, predicted = metrics_of(output), tmp_path / "predicted.jsonl"
    assert metrics["deviation"] == {} and metrics["mean"] == metrics["runs"][0]
    file = next(source.glob("test.*"))
    assert main(["predict", str(output), str(file), "--output", str(predicted)]) == 0
    answers = [json.loads(line) for line in predicted.read_text().splitlines()]
    assert len(answers) == 11
    accuracy = json.loads((output / "evaluation.json").read_text()).get("accuracy")
    if form == "csv":
        right = np.mean([row["predicted_label"] == row["label"] for row in answers])
        assert right == pytest.approx(accuracy) == metrics["runs"][0]["test_accuracy"]
    elif form != "squad":
        gold = "UPOS" if form == "conllu" else "ner"
        right = np.concatenate([np.array(row["predicted_tags"]) == row[gold] for row in answers])
        assert right.mean() == pytest.approx(accuracy)
    if name := PIPELINES.get(TASKS[form]):
        assert pipeline(name, str(output), device="cpu")("the apple is here")


def test_seeds_are_what_they_are_alone_and_the_best_is_kept(tok, rows, tmp_path, output):
    words = ["--run.seeds", "[1,2,3]", "--run.monitor", "val_loss"]
    assert run(*words_for(tok, rows, output, *words)) == 0
    metrics = metrics_of(output)
    losses = [values["val_loss"] for values in metrics["runs"]]
    assert metrics["seeds"] == [1, 2, 3] and metrics["monitor"] == "val_loss"
    assert metrics["mean"]["val_loss"] == pytest.approx(np.mean(losses))
    assert metrics["deviation"]["val_loss"] == pytest.approx(np.std(losses, ddof=1))
    assert metrics["best_seed"] == (1, 2, 3)[int(np.argmin(losses))]
    ids = {
        f"{name}_token_id": getattr(tokenizer(), f"{name}_token_id")
        for name in ("pad", "cls", "sep", "mask")
    }
    config = CONFIG | ids | {"vocab_size": len(tokenizer())}
    alone = finetune(FinetuningModule("classification", model_config_kwargs=config, learning_rate=0.003), data_for(train=texts_of(48)),
                     tmp_path / "alone", 1, monitor="val_loss", seed=metrics["best_seed"], limit_train_batches=4,
                     precision="32-true", accelerator="cpu")  # fmt: skip
    assert alone.metrics["val_loss"] == pytest.approx(min(losses), abs=1e-5)  # rows from memory
    test_rows = texts_of(11, 2)
    answers = load_predictor(output).predict(test_rows).rows
    accuracy = np.mean([a["predicted_label"] == row["label"] for a, row in zip(answers, test_rows)])
    expected = evaluate(alone.module, alone.module.data, "test").numbers["accuracy"]
    assert accuracy == pytest.approx(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("form, name", [("csv", "accuracy"), ("squad", "f1")])
def test_a_gpu_evaluates_as_it_has_validated(tok, tmp_path, output, form, name):
    words = ["--model.task", TASKS[form], "--trainer.accelerator", "gpu"]
    assert run(*words_for(tok, write_rows(tmp_path / "rows", form), output, *words)) == 0
    evaluated = json.loads((output / "evaluation.json").read_text())[name]
    assert evaluated == pytest.approx(metrics_of(output)["runs"][0][f"test_{name}"], abs=1e-3)


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_an_average_is_the_mean_of_finished_seeds(tok, rows, tmp_path, output, capsys, adapter):
    words = ["--run.seeds", "[0,1]", *(["--model.adapter", adapter] if adapter else [])]
    assert run(*words_for(tok, rows, output, *words)) == 0
    names = [f"seed-{seed}/best.ckpt" for seed in (0, 1)]
    heads = [read_state_dict(output / name)["task_head.classifier.weight"] for name in names]
    shutil.copytree(output / "seed-1", output / "seed-2")  # of a seed that was killed
    output = output.rename(tmp_path / "moved")
    config = (output / "run.yaml").read_text()
    assert "accelerator: cpu" in config
    (output / "run.yaml").write_text(config.replace("accelerator: cpu", "accelerator: gpu"))
    assert main(["average", str(output), "--output", str(tmp_path / "mean")]) == 0
    mean = load_predictor(tmp_path / "mean").model.task_head.classifier.weight
    assert not torch.equal(*heads)
    torch.testing.assert_close(mean, (heads[0] + heads[1]) / 2)
    summary = json.loads((tmp_path / "mean" / "average.json").read_text())
    values = [metrics[summary["monitor"]] for metrics in metrics_of(output)["runs"]]
    assert list(summary["singles"].values()) == pytest.approx(values)
    with open(rows / "train.csv", "a") as file:
        file.write("another apple is here,fruit\n")
    assert main(["average", str(output), "--output", str(tmp_path / "other")]) == 2
    assert "rows" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_the_saved_configuration_repeats_the_run(finished, copied, tmp_path, capsys):
    saved = copied / "run.yaml"
    assert run("--config", saved, "--run.output", tmp_path / "two") == 0
    assert metrics_of(tmp_path / "two") == metrics_of(copied)
    words = ["--config", saved, "--run.output", copied]
    assert run(*words) == 2, "a run does not land on another"
    model = ["--model.pretrained_model_name_or_path", copied, "--model.model_config_kwargs", "null"]
    assert run(*words, "--overwrite", *model) == 2
    assert "--overwrite would move it aside" in capsys.readouterr().err
    assert run(*words, "--overwrite") == 0
    assert metrics_of(copied / "previous-1") == metrics_of(copied)


def test_a_built_in_task_brings_rows_and_baselines(output, capsys):
    words = ["--run.task", "code-tokens", "--run.task_sizes", '{"train": 60, "validation": 20, "test": 30}',
             "--data.vocab_size", "300", "--run.output", output]  # fmt: skip
    assert run(*words, *QUICK) == 0
    metrics, printed = metrics_of(output), capsys.readouterr().out
    assert set(metrics["baselines"]) == {"majority", "bag of words"}
    assert set(metrics["baselines"]["majority"]) <= set(metrics["runs"][0])
    assert "bag of words" in printed and "PSF License" in printed
    config = yaml.safe_load((output / "run.yaml").read_text())
    assert config["model"]["task"] == load_predictor(output).task.name == "token_classification"


def write_glue(folder, name):
    "Write a task of GLUE in the hub's form: configurations, splits, and -1 for hidden labels."
    from datasets import ClassLabel, Dataset

    files = {}
    for split, count in (("train", 40), ("validation", 12), ("test", 6)):
        texts = texts_of(count, 0)
        columns = {column: [row["text"] for row in texts] for column in GLUE[name][0]}
        labels = [-1 if split == "test" else int(row["label"] == "tool") for row in texts]
        if name == "stsb":
            labels = [max(-1.0, label * 2.5) for label in labels]
        dataset = Dataset.from_dict({**columns, "label": labels})
        if name != "stsb":
            dataset = dataset.cast_column("label", ClassLabel(names=["no", "yes"]))
        split += "_matched" if name == "mnli" and split != "train" else ""
        dataset.to_parquet(str(folder / name / f"{split}-00000-of-00001.parquet"))
        files[split] = f"{name}/{split}-*"
    files = [{"split": split, "path": path} for split, path in files.items()]
    card = {"configs": [{"config_name": name, "data_files": files}]}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")


@pytest.mark.parametrize("name, metric, problem", [
    ("stsb", "val_spearman", "regression"), ("mnli", "val_accuracy", "single_label_classification"),
])  # fmt: skip
def test_a_glue_task_is_read_by_its_name(tok, tmp_path, output, monkeypatch, name, metric, problem):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "glue").mkdir()
    write_glue(tmp_path / "glue", name)
    assert run(*words_for(tok, tmp_path / "glue", output, "--run.glue", name)) == 0
    metrics = metrics_of(output)
    assert metrics["monitor"] == metric
    assert not any(key.startswith("test_") for key in metrics["runs"][0])
    assert load_predictor(output).task.problem_type == problem


def test_a_glue_task_is_read_from_plain_files(tok, tmp_path, output):
    columns = GLUE["mnli"][0]
    for split, count in (("train", 40), ("dev", 12), ("test", 6)):
        lines = [
            [*columns, "label"],
            *([row["text"]] * 2 + [row["label"]] for row in texts_of(count, 0)),
        ]
        lines = [line[:2] if split == "test" else line for line in lines]
        (tmp_path / f"{split}.tsv").write_text("\n".join(map("\t".join, lines)))
    parts = build(words_for(tok, tmp_path, output, "--run.glue", "mnli"))
    sizes = {split: len(split_rows) for split, split_rows in parts.data.rows.items()}
    assert sizes == {"train": 40, "validation": 12, "test": 6}
    assert [parts.data.columns[role] for role in parts.data.task.text_columns][:2] == columns


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("finetune-*.yaml")), ids=lambda path: path.stem
)
def test_a_configuration_file_names_what_exists(path, output):
    words = ["--config", str(path), "--run.output", str(output)]
    config = resolve_task(config_of("finetune", words))
    for section, values in yaml.safe_load(path.read_text()).items():
        for name, value in values.items():
            if name not in ("output", "task"):
                assert config[section][name] == value, f"{section}.{name}"
    FinetuningModule(**config["model"])  # checks its arguments
    assert not output.exists()


def test_files_go_without_a_flag_and_a_probe_needs_no_steps(tok, rows, output, capsys):
    files = [str(rows / f"{split}.csv") for split in ("train", "validation")]
    words = words_for(tok, rows, output)[2:]  # without the directory
    assert run(*files, *words, "--run.method", "probe", "--run.seeds", "[0, 1]") == 0
    assert "columns text -> label" in capsys.readouterr().out
    metrics = metrics_of(output)
    assert metrics["seeds"] == [0, 1] and not any(
        name.startswith("test") for name in metrics["mean"]
    )
    assert main(["predict", str(output), str(rows / "test.csv")]) == 0
    assert "11 with labels: accuracy" in capsys.readouterr().err


def test_numbers_are_regressed_where_the_model_is_told_to(tok, tmp_path, output):
    write_table(
        tmp_path / "prices.csv", [{"text": f"the apple costs {n}", "label": n} for n in range(40)]
    )
    parts = build(
        words_for(tok, tmp_path / "prices.csv", output, "--model.problem_type", "regression")
    )
    assert parts.data.collator.problem_type == "regression"
    assert len(parts.data.rows["validation"]) == 4


WRONG = [
    ("--run.sedes=[1]", "run.seeds"), ("--run.seeds=[1,1]", "[1, 1]"), ("--run.seeds=[-1]", "run.seeds"),
    ("--run.num_epochs=0", "run.num_epochs"), ("--run.method=zero", "run.method"), ("--run.patience=-1", "run.patience"),
    ("--run.average=2", "run.average"), ("--run.progress=loud", "progress"),
    ("--run.task=docstring-area", "run.glue"), ("--run.glue=sst3", "sst3"), ("--run.monitor=val_bleu", "val_accuracy"),
    ("--data.validation_fraction=1.5", "validation_fraction"), ("--data.train_batch_size=0", "train_batch_size=0"),
    ('--data.text_column=["text", "label", "text"]', "text_column"), ("--data.text_column=txet", "'text'"),
    ('--data.reader_kwargs={"delimiter": ";;"}', "delimiter"), ("--data.train_split=null", "train_split"),
    ("--model.num_labels=7", "num_labels=7"), ("--model.optimizer_class=adamx", "adamx"),
    ('--model.optimizer_kwargs={"bates": 1}', "bates"), ("--task=translation", "translation"), ("--task=docstring-area", "run.task"),
    ("--model.pretrained_model_name_or_path=somebody/model", "not both"),
    ("--trainer.max_steps=3", "max_steps"), ("--trainer.precision=fp17", "precision='fp17'"),
    ("--trainer.limit_train_batches=1.5", "limit_train_batches"), ("--trainer.limit_val_batches=0", "limit_val_batches=0"),
    ("--trainer.devices=2", "trainer.devices"), ("--data.reader_kwargs.encodign=cp1252", "encoding"),
    *((f"--model.{name}=torch.utils.collect_env.run", "installed package") for name in ("scheduler_type", "optimizer_class")),
]  # fmt: skip


@pytest.mark.parametrize("word, part", WRONG)
def test_a_mistake_is_one_line_before_anything_is_written(tok, rows, output, capsys, word, part):
    assert run(*words_for(tok, rows, output, word)) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert part in message and message.startswith("bertlab finetune: ")
    assert not output.exists()


@pytest.mark.parametrize("words", [[], ["--run.task", "areas"]])
def test_nothing_to_learn_from_lists_the_tasks(output, capsys, words):
    assert run("--run.output", output, *words) == 2
    assert "docstring-area" in capsys.readouterr().err


def test_an_interrupted_run_resumes_to_the_same_result(tok, rows, tmp_path, output, capsys):
    words = ["--run.seeds", "[0,1]", "--run.num_epochs", "6", "--run.checkpoint_every_steps", "3"]
    assert run(*words_for(tok, rows, tmp_path / "straight", *words)) == 0
    stop = threading.Event()

    def interrupt():
        while not list((output / "seed-1" / "checkpoints").glob("*.ckpt")):
            stop.wait(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
    assert run(*words_for(tok, rows, output, *words)) == 130
    assert f"bertlab finetune --resume {output}" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler and not (output / "config.json").exists()
    first = (output / "seed-0" / "best.ckpt").stat().st_mtime_ns
    assert run("--resume", output) == 0
    assert (output / "seed-0" / "best.ckpt").stat().st_mtime_ns == first, "a finished seed stays"
    assert metrics_of(tmp_path / "straight") == metrics_of(output)


@pytest.mark.parametrize("words, part", [
    (["--data.max_sequence_length", "16"], "max_sequence_length"), (["--data.train_batch_size", "4"], "train_batch_size"),
    (["--run.num_epochs", "10"], "run.num_epochs"), (["--model.learning_rate", "0.5"], "model.learning_rate=0.003"),
    (["--run.monitor", "val_loss"], "val_accuracy"), (["--trainer.gradient_clip_val", "0.5"], "gradient_clip_val"),
])  # fmt: skip
def test_a_resume_with_other_settings_is_refused(copied, capsys, words, part):
    before = (copied / "run.yaml").read_text()
    assert run("--resume", copied, *words) == 2
    assert part in capsys.readouterr().err.splitlines()[-1]
    assert (copied / "run.yaml").read_text() == before


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_resume_with_other_rows_is_refused(finished, copied, tmp_path, capsys, split):
    shutil.copytree(finished / "rows", tmp_path / "rows")
    with open(tmp_path / "rows" / f"{split}.csv", "a") as file:
        file.write("an apple,fruit\n")
    words = ["--data.dataset_name_or_path", tmp_path / "rows"]
    config = (copied / "run.yaml").read_text()
    (copied / "run.yaml").write_text(config.replace(str(finished / "rows"), str(tmp_path / "rows")))
    assert run("--resume", copied, *words, "--run.seeds", "[0, 1]") == 2
    assert "rows" in capsys.readouterr().err.splitlines()[-1]


def test_a_resume_may_change_what_decides_no_result(copied):
    words = [
        "--trainer.log_every_n_steps=1",
        "--trainer.benchmark=true",
        "--model.gradient_checkpointing=true",
    ]
    assert run("--resume", copied, *words) == 0


def test_a_seed_is_not_begun_over_a_damaged_checkpoint(copied, capsys):
    shutil.copytree(copied / "seed-0", copied / "seed-1")
    for seed in (0, 1):  # a finished seed needs none
        [path] = (copied / f"seed-{seed}" / "checkpoints").glob("*.ckpt")
        path.write_bytes(path.read_bytes()[:-30])
    assert run("--resume", copied, "--run.seeds", "[0, 1]") == 2
    message = capsys.readouterr().err
    assert "no checkpoint in " in message and "seed-1" in message and "seed-0" not in message
    shutil.rmtree(copied / "seed-1")
    assert run("--resume", copied, "--run.seeds", "[1, 0]", "--run.baselines", "false") == 0
    assert metrics_of(copied)["seeds"] == [1, 0]


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_score_of_the_int8_file_is_in_the_evaluation(
    tok, rows, output, monkeypatch, capsys, is_real
):
    pytest.importorskip("nncf")
    if not is_real:

        def export(directory, target, texts, calibration, score, to):
            assert len(calibration) == 48 and len(texts) == 11 and to == "openvino"
            return {"files": {FILES[to]["int8"]: {"scores": [score(None) / 2, score(None)]}}}

        monkeypatch.setattr(finetuning, "export_model", export)
    assert run(*words_for(tok, rows, output), "--run.int8", "true") == 0
    numbers = json.loads((output / "evaluation.json").read_text())
    accuracy, int8 = numbers["accuracy"], numbers["int8"]
    assert int8["score_in_torch"] == pytest.approx(accuracy, abs=1e-6) and accuracy > 0
    assert int8["score"] == pytest.approx(accuracy, abs=0.2) if is_real else accuracy / 2
    assert f"accuracy {int8['score']:.4f} ({accuracy:.4f} in torch)" in capsys.readouterr().out
    if is_real:
        predictor = load_predictor(output / "openvino-int8", None, "openvino", "int8")
        assert len(predictor.predict(texts_of(3)).rows) == 3


def test_a_picture_that_fails_costs_no_model(tok, rows, output, monkeypatch):
    from bertlab.finetuning.evaluation import Evaluation

    def fail(evaluation, directory):
        raise RuntimeError("no picture")

    monkeypatch.setattr(Evaluation, "write", fail)
    with pytest.raises(RuntimeError, match="no picture"):
        run(*words_for(tok, rows, output))
    assert len(load_predictor(output).predict(texts_of(3)).rows) == 3
    assert (output / "task.json").exists()


@pytest.mark.parametrize("name, part", [
    ("in.csv", "in.csv"), ("in.txt", "in.txt"), ("out.csv", "out.csv"),
])  # fmt: skip
def test_predict_never_writes_over_a_file(tmp_path, capsys, name, part):
    for path in ("in.csv", "out.csv"):
        (tmp_path / path).write_text("text\nhello\n")
    assert (
        main(["predict", "nowhere", str(tmp_path / "in.csv"), "--output", str(tmp_path / name)])
        == 2
    )
    assert part in capsys.readouterr().err
    assert (tmp_path / "out.csv").read_text() == "text\nhello\n"


def test_a_defect_is_not_taken_for_a_mistake():
    with pytest.raises(KeyError):
        run_command("devices", lambda: {}["a"])


@pytest.mark.parametrize("num_processes", ["1", "2"])
def test_an_error_is_hidden_by_no_word_in_it(monkeypatch, num_processes):
    monkeypatch.setenv("WORLD_SIZE", num_processes)

    def fail():
        raise RuntimeError("size mismatch in gloomy.txt: NCCL, broken pipe")

    with pytest.raises(RuntimeError, match="size mismatch"):
        run_command("pretrain", fail, "pretrain --resume run")


def test_a_run_that_lost_a_worker_says_how_to_continue(capsys):
    def fail():
        raise ChildProcessError("a worker (process 3) was killed")

    assert run_command("pretrain", fail, lambda: "pretrain --resume run") == 3
    assert "continue with bertlab pretrain --resume run" in capsys.readouterr().err


def test_a_process_whose_peer_died_shows_what_it_saw(monkeypatch, capsys):
    class Exit(BaseException):
        pass

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("os._exit", lambda status: (_ for _ in ()).throw(Exit(status)))
    seen = "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    with pytest.raises(Exit, match="3"):
        run_command(
            "pretrain", lambda: (_ for _ in ()).throw(RuntimeError(seen)), lambda: "pretrain -r x"
        )
    assert "pair.cc:534" in (message := capsys.readouterr().err) and "pretrain -r x" in message
