"A reranker's scores do not depend on the batch, and are those of sentence-transformers."

import json

import numpy as np
import pytest
import torch
from embedding_cases import WORDS, draw_pairs, small_config, small_tokenizer
from test_bi_encoder import make_model

from bertlab.embeddings.bi_encoder import Reranker
from bertlab.model.config import BertLabConfig
from bertlab.model.huggingface import save_model
from bertlab.model.task_heads import BertLabForSequenceClassification

PAIRS = [(row.query, row.positive) for row in draw_pairs(40).rows()]
PAIRS += [(" ".join(WORDS[:9]), " ".join(WORDS * 2)), ("alpha", " ".join(WORDS * 3))]  # are cut


def save_head(directory, family="modernbert", length=48, typed=False, **options):
    "Write a classifier of small weights, which are large enough for different scores."
    torch.manual_seed(0)
    model = BertLabForSequenceClassification(BertLabConfig(**{**small_config(family), **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    tokenizer = small_tokenizer()
    tokenizer.model_max_length = length
    if typed:  # tokens say which text they belong to
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return save_model(model.eval(), tokenizer, directory)


HEADS = {
    "a regression": {"num_labels": 1, "problem_type": "regression"},
    "a regression that transformers has no class for": {
        "family": "bert",
        "num_labels": 1,
        "problem_type": "regression",
        "classifier_pooling": "mean",
    },
    "one score of BERT": {"family": "bert", "num_labels": 1, "typed": True},
    "two classes of BERT": {"family": "bert", "num_labels": 2},
    "the first token": {"num_labels": 1, "classifier_pooling": "cls"},
}


@pytest.mark.parametrize("name", HEADS)
def test_scores_are_those_of_a_cross_encoder(tmp_path, name):
    CrossEncoder = pytest.importorskip("sentence_transformers").CrossEncoder
    reranker = Reranker.load(save_head(tmp_path, **HEADS[name]))
    scores, model = reranker.score(PAIRS), CrossEncoder(str(tmp_path), device="cpu")
    expected = model.predict(PAIRS, apply_softmax=True)
    expected = expected if expected.ndim == 1 else expected[:, -1]
    assert reranker.packs and np.ptp(expected) > 0.01
    assert np.abs(scores - expected).max() < 1e-5
    assert name != "a regression" or np.abs(scores - 0.5).max() > 0.5, "not a sigmoid"
    alone = np.concatenate([reranker.score([pair], 64) for pair in PAIRS])
    assert np.abs(scores - alone).max() < 1e-5
    assert reranker.score([]).shape == (0,)


@pytest.mark.parametrize("activation", ["Sigmoid", "Identity"])
def test_a_directory_of_sentence_transformers_keeps_its_activation(tmp_path, activation):
    CrossEncoder = pytest.importorskip("sentence_transformers").CrossEncoder
    function = getattr(torch.nn, activation)()
    directory = str(save_head(tmp_path / "ours", "bert", num_labels=1))
    model = CrossEncoder(directory, device="cpu", activation_fn=function)
    model.save_pretrained(str(tmp_path / "theirs"))
    scores = Reranker.load(tmp_path / "theirs").score(PAIRS)
    assert np.abs(scores - model.predict(PAIRS)).max() < 1e-5


def write_bi_encoder(directory):
    make_model().save(directory)


def write_classifier_of_one_text(directory):
    save_head(directory, num_labels=1)
    (directory / "task.json").write_text(json.dumps({"columns": {"text": "title"}}))


def write_other_activation(directory):
    config = save_head(directory, num_labels=1) / "config.json"
    settings = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))


@pytest.mark.parametrize("write, part", [
    (write_bi_encoder, "two texts"), (write_classifier_of_one_text, "two texts"),
    (write_other_activation, "Tanh"), (lambda directory: None, "config.json"),
])  # fmt: skip
def test_another_model_is_refused(tmp_path, write, part):
    write(tmp_path)
    with pytest.raises(ValueError, match=part) as caught:
        Reranker.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
