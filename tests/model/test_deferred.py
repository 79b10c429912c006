"A model whose numbers come later is, to the last bit, the model that had them at once."

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (BertConfig, BertForMaskedLM, BertModel, ModernBertConfig, ModernBertForMaskedLM, RobertaConfig,
                          RobertaForMaskedLM)  # fmt: skip

from bertlab.data.corpus import embedded_corpus
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.heads import BertLabForCausalLM
from bertlab.model.config import BertLabConfig
from bertlab.model.deferred import build_deferred, fill_weights, read_deferred
from bertlab.model.encoder import BertLabPreTrainedModel
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.model.layers import NORMS, register_layer
from bertlab.train.modules import OBJECTIVES, PretrainingModule, initialize_model

CONFIG = dict(vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
              max_position_embeddings=32)  # fmt: skip
VARIANTS = [
    {}, dict(norm="deep", norm_position="post"), dict(norm="dynamic_tanh", initialization="kaiming"),
    dict(tie_word_embeddings=False, decoder_bias=True, initialization="megatron"),
    dict(embedding_positions="learned", attention_positions="none", mlp="plain", attention_bias=True),
    dict(qk_norm=True, output_gate="head", norm="rms"),
    dict(initialization="xavier", num_key_value_heads=1, output_gate="element"),
]  # fmt: skip
CLASSES = {**OBJECTIVES, "causal": BertLabForCausalLM}


def equal(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], weight) for name, weight in theirs.items()
    )


def both(build, seed=0):
    "The model that is built as always and the one whose numbers come later; the generator must not notice."
    torch.manual_seed(seed)
    usual, state = build(), torch.get_rng_state()
    torch.manual_seed(seed)
    later = build_deferred(build)
    assert torch.equal(torch.get_rng_state(), state)
    return usual, later


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_those_of_a_model_that_was_built_whole(kind, variant):
    usual, later = both(lambda: CLASSES[kind](BertLabConfig(**CONFIG, **variant)))
    assert all(weight.is_meta for weight in later.parameters())
    torch.manual_seed(99)  # what is drawn in between changes nothing
    state = torch.get_rng_state()
    fill_weights(later)
    assert equal(later, usual) and torch.equal(torch.get_rng_state(), state)
    ids = torch.arange(5, 15)[None]
    assert torch.equal(later.eval()(input_ids=ids)[0], usual.eval()(input_ids=ids)[0])


def test_shares_are_asked_for_one_weight_at_a_time_and_each_once():
    usual, later = both(lambda: BertLabForMaskedLM(BertLabConfig(**CONFIG)))
    asked = []

    def zero(name, whole, own):
        asked.append(name)
        assert whole.shape == own.shape and torch.equal(whole, usual.state_dict()[name])
        return torch.zeros_like(whole)

    fill_weights(later, share=zero)
    assert sorted(asked) == sorted(usual.state_dict()) and not any(
        w.any() for w in later.parameters()
    )


def test_no_two_parts_have_numbers_at_the_same_time(monkeypatch):
    most, begin = [], BertLabPreTrainedModel._init_weights

    def watch(model, part):
        most.append(
            sum(
                w.numel()
                for m in {id(m): m for m in alive}.values()
                for w in m.parameters()
                if not w.is_meta
            )
        )
        begin(model, part)

    alive = []
    init = nn.Module.__init__
    monkeypatch.setattr(
        nn.Module, "__init__", lambda self, *a, **k: (init(self, *a, **k), alive.append(self))[0]
    )
    monkeypatch.setattr(BertLabPreTrainedModel, "_init_weights", watch)
    build_deferred(lambda: BertLabForMaskedLM(BertLabConfig(**CONFIG)))
    assert most and max(most) <= 101, "at most a bias that the outermost module owns itself"


