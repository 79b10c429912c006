"""What a user calls on a TPU, `bertlab pretrain` and fine-tuning, on XLA's CPU device."""

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip(
    "torch_xla", reason="needs torch_xla, in an environment of its own: make test-xla"
)

from host_device import stand_in

from bertlab.cli.demo import DemoConfig, run_demo
from bertlab.core import devices
from bertlab.core.devices import check_device
from bertlab.core.serialization import find_config, load_yaml
from bertlab.train.history import History
from called import pretrain, validate
from bertlab.model.config import modernbert_tiny
from bertlab.data.tokenizers import train_tokenizer
from bertlab.finetuning.module import FinetuningModule
from bertlab.finetuning.data import FinetuningDataModule
from bertlab.train.trainer import make_trainer, seed_everything
from bertlab.train.xla import CompileRecorder, XLACounts, xla_counts

stand_in()
# Autograd counts the devices of a process once. A claimed device is among them for all tests below.
check_device("tpu")
torch.ones(1, requires_grad=True).sum().backward()
WORDS = "the cat sat on a mat and the dog ran to the door of a red house near the sea".split()


class Watched(CompileRecorder):
    "A recorder that a configuration can name; the counts of its latest run are the class's."

    latest: list[XLACounts] = []

    def on_train_start(self, trainer, pl_module) -> None:
        type(self).latest = self.counts


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    "A configuration that has every callback of a run look at it."
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(
        "".join(" ".join(WORDS[i % 7 :] + WORDS[: i % 5]) + "\n" for i in range(120))
    )
    config = {
        "model": {"model_config_kwargs": dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                              num_attention_heads=1, max_position_embeddings=64),
                  "scheduler_warmup_steps": 1, "learning_rate": 0.01},
        "data": {"train_dataset_name_or_path": str(folder / "text.txt"), "max_sequence_length": 32,
                 "train_batch_size": 4, "val_batch_size": 4},
        "trainer": {"max_steps": 32, "precision": "32-true", "callbacks": [{"class_path": f"{__name__}.Watched"}]},
        "run": {"vocab_size": 60, "val_every_steps": 8, "checkpoint_every_steps": 8, "progress": "none",
                "measure_every_steps": 8, "preview_sentences": ["the cat sat on a [MASK]"], "preview_every_steps": 8,
                "histograms": ["*.qkv.weight"], "time_limit": "1h", "stop_above": 100},
    }  # fmt: skip
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    return ["--config", str(folder / "tiny.yaml")]


def test_bertlab_pretrain_with_all_that_watches_a_run_makes_a_handful_of_programs(words, tmp_path):
    there = pretrain(
        [*words, "--trainer.accelerator", "tpu", "--run.output", str(tmp_path / "tpu")]
    )
    counts = Watched.latest
    here = pretrain([*words, "--trainer.accelerator", "cpu", "--run.output", str(tmp_path / "cpu")])
    for name in ("train_loss", "val_loss", "val_bits_per_byte", "tokens"):
        assert there[name] == pytest.approx(here[name], abs=1e-4)
    assert counts[-1].fallbacks == {}
    # Validation, checkpoint, preview and monitors look after steps 8, 16, ..., the history at 10, 20, ...
    assert len({c.compilations for c in counts[20:]}) == 1, [c.compilations for c in counts]
    reads = np.diff([c.host_reads for c in counts], prepend=0)  # entry i: while step i + 1 ran
    assert not (reads[11:15].any() or reads[21:23].any() or reads[25:29].any()), reads.tolist()


def test_a_run_on_a_tpu_is_resumed_and_validated_there_and_elsewhere(words, tmp_path):
    place = ["--run.output", str(tmp_path / "run")]
    short = [*words, *place, "--trainer.max_steps", "4", "--run.checkpoint_every_steps", "4"]
    done = pretrain([*short, "--trainer.accelerator", "tpu"])
    rows = [validate([*place, "--trainer.accelerator", name])[0] for name in ("tpu", "cpu")]
    assert [row["loss"] for row in rows] == pytest.approx([done["val_loss"]] * 2, abs=1e-4)
    longer = pretrain(["--trainer.max_steps", "6"], resume=str(tmp_path / "run"))
    assert longer["steps"] == 6 and longer["tokens"] > done["tokens"]


def test_the_demo_runs_on_the_tpu_that_auto_finds(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "_count_tpus", lambda: 1)
    before = xla_counts()
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "max_sequence_length": 32,
        "vocab_size": 200,
    }
    demo = DemoConfig(steps=20, max_documents=40, batch_size=4, **shape)
    run_demo(demo, tmp_path / "demo")
    assert xla_counts().compilations > before.compilations
    assert xla_counts().fallbacks == before.fallbacks


