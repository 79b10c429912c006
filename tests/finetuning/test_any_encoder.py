"Any encoder of transformers is fine-tuned, resumed, saved and asked; what bertlab cannot express is padded."

import pytest
import torch
import transformers
from test_finetuning import SaveAt, data_for, tokenizer, weights

from bertlab.finetuning.module import FinetuningModule
from bertlab.finetuning.predictions import evaluate, load_predictor
from bertlab.finetuning.runs import finetune
from bertlab.train.trainer import make_trainer, seed_everything

pytestmark = pytest.mark.filterwarnings("ignore")
PLAIN = {"precision": "32-true", "accelerator": "cpu"}
SMALL = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
FAMILIES = {
    "DebertaV2": {"relative_attention": True, "position_buckets": 8},
    "Albert": {"embedding_size": 16},
    "MPNet": {},
}


@pytest.fixture
def encoder(request, tmp_path):
    family, torch_seed = request.param, 0
    torch.manual_seed(torch_seed)
    config = getattr(transformers, f"{family}Config")(**SMALL, **FAMILIES[family])
    getattr(transformers, f"{family}ForMaskedLM")(config).save_pretrained(tmp_path / "encoder")
    tokenizer().save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


def module_of(task, encoder, **options):
    return FinetuningModule(task, str(encoder), learning_rate=1e-3, **options)


@pytest.mark.parametrize("encoder", FAMILIES, indirect=True)
@pytest.mark.parametrize("task", ["classification", "token_classification", "question_answering"])
def test_an_encoder_is_trained_saved_and_asked(encoder, task, tmp_path):
    data = data_for(task)
    run = finetune(module_of(task, encoder), data, tmp_path / "run", num_epochs=1, **PLAIN)
    assert run.module.is_padded and type(run.module.model).__module__.startswith("transformers.")
    predictor = load_predictor(run.save_predictor(tmp_path / "model"))
    rows = [*data.rows["test"]]
    scores = predictor.task.score(rows, predictor.predict_rows(rows).rows)
    for name, value in scores.items():
        assert value == pytest.approx(run.metrics[f"test_{name}"], abs=1e-5), name
    assert evaluate(run.module, data, "test").numbers


@pytest.mark.parametrize("encoder", ["DebertaV2"], indirect=True)
def test_a_resumed_run_ends_as_an_uninterrupted_one(encoder, tmp_path):
    ends, path = [], tmp_path / "half.ckpt"
    for start in (None, path):
        seed_everything(0 if start is None else 9)
        callbacks = [SaveAt(2, path)] if start is None else []
        trainer = make_trainer(4, callbacks=callbacks, **PLAIN)
        module = module_of("classification", encoder, layer_decay=0.8)
        trainer.fit(module, data_for(), ckpt_path=start, weights_only=False)
        ends.append(weights(module))
    for name, weight in ends[0].items():
        assert torch.equal(weight, ends[1][name]), name


@pytest.mark.parametrize("encoder", ["Albert"], indirect=True)
def test_what_needs_bertlabs_encoder_is_refused(encoder):
    data = data_for("token_classification", packing=True)
    for module, message in (
        (module_of("token_classification", encoder), "packing"),
        (
            module_of("token_classification", encoder, model_kwargs={"mlp_dropout": 0.1}),
            "model_kwargs",
        ),
        (module_of("token_classification", encoder, freeze_layers=1), "Albert"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(1, **PLAIN).fit(
                module, data if message == "packing" else data_for("token_classification")
            )
