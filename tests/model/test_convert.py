"Weights of BERT, RoBERTa and ModernBERT in and out, and the directory that loads without bertlab."

import json
import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    ElectraConfig,
    ElectraForMaskedLM,
    ModernBertForMaskedLM,
    PreTrainedTokenizerFast,
)

from bertlab.model.config import bert_tiny, modernbert_tiny
from bertlab.model.convert import (
    HEADS,
    BertLabModelWithPooler,
    from_huggingface,
    from_modernbert,
    match_tokens,
    save_as_modernbert,
    take_weights,
    to_huggingface,
    to_modernbert,
)
from bertlab.model.encoder import BertLabModel
from bertlab.model.families import key_table, their_class
from bertlab.model.heads import BertLabForEnhancedMaskedLM, BertLabForMaskedDiffusion, BertLabForMaskedLM
from bertlab.model.task_heads import BertLabForQuestionAnswering

torch.set_num_threads(1)
TOLERANCE = dict(rtol=0, atol=1e-5)
B, L, V = 4, 24, 50
SHAPE = dict(vocab_size=V, hidden_size=16, intermediate_size=20, num_attention_heads=2)
SPECIAL = dict(pad_token_id=0, cls_token_id=2, bos_token_id=2, sep_token_id=3, eos_token_id=3)
OTHERS = {  # what makes each kind differ from its defaults
    "bert": dict(num_hidden_layers=3, max_position_embeddings=L),
    "roberta": dict(num_hidden_layers=3, max_position_embeddings=L + 2),
    "modernbert": dict(num_hidden_layers=7, local_attention=6, **SPECIAL),
}
MODEL_KINDS = list(OTHERS)


@pytest.fixture(autouse=True)
def same_start_for_every_test():
    torch.manual_seed(0)


def lively(model):
    "Move every weight away from its start, norms and biases too, so that nothing hides."
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return model.eval()


def ours(**overrides) -> BertLabForMaskedLM:
    return lively(BertLabForMaskedLM(modernbert_tiny(**{**SHAPE, "local_attention": 6, **overrides})))


def theirs(kind="modernbert", head="ForMaskedLM", **overrides):
    labels = dict(num_labels=3) if head.endswith("Classification") else {}
    config = their_class(kind, "Config")(**{**SHAPE, **OTHERS[kind], **labels, **overrides})
    return lively(their_class(kind, head)(config))


