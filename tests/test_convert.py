"Weights in and out of transformers' ModernBERT, and the directory that it loads without bertlab."

import json
import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import ModernBertConfig, ModernBertForMaskedLM, PreTrainedTokenizerFast

from bertlab.config import modernbert_tiny
from bertlab.convert import (
    bertlab_config,
    from_modernbert,
    rename_weights,
    save_as_modernbert,
    to_modernbert,
)
from bertlab.heads import BertLabForMaskedLM

torch.set_num_threads(1)
TOLERANCE = dict(rtol=0, atol=1e-5)
B, L, V = 4, 24, 50


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
    shape = dict(vocab_size=V, hidden_size=16, intermediate_size=20, num_attention_heads=2)
    return lively(BertLabForMaskedLM(modernbert_tiny(**{**shape, "local_attention": 6, **overrides})))


def theirs(**overrides) -> ModernBertForMaskedLM:
    shape = dict(vocab_size=V, hidden_size=16, intermediate_size=20, num_attention_heads=2)
    ids = dict(pad_token_id=0, cls_token_id=2, bos_token_id=2, sep_token_id=3, eos_token_id=3)
    settings = {"num_hidden_layers": 7, "local_attention": 6, **shape, **ids, **overrides}
    return lively(ModernBertForMaskedLM(ModernBertConfig(**settings)))


def padded_rows():
    "Ids and a 0/1 mask: no padding, right, left, one token."
    ids = torch.randint(5, V, (B, L), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(B, L, dtype=torch.long)
    mask[1, 15:], mask[2, :9], mask[3, 1:] = 0, 0, 0
    return ids, mask


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


# ---- parity ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        dict(local_attention=2),  # one neighbour on each side
        dict(local_attention=7),  # an odd window is rounded down
        dict(local_attention=128),  # wider than the row
        dict(global_attn_every_n_layers=1),
        dict(num_hidden_layers=1),
        dict(num_hidden_layers=2, global_attn_every_n_layers=5),
        dict(tie_word_embeddings=False),
        dict(hidden_activation="silu", classifier_activation="silu"),
        dict(global_rope_theta=500.0, local_rope_theta=50.0),
    ],
    ids=str,
)
def test_logits_equal_those_of_transformers_on_padded_rows(overrides):
    original, (ids, mask) = theirs(**overrides), padded_rows()
    copy = from_modernbert(original)
    want = original(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(copy(ids, mask).logits[mask.bool()], want, **TOLERANCE)
    back = to_modernbert(copy)(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    assert torch.equal(back, want)


def test_windows_matter_in_the_comparison():
    original, (ids, mask) = theirs(), padded_rows()
    wide = from_modernbert(original)
    wide.config.local_attention = 128
    difference = (wide(ids, mask).logits - original(input_ids=ids, attention_mask=mask).logits)[0]
    assert difference.abs().max() > 1e-2


def test_gradients_equal_those_of_transformers():
    original, (ids, mask) = theirs(), padded_rows()
    copy = from_modernbert(original)
    labels = torch.where(mask > 0, ids.roll(1), -100)
    original(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    copy(ids, mask, labels=labels).loss.backward()
    gradients = {name: p.grad for name, p in copy.named_parameters()}
    for name, want in rename_weights(
        {n: p.grad for n, p in original.named_parameters()}, to_theirs=False
    ).items():
        torch.testing.assert_close(gradients[name], want, **TOLERANCE)


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


# ---- round trip ------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "overrides, message",
    [
        (dict(norm_bias=True), "norm_bias=True"),
        (dict(attention_bias=True), "attention_bias"),
        (dict(mlp_bias=True), "mlp_bias"),
        (dict(classifier_bias=True), "classifier_bias"),
        (dict(decoder_bias=False), "decoder_bias"),
        (dict(classifier_activation="relu"), "classifier_activation"),
        (dict(layer_types=["sliding_attention"] * 7), "layer_types"),
        (dict(layer_types=["full_attention"] * 3 + ["sliding_attention"] * 4), "layer_types"),
    ],
)
def test_a_modernbert_that_we_cannot_express_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        bertlab_config(theirs(**overrides).config)


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
