"A task of one's own is a class in a file: found by its dotted name, trained, saved and asked."

import pytest
import torch
from test_finetuning import data_for, module_for, texts_of
from torchmetrics import MeanSquaredError, MetricCollection

from bertlab.finetuning.classification import Classification
from bertlab.finetuning.predictions import load_predictor
from bertlab.finetuning.runs import finetune

pytestmark = pytest.mark.filterwarnings("ignore")


class Ordinal(Classification):
    "Labels in an order: the error is their distance."

    name = "ordinal"
    metric_names = ("distance",)
    monitor = "distance"

    def metric(self, rows):
        return MetricCollection({"distance": MeanSquaredError()})

    def loss(self, output, batch):
        steps = torch.arange(self.num_labels, device=output["logits"].device)
        expected = (output["logits"].float().softmax(-1) * steps).sum(-1)
        has_label = batch["labels"] >= 0
        return ((expected - batch["labels"]).square() * has_label).sum(), has_label.sum()


def test_a_class_in_a_file_is_a_task(tmp_path):
    from bertlab.finetuning.data import FinetuningDataModule
    from test_finetuning import CONFIG, tokenizer

    from bertlab.finetuning.module import FinetuningModule

    data = FinetuningDataModule("test_own_task.Ordinal", tokenizer(), max_sequence_length=32)
    data.set_datasets(texts_of(32), texts_of(9, 1), texts_of(9, 2))
    module = FinetuningModule(
        "test_own_task.Ordinal", model_config_kwargs=CONFIG, learning_rate=3e-3
    )
    run = finetune(
        module, data, tmp_path / "run", num_epochs=2, precision="32-true", accelerator="cpu"
    )
    assert set(run.metrics) == {f"{s}_{n}" for s in ("val", "test") for n in ("loss", "distance")}
    predictor = load_predictor(run.save_predictor(tmp_path / "model"))
    assert type(predictor.task).__name__ == "Ordinal" and predictor.task.labels.names == (
        "fruit",
        "tool",
    )
    assert predictor.predict(["the saw is here"]).rows[0]["predicted_label"] in ("fruit", "tool")
    with pytest.raises(ValueError, match="ordinal"):
        module_for().settle(data)
    assert data_for().task.name == "classification"
