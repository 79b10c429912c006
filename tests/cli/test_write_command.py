"`bertlab write`: finished texts on standard output, the show on standard error, one line for every mistake."

import io

import pytest
import torch
import yaml

from bertlab.cli.main import main
from bertlab.cli.write import show_state, show_steps, was_taught_ends, write_texts
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedDiffusion
from bertlab.model.huggingface import save_model
from bertlab.model.sampling import SamplingStep

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = train_tokenizer(["the cat sat on the mat"] * 9, vocab_size=60)
    torch.manual_seed(0)
    model = BertLabForMaskedDiffusion(modernbert_tiny(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16,
                                                      num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=32))  # fmt: skip
    return save_model(model, tokenizer, tmp_path_factory.mktemp("write") / "model")


PROMPTS = ["the [MASK] sat on the [MASK]", "the cat"]


def test_the_texts_are_on_standard_output_and_the_show_is_not(folder, capsys):
    texts = write_texts(str(folder), PROMPTS, max_new_tokens=5, sampler="random", seed=3)
    words = [str(folder), *PROMPTS, "--max_new_tokens", "5", "--sampler", "random", "--seed", "3"]
    for live in ("false", "true"):
        assert main(["write", *words, "--live", live]) == 0
        captured = capsys.readouterr()
        assert captured.out.splitlines() == texts
        assert ("\x1b[" in captured.err) == (live == "true")


@pytest.mark.parametrize("words, part", [
    (["{place}-not", "x"], "no such file or directory"), (["{place}", "x", "--sampler", "confidense"], "confidence"),
    (["{place}", "no gap", "--mode", "infill"], "no gap"), (["{place}", "x", "--temprature", "1"], "temperature"),
    (["{place}", "x", "--max_new_tokens", "99"], "max_position_embeddings"),
])  # fmt: skip
def test_a_mistake_is_answered_in_one_line(folder, capsys, words, part):
    assert main(["write", *[word.replace("{place}", str(folder)) for word in words]]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bertlab")]
    assert len(err) == 1 and part in err[0]


def test_each_step_is_a_line():
    tokenizer = train_tokenizer(["the cat sat"] * 9, vocab_size=60)
    ids = torch.tensor([tokenizer("the cat sat")["input_ids"]])
    no, stream = torch.zeros_like(ids, dtype=torch.bool), io.StringIO()
    show = show_steps(tokenizer, stream)
    for seed in (0, 0, 1):
        show(seed, SamplingStep(ids, no, no, torch.ones(ids.shape)))
    assert stream.getvalue().splitlines() == [
        "  0 the cat sat",
        "  1 the cat sat",
        "  0 the cat sat",
    ]


def test_a_break_in_a_text_does_not_break_the_line_of_the_show():
    tokenizer = train_tokenizer(["a b\nc\td"] * 9, vocab_size=300, kind="bpe")
    ids = torch.tensor([tokenizer("a b\nc\td")["input_ids"]])
    no = torch.zeros_like(ids, dtype=torch.bool)
    assert (
        show_state(tokenizer, SamplingStep(ids, no, no, torch.ones(ids.shape)), colours=False)
        == "a b c d"
    )


def test_a_run_remembers_whether_its_model_may_end_a_text(folder, tmp_path):
    assert not was_taught_ends(folder)
    (tmp_path / "models" / "step-5").mkdir(parents=True)
    for ends, is_remembered in ((0, False), (8, True)):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({"data": {"max_ends": ends}}))
        assert was_taught_ends(tmp_path / "models" / "step-5") is is_remembered
