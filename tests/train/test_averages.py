"Averages: by hand, validated and written where the run's own weights are not, resumed bit by bit."

import copy
import json

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file, save_file
from test_training import CONFIG, word_tokenizer

from bertlab.data.module import PretrainingDataModule
from bertlab.model.config import bert_tiny, modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.model.task_heads import BertLabForSequenceClassification
from bertlab.train.averages import (
    EMA,
    average_weights,
    find_models,
    greedy_soup,
    save_average,
)
from bertlab.train.checkpoints import TrainingCheckpoint
from bertlab.train.resume import latest_checkpoint
from bertlab.train.modules import PretrainingModule
from bertlab.train.trainer import make_trainer, seed_everything

WORDS = [f"w{i}" for i in range(80)]


class Seen(Callback):
    "The weights after each step, and the losses of validation."

    def __init__(self):
        self.weights, self.losses = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.weights.append(copy.deepcopy(pl_module.model.state_dict()))

    def on_validation_end(self, trainer, pl_module):
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("averages") / "text.txt"
    path.write_text(
        "\n".join(
            " ".join(WORDS[(7 * i + j * j) % 80] for j in range(5 + i % 9)) for i in range(120)
        )
    )
    return str(path)


def run(text, output, steps, average, resume=False, **options):
    seed_everything(0)
    data = PretrainingDataModule(text, word_tokenizer(WORDS), max_sequence_length=32, train_batch_size=4,
                                 val_batch_size=8)  # fmt: skip
    module = PretrainingModule({**CONFIG, "num_hidden_layers": 1, "mlp_dropout": 0.1}, learning_rate=1e-2,
                               scheduler_warmup_steps=2, **options)  # fmt: skip
    seen = Seen()
    saving = TrainingCheckpoint(output / "checkpoints", 3, models=output / "models")
    callbacks = [seen, *([average] if average else []), saving]
    trainer = make_trainer(
        steps, "32-true", accelerator="cpu", val_check_steps=3, callbacks=callbacks
    )
    trainer.fit(
        module,
        data,
        ckpt_path=latest_checkpoint(output / "checkpoints") if resume else None,
        weights_only=True,
    )
    return module, seen, data


def test_the_average_leaves_training_alone(text, tmp_path):
    average = EMA(0.5, ramp=False, start_step=1)
    module, seen, data = run(text, tmp_path / "with", 5, average)
    plain, without, _ = run(text, tmp_path / "without", 5, None)
    assert all(torch.equal(a[n], b[n]) for a, b in zip(seen.weights, without.weights) for n in a)
    name = "encoder.blocks.0.mlp.up_proj.weight"
    steps = [weights[name].double() for weights in seen.weights[1:]]
    want = steps[0]
    for weight in steps[1:]:
        want = 0.5 * want + 0.5 * weight
    torch.testing.assert_close(average.averages[name].double(), want, rtol=0, atol=1e-6)
    assert torch.equal(module.model.state_dict()[name], seen.weights[-1][name])
    plain.model.load_state_dict({**plain.model.state_dict(), **average.averages})
    judge = make_trainer(1, "32-true", accelerator="cpu", callbacks=[average])
    scores = [judge.validate(module, data, verbose=False)[0]["val_loss"],
              make_trainer(1, "32-true", accelerator="cpu").validate(plain, data, verbose=False)[0]["val_loss"],
              make_trainer(1, "32-true", accelerator="cpu").validate(module, data, verbose=False)[0]["val_loss"]]  # fmt: skip
    assert scores[0] == scores[1] != scores[2]


def test_what_is_written_and_validated_is_the_average(text, tmp_path):
    import transformers

    average = EMA(0.9)
    module, seen, _ = run(text, tmp_path, 6, average)
    (path,) = find_models([tmp_path], last=1)
    reference = transformers.AutoModelForMaskedLM.from_pretrained(path)
    table = reference.get_input_embeddings().weight
    torch.testing.assert_close(table, average.averages["encoder.embeddings.tokens.weight"])
    assert not torch.equal(table, module.model.get_input_embeddings().weight)


def test_a_resume_continues_weights_and_average(text, tmp_path):
    uninterrupted, parts = EMA(0.9), EMA(0.9)
    scored, _, _ = run(text, tmp_path / "whole", 6, uninterrupted)
    run(text, tmp_path / "parts", 3, EMA(0.9))
    two, _, _ = run(text, tmp_path / "parts", 6, parts, resume=True)
    assert all(
        torch.equal(a, b) for a, b in zip(scored.state_dict().values(), two.state_dict().values())
    )
    assert uninterrupted.num_averaged == parts.num_averaged == 6
    assert all(
        torch.equal(uninterrupted.averages[name], parts.averages[name])
        for name in uninterrupted.averages
    )


