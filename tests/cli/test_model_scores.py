"A judge scores what lies in a directory: the right numbers, an honest interval, and refusals that name the reason."

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from transformers import BertConfig, BertForMaskedLM

from bertlab.cli.main import main
from bertlab.cli.speedrun import TRACKS, Judge, format_score, ratio_interval, score_model
from bertlab.data.corpus import make_corpus
from bertlab.data.documents import Document
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.encoder import BertLabModel
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model

WORDS = "zero one two three four five six seven eight nine ten".split()


@pytest.fixture(scope="module")
def corpus():
    "120 documents of 5 to 44 words, some of them held out."
    texts = [" ".join(WORDS[(n * k + n) % 11] for k in range(1, 6 + n % 40)) for n in range(1, 121)]
    return make_corpus("numbers", [Document(text, f"n:{n}") for n, text in enumerate(texts)], 0.3)


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return train_tokenizer(corpus.train_texts, 90)


@pytest.fixture(scope="module", autouse=True)
def track():
    TRACKS["tiny"] = replace(
        TRACKS["ten-minutes"], name="tiny", vocab_size=90, max_sequence_length=32
    )
    yield TRACKS["tiny"]
    del TRACKS["tiny"]


def shape_of(tokenizer):
    return modernbert_tiny(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                           num_attention_heads=1, pad_token_id=tokenizer.pad_token_id)  # fmt: skip


@pytest.fixture
def model_dir(tmp_path, tokenizer):
    torch.manual_seed(3)
    model = BertLabForMaskedLM(shape_of(tokenizer))
    with torch.no_grad():
        model.head.bias.normal_()  # or every token would be as likely as every other
    save_model(model, tokenizer, tmp_path / "model")
    return tmp_path / "model"


def add_run(directory, sha, metrics='{"train_seconds": 30.5}'):
    (directory / "run.yaml").write_text(
        yaml.safe_dump({"record": {"corpus_sha256": sha, "corpus": "my text"}})
    )
    (directory / "metrics.json").write_text(metrics)


def by_hand(directory, track, corpus, tokenizer):
    "Nats, gaps and bytes of each held-out row, token by token."
    model, rows = BertLabForMaskedLM.from_pretrained(directory).eval(), []
    for batch in Judge(track, corpus, tokenizer).data.val_dataloader():
        for n in range(len(batch["labels"])):
            with torch.no_grad():
                logits = model(
                    *(batch[k][n : n + 1] for k in ("input_ids", "attention_mask", "position_ids"))
                ).logits[0]
            nats = count = num_bytes = 0
            for scores, label in zip(logits.double().numpy(), batch["labels"][n].tolist()):
                if label != -100:
                    nats += (
                        math.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[label]
                    )
                    count += 1
                    num_bytes += len(
                        tokenizer.convert_ids_to_tokens(label).removeprefix("##").encode()
                    )
            rows.append((nats, count, num_bytes))
    return np.array(
        [row for row in rows if row[1]]
    ).T  # the last batch is filled up with empty rows


def saved_as_ours(tmp_path, tokenizer):
    model = BertLabForMaskedLM(shape_of(tokenizer))
    model.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    return tmp_path / "ours"


def test_the_score_is_what_a_loop_over_tokens_gives(tmp_path, track, corpus, tokenizer):
    torch.manual_seed(0)
    directory = saved_as_ours(tmp_path, tokenizer)
    sums, counts, num_bytes = by_hand(directory, track, corpus, tokenizer)
    score = score_model(directory, "tiny", corpus)
    np.testing.assert_allclose(score.sums_N, sums, rtol=1e-4)
    np.testing.assert_array_equal(score.counts_N, counts)
    np.testing.assert_array_equal(score.bytes_N, num_bytes)
    assert score.nats[0] == pytest.approx(sums.sum() / counts.sum(), rel=1e-4)
    assert score.bits[0] == pytest.approx(sums.sum() / math.log(2) / num_bytes.sum(), rel=1e-4)
    assert score.nats[1] < score.nats[0] < score.nats[2]


def test_the_gaps_are_the_same_for_every_model_with_this_tokenizer(
    model_dir, tmp_path, corpus, tokenizer
):
    first, second = (
        score_model(model_dir, "tiny", corpus),
        score_model(saved_as_ours(tmp_path, tokenizer), "tiny", corpus),
    )
    assert first.hidden_sha256 == second.hidden_sha256 and first.nats != second.nats
    assert first.line == second.line and first == replace(first, sums_N=first.sums_N * 2), (
        "arrays are not compared"
    )


def test_a_model_of_transformers_alone_is_scored_too(tmp_path, corpus, tokenizer):
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                        num_attention_heads=1, max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id)  # fmt: skip
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    score = score_model(tmp_path / "bert", "tiny", corpus)
    assert score.nats[0] == pytest.approx(math.log(len(tokenizer)), abs=0.3) and not score.reads