def test_a_fresh_part_and_a_part_of_a_file(tmp_path):
    "The file knows the encoder; the head begins as in a model that was built whole."
    torch.manual_seed(7)
    encoder = BertLabForMaskedLM(BertLabConfig(**CONFIG)).encoder
    save_model(encoder, None, tmp_path)
    found = []
    for deferred in (False, True):
        torch.manual_seed(1)
        model = initialize_model(tmp_path, "mlm", {}, deferred=deferred)
        found.append(fill_weights(model))
    assert equal(*found)
    assert torch.equal(
        found[1].encoder.blocks[0].mlp.up_proj.weight, encoder.blocks[0].mlp.up_proj.weight
    )


TINY = dict(
    vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
)
THEIRS = {
    "bert": lambda: BertForMaskedLM(BertConfig(**TINY, max_position_embeddings=32)),
    "bert without a head": lambda: BertModel(BertConfig(**TINY, max_position_embeddings=32)),
    "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**TINY, max_position_embeddings=34, pad_token_id=1)),
    "modernbert": lambda: ModernBertForMaskedLM(ModernBertConfig(**TINY, pad_token_id=0, cls_token_id=1, sep_token_id=2,
                                                                 bos_token_id=1, eos_token_id=2)),
}  # fmt: skip


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize(
    "objective, file_size", [("mlm", "50GB"), ("diffusion", "50GB"), ("mlm", "25KB")]
)
def test_another_familys_weights_are_read_in_shares_as_they_are_read_whole(
    kind, objective, file_size, tmp_path
):
    torch.manual_seed(5)
    THEIRS[kind]().save_pretrained(tmp_path, max_shard_size=file_size)
    found = []
    for deferred in (False, True):
        torch.manual_seed(2)
        model = initialize_model(tmp_path, objective, {}, deferred=deferred)
        assert all(weight.is_meta for weight in model.parameters()) == deferred
        found.append(fill_weights(model))
    assert equal(*found)


def test_a_module_under_torchs_context_waits_and_one_outside_does_not(tmp_path):
    torch.manual_seed(3)
    model = BertLabForMaskedLM(BertLabConfig(**CONFIG))
    tokenizer = train_tokenizer(embedded_corpus().train_texts[:20], vocab_size=101)
    save_model(model, tokenizer, tmp_path)
    with torch.device("meta"):
        later = PretrainingModule(pretrained_model_name_or_path=str(tmp_path))
    assert later.bytes_per_token_V.device.type == "cpu"
    assert all(weight.is_meta for weight in later.model.parameters())
    later.configure_model()  # nobody shares: it is filled whole
    now = PretrainingModule(pretrained_model_name_or_path=str(tmp_path))
    assert equal(later.model, now.model)


class Tilted(nn.Module):
    "A norm whose weight begins in its constructor and nowhere else."

    def __init__(self, config):
        super().__init__()
        self.tilt = nn.Parameter(torch.randn(config.hidden_size))

    def forward(self, x):
        return x + self.tilt


def test_a_layer_that_nobody_can_begin_again_is_built_whole():
    if "tilted" not in NORMS:
        register_layer("norm", "tilted", Tilted)
    usual, later = both(lambda: BertLabForMaskedLM(BertLabConfig(**CONFIG, norm="tilted")))
    assert not any(weight.is_meta for weight in later.parameters()) and equal(later, usual)
    assert fill_weights(later) is later


def test_a_file_of_another_shape_or_with_nan_is_refused_with_its_name(tmp_path):
    build = lambda **more: BertLabForMaskedLM(BertLabConfig(**{**CONFIG, **more}))  # noqa: E731
    save_model(build(), None, tmp_path / "good")
    with pytest.raises(ValueError, match="good does not fit the model"):
        read_deferred(build_deferred(lambda: build(intermediate_size=64)), tmp_path / "good")
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "good" / "model.safetensors")
    name = next(name for name in weights if "mlp" in name.lower() and weights[name].dim() == 2)
    weights[name][3, 3] = np.nan
    save_file(weights, tmp_path / "good" / "model.safetensors", metadata={"format": "pt"})
    model = build_deferred(build)
    read_deferred(model, tmp_path / "good")
    with pytest.raises(ValueError, match="good are damaged"):
        fill_weights(model)
