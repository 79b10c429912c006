"Averages: by hand, validated and written where the run's own weights are not, resumed bit by bit."

import copy

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from test_training import CONFIG, word_tokenizer

from bertlab.data.module import PretrainingDataModule
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model
from bertlab.train.averages import AveragedWeights, average_weights, find_models, greedy_soup, write_average
from bertlab.train.checkpoints import CheckpointSeries, find_checkpoint
from bertlab.train.model_directories import ModelDirectories
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
    path.write_text("\n".join(" ".join(WORDS[(7 * i + j * j) % 80] for j in range(5 + i % 9)) for i in range(120)))
    return str(path)


def run(text, output, steps, average, resume=False, **options):
    seed_everything(0)
    data = PretrainingDataModule(text, word_tokenizer(WORDS), max_sequence_length=32, train_batch_size=4,
                                 val_batch_size=8)  # fmt: skip
    module = PretrainingModule({**CONFIG, "num_hidden_layers": 1, "mlp_dropout": 0.1}, learning_rate=1e-2,
                               scheduler_warmup_steps=2, **options)  # fmt: skip
    seen = Seen()
    callbacks = [seen, *([average] if average else []), ModelDirectories(output / "models", module.tokenizer, 100),
                 CheckpointSeries(output / "checkpoints", 3)]  # fmt: skip
    trainer = make_trainer(steps, "32-true", accelerator="cpu", val_check_steps=3, callbacks=callbacks)
    trainer.fit(module, data, ckpt_path=find_checkpoint(output / "checkpoints") if resume else None, weights_only=True)
    return module, seen, data


@pytest.mark.parametrize("decay", [0.5, None])
def test_the_average_is_that_of_the_steps_and_the_training_does_not_see_it(decay, text, tmp_path):
    average = AveragedWeights(decay, ramp=False, start_step=1)
    module, seen, data = run(text, tmp_path / "with", 5, average)
    plain, without, _ = run(text, tmp_path / "without", 5, None)
    assert all(torch.equal(a[n], b[n]) for a, b in zip(seen.weights, without.weights) for n in a)
    name = "encoder.blocks.0.mlp.expand.weight"
    steps = [weights[name].double() for weights in seen.weights[1:]]
    want = steps[0]
    for number, weight in enumerate(steps[1:], 2):
        want = 0.5 * want + 0.5 * weight if decay else want + (weight - want) / number
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

    average = AveragedWeights(0.9)
    module, seen, _ = run(text, tmp_path, 6, average)
    (place,) = find_models([tmp_path], last=1)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(place)
    table = theirs.get_input_embeddings().weight
    torch.testing.assert_close(table, average.averages["encoder.embeddings.tokens.weight"])
    assert not torch.equal(table, module.model.get_input_embeddings().weight)


def test_a_run_that_was_stopped_goes_on_with_weights_and_average(text, tmp_path):
    whole, parts = AveragedWeights(0.9), AveragedWeights(0.9)
    one, _, _ = run(text, tmp_path / "whole", 6, whole)
    run(text, tmp_path / "parts", 3, AveragedWeights(0.9))
    two, _, _ = run(text, tmp_path / "parts", 6, parts, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values()))
    assert whole.num_averaged == parts.num_averaged == 6
    assert all(torch.equal(whole.averages[name], parts.averages[name]) for name in whole.averages)


def test_frozen_weights_have_no_average(text, tmp_path):
    average = AveragedWeights(0.9)
    run(text, tmp_path, 3, average, freeze="embeddings")
    assert average.averages and not any("embeddings" in name for name in average.averages)


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"decay": -0.1}, {"every_steps": 0}, {"start_step": -1}])
def test_an_average_that_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        AveragedWeights(**options)


def test_a_mean_of_models_is_that_of_their_numbers():
    weights = [{"a": torch.tensor([float(i)]), "n": torch.tensor([3])} for i in (1, 2, 6)]
    assert average_weights(weights)["a"].item() == 3
    assert average_weights(weights, [0, 1, 1])["a"].item() == 4
    for other in ({"a": torch.ones(2), "n": torch.tensor([3])}, {"a": torch.ones(1)},
                  {"a": torch.ones(1), "n": torch.tensor([4])}):  # fmt: skip
        with pytest.raises(ValueError):
            average_weights([weights[0], other])
    with pytest.raises(ValueError, match="shares"):
        average_weights(weights, [0, 0, 0])


def test_a_greedy_soup_keeps_what_helps_and_is_never_worse_than_its_best():
    "Scores: minus the distance to 5. 4 goes in first, 6.5 helps (5.25), 7 and 0 do not."
    weights = {name: {"a": torch.tensor([value])} for name, value in
               (("far", 0.0), ("four", 4.0), ("seven", 7.0), ("six", 6.5))}  # fmt: skip
    calls = []

    def score(one):
        calls.append(one["a"].item())
        return -abs(one["a"].item() - 5)

    soup, chosen, singles = greedy_soup(weights, score)
    assert chosen == ["four", "six"] and soup["a"].item() == 5.25 and singles["far"] == -5
    assert len(calls) == 7
    _, lower, _ = greedy_soup(weights, lambda one: -score(one), higher=False)
    assert lower == chosen


def test_a_written_mean_opens_in_plain_transformers(tmp_path):
    import transformers

    paths = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = BertLabForMaskedLM(modernbert_tiny(vocab_size=60, hidden_size=32, num_attention_heads=2,
                                                   intermediate_size=48, num_hidden_layers=1))  # fmt: skip
        paths.append(save_model(model, None, tmp_path / f"{seed}"))
    place = write_average(paths, tmp_path / "mean")
    mean, *parts = (transformers.AutoModelForMaskedLM.from_pretrained(p).state_dict() for p in (place, *paths))
    for name, weight in mean.items():
        torch.testing.assert_close(weight, (parts[0][name] + parts[1][name]) / 2)
    with pytest.raises(ValueError, match="output"):
        write_average(paths, tmp_path / "mean")
    with pytest.raises(ValueError, match="config.json"):
        find_models([tmp_path])