def test_frozen_weights_have_no_average(text, tmp_path):
    average = EMA(0.9)
    run(text, tmp_path, 3, average, freeze="embeddings")
    assert average.averages and not any("embeddings" in name for name in average.averages)


@pytest.mark.parametrize(
    "options", [{"decay": 1.0}, {"decay": -0.1}, {"every_n_steps": 0}, {"start_step": -1}]
)
def test_an_average_that_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        EMA(**options)


def test_a_mean_of_models_is_that_of_their_numbers():
    weights = [{"a": torch.tensor([float(i)]), "n": torch.tensor([3])} for i in (1, 2, 6)]
    assert average_weights(weights)["a"].item() == 3
    assert average_weights(weights, [0, 1, 1])["a"].item() == 4
    for another in ({"a": torch.ones(2), "n": torch.tensor([3])}, {"n": torch.tensor([3])},
                  {"a": torch.ones(1), "n": torch.tensor([4])}):  # fmt: skip
        with pytest.raises(ValueError):
            average_weights([weights[0], another])
    with pytest.raises(ValueError, match="shares"):
        average_weights(weights, [0, 0, 0])


def test_an_index_buffer_may_be_missing_in_one_model():
    buffer = {"position_ids": torch.arange(3)}
    models = [{"weight": torch.tensor([1.0])} | buffer, {"weight": torch.tensor([3.0])}]
    assert average_weights(models)["weight"] == average_weights(models[::-1])["weight"] == 2
    with pytest.raises(ValueError, match="position_ids"):
        average_weights([models[0], models[1] | {"position_ids": torch.arange(3) + 1}])


def test_a_greedy_soup_keeps_what_helps():
    "Scores: minus the distance to 5. 4 goes in first, 6.5 helps (5.25), 7 and 0 do not."
    weights = {name: {"a": torch.tensor([value])} for name, value in
               (("far", 0.0), ("four", 4.0), ("seven", 7.0), ("six", 6.5))}  # fmt: skip
    calls = []

    def score(scored):
        calls.append(scored["a"].item())
        return -abs(scored["a"].item() - 5)

    soup, chosen, singles = greedy_soup(weights, score)
    assert chosen == ["four", "six"] and soup["a"].item() == 5.25 and singles["far"] == -5
    assert len(calls) == 7
    _, lower, _ = greedy_soup(weights, lambda scored: -score(scored), higher=False)
    assert lower == chosen


@pytest.mark.parametrize("higher", [True, False])
def test_a_model_whose_score_is_undefined_is_in_no_soup(higher):
    weights = {
        name: {"a": torch.tensor([value])}
        for name, value in (("lost", 0.0), ("one", 1.0), ("two", 2.0))
    }
    score = lambda scored: (
        float("nan") if scored["a"].item() in (0.0, 1.5) else 1 + 0.1 * scored["a"].item()
    )
    _, chosen, _ = greedy_soup(weights, score, higher)
    assert chosen == (["two"] if higher else ["one"])
    with pytest.raises(ValueError, match="lost"):
        greedy_soup({"lost": weights["lost"]}, score, higher)


@pytest.mark.parametrize("num_layers", [1, 12])
def test_a_written_mean_opens_in_plain_transformers(tmp_path, num_layers):
    import transformers

    paths = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = BertLabForMaskedLM(modernbert_tiny(vocab_size=60, hidden_size=32, num_attention_heads=2,
                                                   intermediate_size=48, num_hidden_layers=num_layers))  # fmt: skip
        paths.append(save_model(model, None, tmp_path / f"{seed}"))
    measured = {
        "metrics.json",
        "evaluation.json",
        "stage.json",
    }  # of the first model: not the mean's
    for name in measured:
        (paths[0] / name).write_text('{"val_loss": 1.0}')
    directory = save_average(paths, tmp_path / "mean")
    assert not measured & {path.name for path in directory.iterdir()}
    assert (
        len({path.stat().st_mode for path in directory.iterdir()}) == 1
    )  # weights are not for their owner alone
    mean, *parts = (
        transformers.AutoModelForMaskedLM.from_pretrained(p).state_dict()
        for p in (directory, *paths)
    )
    for name, weight in mean.items():
        torch.testing.assert_close(weight, (parts[0][name] + parts[1][name]) / 2)
    with pytest.raises(ValueError, match="output"):
        save_average(paths, tmp_path / "mean")
    with pytest.raises(ValueError, match="config.json"):
        find_models([tmp_path])