def padded_rows(pad=0):
    "Ids and a 0/1 mask: no padding, right, left, one token."
    ids = torch.randint(5, V, (B, L), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(B, L, dtype=torch.long)
    mask[1, 15:], mask[2, :9], mask[3, 1:] = 0, 0, 0
    return ids.masked_fill(mask == 0, pad), mask


def batches(kind, pad=None):
    "The same rows for their model and for ours; BERT must be told where a left-padded text begins."
    ids, mask = padded_rows({"roberta": 1}.get(kind, 0) if pad is None else pad)
    batch = dict(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    if kind != "bert":
        return batch, batch
    batch["token_type_ids"] = torch.randint(0, 2, (B, L), generator=torch.Generator().manual_seed(2))
    return {**batch, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}, batch


def assert_same_outputs(want, got, mask, skip_pooled=()):
    assert set(want) == set(got)
    for name in want:
        pairs = zip(want[name], got[name], strict=True) if name == "hidden_states" else [(want[name], got[name])]
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


# ---- parity and round trip ---------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_every_head_computes_the_same_and_comes_back_whole(kind, head, tied):
    original = theirs(kind, head, tie_word_embeddings=tied)
    copy = from_huggingface(original)
    batch, own = batches(kind)
    mask = batch["attention_mask"]
    # transformers takes place 0 of a row for its first token, also where that is padding (row 2).
    pooled_at_padding = {"skip_pooled": (2,)}
    with torch.no_grad():
        want = original(**batch)
        assert_same_outputs(want, copy(**own), mask, **pooled_at_padding)
        back = to_huggingface(copy)
        assert_same_outputs(want, back(**batch), mask)
        single = {k: v[:1] if torch.is_tensor(v) else v for k, v in own.items()}
        assert_same_outputs(original(**single), copy(**single), mask[:1])
    assert type(back) is type(original)
    assert back.config.to_diff_dict() == original.config.to_diff_dict()
    state = back.state_dict()
    assert state.keys() == original.state_dict().keys()
    for name, weight in original.state_dict().items():
        if not tied and name in ("cls.predictions.bias", "lm_head.bias"):
            continue  # untied: a copy beside the bias, which no forward pass reads
        assert torch.equal(state[name], weight), name
    again = from_huggingface(back)
    assert again.config.to_diff_dict() == copy.config.to_diff_dict()
    assert all(torch.equal(again.state_dict()[k], w) for k, w in copy.state_dict().items())


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_pooled_vector_is_of_the_first_real_token(kind):
    original = theirs(kind, "ForSequenceClassification")
    copy, (_, own) = from_huggingface(original), batches(kind)
    alone = {k: v[2:3, 9:] for k, v in own.items() if torch.is_tensor(v)}
    torch.testing.assert_close(copy(**own).logits[2:3], original(**alone).logits, **TOLERANCE)


def test_bert_without_given_positions_counts_from_the_start_of_the_row():
    original = theirs("bert")
    copy, (_, own) = from_huggingface(original), batches("bert")
    real, places = own["attention_mask"].bool(), torch.arange(L).expand(B, L)
    want = original(**own).logits[real]
    torch.testing.assert_close(copy(**own, position_ids=places).logits[real], want, **TOLERANCE)
    assert (copy(**own).logits[real] - want).abs().max() > 1e-2  # contract: texts begin at 0


def test_positions_of_roberta_that_are_off_are_noticed():
    original = theirs("roberta")
    copy, (batch, own) = from_huggingface(original), batches("roberta")
    copy.config.position_offset -= 2
    difference = (copy(**own).logits - original(**batch).logits)[0]
    assert difference.abs().max() > 1e-2


def test_a_swap_of_segments_is_noticed():
    original = theirs("bert")
    copy, (batch, own) = from_huggingface(original), batches("bert")
    own["token_type_ids"] = 1 - own["token_type_ids"]
    assert (copy(**own).logits - original(**batch).logits)[0].abs().max() > 1e-2


@pytest.mark.parametrize(
    "overrides",
    [
        dict(local_attention=2),  # one neighbour on each side
        dict(local_attention=7),  # an odd window is rounded down
        dict(local_attention=128),  # wider than the row
        dict(global_attn_every_n_layers=1),
        dict(num_hidden_layers=1),
        dict(num_hidden_layers=2, global_attn_every_n_layers=5),
        dict(hidden_activation="silu", classifier_activation="silu"),
        dict(global_rope_theta=500.0, local_rope_theta=50.0),
        dict(norm_bias=True, attention_bias=True),
        dict(mlp_bias=True, classifier_bias=True, classifier_activation="relu"),
        dict(decoder_bias=False),
        dict(classifier_pooling="mean"),
    ],
    ids=str,
)
@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification"])
def test_modernbert_with_other_settings_computes_the_same(overrides, head):
    original = theirs("modernbert", head, **overrides)
    copy, (batch, own) = from_huggingface(original), batches("modernbert")
    with torch.no_grad():
        want, mask = original(**batch), batch["attention_mask"]
        by_first = overrides.get("classifier_pooling") != "mean"
        assert_same_outputs(want, copy(**own), mask, skip_pooled=(2,) if by_first else ())
        assert torch.equal(to_huggingface(copy)(**batch).logits[0], want.logits[0])


def test_bert_with_other_settings_computes_the_same():
    for changes in (dict(hidden_act="relu"), dict(layer_norm_eps=1e-2), dict(type_vocab_size=4)):
        original = theirs("bert", **changes)
        batch, own = batches("bert")
        assert_same_outputs(original(**batch), from_huggingface(original)(**own), batch["attention_mask"])
    original = theirs("roberta", hidden_act="silu", pad_token_id=4, max_position_embeddings=L + 5)
    batch, own = batches("roberta", pad=4)
    assert_same_outputs(original(**batch), from_huggingface(original)(**own), batch["attention_mask"])


def test_windows_matter_in_the_comparison():
    original, (ids, mask) = theirs(), padded_rows()
    wide = from_modernbert(original)
    wide.config.local_attention = 128
    difference = (wide(ids, mask).logits - original(input_ids=ids, attention_mask=mask).logits)[0]
    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_gradients_equal_those_of_transformers(kind):
    original = theirs(kind)
    copy, (batch, own) = from_huggingface(original), batches(kind)
    labels = torch.where(batch["attention_mask"] > 0, batch["input_ids"].roll(1), -100)
    original(**batch, labels=labels).loss.backward()
    copy(**own, labels=labels).loss.backward()
    gradients = {name: p.grad for name, p in copy.named_parameters()}
    known = {name: p.grad for name, p in original.named_parameters()}
    if kind != "modernbert":  # a tied bias has its gradient under its second name
        stem = {"bert": "cls.predictions", "roberta": "lm_head"}[kind]
        known[f"{stem}.decoder.bias"] = known.pop(f"{stem}.bias")
    pad = original.config.pad_token_id
    for name, want in take_weights(known, list(gradients), key_table(kind, "ForMaskedLM")).items():
        if name.endswith(("tokens.weight", "positions.weight")):  # theirs freeze the padding's row
            want, gradients[name] = (torch.cat((g[:pad], g[pad + 1 :])) for g in (want, gradients[name]))
        torch.testing.assert_close(gradients[name], want, **TOLERANCE)


def test_roberta_keeps_its_padding_on_which_positions_count_and_others_take_the_tokenizers():
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    names = dict(zip(["[UNK]", *special.values()], range(5)))  # padding is 1 only by chance in RoBERTa's own
    words = models.WordLevel(names | {"[PAD]": 4, "[MASK]": 1}, unk_token="[UNK]")
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), model_input_names=inputs, **special)
    for kind, padding in (("bert", 4), ("roberta", 1), ("modernbert", 4)):
        config = theirs(kind).config
        fitted = match_tokens(config, tokenizer)
        assert (config.pad_token_id, config.cls_token_id, config.bos_token_id) == (padding, 2, 2)
        assert ("token_type_ids" in fitted.model_input_names) == (kind != "modernbert")


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_packed_documents_of_a_converted_model_equal_documents_alone(kind):
    original, (ids, _) = theirs(kind), padded_rows(1)
    copy, ids = from_huggingface(original), ids[:1].clamp(min=5)
    documents = torch.tensor([[1] * 7 + [2] * 1 + [3] * 14 + [0] * 2])
    packed = copy(ids, documents).logits
    for begin, end in ((0, 7), (7, 8), (8, 22)):
        alone = original(input_ids=ids[:, begin:end]).logits
        torch.testing.assert_close(packed[:, begin:end], alone, **TOLERANCE)
    leaking = copy(ids, documents.clamp(max=1)).logits  # without document numbers
    assert (leaking - packed)[:, :22].abs().max() > 1e-2


