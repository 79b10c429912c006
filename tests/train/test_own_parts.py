"A part of a user's own joins by one row, one call or one argument, added while the tests run."

import importlib
import sys
from functools import partial

import pytest
import torch
from torch import nn

import bertlab
from bertlab.model import config as shapes
from bertlab.model import layers
from bertlab.train.objectives import OBJECTIVES, check_batch, collator_objective

SIZES = dict(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
             max_position_embeddings=16)  # fmt: skip
IDS = torch.randint(5, 40, (2, 8), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS}


@pytest.fixture(autouse=True)
def tables_as_they_were():
    tables = OBJECTIVES, layers.NORMS, layers.MLPS, layers.ACTIVATIONS, shapes.CHOICES
    saved = [dict(table) for table in tables]
    yield
    for table, rows in zip(tables, saved):
        table.clear()
        table.update(rows)


class Halved(bertlab.BertLabForMaskedLM):
    "Labels that count half."

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.loss_sum = out.loss_sum / 2
        return out


class Weighed(bertlab.BertLabForMaskedLM):
    "An objective whose batches carry something of their own."

    required_input = "importance"

    def forward(self, importance=None, **kwargs):
        return super().forward(**kwargs)


def test_an_objective_is_one_row_of_one_table():
    OBJECTIVES["halves"] = Halved
    module = bertlab.PretrainingModule(SIZES, objective="halves", compile_model=False)
    module.configure_model()
    assert type(module.model) is Halved
    plain = bertlab.PretrainingModule(SIZES, compile_model=False)
    plain.configure_model()
    plain.model.load_state_dict(module.model.state_dict())
    halves, full = (m.eval().label_loss(BATCH).loss_sum.item() for m in (module, plain))
    assert halves == pytest.approx(full / 2)


def test_an_own_objective_is_known_by_its_class():
    OBJECTIVES["weighed"] = Weighed
    weighed, plain = Weighed, bertlab.BertLabForMaskedLM
    reference = {**BATCH, "importance": torch.ones(2)}
    check_batch(reference, weighed, "weighed")
    with pytest.raises(ValueError, match="objective='weighed'.*objective='mlm'"):
        check_batch(reference, plain, "mlm")
    with pytest.raises(ValueError, match="no importance.*objective='weighed'"):
        check_batch(BATCH, weighed, "weighed")
    with pytest.raises(ValueError, match="objective='diffusion'"):
        check_batch({**BATCH, "loss_weights": torch.ones_like(IDS).float()}, plain, "mlm")


def test_a_model_given_as_an_argument_is_an_objective_and_scores_the_batches_of_its_base():
    module = bertlab.PretrainingModule(SIZES, objective=Halved, compile_model=False)
    assert OBJECTIVES[module.hparams.objective] is Halved
    assert (
        collator_objective(module.hparams.objective) == "mlm"
        and collator_objective("diffusion") == "diffusion"
    )
    with pytest.raises(ValueError, match="not a model that predicts tokens"):
        bertlab.PretrainingModule(SIZES, objective=nn.Linear)


class Silent(nn.Module):
    "A norm that does nothing."

    def __init__(self, config):
        super().__init__()

    def forward(self, x):
        return x


@pytest.mark.parametrize("setting, build", [
    ("norm", Silent), ("mlp", type("Mine", (layers.MLP,), {})), ("hidden_activation", torch.sin)])  # fmt: skip
def test_a_layer_is_one_call(setting, build):
    with pytest.raises(ValueError, match="unknown"):
        bertlab.BertLabConfig(**SIZES, **{setting: "mine"})
    bertlab.register_layer(setting, "mine", build)
    model = bertlab.BertLabForMaskedLM(bertlab.BertLabConfig(**SIZES, **{setting: "mine"}))
    assert model(**BATCH).loss_sum.isfinite()
    if setting != "hidden_activation":
        assert any(isinstance(part, build) for part in model.modules())
    with pytest.raises(ValueError, match="there already"):
        bertlab.register_layer(setting, "mine", nn.Identity)
    bertlab.register_layer(
        setting, "mine", build
    )  # the same once more: a notebook's cell that runs again


class Convolved(nn.Module):
    "An MLP of layers of other kinds than ours."

    def __init__(self, hidden_size, intermediate_size, activation, dropout, bias):
        super().__init__()
        self.up_proj = nn.Conv1d(hidden_size, intermediate_size, 1)
        self.activation = nn.PReLU()
        self.down_proj = nn.Bilinear(intermediate_size, 1, hidden_size, bias=False)

    def forward(self, x_BLD):
        y_BLI = self.activation(self.up_proj(x_BLD.transpose(1, 2)).transpose(1, 2))
        return self.down_proj(y_BLI, torch.ones_like(y_BLI[..., :1]))


