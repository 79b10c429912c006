"Heads for texts, tokens and questions: losses by hand, padding without a say, pipelines."

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import model_cases
from model_cases import lively, same_start_for_every_test  # noqa: F401

from bertlab.model.encoder import BertLabModel
from bertlab.model.heads import BertLabForEnhancedMaskedLM
from bertlab.model.task_heads import (
    BertLabForQuestionAnswering,
    BertLabForSequenceClassification,
    BertLabForSpanClassification,
    BertLabForTokenClassification,
    TaskHead,
    allowed_spans,
    pool_tokens,
)

TOLERANCE = dict(rtol=0, atol=1e-5)
V, L, C = 50, 9, 3
small = partial(model_cases.small, num_labels=C)
AUTO = {
    BertLabForSequenceClassification: AutoModelForSequenceClassification,
    BertLabForTokenClassification: AutoModelForTokenClassification,
    BertLabForQuestionAnswering: AutoModelForQuestionAnswering,
}
PROBLEM = dict(
    single="single_label_classification", multi="multi_label_classification", numbers="regression"
)


def some_ids(*shape) -> torch.Tensor:
    return torch.randint(5, V, shape)


def scores_of(model, *args, **kwargs) -> torch.Tensor:
    out = model(*args, **kwargs)
    if isinstance(model, BertLabForQuestionAnswering):
        return torch.stack((out.start_logits, out.end_logits), -1)
    return out.logits


# ---- pooling ---------------------------------------------------------------------------------


def test_pooling_by_hand():
    x, mask = torch.arange(8.0).view(2, 4, 1), torch.tensor([[0, 0, 1, 1], [1, 2, 0, 2]])
    x[0, 0] = float("nan")  # padding has no influence
    assert pool_tokens(x, mask, "mean").flatten().tolist() == pytest.approx([2.5, (4 + 5 + 7) / 3])
    assert pool_tokens(x, mask, "cls").flatten().tolist() == [2, 4]


@pytest.mark.parametrize("cls", AUTO)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("sides", [(0, 5), (2, 3)])
def test_padding_on_either_side_changes_nothing(cls, pooling, sides):
    model = lively(cls(small(classifier_pooling=pooling)))
    ids, all_ones = some_ids(2, L), torch.ones(2, L).long()
    alone, padded = (
        scores_of(model, ids),
        scores_of(model, F.pad(ids, sides), F.pad(all_ones, sides)),
    )
    if padded.dim() == 3:
        padded = padded[:, sides[0] : sides[0] + L]
    torch.testing.assert_close(padded, alone, **TOLERANCE)


# ---- the head --------------------------------------------------------------------------------


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("classifier_head", ["prediction", "tanh"])
def test_the_head_by_hand(classifier_head, per_token):
    head = lively(TaskHead(small(classifier_head=classifier_head), C, per_token))
    x = hidden = torch.randn(4, 16)
    if classifier_head == "prediction":
        hidden = F.layer_norm(F.gelu(x @ head.dense.weight.T), (16,)) * head.norm.weight
    elif not per_token:
        hidden = torch.tanh(x @ head.dense.weight.T + head.dense.bias)
    torch.testing.assert_close(head(x), hidden @ head.classifier.weight.T + head.classifier.bias)


@pytest.mark.parametrize("shape", [dict(problem_type="regression"), dict(num_labels=1)])
@pytest.mark.parametrize("mixed", [True, False])
def test_amounts_are_not_rounded_to_the_eight_bits_of_bfloat16(shape, mixed):
    model = lively(BertLabForSequenceClassification(small(**shape))).bfloat16().float()
    torch.nn.init.constant_(model.task_head.classifier.bias, 300.0)  # where bfloat16 counts by twos
    ids = some_ids(40, L)
    exact = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        rounded = (model if mixed else model.bfloat16())(ids).logits
    assert rounded.dtype == torch.float32 and len(rounded.unique()) > 0.9 * rounded.numel()
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.08)


# ---- losses ------------------------------------------------------------------------------------


def batches(problem: str, num: int):
    ids, mask = some_ids(num, L), torch.ones(num, L).long()
    mask[0, 5:] = 0
    positions = torch.randint(L, (2, num))
    labels = {
        "single": dict(labels=torch.randint(C, (num,))),
        "multi": dict(labels=torch.randint(2, (num, C)).float()),
        "numbers": dict(labels=torch.randn(num, C)),
        "tokens": dict(
            labels=torch.randint(C, (num, L)).masked_fill(torch.rand(num, L) < 0.5, -100)
        ),
        "answers": dict(start_positions=positions[0], end_positions=positions[1]),
    }
    return dict(input_ids=ids, attention_mask=mask, **labels[problem])


