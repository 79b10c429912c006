"BERT, RoBERTa and ModernBERT in and out: settings, names, weights, and the directory that loads without bertlab."

import contextlib
import copy
import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    BertForPreTraining,
    BertModel,
    ModernBertForMaskedLM,
    PreTrainedTokenizerFast,
)

from model_cases import lively, same_start_for_every_test  # noqa: F401

from bertlab.model.config import (
    BertLabConfig,
    bert_base,
    bert_tiny,
    modernbert_base,
    modernbert_tiny,
    roberta_base,
)
from bertlab.model.huggingface import (
    read_config,
    ARCHITECTURES,
    BertLabModelWithPooler,
    from_huggingface,
    load_model,
    merged_copy,
    save_model,
    saved_as,
    to_huggingface,
)
from bertlab.model.families import (
    FAMILIES,
    Family,
    to_bertlab_config,
    to_family_config,
    unused_settings,
)
from bertlab.data.tokenizers import load_tokenizer, train_tokenizer
from bertlab.model.encoder import BertLabModel
from bertlab.model.heads import (
    BertLabForEnhancedMaskedLM,
    BertLabForMaskedLM,
)
from bertlab.model.loading import read_state_dict
from bertlab.model.task_heads import BertLabForQuestionAnswering

ONE_TYPE = []  # a ModernBERT whose layers are all alike, which transformers 5.15 refuses
with contextlib.suppress(StrictDataclassFieldValidationError):
    ONE_TYPE = [transformers.ModernBertConfig(global_attn_every_n_layers=1, local_attention=7)]
TOLERANCE = dict(rtol=0, atol=1e-5)
B, L, V = 4, 24, 50
SHAPE = dict(vocab_size=V, hidden_size=16, intermediate_size=20, num_attention_heads=2)
SPECIAL = dict(pad_token_id=0, cls_token_id=2, bos_token_id=2, sep_token_id=3, eos_token_id=3)
OTHERS = {  # what makes each kind differ from its defaults
    "bert": dict(num_hidden_layers=12, max_position_embeddings=L),
    "roberta": dict(num_hidden_layers=3, max_position_embeddings=L + 2),
    "modernbert": dict(num_hidden_layers=7, local_attention=6, **SPECIAL),
}
MODEL_KINDS = list(OTHERS)


def ours(**overrides) -> BertLabForMaskedLM:
    return lively(
        BertLabForMaskedLM(modernbert_tiny(**{**SHAPE, "local_attention": 6, **overrides}))
    )


def theirs(family="modernbert", head="ForMaskedLM", **overrides):
    labels = dict(num_labels=3) if head.endswith("Classification") else {}
    config = FAMILIES[family].get_class("Config")(
        **{**SHAPE, **OTHERS[family], **labels, **overrides}
    )
    return lively(FAMILIES[family].get_class(head)(config))