def test_packed_rows_equal_transformers_with_explicit_masks():
    copy = ours()
    original, ids = to_modernbert(copy), padded_rows()[0]
    documents = torch.tensor([[1] * 7 + [2] * 16 + [3] * 1] * B)
    positions = torch.tensor([[*range(7), *range(16), 0]] * B)
    same = (documents[:, None, :, None] == documents[:, None, None, :])
    near = (torch.arange(L)[:, None] - torch.arange(L)).abs() <= 3
    masks = {"full_attention": same, "sliding_attention": same & near}
    want = original(input_ids=ids, attention_mask=masks, position_ids=positions).logits
    torch.testing.assert_close(copy(ids, documents).logits, want, **TOLERANCE)


# ---- weights that must not get lost ---------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_loses_no_weight_and_no_setting(tied):
    model = ours(tie_word_embeddings=tied, norm_eps=1e-4, mask_token_id=4, cls_token_id=2)
    again = from_modernbert(to_modernbert(model))
    assert again.config.to_diff_dict() == model.config.to_diff_dict()
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_a_copy_shares_no_memory_with_its_original():
    model = ours()
    copy = to_modernbert(model)
    before = copy.model.layers[0].attn.Wqkv.weight.clone()
    with torch.no_grad():
        model.encoder.blocks[0].attention.qkv.weight.zero_()
    assert torch.equal(copy.model.layers[0].attn.Wqkv.weight, before)


def test_type_of_numbers_is_kept():
    copy = to_modernbert(ours().to(torch.bfloat16))
    assert copy.dtype == torch.bfloat16 and copy.decoder.weight.dtype == torch.bfloat16
    assert from_modernbert(copy).dtype == torch.bfloat16


def test_a_tied_decoder_stays_tied_and_an_untied_one_its_own():
    for tied in (True, False):
        back = to_huggingface(from_huggingface(theirs("bert", tie_word_embeddings=tied)))
        same = back.cls.predictions.decoder.weight is back.bert.embeddings.word_embeddings.weight
        assert same == tied