def model_for(problem: str, **overrides):
    if problem in PROBLEM:
        return lively(
            BertLabForSequenceClassification(small(problem_type=PROBLEM[problem], **overrides))
        )
    cls = BertLabForTokenClassification if problem == "tokens" else BertLabForQuestionAnswering
    return lively(cls(small(**overrides)))


PROBLEMS = [*PROBLEM, "tokens", "answers"]


def mean_of_ends(logits, start_positions, end_positions):
    ends = zip(logits.unbind(-1), (start_positions, end_positions))
    return sum(F.cross_entropy(scores, positions) for scores, positions in ends) / 2


LOSSES = {
    "single": F.cross_entropy,
    "multi": F.binary_cross_entropy_with_logits,
    "numbers": F.mse_loss,
    "tokens": lambda logits, labels: F.cross_entropy(logits.mT, labels),
    "answers": mean_of_ends,
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_loss_is_torchs_mean(problem):
    model, batch = model_for(problem), batches(problem, 4)
    labels = {k: v for k, v in batch.items() if k not in ("input_ids", "attention_mask")}
    logits = scores_of(model, batch["input_ids"], batch["attention_mask"])
    torch.testing.assert_close(model(**batch).loss, LOSSES[problem](logits, *labels.values()))
    assert model(batch["input_ids"]).loss is None


def test_an_answer_outside_of_its_row_has_no_loss():
    model, ids = model_for("answers"), some_ids(3, L)
    starts, ends = torch.tensor([1, 3, L]), torch.tensor([2, 3, L + 4])
    loss = model(ids, start_positions=starts, end_positions=ends).loss
    inside = model(ids[:2], start_positions=starts[:2], end_positions=ends[:2]).loss
    torch.testing.assert_close(loss, inside)


def test_padding_can_be_no_answer():
    model, ids, mask = model_for("answers"), some_ids(2, L), torch.ones(2, L).long()
    mask[:, 6:] = 0
    out = model(ids, mask)
    for logits in (out.start_logits, out.end_logits):
        assert (logits.softmax(-1)[:, 6:] == 0).all() and logits.isfinite().all()


def test_packed_documents_are_scored_as_alone():
    documents, ids = torch.tensor([[1] * 4 + [2] + [3] * 3 + [0]]), some_ids(1, L)
    tagger, finder = model_for("tokens"), lively(BertLabForSpanClassification(small()))
    tags, spans = tagger(ids, documents).logits, finder(ids, documents).logits
    for a, b in ((0, 4), (4, 5), (5, 8)):
        alone = ids[:, a:b]
        torch.testing.assert_close(tags[:, a:b], tagger(alone).logits, **TOLERANCE)
        torch.testing.assert_close(spans[..., a:b, a:b], finder(alone).logits, **TOLERANCE)
        spans[..., a:b, a:b] = torch.finfo(spans.dtype).min
    assert (spans == torch.finfo(spans.dtype).min).all()  # no span between documents


def test_no_span_touches_special_tokens():
    finder, ids = lively(BertLabForSpanClassification(small(cls_token_id=2))), some_ids(1, 4)
    ids[0, 0], lowest = 2, torch.finfo(torch.float32).min
    want = torch.ones(4, 4, dtype=torch.bool).triu()
    want[0] = False
    for logits in (finder(ids).logits, finder(ids, special_tokens_mask=(ids == 2).int()).logits):
        assert torch.equal(logits[0, 0] > lowest, want)
    assert allowed_spans(torch.tensor([[1, 1, 0]])).sum() == 3


# ---- at home in transformers -----------------------------------------------------------------


@pytest.mark.parametrize("cls", AUTO)
@pytest.mark.parametrize("source", [BertLabForEnhancedMaskedLM, BertLabModel])
def test_a_pretrained_directory_gives_its_encoder_alone(cls, source, tmp_path):
    base = lively(source(small()))
    base.save_pretrained(tmp_path)
    model, info = AUTO[cls].from_pretrained(tmp_path, num_labels=5, output_loading_info=True)
    assert type(model) is cls and not info["unexpected_keys"]
    head = {f"task_head.{name}" for name in model.task_head.state_dict()}
    assert {*info["missing_keys"]} == head
    weights = getattr(base, "encoder", base).state_dict()
    for name, weight in model.encoder.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    outputs = 2 if cls is BertLabForQuestionAnswering else 5
    assert model.task_head.classifier.weight.shape == (outputs, 16)