def padded_rows(pad=0):
    "Ids and a 0/1 mask: no padding, right, left, one token."
    ids = torch.randint(5, V, (B, L), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(B, L, dtype=torch.long)
    mask[1, 15:], mask[2, :9], mask[3, 1:] = 0, 0, 0
    return ids.masked_fill(mask == 0, pad), mask


def batches(family, pad=None):
    "The same rows for their model and for ours; BERT must be told where a left-padded text begins."
    ids, mask = padded_rows({"roberta": 1}.get(family, 0) if pad is None else pad)
    batch = dict(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    if family != "bert":
        return batch, batch
    batch["token_type_ids"] = torch.randint(
        0, 2, (B, L), generator=torch.Generator().manual_seed(2)
    )
    return {**batch, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}, batch


def assert_same_outputs(want, got, mask, skip_pooled=()):
    assert set(want) == set(got)
    for name in want:
        pairs = (
            zip(want[name], got[name], strict=True)
            if name == "hidden_states"
            else [(want[name], got[name])]
        )
        for a, b in pairs:
            if a.shape[:2] == mask.shape:
                a, b = a[mask.bool()], b[mask.bool()]
            else:  # one vector a row
                rows = [i for i in range(len(a)) if i not in skip_pooled]
                a, b = a[rows], b[rows]
            torch.testing.assert_close(b, a, **TOLERANCE)


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [f"w{i}" for i in range(V - 5)]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")
    names["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]  # as BERT's
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", **names)


def equal(first, second):
    weights = second.state_dict()
    return all(torch.equal(weight, weights[name]) for name, weight in first.state_dict().items())


def there_and_back(config: BertLabConfig, family: str, head: str = "ForMaskedLM") -> BertLabConfig:
    return to_bertlab_config(to_family_config(config, family, head))


# ---- settings: what transformers ships ----------------------------------------------------------------------


def test_the_published_shapes_are_our_presets():
    roberta = transformers.RobertaConfig(
        max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
    )
    modern = dict(pad_token_id=50283, cls_token_id=50281, sep_token_id=50282)
    pairs = [
        (transformers.BertConfig(), bert_base(pad_token_id=0)),
        (roberta, roberta_base(pad_token_id=1, cls_token_id=0, sep_token_id=2)),
        (transformers.ModernBertConfig(), modernbert_base(classifier_pooling="cls", **modern)),
    ]
    for theirs, ours in pairs:
        ours.family = theirs.model_type
        assert to_bertlab_config(theirs).to_diff_dict() == ours.to_diff_dict()


@pytest.mark.parametrize("reference", [
    transformers.BertConfig(hidden_act="relu", hidden_dropout_prob=0.2, classifier_dropout=0.4),
    transformers.BertConfig(type_vocab_size=5, tie_word_embeddings=False, bos_token_id=7),
    transformers.BertConfig(num_labels=5, problem_type="regression", pad_token_id=None),
    transformers.RobertaConfig(pad_token_id=4, hidden_act="silu", eos_token_id=9),
    transformers.ModernBertConfig(norm_bias=True, attention_bias=True, classifier_bias=True),
    transformers.ModernBertConfig(decoder_bias=False, classifier_activation="relu"),
    *ONE_TYPE,
], ids=repr)  # fmt: skip
def test_settings_of_a_family_survive_the_round_trip(reference):
    back = to_family_config(to_bertlab_config(reference), reference.model_type, "ForMaskedLM")
    want = reference.to_diff_dict()
    want.pop("global_attn_every_n_layers", None)  # the same as layer_types
    assert back.to_diff_dict() == want


@pytest.mark.parametrize("reference, name", [
    (transformers.BertConfig(is_decoder=True), "is_decoder=True"),
    (transformers.BertConfig(position_embedding_type="relative_key"), "position_embedding_type"),
    (transformers.BertConfig(hidden_act="gelu_new"), "gelu_new"),
    (transformers.RobertaConfig(pad_token_id=None), "pad_token_id=None"),
    (transformers.ModernBertConfig(layer_types=["sliding_attention"] * 21 + ["full_attention"]),
     "layer_types"),
    (transformers.DebertaV2Config(), "deberta-v2"),
    (transformers.ElectraConfig(), "_size="),
], ids=str)  # fmt: skip
def test_settings_that_bertlab_lacks_are_named(reference, name):
    with pytest.raises(ValueError, match=name):
        to_bertlab_config(reference)


@pytest.mark.parametrize("head", ARCHITECTURES)
@pytest.mark.parametrize("config, family", [
    (bert_tiny(embedding_dropout=0.3, mlp_dropout=0.2, initialization="kaiming"), "bert"),
    (bert_tiny(local_attention=6, num_key_value_heads=2, classifier_dropout=0.3), "bert"),
    (bert_tiny(head_activation="gelu", num_labels=7, residual_in_fp32=False), "bert"),
    (roberta_base(pad_token_id=1, tie_word_embeddings=False), "roberta"),
    (modernbert_tiny(global_attention_every_n_layers=9, num_key_value_heads=3), "modernbert"),
    *[(modernbert_tiny(num_hidden_layers=1, problem_type="regression"), "modernbert") for _ in ONE_TYPE],
])  # fmt: skip
def test_bertlab_settings_survive_the_round_trip_and_a_file(config, family, head, tmp_path):
    config.family = family
    assert there_and_back(config, family, head).to_diff_dict() == config.to_diff_dict()
    to_family_config(config, family, head).save_pretrained(tmp_path)
    again = to_bertlab_config(transformers.AutoConfig.from_pretrained(tmp_path)).to_diff_dict()
    versions = {"transformers_version": 0}
    assert {**again, **versions} == {**config.to_diff_dict(), **versions}


def test_a_config_that_transformers_refuses_is_named(monkeypatch):
    def refuse(**settings):
        raise StrictDataclassFieldValidationError("rope_parameters", TypeError("wrong"))

    monkeypatch.setattr(Family, "get_class", lambda self, ending: refuse)
    with pytest.raises(ValueError, match=f"{transformers.__version__}.*rope_parameters"):
        to_family_config(modernbert_tiny(), "modernbert", "ForMaskedLM")


@pytest.mark.parametrize("config, family, name", [
    (bert_tiny(norm="rms"), "bert", "norm='rms'"),
    (bert_tiny(mlp_bias=False), "bert", "mlp_bias=False"),
    (bert_tiny(decoder_bias=False), "bert", "decoder_bias"),
    (bert_tiny(attention_positions="alibi"), "bert", "attention_positions"),
    (bert_tiny(global_attention_every_n_layers=2), "bert", "global_attention_every_n_layers=2"),
    (roberta_base(pad_token_id=5), "roberta", "pad_token_id=5"),
    (roberta_base(pad_token_id=1, hidden_activation="relu"), "roberta", "head_activation=None"),
    (modernbert_tiny(qk_norm=True), "modernbert", "qk_norm=True"),
    (modernbert_tiny(partial_rotary_factor=0.5), "modernbert", "partial_rotary_factor=0.5"),
    (modernbert_tiny(embedding_positions="sinusoidal"), "modernbert", "embedding_positions"),
], ids=str)  # fmt: skip
def test_settings_that_a_family_lacks_are_named(config, family, name):
    with pytest.raises(ValueError, match=name):
        to_family_config(config, family, "ForMaskedLM")


# ---- settings: what bertlab ships ---------------------------------------------------------------------------


def test_a_setting_is_refused_only_where_the_head_reads_it():
    mean = bert_tiny(classifier_pooling="mean")
    assert there_and_back(mean, "bert", "ForTokenClassification").classifier_pooling == "mean"
    with pytest.raises(ValueError, match="classifier_pooling='mean'"):
        to_family_config(mean, "bert", "ForSequenceClassification")
    with pytest.raises(ValueError, match="classifier_head='prediction'"):
        to_family_config(bert_tiny(classifier_head="prediction"), "bert", "ForTokenClassification")
    assert "decoder_bias" in unused_settings(mean, "Model") - unused_settings(mean, "ForMaskedLM")


# ---- names ----------------------------------------------------------------------------------------


# ---- parity and round trip ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "head, tied", [*((head, True) for head in ARCHITECTURES), ("ForMaskedLM", False)]
)
@pytest.mark.parametrize("family", MODEL_KINDS)
def test_every_head_computes_the_same_and_comes_back_whole(family, head, tied):
    original = theirs(family, head, tie_word_embeddings=tied)
    ours = from_huggingface(original)
    batch, options = batches(family)
    mask = batch["attention_mask"]
    # transformers takes place 0 of a row for its first token, also where that is padding (row 2).
    pooled_at_padding = {"skip_pooled": (2,)}
    with torch.no_grad():
        want = original(**batch)
        assert_same_outputs(want, ours(**options), mask, **pooled_at_padding)
        back = to_huggingface(ours)
        assert_same_outputs(want, back(**batch), mask)
        single = {k: v[:1] if torch.is_tensor(v) else v for k, v in options.items()}
        assert_same_outputs(original(**single), ours(**single), mask[:1])
    assert type(back) is type(original)
    assert back.config.to_diff_dict() == original.config.to_diff_dict()
    state = back.state_dict()
    assert state.keys() == original.state_dict().keys()
    for name, weight in original.state_dict().items():
        if not tied and name in ("cls.predictions.bias", "lm_head.bias"):
            continue  # untied: a ours beside the bias, which no forward pass reads
        assert torch.equal(state[name], weight), name
    again = from_huggingface(back)
    assert again.config.to_diff_dict() == ours.config.to_diff_dict()
    assert all(torch.equal(again.state_dict()[k], w) for k, w in ours.state_dict().items())


@pytest.mark.parametrize(
    "overrides",
    [
        dict(local_attention=7),  # an odd window is rounded down
        dict(local_attention=128),  # wider than the row
        dict(num_hidden_layers=2, global_attn_every_n_layers=5),
        dict(hidden_activation="silu", classifier_activation="silu"),
        dict(global_rope_theta=500.0, local_rope_theta=50.0),
        dict(norm_bias=True, attention_bias=True),
        dict(mlp_bias=True, classifier_bias=True, classifier_activation="relu"),
        dict(decoder_bias=False, classifier_pooling="mean"),
    ],
    ids=str,
)
def test_modernbert_with_other_settings_computes_the_same(overrides):
    original = theirs("modernbert", "ForSequenceClassification", **overrides)
    converted, (batch, options) = from_huggingface(original), batches("modernbert")
    with torch.no_grad():
        want, mask = original(**batch), batch["attention_mask"]
        by_first = overrides.get("classifier_pooling") != "mean"
        assert_same_outputs(want, converted(**options), mask, skip_pooled=(2,) if by_first else ())
        assert torch.equal(to_huggingface(converted)(**batch).logits[0], want.logits[0])


@pytest.mark.parametrize("settings", [{}, {"cls_token_id": 2, "sep_token_id": 3}], ids=str)
def test_a_modernbert_of_another_vocabulary_is_packed(settings, tmp_path):
    "Its default ids of [CLS] and [SEP] are those of the published vocabulary: 50281 and 50282."
    defaults = dict.fromkeys(("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"))
    published = {name: getattr(transformers.ModernBertConfig(), name) for name in defaults}
    original = theirs(**{**published, **settings}, sparse_prediction=True)
    original.save_pretrained(tmp_path)
    loaded, (ids, mask) = load_model(tmp_path), padded_rows()
    assert loaded.padded_because is None
    assert loaded.model.config.cls_token_id == settings.get("cls_token_id")
    want = original(ids, attention_mask=mask).logits
    torch.testing.assert_close(
        loaded.model(ids, mask).logits[mask > 0], want[mask > 0], **TOLERANCE
    )


@pytest.mark.parametrize("family", ["Bert", "ModernBert", "DebertaV2"])  # the last one is padded
def test_layers_are_never_dropped_in_silence(family, tmp_path):
    config = getattr(transformers, f"{family}Config")(**SHAPE, num_hidden_layers=3, pad_token_id=0)
    getattr(transformers, f"{family}ForMaskedLM")(config).save_pretrained(tmp_path)
    config.num_hidden_layers = 2
    config.layer_types = (getattr(config, "layer_types", None) or [])[:2] or None
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="num_hidden_layers=2.*layers?.2"):
        load_model(tmp_path)


def test_a_run_is_a_model_its_best_one_first(tmp_path):
    for name in ("models/step-00000002", "models/step-00000010", "models/best"):
        newer = ours()
        save_model(newer, tokenizer(), tmp_path / "run" / name)
        (tmp_path / "run" / "run.yaml").write_text("")
        assert equal(load_model(tmp_path / "run").model, newer)
        assert load_tokenizer(tmp_path / "run").get_vocab() == tokenizer().get_vocab()
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "run.yaml").write_text("")
    for load in (load_model, load_tokenizer, read_state_dict):
        with pytest.raises(ValueError, match="none has no model"):
            load(tmp_path / "none")


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification"])
def test_a_roberta_with_another_padding_is_written_as_a_bert(head, tmp_path):
    "RoBERTa in transformers counts positions from padding id 1, which is this tokenizer's [UNK]."
    model, words = from_huggingface(theirs("roberta", head)), tokenizer()
    before, settings = copy.deepcopy(model.state_dict()), model.config.to_dict()
    save_model(model, words, tmp_path)
    assert model.config.to_dict() == settings
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())
    again = FAMILIES["bert"].get_class(head).from_pretrained(tmp_path).eval()
    assert (again.config.pad_token_id, again.config.sep_token_id) == (words.pad_token_id, 3)
    ids, mask = padded_rows()
    ids[0, 3:6], mask[2] = 1, 1  # their BERT numbers from the start of the row
    ids[2, :9] = 7
    with torch.no_grad():
        want, got = model(ids, mask), again(ids, attention_mask=mask)
    assert_same_outputs({k: v for k, v in want.items() if v is not None}, got, mask)
    assert type(again).__name__ in saved_as(model, tokenizer=words)
    assert from_huggingface(tmp_path).config.max_position_embeddings == L