def test_a_decoder_that_claims_to_be_tied_and_is_not_is_refused():
    original = theirs("bert", tie_word_embeddings=False)
    original.config.tie_word_embeddings = True
    with pytest.raises(ValueError, match="decoder.weight.*tie_word_embeddings=False"):
        from_huggingface(original)


def test_a_weight_missing_or_left_over_is_named():
    state, table = theirs("bert").state_dict(), key_table("bert", "ForMaskedLM")
    keys = list(from_huggingface(theirs("bert")).state_dict())
    with pytest.raises(ValueError, match="'adapter.weight'"):
        take_weights({**state, "adapter.weight": torch.ones(1)}, keys, table)
    gone = "bert.encoder.layer.1.attention.self.key.bias"
    with pytest.raises(ValueError, match=gone):
        take_weights({k: v for k, v in state.items() if k != gone}, keys, table)


def test_a_pooler_is_kept_where_there_is_one():
    config = theirs("bert").config
    for pooler in (True, False):
        original = lively(BertModel(config, add_pooling_layer=pooler))
        copy = from_huggingface(original)
        assert type(copy) is (BertLabModelWithPooler if pooler else BertLabModel)
        assert to_huggingface(copy).state_dict().keys() == original.state_dict().keys()
    assert to_huggingface(BertLabModel(bert_tiny(**SHAPE))).pooler is None


def test_a_pooled_model_can_be_saved_and_packed(tmp_path):
    model = lively(BertLabModelWithPooler(bert_tiny(**SHAPE)))
    model.save_pretrained(tmp_path)
    ids, mask = padded_rows()
    again = BertLabModelWithPooler.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids, mask).pooler_output, model(ids, mask).pooler_output)
    assert torch.equal(model(ids, mask, return_dict=False)[1], model(ids, mask).pooler_output)


# ---- what is asked for ----------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_directory_is_read_by_its_name(kind, head, tmp_path):
    original = theirs(kind, head)
    original.save_pretrained(tmp_path)
    for name in (tmp_path, str(tmp_path)):
        state, want = from_huggingface(name).state_dict(), from_huggingface(original).state_dict()
        assert state.keys() == want.keys()
        assert all(torch.equal(state[key], weight) for key, weight in want.items())


def test_only_the_shape_is_taken_without_weights(tmp_path):
    original = theirs("roberta", "ForTokenClassification")
    original.save_pretrained(tmp_path)
    for source in (original, tmp_path):
        fresh = from_huggingface(source, load_weights=False)
        full = from_huggingface(source)
        assert fresh.config.vocab_size == V and fresh.num_labels == 3 and type(fresh) is type(full)
        start = fresh.encoder.blocks[0].mlp.expand
        assert start.bias.abs().max() == 0 and full.encoder.blocks[0].mlp.expand.bias.abs().max() > 0
        assert not torch.equal(start.weight, full.encoder.blocks[0].mlp.expand.weight)


def test_models_without_a_counterpart_are_refused(tmp_path):
    small = dict(num_hidden_layers=1, embedding_size=16)
    electra = ElectraForMaskedLM(ElectraConfig(**SHAPE, **small))
    electra.save_pretrained(tmp_path / "electra")
    for source in (electra, tmp_path / "electra"):
        with pytest.raises(ValueError, match="'electra'.*supported are bert, roberta, modernbert"):
            from_huggingface(source)
    pretraining = BertForPreTraining(theirs("bert").config)
    pretraining.save_pretrained(tmp_path / "bert")
    for source in (pretraining, tmp_path / "bert"):
        with pytest.raises(ValueError, match="BertForPreTraining has no counterpart.*ForMaskedLM"):
            from_huggingface(source)
    with pytest.raises(ValueError, match="BertLabForEnhancedMaskedLM has no counterpart"):
        to_huggingface(BertLabForEnhancedMaskedLM(modernbert_tiny(**SHAPE)))
    with pytest.raises(ValueError, match="kind 'bort' is unknown; choose one of bert"):
        to_huggingface(ours(), "bort")
    with pytest.raises(ValueError, match="num_labels=3"):
        to_huggingface(BertLabForQuestionAnswering(bert_tiny(**SHAPE, num_labels=3)))


