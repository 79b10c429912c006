"Runs in stages: each begins where the last one ended, and none is run twice."

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT
from lightning.pytorch.callbacks import Callback
from forks import forked
from safetensors.torch import load_file

from bertlab.train.distill import DistillationModule, load_reference, state_dict_hash
from bertlab.train.stages import TrainingStopped, load_stage_configs, newest_model, run_stages
from bertlab.train.stages import _stage_config

WORDS = "the cat sat on a mat and the dog ran to the door of a red house near the sea".split()
SHAPE = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=1,
             max_position_embeddings=64, mlp_dropout=0.2)  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(" ".join(WORDS[i % 7 :] + WORDS[: i % 5]) + "\n" for i in range(120)))
    return str(path)


def plan(text, **later):
    "Two stages of 5 and 4 steps."
    data = {"train_dataset_name_or_path": text, "max_sequence_length": 32, "train_batch_size": 4}
    trainer = {"precision": "32-true", "accelerator": "cpu", "accumulate_grad_batches": 2}
    run = {"checkpoint_every_steps": 2, "progress": "none", "vocab_size": 60}
    first = {"model_config_kwargs": SHAPE, "learning_rate": 3e-3, "scheduler_warmup_steps": 2}
    second = {"reference_model_name_or_path": "previous", "kl_weight": 0.5, "learning_rate": 1e-3,
              "scheduler_warmup_steps": 0, **later.pop("model", {})}  # fmt: skip
    tokens = {"max_tokens": 32 * 8 * 4 + 7, **later.pop("run", {})}
    return [
        {"model": first, "data": data, "trainer": {**trainer, "max_steps": 5}, "run": run},
        {"model": second, "data": {**data, **later.pop("data", {})}, "trainer": trainer,
         "run": {**run, **tokens}, **later},
    ]  # fmt: skip


def weights(stage):
    return load_file(newest_model(stage) / "model.safetensors")


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    torch.set_num_threads(1)  # as in the processes below
    output = tmp_path_factory.mktemp("stages") / "out"
    return output, run_stages(plan(text), output)


def test_a_stage_begins_where_the_last_one_ended(finished):
    output, metrics = finished
    assert [m["steps"] for m in metrics] == [5, 4]  # 1,031 tokens are 4 steps of 256
    assert "val_kl" not in metrics[0] and metrics[1]["val_kl"] > 0
    state = torch.load(output / "stage-2/checkpoints/step-00000002.ckpt")
    size = state["model_config"]["vocab_size"]
    reference = load_reference(newest_model(output / "stage-1"), "mlm", size).model
    assert state["reference_hash"] == state_dict_hash(reference)
    assert state["model_config"]["mlp_dropout"] == 0.2
    first, last = weights(output / "stage-1"), weights(output / "stage-2")
    change = max((first[name] - last[name]).abs().max().item() for name in first)
    assert 0 < change < 4.5e-3  # four steps of AdamW at no more than 1e-3