def test_packed_rows_equal_transformers_with_explicit_masks():
    converted = ours()
    original, ids = to_huggingface(converted), padded_rows()[0]
    documents = torch.tensor([[1] * 7 + [2] * 16 + [3] * 1] * B)
    positions = torch.tensor([[*range(7), *range(16), 0]] * B)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    near = (torch.arange(L)[:, None] - torch.arange(L)).abs() <= 3
    masks = {"full_attention": same, "sliding_attention": same & near}
    want = original(input_ids=ids, attention_mask=masks, position_ids=positions).logits
    torch.testing.assert_close(converted(ids, documents).logits, want, **TOLERANCE)


# ---- weights that must not get lost ---------------------------------------------------------------


@pytest.mark.parametrize("copied", [to_huggingface, merged_copy])
def test_a_copy_shares_no_memory_with_its_original(copied):
    model = ours()
    converted = copied(model)
    before = {name: weight.clone() for name, weight in converted.state_dict().items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(7)
    assert all(torch.equal(weight, before[name]) for name, weight in converted.state_dict().items())


def test_a_pooler_is_kept_where_there_is_one():
    config = theirs("bert").config
    for pooler in (True, False):
        original = lively(BertModel(config, add_pooling_layer=pooler))
        converted = from_huggingface(original)
        assert type(converted) is (BertLabModelWithPooler if pooler else BertLabModel)
        assert to_huggingface(converted).state_dict().keys() == original.state_dict().keys()
    assert to_huggingface(BertLabModel(bert_tiny(**SHAPE))).pooler is None


# ---- what is requested for ----------------------------------------------------------------------------


@pytest.mark.parametrize("convert, name", [
    (lambda: from_huggingface(BertForPreTraining(theirs("bert").config)), "ForPreTraining"),
    (lambda: to_huggingface(BertLabForEnhancedMaskedLM(modernbert_tiny(**SHAPE))), "Enhanced"),
    (lambda: to_huggingface(ours(), "bort"), "bort"),
    (lambda: to_huggingface(BertLabForQuestionAnswering(bert_tiny(num_labels=3))), "num_labels=3"),
    (lambda: save_model(ours(norm="rms"), None, "never", "modernbert"), "norm='rms'"),
])  # fmt: skip
def test_models_without_a_counterpart_are_refused(convert, name):
    with pytest.raises(ValueError, match=name):
        convert()


# ---- the directory ---------------------------------------------------------------------------

READER = """
import json, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "bertlab": raise ImportError("bertlab is not installed here")
sys.meta_path.insert(0, Refuse())
try: import bertlab
except ImportError: pass
else: raise SystemExit("bertlab is there")
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1])
batch = tokenizer(["w1 w2 [MASK] w4", "w7 [MASK]"], padding=True, return_tensors="pt")
with torch.no_grad(): logits = model(**batch).logits
best = pipeline("fill-mask", sys.argv[1])("w1 w2 [MASK] w4", top_k=3)
trained = AutoTokenizer.from_pretrained(sys.argv[2])
filled = pipeline("fill-mask", sys.argv[2])("return the [MASK] of x.")
print(json.dumps(dict(
    kind=type(model).__name__, keys=sorted(batch), logits=logits.tolist(),
    best=[(b["token_str"], b["score"]) for b in best],
    trained=trained("return the value").input_ids, filled=len(filled),
)))
"""


def read_elsewhere(directory, trained) -> dict:
    "What plain transformers finds in two directories, in a process that cannot import bertlab."
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", READER, str(directory), str(trained)],
        capture_output=True, text=True, cwd=directory, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    model, directory = ours(), tmp_path_factory.mktemp("saved") / "new" / "model"
    assert save_model(model, tokenizer(), directory) == directory
    return model, directory


def test_directories_and_tokenizers_load_without_bertlab(saved, tmp_path):
    model, directory = saved
    trained = train_tokenizer(["return the value of x.", "the mask of the value"] * 20, 100)
    trained.save_pretrained(tmp_path)
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    config = transformers.BertConfig(vocab_size=len(trained), **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    result = read_elsewhere(directory, tmp_path)
    assert result["trained"] == trained("return the value").input_ids and result["filled"] == 5
    assert result["kind"] == "ModernBertForMaskedLM"
    assert result["keys"] == ["attention_mask", "input_ids"]
    batch = tokenizer()(["w1 w2 [MASK] w4", "w7 [MASK]"], padding=True, return_tensors="pt")
    assert "token_type_ids" in batch  # our model takes them, ModernBERT has none
    real = batch["attention_mask"].bool()
    logits = model(**batch).logits
    torch.testing.assert_close(torch.tensor(result["logits"])[real], logits[real], **TOLERANCE)
    top = logits[0, 3].softmax(-1).topk(3)
    names = [tokenizer().decode([i]) for i in top.indices]
    assert [word for word, _ in result["best"]] == names
    scores = torch.tensor([score for _, score in result["best"]])
    torch.testing.assert_close(scores, top.values, **TOLERANCE)


def test_saving_leaves_the_owner_everything_as_it_was(saved, tmp_path):
    model, options = ours().train(), tokenizer()
    before = list(options.model_input_names)
    (tmp_path / "notes.txt").write_text("mine")
    save_model(model, options, tmp_path)
    assert options.model_input_names == before and model.training
    assert model.config.mask_token_id is None
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in saved[1].iterdir()} | {
        "notes.txt"
    }


def test_weights_have_the_permissions_of_other_files(tmp_path):
    before = os.umask(0o027)
    try:
        save_model(ours(), tokenizer(), tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


@pytest.mark.parametrize("chosen, length", [(8192, L), (10**30, L), (7, 7)])
def test_a_saved_tokenizer_is_no_longer_than_its_model(chosen, length, tmp_path):
    words = tokenizer()
    words.model_max_length = chosen
    save_model(ours(max_position_embeddings=L), words, tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.model_max_length == length and words.model_max_length == chosen
    ids = again(" ".join(["w7"] * 4 * L), truncation=True, return_tensors="pt").input_ids
    assert ids.shape[1] == length


def test_saving_that_fails_keeps_the_files_that_were_there(saved, tmp_path, monkeypatch):
    save_model(ours(), tokenizer(), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr(ModernBertForMaskedLM, "save_pretrained", half_a_save)
    with pytest.raises(OSError, match="disk"):
        save_model(ours(), tokenizer(), tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


OLDER = {  # of a tokenizer that transformers 4 wrote
    "special_tokens_map.json": json.dumps({"pad_token": "<pad>", "mask_token": "<mask>", "cls_token": "<s>"}),
    "added_tokens.json": json.dumps({"<new>": V + 7}), "vocab.txt": "a\nb", "vocab.json": "{}", "merges.txt": "",
    "spiece.model": "", "tokenizer.model": "",
}  # fmt: skip


def test_no_file_of_an_older_tokenizer_stays_beside_a_new_one(tmp_path):
    for name, content in OLDER.items():
        (tmp_path / name).write_text(content)
    save_model(ours(), None, tmp_path)
    assert OLDER.keys() <= {path.name for path in tmp_path.iterdir()}  # no tokenizer was given
    save_model(ours(), tokenizer(), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == tokenizer().get_vocab() and again.mask_token == "[MASK]"


def half_a_save(self, directory):
    with open(os.path.join(directory, "model.safetensors"), "wb") as f:
        f.write(b"half")
    raise OSError("no space left on the disk")


def test_a_wrong_tokenizer_is_refused_before_writing(tmp_path):
    with pytest.raises(ValueError, match="49.*vocab_size is 40"):
        save_model(ours(vocab_size=40), tokenizer(), tmp_path / "a")
    maskless = tokenizer()
    maskless.mask_token = None
    with pytest.raises(ValueError, match="mask token"):
        save_model(ours(), maskless, tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        save_model(ours(), tokenizer(), tmp_path / "file")
    assert not (tmp_path / "a").exists()


# ---- models that no family can say ----------------------------------------------------------------

OWN = {  # shapes without a place elsewhere, and the setting that says so
    "rms": (dict(norm="rms"), "norm='rms'"),
    "alibi": (dict(attention_positions="alibi"), "attention_positions='alibi'"),
}
OWN_HEADS = [*ARCHITECTURES.values(), BertLabForEnhancedMaskedLM]


@pytest.mark.parametrize(
    "shape, head",
    [
        ("alibi", ARCHITECTURES["ForMaskedLM"]),
        *(("rms", head) for head in OWN_HEADS),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_model_without_a_family_keeps_its_class(shape, head, tmp_path):
    settings, word = OWN[shape]
    model = lively(head(modernbert_tiny(**SHAPE, **settings)))
    path = save_model(model, tokenizer(), tmp_path / "model")
    settings = json.loads((path / "config.json").read_text())
    assert (settings["model_type"], settings["architectures"]) == ("bertlab", [head.__name__])
    assert (settings["mask_token_id"], model.config.mask_token_id) == (4, None)
    again = head.from_pretrained(path).eval()
    assert all(
        torch.equal(again.state_dict()[name], weight) for name, weight in model.state_dict().items()
    )
    line = saved_as(model)
    assert head.__name__ in line and (word in line or "no family has" in line)


def test_a_classifier_needs_no_mask_token(tmp_path):
    maskless = tokenizer()
    maskless.mask_token = None
    model = ARCHITECTURES["ForSequenceClassification"](modernbert_tiny(**SHAPE))
    assert (save_model(model, maskless, tmp_path / "a") / "model.safetensors").exists()


def test_the_reason_of_a_wrong_configuration_is_told_in_full(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "bertlab"}')
    message = "Class validation error:\n    num_hidden_layers (1) must equal layer_types (2)"

    def refuse(*args, **kwargs):
        raise ValueError(message)

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    with pytest.raises(ValueError, match="layer_types.*correct its config.json"):
        read_config(tmp_path)
