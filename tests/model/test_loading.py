"""Weights find their place or are named: every source, every naming, and nothing half loaded."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from test_training import CONFIG, Texts, train

from bertlab.train.checkpoints import TrainingCheckpoint
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


def write(model, folder, form):
    state = model.state_dict()
    if form in ("directory", "shards"):
        model.save_pretrained(folder, max_shard_size="20KB" if form == "shards" else "1GB")
        assert (len(list(folder.glob("*.safetensors"))) > 1) == (form == "shards")
        return folder
    if form == "shards of pickles":
        weight_map = {name: f"part{i % 2}.bin" for i, name in enumerate(state)}
        for file in ("part0.bin", "part1.bin"):
            part = {name: state[name] for name, where in weight_map.items() if where == file}
            torch.save(part, folder / file)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder
    if form == "safetensors":
        save_file({name: w.contiguous() for name, w in state.items()}, folder / "w.safetensors")
        return folder / "w.safetensors"
    content = {
        "lightning": {"state_dict": {f"model.{name}": w for name, w in state.items()}, "epoch": 1},
        "wrapped blocks": {
            name.replace("blocks.0.", "blocks.0._checkpoint_wrapped_module."): weight
            for name, weight in state.items()
        },
        **{
            prefix: {f"{prefix}{name}": weight for name, weight in state.items()}
            for prefix in PREFIXES
        },
    }.get(form, state)
    path, is_archive = folder / "pytorch_model.bin", form != "torch before 1.6"
    torch.save(content, path, _use_new_zipfile_serialization=is_archive)
    return path


PREFIXES = "_orig_mod.", "module.", "module._orig_mod.", "_fsdp_wrapped_module.", "model.module."
FORMS = ("directory", "shards", "shards of pickles", "safetensors", "bin", "torch before 1.6",
         "lightning", "wrapped blocks", *PREFIXES)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_source_gives_the_same_weights(model, tmp_path, form):
    target, source = BertLabForMaskedLM(config()), write(model, tmp_path, form)
    report = load_state_dict(target, source)
    assert report.complete and equal(target, model)
    assert sorted(report.loaded) == sorted(model.state_dict())
    if form == "bin":  # the directory with this file, too
        assert load_state_dict(target, str(tmp_path)).complete


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_in_many_files_is_read_as_in_one(family, tmp_path):
    "Of ModernBERT's names most begin with model., and in some files all do; the head's do not."
    model, target = lively(BertLabForMaskedLM(config(family))), BertLabForMaskedLM(config(family))
    to_huggingface(model).save_pretrained(tmp_path, max_shard_size="25KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert load_state_dict(target, tmp_path).complete and equal(target, model)


def test_a_checkpoint_of_a_run_is_read_without_running_its_code(tmp_path):
    weights, _ = train(Texts(), 3, [TrainingCheckpoint(tmp_path)])
    from bertlab.model.config import BertLabConfig

    target = BertLabForMaskedLM(
        BertLabConfig(**{**CONFIG, "embedding_dropout": 0.1, "mlp_dropout": 0.1})
    )
    assert load_state_dict(target, tmp_path / "step-00000003.ckpt").complete
    assert all(torch.equal(weight, weights[name]) for name, weight in target.state_dict().items())


class Trap:
    "Runs code when it is unpickled."

    def __init__(self, path):
        self.place = path

    def __reduce__(self):
        return os.mkdir, (self.place,)


def test_code_in_a_file_is_refused_and_never_run(model, tmp_path):
    state = {"state_dict": model.state_dict(), "extra": Trap(str(tmp_path / "was run"))}
    torch.save(state, tmp_path / "w.ckpt")
    with pytest.raises(ValueError, match=r"w.ckpt holds posix.mkdir, which safe loading refuses"):
        load_state_dict(model, tmp_path / "w.ckpt")
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("content, word", [
    (None, "is damaged or cut short"), (b"", "is empty"), (b"<html>404</html>", "is a web page"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
])  # fmt: skip
def test_a_file_without_weights_is_named_and_changes_nothing(model, tmp_path, form, content, word):
    path = write(lively(BertLabForMaskedLM(config())), tmp_path, form)
    half = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(half if content is None else content)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"{path.name} {word}"):
        load_state_dict(model, path)
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items())


# ---- names of others ------------------------------------------------------------------------------


def test_names_of_the_first_releases_are_understood():
    model, target = (lively(BertLabForMaskedLM(config("bert"))) for _ in range(2))
    old = {"bert.embeddings.position_ids": torch.arange(64)[None]}
    for name, weight in to_huggingface(model).state_dict().items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        old[name.replace("LayerNorm.bias", "LayerNorm.beta")] = weight
    assert load_state_dict(target, old).complete and equal(target, model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("result", [True, False])
def test_an_encoder_goes_into_a_model_with_a_head_and_back(family, result):
    base, full = lively(BertLabModel(config(family))), BertLabForMaskedLM(config(family))
    source = base if result else to_huggingface(base)
    report = load_state_dict(full, source.state_dict(), strict=False)
    assert equal(base, full.encoder) and not report.unexpected_keys
    assert all(name.startswith("head.") for name in report.missing_keys) and report.missing_keys
    again = BertLabModel(config(family))
    source = full if result else to_huggingface(full)
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


@pytest.mark.parametrize("key, mapping, want", [
    ("head.bias", {"head.bias": "b"}, "b"),
    ("blocks.3.mlp.weight", {"blocks.*.mlp.*": "h.*.fc1.*"}, "h.3.fc1.weight"),
    ("a.b.c", {"*": "net.*"}, "net.a.b.c"),
    ("blocks.3.w", {r"^blocks\.(\d)\.w$": r"h\1.w"}, "h3.w"),
    ("a.x", {"a.*": "b.*", "a.x": "other"}, "b.x"),  # the first pattern that matches
    ("head.bias", {"head": "b"}, None),
    ("axb", {"a.b": "c"}, None),  # a dot is a dot
])  # fmt: skip
def test_a_pattern_translates_a_key(key, mapping, want):
    if want is None:
        with pytest.raises(ValueError, match="load_key_mapping"):
            apply_key_mapping([key], mapping)
    else:
        assert apply_key_mapping([key], mapping) == {key: want}


def test_a_mapping_reaches_names_of_no_family(model):
    target = BertLabForMaskedLM(config())
    mapping = {"encoder.blocks.*": "net.layers.*", "head.*": "out.*"}
    renamed = {
        name.replace("encoder.blocks.", "net.layers.").replace("head.", "out."): weight
        for name, weight in model.state_dict().items()
    }
    with pytest.raises(ValueError, match="does not fit"):
        load_state_dict(target, renamed)
    assert load_state_dict(target, renamed, mapping).complete and equal(target, model)


WRONG = {
    "no file": ("no/such-model", {}, "no/such-model"),
    "no tensors": ({"weight": 3}, {}, "state dict"),
    "another model": ({"x": torch.ones(2)}, {}, "is it another model"),
    "a pattern of no weight": (None, {"encoder.block.*": "x.*"}, r"encoder\.block\.\*"),
    "a name of no weight": (None, {"encoder.blocks.*": "encoder.stack.*"}, "encoder.stack"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_sources_and_patterns_are_named(model, case):
    source, mapping, name = WRONG[case]
    with pytest.raises(ValueError, match=name):
        load_state_dict(model, source or model.state_dict(), mapping, strict=False)


# ---- strict, partial, and types of numbers --------------------------------------------------------


def test_strict_loading_names_problems_and_changes_nothing(model):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    wrong = {name: weight + 1 for name, weight in before.items()}
    wrong["stranger"] = torch.ones(2)
    missing = {"head.bias", "head.norm.weight"}
    for name in missing:
        del wrong[name]
    wrong["head.dense.weight"] = torch.ones(1, 1)  # copy_ would spread it out silently
    with pytest.raises(ValueError) as caught:
        load_state_dict(model, wrong)
    words = ("stranger", "strict=False", "head.dense.weight", "[1, 1]", "[32, 32]", *missing)
    assert all(word in str(caught.value) for word in words)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    report = load_state_dict(model, wrong, strict=False)
    assert {*report.missing_keys} == missing and report.unexpected_keys == ["stranger"]
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, (wrong if name in report.loaded else before)[name])


@pytest.mark.parametrize("stored, dtype", [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)])  # fmt: skip
def test_the_model_keeps_its_dtype(model, stored, dtype):
    model, target = model.to(stored), BertLabForMaskedLM(config()).to(dtype)
    load_state_dict(target, model.state_dict())
    assert torch.equal(target.head.dense.weight, model.head.dense.weight.to(dtype))
