"A pretrained encoder under a new head: what is taken over, what is fresh, what stands still, what is saved."

import json
import subprocess
import sys

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.model.config import BertLabConfig, modernbert_tiny
from bertlab.model.huggingface import save_model
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.task_heads import BertLabForSequenceClassification, BertLabForTokenClassification
from bertlab.finetuning.models import layerwise_rates, load_task_model
from bertlab.finetuning.models import reinit_top_layers, save_predictor
from bertlab.finetuning.task import LabelNames, get_task

WORDS = "apple pear plum fig saw hammer drill file the is in here where what oslo rome"
TOKENIZER = train_tokenizer([WORDS] * 30, 120)
TINY = modernbert_tiny(
    vocab_size=len(TOKENIZER),
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=48,
)


def task_of(*names, kind="classification"):
    return get_task(kind, labels=LabelNames(names, names))


TASK = task_of("fruit", "tool")
FRESH = ["task_head.classifier.bias", "task_head.classifier.weight"]
SMALL = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
         "max_position_embeddings": 40}  # fmt: skip


def shaken(model):
    "No two weights are alike, so that none can be taken for another."
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    "The same masked language model, as a bertlab directory and as `bertlab demo` writes it."
    model, folder = shaken(BertLabForMaskedLM(TINY)), tmp_path_factory.mktemp("pretrained")
    model.save_pretrained(folder / "ours")
    save_model(model, TOKENIZER, folder / "theirs")
    return model, folder


def test_both_kinds_of_directory_give_the_same_encoder_and_head(pretrained):
    model, folder = pretrained
    for library in ("ours", "theirs"):
        loaded, fresh, _ = load_task_model(TASK, folder / library)
        assert sorted(fresh) == FRESH and loaded.config.id2label == {0: "fruit", 1: "tool"}
        state = loaded.state_dict()
        for key, weight in model.state_dict().items():
            name = key.replace("head.dense", "task_head.dense").replace(
                "head.norm", "task_head.norm"
            )
            if name in state:
                assert torch.equal(state[name], weight), key
        assert {k for k in state if k.startswith("encoder.")} == {
            k for k in model.state_dict() if k.startswith("encoder.")
        }


@pytest.mark.parametrize("task", ["classification", "token_classification", "question_answering"])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "ModernBert"])
def test_a_checkpoint_of_transformers_gets_the_head_that_transformers_gives_it(
    tmp_path, family, task
):
    config = getattr(transformers, f"{family}Config")(
        **SMALL, bos_token_id=2, cls_token_id=2, eos_token_id=3, sep_token_id=3, pad_token_id=0
    )
    shaken(getattr(transformers, f"{family}ForMaskedLM")(config)).save_pretrained(tmp_path / "mlm")
    task = task_of("fruit", "tool", kind=task)
    model, fresh, _ = load_task_model(task, tmp_path / "mlm")
    # Their own class, with the weights that were drawn here: equal scores mean equal everything else.
    save_predictor(model, tmp_path / "saved", TOKENIZER)
    head = task.architecture
    reference, report = getattr(transformers, family + head).from_pretrained(
        tmp_path / "mlm", num_labels=2, output_loading_info=True
    )
    saved = getattr(transformers, family + head).from_pretrained(tmp_path / "saved")
    assert len(fresh) == len(report["missing_keys"]) and all(
        key.startswith("task_head.") for key in fresh
    )
    for key, weight in reference.state_dict().items():
        if key not in report["missing_keys"] and not key.endswith("position_ids"):
            assert torch.equal(saved.state_dict()[key], weight), key
    ids = torch.randint(5, 100, (2, 9))
    model, saved = model.eval(), saved.eval()
    for a, b in zip(model(ids).to_tuple(), saved(ids).to_tuple()):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_classifier_that_answered_to_other_names_is_forgotten_and_the_same_one_kept(tmp_path):
    old = shaken(
        BertLabForSequenceClassification(
            BertLabConfig(**{**TINY.to_diff_dict(), **TASK.config_settings()})
        )
    )
    old.save_pretrained(tmp_path)
    model, fresh, _ = load_task_model(TASK, tmp_path)
    assert fresh == [] and torch.equal(
        model.task_head.classifier.weight, old.task_head.classifier.weight
    )
    for labels in (task_of("tool", "fruit"), get_task("classification", num_labels=3)):
        anew, fresh, _ = load_task_model(labels, tmp_path)
        assert (
            sorted(fresh) == FRESH and anew.task_head.classifier.out_features == labels.num_labels
        )
        assert torch.equal(anew.task_head.dense.weight, old.task_head.dense.weight)
        if labels.num_labels == 2:
            assert not torch.equal(
                anew.task_head.classifier.weight, old.task_head.classifier.weight
            )
    tagger, fresh, _ = load_task_model(get_task("token_classification", num_labels=2), tmp_path)
    assert sorted(fresh) == FRESH and isinstance(tagger, BertLabForTokenClassification)