def test_a_finished_stage_is_not_run_again_and_stages_can_be_added(finished, text, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(finished[0], output)
    files = [path for path in output.glob("stage-*/**/*") if path.is_file()]
    times = {path: path.stat().st_mtime_ns for path in files}
    third = {**plan(text)[1], "optimizer": "previous"}
    metrics = run_stages([*plan(text), third], output, resume=True)
    assert metrics[:2] == finished[1] and len(metrics) == 3
    assert times == {path: path.stat().st_mtime_ns for path in files}


def test_an_edited_stage_that_is_finished_is_named(finished, text, capsys):
    stages = plan(text)
    stages[0]["model"] = {**stages[0]["model"], "learning_rate": 1e-2}
    assert run_stages(stages, finished[0], resume=True) == finished[1]
    lines = [line for line in capsys.readouterr().out.splitlines() if "stage" in line]
    assert len(lines) == 1 and "stage 1" in lines[0] and "model.learning_rate" in lines[0]


def test_a_stage_can_begin_with_the_moments_of_the_last_one(finished, text, tmp_path):
    changes = {}
    for optimizer in (None, "previous"):
        output = tmp_path / str(optimizer)
        shutil.copytree(finished[0], output)
        third = {
            **plan(text)[1],
            "optimizer": optimizer,
            "trainer": {**plan(text)[0]["trainer"], "max_steps": 1},
        }
        third["run"] = {**third["run"], "max_tokens": None}
        run_stages([*plan(text), third], output, resume=True)
        state = torch.load(output / "stage-3/checkpoints/step-00000001.ckpt")
        moments = state["optimizer_states"][0]["state"].values()
        changes[optimizer] = [float(moment["step"]) for moment in moments]
    assert set(changes[None]) == {1.0} and set(changes["previous"]) == {5.0}


class Death(Callback):
    def __init__(self, at):
        self.at = at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        stage = 2 if isinstance(pl_module, DistillationModule) else 1
        if (stage, trainer.fit_loop.total_batch_idx) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def dying_run(text, output, at):
    "Train all stages, or die before a micro-batch, or before the last model of a stage is written."
    import bertlab.train.run as run_module

    torch.set_num_threads(1)
    make_trainer = run_module.make_trainer

    def dying_trainer(callbacks, **options):
        return make_trainer(callbacks=[*callbacks, Death(at)], **options)

    run_module.make_trainer = dying_trainer
    if at == "model":
        save = run_module.TrainingCheckpoint.save

        def die_at_the_end(self, trainer, *arguments):
            if trainer.global_step == trainer.max_steps:
                os.kill(os.getpid(), signal.SIGKILL)
            save(self, trainer, *arguments)

        run_module.TrainingCheckpoint.save = die_at_the_end
    run_stages(plan(text), output, resume=(Path(output) / "run.yaml").exists())


def test_killed_anywhere_the_stages_end_with_the_same_weights(finished, text, tmp_path):
    for at, code in (((1, 5), -9), ("model", -9), ((2, 3), -9), ((2, 7), -9), ("none", 0)):
        process = forked(dying_run, (text, tmp_path / "out", at))
        process.start()
        process.join(120)
        assert process.exitcode == code, at
    for stage in ("stage-1", "stage-2"):
        assert equal(weights(finished[0] / stage), weights(tmp_path / "out" / stage))
    assert {path.name for path in (tmp_path / "out").glob("**/.*")} <= {
        ".lock",
        ".directories.json",
    }


def test_a_stage_that_was_stopped_is_not_finished(text, tmp_path):
    with pytest.raises(TrainingStopped, match="stage 1 .* of 5"):
        limit = {**plan(text)[0], "run": {**plan(text)[0]["run"], "time_limit": "0.001s"}}
        run_stages([limit, plan(text)[1]], tmp_path / "out")
    assert run_stages(plan(text), tmp_path / "out", resume=True)[1]["steps"] == 4


def test_averages_are_what_the_next_stage_begins_with(text, tmp_path):
    stages = plan(text)
    stages[0]["run"] = {**stages[0]["run"], "ema_decay": 0.9}
    run_stages(stages, tmp_path / "out")
    state = torch.load(tmp_path / "out/stage-1/checkpoints/step-00000005.ckpt")
    [averages] = [s["averages"] for name, s in state["callbacks"].items() if "EMA" in name]
    written = weights(tmp_path / "out/stage-1")
    matrices = [name for name in written if written[name].dim() > 1]
    assert all(any(torch.equal(written[n], a) for a in averages.values()) for n in matrices)


def test_a_reference_on_the_disk_makes_one_stage_distillation(finished, text, tmp_path):
    teacher = str(newest_model(finished[0] / "stage-1"))
    model = {"model_config_kwargs": {**SHAPE, "intermediate_size": 8}, "kl_weight": 2.0,
             "reference_model_name_or_path": teacher,
             "pretrained_tokenizer_name_or_path": teacher}  # fmt: skip
    student = plan(text, model=model)[1]
    assert run_stages([student], tmp_path / "out")[0]["val_kl"] > 0


@pytest.mark.parametrize("later, words", [
    ({"data": {"train_dataset_name_or_path": "missing.txt"}}, ["missing.txt"]),
    ({"data": {"max_sequence_length": 4}}, ["max_sequence_length"]),
    ({"data": {"bacth": 3}}, ["bacth"]),
    ({"model": {"optimizer_class": "adamww"}}, ["adamww"]),
    ({"model": {"learning_rate": -1.0}}, ["learning_rate", "-1.0"]),
    ({"model": {"kl_weight": -1.0}}, ["kl_weight", "-1.0"]),
    ({"run": {"max_tokens": 3}}, ["max_tokens", "3"]),
    ({"trainer": {"max_steps": 3}}, ["max_steps", "max_tokens"]),
])  # fmt: skip
def test_a_mistake_in_a_later_stage_is_found_before_the_first(text, tmp_path, later, words):
    with pytest.raises(ValueError) as error:
        run_stages(plan(text, **later), tmp_path / "out")
    assert all(word in str(error.value) for word in ["stage 2", *words])
    assert not (tmp_path / "out").exists()


def test_a_run_in_the_way_and_a_missing_beginning_are_refused(finished, text, tmp_path):
    for stages, options, word in (
        (plan(text), {}, "already holds a run"),
        (plan(text), {"resume": True, "overwrite": True}, "exclude"),
    ):
        with pytest.raises(ValueError, match=word):
            run_stages(stages, finished[0], **options)
    for stages, options, word in (
        (plan(text), {"resume": True}, "nothing to resume"),
        (plan(text)[1:], {}, "reference_model_name_or_path"),
    ):
        with pytest.raises(ValueError, match=word):
            run_stages(stages, tmp_path / "new", **options)
    begin = {"pretrained_model_name_or_path": str(newest_model(finished[0] / "stage-1"))}
    with pytest.raises(ValueError, match="--overwrite would move it aside"):
        run_stages(plan(text, model=begin)[1:], finished[0], overwrite=True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content, words", [
    ("stages: [{steps: 3}]", ["stage 1", "steps", "model"]), ("stages: []", ["stages"]),
    ("model: {}", ["stages"]), ("stages: {a: 1}", ["stages"]), ("stages: [3]", ["stage 1", "3"]),
    ("{stages: [{run: {}}], seed: 4}", ["seed"]), ("stages: [", ["YAML"]),
])  # fmt: skip
def test_a_wrong_file_of_stages_is_refused(tmp_path, content, words):
    path = tmp_path / "stages.yaml"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        load_stage_configs(path)
    assert all(word in str(error.value) for word in ["stages.yaml", *words])


@pytest.mark.parametrize("name", ["kl-two-stage", "longer-rows"])
def test_the_stages_of_the_repository_are_complete(name, tmp_path):
    path = ROOT / "bertlab/configs" / f"{name}.yaml"
    shared, stages = yaml.safe_load(path.read_text()), load_stage_configs(path)
    assert stages[1]["model"]["weight_decay"] == shared["model"]["weight_decay"]
    config = _stage_config(stages[1], 2, "before", tmp_path)
    assert config["model"]["pretrained_model_name_or_path"] == "before"
    if name == "kl-two-stage":
        assert config["model"]["reference_model_name_or_path"] == "before"