SMALL = dict(vocab_size=100, hidden_size=32, num_attention_heads=2, intermediate_size=48, num_hidden_layers=2,
             max_position_embeddings=64, local_attention=16)  # fmt: skip


def put(
    path,
    seed=0,
    tokenizer=None,
    config=modernbert_tiny,
    head=BertLabForMaskedLM,
    labels=None,
    **changes,
):
    torch.manual_seed(seed)
    shape = config(**{**SMALL, **changes})
    if labels:
        shape.id2label, shape.label2id = (
            dict(enumerate(labels)),
            {name: i for i, name in enumerate(labels)},
        )
    return save_model(head(shape), tokenizer, path)


@pytest.mark.parametrize(
    "name, here, there, options",
    [
        ("num_attention_heads", 2, 4, {}),
        ("global_rope_theta", 160000.0, 100.0, {}),
        ("local_attention", 16, 64, {}),
        ("norm_eps", 1e-5, 1e-3, {"config": bert_tiny}),
        (
            "norm_groups",
            2,
            4,
            {"norm": "group"},
        ),  # a model of ours, which transformers does not have
        ("labels", ("neg", "pos"), ("pos", "neg"), {"head": BertLabForSequenceClassification}),
        ("classifier_pooling", "mean", "cls", {"head": BertLabForSequenceClassification}),
    ],
)
def test_models_that_only_look_alike_have_no_mean(tmp_path, name, here, there, options):
    "Weights of one shape that compute other things: the message names the setting and both values."
    paths = [
        put(tmp_path / f"{i}", **{**options, name: value}) for i, value in enumerate((here, there))
    ]
    with pytest.raises(
        ValueError, match={"labels": "id2label", "global_rope_theta": "rope"}.get(name, name)
    ) as error:
        save_average(paths, tmp_path / "mean")
    values = ("0: 'neg'", "0: 'pos'") if name == "labels" else map(str, (here, there))
    assert all(value in str(error.value) for value in values) and not (tmp_path / "mean").exists()


def test_settings_that_no_score_reads_keep_no_models_apart(tmp_path):
    first = put(tmp_path / "0", config=bert_tiny)
    alternatives = [put(tmp_path / "1", 1, config=bert_tiny, hidden_dropout=0.3, classifier_dropout=0.2, local_attention=8),
              put(tmp_path / "2", 2, config=bert_tiny, initializer_range=0.1, global_rope_theta=99.0)]  # fmt: skip
    for (
        path
    ) in alternatives:  # as another version of transformers, and another type of numbers, write it
        content = json.loads((path / "config.json").read_text())
        content |= {
            "transformers_version": "4.57.0",
            "dtype": "bfloat16",
            "_name_or_path": str(path),
        }
        (path / "config.json").write_text(json.dumps(content))
    assert save_average([first, *alternatives], tmp_path / "mean").is_dir()


def test_models_that_read_other_tokens_have_no_mean(tmp_path):
    first = put(tmp_path / "0", tokenizer=word_tokenizer(WORDS))
    save_average(
        [first, put(tmp_path / "1", 1, word_tokenizer(WORDS)), put(tmp_path / "2", 2)],
        tmp_path / "mean",
    )
    another = put(tmp_path / "3", 1, word_tokenizer([word.upper() for word in WORDS]))
    with pytest.raises(ValueError, match="tokenizer is"):
        save_average([first, another], tmp_path / "x")
    file = first / "tokenizer.json"  # the same words, and no capitals in front of them
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "normalizer": {"type": "Lowercase"}})
    )
    with pytest.raises(ValueError, match="tokenizer is"):
        save_average([first, tmp_path / "1"], tmp_path / "x")


def test_models_that_cannot_be_read_are_refused_in_one_line(tmp_path):
    good, bad, nan = (put(tmp_path / name) for name in ("good", "bad", "nan"))
    (bad / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="model_type"):
        save_average([good, bad], tmp_path / "x")
    with pytest.raises(ValueError, match="nothing to average"):
        save_average([], tmp_path / "x")
    weights = load_file(nan / "model.safetensors")
    next(iter(weights.values()))[0] = float("nan")
    save_file(weights, nan / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="nan.*NaN"):
        save_average([good, nan], tmp_path / "x")


def test_one_model_by_two_names_is_one_model(tmp_path):
    path = put(tmp_path / "a")
    (tmp_path / "best").symlink_to("a")
    assert find_models([path, tmp_path / "best", tmp_path / "best" / ".." / "a"]) == [path]
