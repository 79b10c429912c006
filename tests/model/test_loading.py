"""Weights find their place or are named: every source, every naming, and nothing half loaded."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from test_training import CONFIG, Texts, train
from torch import nn

from bertlab.train.checkpoints import RunCheckpoint
from bertlab.model.config import bert_tiny, modernbert_tiny, roberta_base
from bertlab.model.huggingface import to_huggingface
from bertlab.model.encoder import BertLabModel
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.loading import apply_key_mapping, load_state_dict

SHAPE = dict(vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=2, max_position_embeddings=64)  # fmt: skip
FAMILIES = {"modernbert": modernbert_tiny, "bert": bert_tiny,
            "roberta": lambda **shape: roberta_base(pad_token_id=1, **shape)}  # fmt: skip


def config(family="modernbert", **changes):
    return FAMILIES[family](**{**SHAPE, **changes})


def lively(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight))
    return model


@pytest.fixture
def model():
    return lively(BertLabForMaskedLM(config()))


def equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return all(torch.equal(a[key], b[key]) for key in a)


# ---- sources --------------------------------------------------------------------------------------


def write(model, folder, kind):
    state = model.state_dict()
    if kind == "directory":
        model.save_pretrained(folder)
        return folder
    if kind == "shards":
        model.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        return folder
    if kind == "bin directory":
        torch.save(state, folder / "pytorch_model.bin")
        return str(folder)
    if kind == "old directory":  # with its weights in two files of pickles
        halves = list(state)[::2], list(state)[1::2]
        for number, names in enumerate(halves):
            torch.save({n: state[n] for n in names}, folder / f"part{number}.bin")
        weight_map = {n: f"part{i}.bin" for i, names in enumerate(halves) for n in names}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder
    if kind == "safetensors":
        save_file({n: w.contiguous() for n, w in state.items()}, folder / "w.safetensors")
        return folder / "w.safetensors"
    wrapped = {"compiled": {f"_orig_mod.{n}": w for n, w in state.items()},
               "parallel": {f"module.{n}": w for n, w in state.items()},
               "lightning": {"state_dict": {f"model.{n}": w for n, w in state.items()}, "epoch": 1},
               "trained": {"state_dict": state, "best": 0.5}, "bin": state}[kind]  # fmt: skip
    torch.save(wrapped, folder / "w.bin")
    return folder / "w.bin"


KINDS = ("directory", "shards", "bin directory", "old directory", "safetensors", "bin", "compiled",
         "parallel", "lightning", "trained")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source_gives_the_same_weights(model, tmp_path, kind):
    fresh = BertLabForMaskedLM(config())
    report = load_state_dict(fresh, write(model, tmp_path, kind))
    assert report.complete and equal(fresh, model)
    assert sorted(report.loaded) == sorted(model.state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_in_many_files_is_read_as_in_one(family, tmp_path):
    "Of ModernBERT's names most begin with model., and in some files all do; the head's do not."
    model, fresh = lively(BertLabForMaskedLM(config(family))), BertLabForMaskedLM(config(family))
    to_huggingface(model).save_pretrained(tmp_path, max_shard_size="25KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert load_state_dict(fresh, tmp_path).complete and equal(fresh, model)


def test_a_checkpoint_of_a_run_is_read_without_running_its_code(tmp_path):
    weights, _ = train(Texts(), 3, [RunCheckpoint(tmp_path / "last.ckpt")])
    from bertlab.model.config import BertLabConfig

    fresh = BertLabForMaskedLM(
        BertLabConfig(**{**CONFIG, "embedding_dropout": 0.1, "mlp_dropout": 0.1})
    )
    assert load_state_dict(fresh, tmp_path / "last.ckpt").complete
    assert all(torch.equal(weight, weights[name]) for name, weight in fresh.state_dict().items())


class Trap:
    "Runs code when it is unpickled."

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (self.place,)


def test_code_in_a_file_is_refused_and_never_run(model, tmp_path):
    state = {"state_dict": model.state_dict(), "extra": Trap(str(tmp_path / "was run"))}
    torch.save(state, tmp_path / "w.ckpt")
    with pytest.raises(ValueError, match=r"w.ckpt holds posix.mkdir, which safe loading refuses"):
        load_state_dict(model, tmp_path / "w.ckpt")
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_damaged_file_is_named_and_the_model_stays_as_it_was(model, tmp_path, kind, share):
    path = write(lively(BertLabForMaskedLM(config())), tmp_path, kind)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    before = {n: w.clone() for n, w in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"{path.name} is damaged or cut short"):
        load_state_dict(model, path)
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items())


@pytest.mark.parametrize("source, message", [
    ("no/such-model", "no/such-model is not a file or a directory with model.safetensors"),
    ({}, "holds no state dict"),
    ({"weight": 3}, "holds no state dict"),
])  # fmt: skip
def test_what_is_no_source_is_named(model, source, message):
    with pytest.raises(ValueError, match=message):
        load_state_dict(model, source)


# ---- names of others ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stored", ["state dict", "directory"])
def test_a_model_of_transformers_is_recognised_by_its_names(family, stored, tmp_path):
    model, fresh = (lively(BertLabForMaskedLM(config(family))) for _ in range(2))
    theirs = to_huggingface(model)
    theirs.save_pretrained(tmp_path)
    source = tmp_path if stored == "directory" else theirs.state_dict()
    assert load_state_dict(fresh, source).complete and equal(fresh, model)


def test_names_of_the_first_releases_are_understood():
    model, fresh = (lively(BertLabForMaskedLM(config("bert"))) for _ in range(2))
    old = {}
    for name, weight in to_huggingface(model).state_dict().items():
        old[
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
        ] = weight
    old["bert.embeddings.position_ids"] = torch.arange(64)[None]
    assert any("gamma" in name for name in old)
    assert load_state_dict(fresh, old).complete and equal(fresh, model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ours", [True, False])
def test_an_encoder_goes_into_a_model_with_a_head_and_back(family, ours):
    base, whole = lively(BertLabModel(config(family))), BertLabForMaskedLM(config(family))
    source = base if ours else to_huggingface(base)
    report = load_state_dict(whole, source.state_dict(), strict=False)
    assert equal(base, whole.encoder) and not report.unexpected_keys
    assert all(name.startswith("head.") for name in report.missing_keys) and report.missing_keys
    again = BertLabModel(config(family))
    source = whole if ours else to_huggingface(whole)
    report = load_state_dict(again, source.state_dict(), strict=False)
    assert equal(again, base) and not report.missing_keys and report.unexpected_keys


# ---- tied weights ---------------------------------------------------------------------------------


def test_a_tied_source_fills_an_untied_decoder(model):
    untied = lively(BertLabForMaskedLM(config(tie_word_embeddings=False)))
    for source in (model.state_dict(), to_huggingface(model).state_dict()):
        assert load_state_dict(untied, source).complete
        assert torch.equal(untied.head.decoder, model.encoder.embeddings.tokens.weight)


def test_a_tied_model_takes_only_its_embedding_as_decoder(model):
    untied = BertLabForMaskedLM(config(tie_word_embeddings=False))
    load_state_dict(untied, model.state_dict())
    assert load_state_dict(model, untied.state_dict()).complete
    lively(untied)
    with pytest.raises(ValueError, match=r"1 unexpected \(head.decoder\)"):
        load_state_dict(model, untied.state_dict())


# ---- mappings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key, pattern, target, want", [
    ("head.bias", "head.bias", "b", "b"),
    ("head.bias", "head", "b", None),
    ("blocks.3.mlp.up_proj.weight", "blocks.*.mlp.up_proj.*", "h.*.fc1.*", "h.3.fc1.weight"),
    ("blocks.3.weight", "blocks.*", "*", "3.weight"),
    ("a.b.c", "*", "net.*", "net.a.b.c"),
    ("axb", "a.b", "c", None),  # a dot is a dot
    ("blocks.3.w", r"^blocks\.(\d)\.w$", r"h\1.w", "h3.w"),
    ("blocks.3.w", "blocks.*.w", "one", "one"),
])  # fmt: skip
def test_a_pattern_translates_a_key(key, pattern, target, want):
    if want is None:
        with pytest.raises(ValueError, match="load_key_mapping"):
            apply_key_mapping([key], {pattern: target})
    else:
        assert apply_key_mapping([key], {pattern: target}) == {key: want}


def test_the_first_pattern_that_fits_counts():
    assert apply_key_mapping(["a.x", "a.y"], {"a.x": "one", "a.*": "b.*"}) == {
        "a.x": "one",
        "a.y": "b.y",
    }
    assert apply_key_mapping(["a.x"], {"a.*": "b.*", "a.x": "one"}) == {"a.x": "b.x"}


def test_a_mapping_reaches_what_no_convention_explains(model):
    fresh, mapping = (
        BertLabForMaskedLM(config()),
        {"encoder.blocks.*": "net.layers.*", "head.*": "out.*"},
    )
    strange = {name.replace("encoder.blocks.", "net.layers.").replace("head.", "out."): weight
               for name, weight in model.state_dict().items()}  # fmt: skip
    with pytest.raises(ValueError, match="does not fit"):
        load_state_dict(fresh, strange)
    assert load_state_dict(fresh, strange, mapping).complete and equal(fresh, model)


def test_a_pattern_that_fits_nothing_is_named_with_a_likely_one(model):
    with pytest.raises(ValueError, match=r"'encoder.block.\*' matches no weight.*'encoder\.blocks"):
        load_state_dict(model, model.state_dict(), {"encoder.block.*": "x.*"})
    with pytest.raises(
        ValueError, match=r"'encoder.blocks.\*': .*no 'encoder.stack.*'encoder\.blocks"
    ):
        load_state_dict(
            model, model.state_dict(), {"encoder.blocks.*": "encoder.stack.*"}, strict=False
        )


# ---- strict, partial, and types of numbers --------------------------------------------------------


def test_strict_loading_names_problems_and_changes_nothing(model):
    before = {n: w.clone() for n, w in model.state_dict().items()}
    wrong = {n: w + 1 for n, w in before.items()}
    wrong["stranger"] = torch.ones(2)
    del wrong["head.bias"], wrong["head.norm.weight"]
    wrong["head.dense.weight"] = torch.ones(1, 1)  # copy_ would spread it out in silence
    with pytest.raises(ValueError) as caught:
        load_state_dict(model, wrong)
    words = str(caught.value)
    assert (
        "2 missing (head.bias, head.norm.weight)" in words
        or "2 missing (head.norm.weight, head.bias)" in words
    )
    assert "1 unexpected (stranger)" in words and "strict=False" in words and "\n" not in words
    assert all(word in words for word in ("head.dense.weight", "float32[1, 1]", "float32[32, 32]"))
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items())
    report = load_state_dict(model, wrong, strict=False)
    assert {*report.missing_keys} == {
        "head.bias",
        "head.norm.weight",
    } and report.unexpected_keys == ["stranger"]
    after = model.state_dict()
    assert all(torch.equal(after[n], wrong[n]) for n in report.loaded)
    assert all(torch.equal(after[n], before[n]) for n in after if n not in report.loaded)


def test_where_nothing_fits_even_partial_loading_refuses(model):
    with pytest.raises(ValueError, match="is it another model"):
        load_state_dict(model, {"x": torch.ones(2)}, strict=False)


@pytest.mark.parametrize(
    "theirs, ours", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")]
)
def test_the_model_keeps_its_dtype(model, theirs, ours):
    model, fresh = (
        model.to(getattr(torch, theirs)),
        BertLabForMaskedLM(config()).to(getattr(torch, ours)),
    )
    load_state_dict(fresh, model.state_dict())
    want = model.head.dense.weight.to(getattr(torch, ours))
    assert fresh.head.dense.weight.dtype == getattr(torch, ours) and torch.equal(
        fresh.head.dense.weight, want
    )


def test_whole_numbers_are_no_weights(model):
    state = {**model.state_dict(), "head.bias": torch.zeros(90, dtype=torch.int8)}
    with pytest.raises(ValueError, match=r"head.bias: int8\[90\].*float32\[90\]"):
        load_state_dict(model, state)


def test_a_model_without_memory_is_refused(model):
    with torch.device("meta"):
        ghost = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="device meta.*to_empty"):
        load_state_dict(ghost, nn.Linear(2, 2).state_dict())