def test_options_reach_the_model(pretrained):
    options = {
        "classifier_dropout": 0.3,
        "mlp_dropout": 0.2,
        "classifier_pooling": "cls",
        "attn_implementation": "eager",
    }
    for library in ("ours", "theirs"):
        model, *_ = load_task_model(TASK, pretrained[1] / library, options)
        assert model.task_head.dropout.p == 0.3 and model.config._attn_implementation == "eager"
        assert {
            m.p for m in model.encoder.blocks[0].mlp.modules() if isinstance(m, torch.nn.Dropout)
        } == {0.2}
        assert model.config.classifier_pooling == "cls"


def test_an_encoder_with_holes_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    BertLabForMaskedLM(TINY).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["encoder.blocks.1.attention.qkv.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError,
        match="encoder.blocks.1.attention.qkv.weight",
    ):
        load_task_model(TASK, tmp_path)


# --- labels ---------------------------------------------------------------------------------------


# --- layers ---------------------------------------------------------------------------------------


def fresh_model():
    torch.manual_seed(0)
    return BertLabForSequenceClassification(TINY)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.floats(1e-6, 1.0), st.floats(0.05, 1.0), st.integers(1, 24))
def test_rates_fall_by_one_factor_a_layer_and_end_at_the_heads(rate, decay, num_layers):
    rates = layerwise_rates(rate, decay, num_layers)
    assert len(rates) == num_layers + 2 and rates[-1] == rate
    for low, high in zip(rates, rates[1:]):
        assert low == pytest.approx(high * decay)


def test_reinit_begins_the_top_anew_and_leaves_the_rest(tmp_path):
    shaken(BertLabForMaskedLM(TINY)).save_pretrained(tmp_path)
    model, *_ = load_task_model(TASK, tmp_path)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    anew = reinit_top_layers(model, 2)
    changed = {
        key for key, weight in model.state_dict().items() if not torch.equal(weight, before[key])
    }
    expected = {
        k
        for k in before
        if k.startswith(("encoder.blocks.1.", "encoder.blocks.2.", "encoder.final_norm."))
    }
    assert changed == set(anew) == expected
    assert (
        model.encoder.final_norm.weight.eq(1).all()
        and model.encoder.blocks[1].pre_mlp_norm.weight.eq(1).all()
    )
    widths = {key: fresh_model().state_dict()[key].std() for key in expected if "norm" not in key}
    for key, width in widths.items():
        assert model.state_dict()[key].std() == pytest.approx(width.item(), rel=0.15), key
    assert reinit_top_layers(model, 0) == []


# --- saved ----------------------------------------------------------------------------------------

ELSEWHERE = """
import json, sys
sys.modules["bertlab"] = None  # an import of it fails
import transformers
transformers.logging.set_verbosity_error()
everything = {}
for kind in ("modernbert", "bert"):
    found = everything[kind] = {}
    for task in ("text-classification", "token-classification"):
        folder = f"{sys.argv[1]}/{kind}/{task}"
        found[task] = transformers.pipeline(task, folder)("the apple is here")
        assert "bertlab" not in type(transformers.AutoConfig.from_pretrained(folder)).__module__
    folder = f"{sys.argv[1]}/{kind}/question-answering"
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder)
    inputs = transformers.AutoTokenizer.from_pretrained(folder)("where", "in oslo", return_tensors="pt")
    found["answers"] = model(**inputs).start_logits[0].tolist()
print(json.dumps(everything, default=float))
"""


PIPELINES = {"text-classification": "classification", "token-classification": "token_classification",
             "question-answering": "question_answering"}  # fmt: skip
TAGS = ("O", "B-X", "I-X")


def save_all(source, folder):
    "A model for each task, saved for its pipeline."
    models = {}
    for pipeline, task in PIPELINES.items():
        models[task] = load_task_model(task_of(*TAGS, kind=task), source).model.eval()
        save_predictor(models[task], folder / pipeline, TOKENIZER)
        assert not list((folder / pipeline).glob(".saving*"))
    return models


@torch.no_grad()
def test_pipelines_load_what_was_saved_where_bertlab_is_not(tmp_path):
    shaken(transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))).save_pretrained(
        tmp_path / "mlm-bert"
    )
    shaken(BertLabForMaskedLM(TINY)).save_pretrained(tmp_path / "mlm-modernbert")
    directories = {
        family: save_all(tmp_path / f"mlm-{family}", tmp_path / family)
        for family in ("bert", "modernbert")
    }
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    everything = json.loads(run.stdout.splitlines()[-1])
    for family, models in directories.items():
        found, ids = (
            everything[family],
            TOKENIZER("the apple is here", return_tensors="pt")["input_ids"],
        )
        score = models["classification"](ids).logits.softmax(-1)[0]
        assert found["text-classification"][0]["label"] == TAGS[score.argmax()]
        assert found["text-classification"][0]["score"] == pytest.approx(
            score.max().item(), abs=1e-4
        )
        tags = models["token_classification"](ids).logits[0].argmax(-1)
        tag_ids = [TAGS.index(one["entity"]) for one in found["token-classification"]]
        assert tag_ids == [
            int(tag) for tag in tags[1:-1] if tag
        ]  # the pipeline leaves O and special tokens out
        pair = TOKENIZER("where", "in oslo", return_tensors="pt")["input_ids"]
        start_logits = models["question_answering"](pair).start_logits[0]
        torch.testing.assert_close(
            torch.tensor(found["answers"]), start_logits, atol=1e-4, rtol=1e-3
        )