def test_a_gpu_scores_where_there_is_one(model_dir, corpus, monkeypatch):
    asked = []
    monkeypatch.setattr("bertlab.core.devices.find_accelerator", lambda: "cuda")
    monkeypatch.setattr(
        BertLabForMaskedLM, "to", lambda model, device: asked.append(device) or model
    )
    score_model(model_dir, "tiny", corpus)
    assert asked[-1] == "cuda"


@pytest.mark.gpu
def test_a_gpu_gives_the_score_of_the_cpu(model_dir, corpus, monkeypatch):
    on_gpu = score_model(model_dir, "tiny", corpus)
    monkeypatch.setattr("bertlab.core.devices.find_accelerator", lambda: "cpu")
    np.testing.assert_allclose(
        on_gpu.sums_N, score_model(model_dir, "tiny", corpus).sums_N, rtol=1e-3
    )


def test_without_a_record_nobody_knows_what_a_model_has_read(model_dir, corpus):
    score = score_model(model_dir, "tiny", corpus)
    assert score.seconds is None and score.in_time is None and "unknown" in format_score(score)


@pytest.mark.parametrize("nats, verdict", [
    ((3.0, 2.9, 3.1), "reads"), ((4.0, 3.8, 4.2), "not known to read"), ((5.0, 4.9, 5.1), "above the line")])  # fmt: skip
def test_a_verdict_tells_a_loss_above_the_line_from_one_that_may_be_below(
    nats, verdict, model_dir, corpus
):
    score = replace(score_model(model_dir, "tiny", corpus), nats=nats, line=4.1)
    said = format_score(score).splitlines()[-1]
    assert verdict in said and score.reads == (verdict == "reads")


@pytest.mark.parametrize("seconds, in_time", [(30.5, True), (605, True), (700, False)])
def test_the_seconds_of_the_run_are_held_against_the_track(seconds, in_time, model_dir, corpus):
    add_run(model_dir, corpus.sha256, json.dumps({"train_seconds": seconds}))
    score = score_model(model_dir, "tiny", corpus)
    assert (score.seconds, score.in_time) == (seconds, in_time)
    assert ("over time" in format_score(score)) is not in_time


def test_a_model_that_has_trained_on_the_held_out_text_is_refused(model_dir, corpus):
    everything = replace(corpus, train=corpus.train + corpus.validation, validation=[])
    assert everything.sha256 != corpus.sha256
    add_run(model_dir, everything.sha256)
    with pytest.raises(ValueError, match="held out") as found:
        score_model(model_dir, "tiny", corpus)
    assert "my text" in str(found.value) and "directory=" in str(found.value)


@pytest.mark.parametrize("metrics", ["{}", '{"train_seconds": "long"}', '{"train_seconds": true}',
                                     '{"train_seconds": -1}', '{"train_seconds": NaN}', "{"])  # fmt: skip
def test_a_record_without_a_time_is_refused(metrics, model_dir, corpus):
    add_run(model_dir, corpus.sha256, metrics)
    with pytest.raises(ValueError, match="metrics.json"):
        score_model(model_dir, "tiny", corpus)


def test_what_predicts_no_words_or_is_no_model_is_refused(tmp_path, corpus, tokenizer):
    save_model(BertLabModel(shape_of(tokenizer)), tokenizer, tmp_path / "bare")
    with pytest.raises(ValueError, match="masked language model"):
        score_model(tmp_path / "bare", "tiny", corpus)
    with pytest.raises(ValueError, match="nowhere"):
        score_model(tmp_path / "nowhere", "tiny", corpus)
    with pytest.raises(ValueError, match="uphill"):
        score_model(tmp_path / "bare", "uphill", corpus)


def test_an_interval_is_a_point_where_rows_agree_and_has_the_width_that_theory_gives():
    assert ratio_interval(np.full(50, 6.0), np.full(50, 2.0)) == (3.0, 3.0, 3.0)
    rng = np.random.default_rng(1)
    sums, counts = rng.normal(40, 8, 400), np.full(400, 10.0)
    mean, low, high = ratio_interval(sums, counts)
    assert mean == pytest.approx(sums.mean() / 10)
    assert high - low == pytest.approx(2 * 1.96 * sums.std() / 10 / 400**0.5, rel=0.15)


def test_long_rows_weigh_more_than_short_ones():
    mean, low, high = ratio_interval(np.array([90.0, 1.0]), np.array([9.0, 1.0]))
    assert mean == 9.1 and low == 1.0 and high == 10.0


def test_the_command_scores_and_refuses_in_one_line(
    model_dir, tmp_path, corpus, monkeypatch, capsys
):
    monkeypatch.setattr(type(TRACKS["tiny"]), "text", lambda self: corpus)
    assert main(["speedrun", "--score", str(model_dir), "--track", "tiny"]) == 0
    assert "nats per hidden token" in capsys.readouterr().out
    assert main(["speedrun", "--score", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