def test_our_shape_chooses_the_kind():
    assert type(to_huggingface(BertLabForMaskedLM(bert_tiny(**SHAPE)))) is BertForMaskedLM
    assert type(to_huggingface(ours())) is ModernBertForMaskedLM
    with pytest.raises(ValueError, match="qk_norm=True has no place in a modernbert model"):
        to_huggingface(ours(qk_norm=True))


def test_a_model_of_masked_diffusion_has_the_same_weights():
    model = lively(BertLabForMaskedDiffusion(modernbert_tiny(**SHAPE)))
    ids, mask = padded_rows()
    want = model(ids, mask).logits[mask.bool()]
    torch.testing.assert_close(to_huggingface(model)(ids, mask).logits[mask.bool()], want, **TOLERANCE)


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
print(json.dumps(dict(
    kind=type(model).__name__, keys=sorted(batch), logits=logits.tolist(),
    best=[(b["token_str"], b["score"]) for b in best],
)))
"""


def read_elsewhere(directory) -> dict:
    "What plain transformers finds in a directory, in a process that cannot import bertlab."
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", READER, str(directory)],
        capture_output=True, text=True, cwd=directory, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    model, directory = ours(), tmp_path_factory.mktemp("saved") / "new" / "model"
    assert save_as_modernbert(model, directory, tokenizer()) == directory
    return model, directory


def test_directory_loads_without_bertlab_and_gives_the_same_logits(saved):
    model, directory = saved
    found = read_elsewhere(directory)
    assert found["kind"] == "ModernBertForMaskedLM"
    assert found["keys"] == ["attention_mask", "input_ids"]
    batch = tokenizer()(["w1 w2 [MASK] w4", "w7 [MASK]"], padding=True, return_tensors="pt")
    assert "token_type_ids" in batch  # our model takes them, ModernBERT has none
    real = batch["attention_mask"].bool()
    logits = model(**batch).logits
    torch.testing.assert_close(torch.tensor(found["logits"])[real], logits[real], **TOLERANCE)
    top = logits[0, 3].softmax(-1).topk(3)
    names = [tokenizer().decode([i]) for i in top.indices]
    assert [word for word, _ in found["best"]] == names
    scores = torch.tensor([score for _, score in found["best"]])
    torch.testing.assert_close(scores, top.values, **TOLERANCE)


def test_directory_names_the_special_ids_of_its_tokenizer(saved):
    settings = json.loads((saved[1] / "config.json").read_text())
    ids = dict(pad_token_id=0, cls_token_id=2, bos_token_id=2, sep_token_id=3, eos_token_id=3)
    assert settings["model_type"] == "modernbert"
    assert {name: settings[name] for name in [*ids, "mask_token_id"]} == {**ids, "mask_token_id": 4}


def test_saving_leaves_the_owner_everything_as_it_was(saved, tmp_path):
    model, own = ours().train(), tokenizer()
    before = list(own.model_input_names)
    (tmp_path / "notes.txt").write_text("mine")
    save_as_modernbert(model, tmp_path, own)
    assert own.model_input_names == before and model.training
    assert model.config.mask_token_id is None
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in saved[1].iterdir()} | {"notes.txt"}


def test_saving_that_fails_keeps_the_files_that_were_there(saved, tmp_path, monkeypatch):
    save_as_modernbert(ours(), tmp_path, tokenizer())
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr(ModernBertForMaskedLM, "save_pretrained", half_a_save)
    with pytest.raises(OSError, match="disk"):
        save_as_modernbert(ours(), tmp_path, tokenizer())
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def half_a_save(self, directory):
    with open(os.path.join(directory, "model.safetensors"), "wb") as f:
        f.write(b"half")
    raise OSError("no space left on the disk")


def test_weights_appear_last(tmp_path, monkeypatch):
    order, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(os.path.basename(b)), replace(a, b)))
    save_as_modernbert(ours(), tmp_path, tokenizer())
    assert order[-1] == "model.safetensors" and {"config.json", "tokenizer.json"} <= set(order)


def test_a_tokenizer_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="50 entries.*vocab_size is 40"):
        save_as_modernbert(ours(vocab_size=40), tmp_path / "a", tokenizer())
    maskless = tokenizer()
    maskless.mask_token = None
    with pytest.raises(ValueError, match="mask token"):
        save_as_modernbert(ours(), tmp_path / "a", maskless)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        save_as_modernbert(ours(), tmp_path / "file", tokenizer())
    assert not (tmp_path / "a").exists()