def test_the_tpu_configuration_trains_without_the_host(words, tmp_path):
    "Optimizer, precision, collator and schedule are the file's; text and shape are small."
    small, config = load_yaml(words[1]), load_yaml(find_config("colab-tpu"))
    changes = {
        "model": {**small["model"], "scheduler_warmup_steps": 2, "scheduler_cooldown_steps": 10},
        "data": {**small["data"], "num_workers": 0, "cache_dir": None, "data_kwargs": None,
                 "train_split": None, "val_split": None, "pretrained_tokenizer_name_or_path": None},
        "trainer": {**small["trainer"], "max_steps": 20, "accelerator": "tpu", "precision": "auto"},
        "run": {"vocab_size": 60, "batch_tokens": 128, "progress": "none", "output": str(tmp_path / "tpu")},
    }  # fmt: skip
    del changes["model"]["learning_rate"]
    path = tmp_path / "small-tpu.yaml"
    path.write_text(yaml.safe_dump({name: config[name] | changes[name] for name in changes}))
    pretrain(["--config", str(path)])
    counts = Watched.latest
    assert len(counts) == 20 and counts[-1].fallbacks == {}
    assert counts[-1].compilations == counts[11].compilations


FRUIT, TOOLS = ("apple", "pear", "plum"), ("saw", "drill", "file")


def texts_of(count, seed):
    draw = np.random.default_rng(seed)
    words = lambda kind: ["the", *draw.choice(kind, draw.integers(1, 6)), "is", "here"]
    return [{"text": " ".join(words(FRUIT if i % 2 else TOOLS)), "label": ("tool", "fruit")[i % 2]}
            for i in range(count)]  # fmt: skip


def tagged(count, seed):
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        places = ["rome"] * int(draw.integers(1, 4))
        rows.append({"text": ["the", str(draw.choice(FRUIT)), "in", *places],
                     "label": ["O", "B-FRUIT", "O", "B-PLACE", *["I-PLACE"] * (len(places) - 1)]})  # fmt: skip
    return rows


def asked(count, seed):
    draw = np.random.default_rng(seed)
    contexts = [
        f"the {draw.choice(TOOLS)} is in rome " + "here " * int(draw.integers(0, 6))
        for _ in range(count)
    ]
    return [{"question": "where is it", "context": context,
             "answers": [{"text": "rome", "answer_start": context.find("rome")}]} for context in contexts]  # fmt: skip


TASKS = {"classification": texts_of, "token_classification": tagged, "question_answering": asked}


def finetuned(task, accelerator):
    "Fine-tune for 12 steps, validate every 4, test, and predict."
    seed_everything(0)
    tokenizer = train_tokenizer(
        [" ".join((*FRUIT, *TOOLS, "the is in here rome where it"))] * 30, 90
    )
    windows = {"collator_kwargs": {"doc_stride": 4}} if task == "question_answering" else {}
    data = FinetuningDataModule(task, tokenizer, max_sequence_length=32, train_batch_size=4, val_batch_size=4,
                                test_batch_size=4, fixed_shapes=True, **windows)  # fmt: skip
    data.set_datasets(*(TASKS[task](count, seed) for seed, count in enumerate((22, 7, 5))))
    shape = modernbert_tiny(vocab_size=90, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                            num_attention_heads=1)  # fmt: skip
    module = FinetuningModule(task, model_config_kwargs=shape.to_diff_dict(), learning_rate=3e-3,
                              scheduler_type="linear", warmup_steps=2)  # fmt: skip
    history, recorder = History(), CompileRecorder()
    watching = [recorder] if accelerator == "tpu" else []
    trainer = make_trainer(
        12, "32-true", accelerator, callbacks=[history, *watching], val_check_steps=4
    )
    trainer.fit(module, data)
    scores = [*history.validation, *trainer.test(module, data, verbose=False)]
    return history, scores, trainer.predict(module, data.test_dataloader()), recorder.counts


@pytest.mark.parametrize("task", TASKS)
def test_fine_tuning_gives_the_losses_scores_and_predictions_of_a_cpu(task):
    before = xla_counts().fallbacks
    record, scores, predicted, counts = finetuned(task, "tpu")
    assert xla_counts().fallbacks == before  # training, validation, test and predictions
    assert len({c.compilations for c in counts[9:]}) == 1, [c.compilations for c in counts]
    plain_record, plain_scores, plain_predicted, _ = finetuned(task, "cpu")
    np.testing.assert_allclose(
        record.column("train_loss"), plain_record.column("train_loss"), atol=1e-4, rtol=0
    )
    for ours, theirs in zip(scores, plain_scores, strict=True):
        assert {k: float(v) for k, v in ours.items()} == pytest.approx(
            {k: float(v) for k, v in theirs.items()}, abs=1e-4)  # fmt: skip
    for ours, theirs in zip(predicted, plain_predicted, strict=True):
        for name, values in theirs.items():  # logits that all move alike say the same
            logits = name.endswith("logits")
            apart = lambda x: x - x[..., :1] if logits else x  # noqa: B023
            np.testing.assert_allclose(apart(ours[name]), apart(values), atol=1e-4)