@pytest.mark.parametrize("initialization", shapes.CHOICES["initialization"])
def test_matrices_of_an_own_layer_are_initialized(initialization, tmp_path):
    torch.manual_seed(0)  # two numbers may be alike by chance
    bertlab.register_layer("mlp", "convolved", Convolved)
    config = bertlab.BertLabConfig(
        **SIZES, mlp="convolved", initialization=initialization, norm_bias=True
    )
    model = bertlab.BertLabForMaskedLM(config)
    state = model.state_dict()
    model.save_pretrained(
        tmp_path, state_dict={key: state[key] for key in state if ".mlp." not in key}
    )
    completed = bertlab.BertLabForMaskedLM.from_pretrained(tmp_path)
    for mlp in (built_model.encoder.blocks[0].mlp for built_model in (model, completed)):
        for weight in (mlp.up_proj.weight, mlp.down_proj.weight):
            assert (
                len(weight.unique()) == weight.numel() and abs(weight.mean()) < weight.std() < 0.5
            )
        assert (mlp.up_proj.bias == 0).all() and mlp.activation.weight.item() == 0.25
    assert (model.encoder.final_norm.weight == 1).all()


def test_a_layer_is_given_as_a_class_in_the_configuration():
    module = bertlab.PretrainingModule({**SIZES, "norm": Silent}, compile_model=False)
    module.configure_model()
    assert any(isinstance(part, Silent) for part in module.model.modules())
    with pytest.raises(ValueError, match="torch.nn.Module"):
        bertlab.PretrainingModule({**SIZES, "norm": print})


class Scaled(nn.Module):
    "An activation with a weight to learn."

    def __init__(self, begin=2.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(begin))

    def forward(self, x):
        return x * torch.sigmoid(self.scale * x)


def twice(x):
    return 2 * x


def built(**settings):
    module = bertlab.PretrainingModule(
        {**SIZES, "num_hidden_layers": 2, **settings}, compile_model=False
    )
    module.configure_model()
    assert module.model(**BATCH).loss_sum.isfinite()
    return module.model


@pytest.mark.parametrize("value, name", [
    (Scaled, f"{__name__}.Scaled"), (f"{__name__}.Scaled", f"{__name__}.Scaled"), (nn.Mish, "torch.nn.modules.activation.Mish"),
    ("torch.nn.PReLU", "torch.nn.PReLU"), (twice, f"{__name__}.twice")])  # fmt: skip
def test_an_activation_is_a_function_or_a_module_class(value, name, tmp_path):
    model = built(hidden_activation=value)
    assert model.config.hidden_activation == name
    parts = [block.mlp.activation for block in model.encoder.blocks] + [model.head.activation]
    if isinstance(parts[0], nn.Module):
        assert len({id(part) for part in parts}) == 3
    model.save_pretrained(tmp_path)
    again = bertlab.BertLabForMaskedLM.from_pretrained(tmp_path)
    assert again(**BATCH).loss_sum.item() == model.eval()(**BATCH).loss_sum.item()


def test_an_activation_of_a_head_is_a_class_as_well():
    assert isinstance(built(head_activation=Scaled).head.activation, Scaled)
    config = bertlab.BertLabConfig(**SIZES, head_activation=f"{__name__}.Scaled", num_labels=3)
    parts = bertlab.BertLabForSequenceClassification(config).modules()
    assert any(isinstance(part, Scaled) for part in parts)


def test_an_activation_without_a_name_of_its_own_is_refused():
    with pytest.raises(ValueError, match="hidden_activation.*bertlab.register_layer"):
        bertlab.PretrainingModule({**SIZES, "hidden_activation": nn.Mish()})


def test_add_layer_names_modules_and_partials():
    bertlab.register_layer("hidden_activation", "mish", nn.Mish())
    bertlab.register_layer("hidden_activation", "mish", nn.Mish())  # the same cell again
    bertlab.register_layer(
        "hidden_activation", "soft", partial(nn.functional.gelu, approximate="tanh")
    )
    built_model, another = built(hidden_activation="mish"), built(hidden_activation="mish").eval()
    assert built_model.head.activation.training and not another.head.activation.training
    built(hidden_activation="soft")
    with pytest.raises(ValueError, match="own weights.*give the class"):
        bertlab.register_layer("hidden_activation", "scaled", Scaled())


def test_a_layer_defined_anew_replaces_its_old_self(tmp_path, monkeypatch):
    source = "from torch import nn\n\nclass Norm(nn.Identity):\n    version = {}\n"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        sys, "dont_write_bytecode", True
    )  # a second file of the same second would not be read
    norms = []
    for version in range(3):
        (tmp_path / "norm_in_a_notebook.py").write_text(source.format(version))
        if version == 0:
            module = importlib.import_module("norm_in_a_notebook")
        else:
            module = importlib.reload(module)
        value = "norm_in_a_notebook.Norm" if version == 1 else module.Norm
        norms.append(built(norm=value).encoder.final_norm)
    assert [norm.version for norm in norms] == [0, 1, 2]


class Plain(bertlab.MaskedLanguageModelingCollator):
    objective = None


def test_a_collator_is_given_as_an_argument():
    tokenizer = bertlab.train_tokenizer(["a cat sat on the mat", "the dog ran"], vocab_size=60)
    data = bertlab.PretrainingDataModule(
        ["a cat sat"] * 9, tokenizer, collator=Plain, objective="diffusion"
    )
    assert data.collator_cls is Plain and data.objective is None
    with pytest.raises(ValueError, match="collator=MaskedDiffusionCollator.*'diffusion'"):
        bertlab.PretrainingDataModule(["a"], tokenizer, collator=bertlab.MaskedDiffusionCollator)
    with pytest.raises(ValueError, match="no option 'mlm_prob'.*'mlm_probability'"):
        bertlab.PretrainingDataModule(["a"], tokenizer, collator_kwargs={"mlm_prob": 0.2})
