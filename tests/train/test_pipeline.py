"""Stages of an encoder in a pipeline are the encoder: blocks dealt once, loss and gradients those of one process."""

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_on_ranks
from test_parallel import CONFIG, batch_of

from bertlab.model.config import BertLabConfig
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.train.pipeline import (
    EncoderStage,
    keep_tied,
    make_schedule,
    pipeline_step,
    stage_blocks,
)

SHAPES = {
    "tied": dict(num_hidden_layers=3),
    "untied, slopes, local layers": dict(num_hidden_layers=4, tie_word_embeddings=False, attention_positions="alibi",
                                         local_attention=8, global_attention_every_n_layers=2),
    "learned positions": dict(attention_positions="none", embedding_positions="learned", norm_position="post"),
}  # fmt: skip
BATCH = {k: v for k, v in batch_of(*range(4, 12)).items()}
UNLABELLED = BATCH | {"labels": torch.full_like(BATCH["labels"], -100)}


def model_of(name):
    torch.manual_seed(0)
    return BertLabForMaskedLM(BertLabConfig(**{**CONFIG, **SHAPES[name]}))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(1, 60), st.integers(1, 12))
def test_every_block_has_one_stage_and_stages_are_even(num_blocks, num_stages):
    if num_stages > num_blocks:
        with pytest.raises(ValueError, match=f"num_stages={num_stages}"):
            stage_blocks(num_blocks, num_stages)
        return
    dealt = stage_blocks(num_blocks, num_stages)
    assert [n for own in dealt for n in own] == list(range(num_blocks)) and len(dealt) == num_stages
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_stages_one_after_the_other_are_the_model(name, num_stages):
    model, rest = (
        model_of(name),
        {k: BATCH[k] for k in ("attention_mask", "position_ids", "label_positions")},
    )
    x = BATCH["input_ids"]
    for n in range(num_stages):
        x = EncoderStage(model, n, num_stages)(x, **rest)
    wanted = model(BATCH["input_ids"], **rest, labels=BATCH["labels"]).logits
    torch.testing.assert_close(x, wanted, atol=1e-5, rtol=0)


def test_one_stage_alone_has_one_tied_table():
    model = model_of("tied")
    stage = EncoderStage(model, 0, 1)
    assert stage.table is stage.embeddings.tokens.weight
    assert sum(p.numel() for p in stage.parameters()) == sum(p.numel() for p in model.parameters())
    keep_tied(stage)  # nothing to add up, and nobody to ask


def test_what_cannot_be_scheduled_is_refused():
    stage = EncoderStage(model_of("tied"), 0, 2)
    with pytest.raises(ValueError, match="num_microbatches=3"):
        make_schedule(stage, BATCH, 3)
    with pytest.raises(ValueError, match="zigzag"):
        make_schedule(stage, BATCH, 4, "zigzag")


def worker(folder):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    found = {}
    for name in SHAPES:
        for kind in ("gpipe", "1f1b"):
            stage = EncoderStage(model_of(name), rank, 2)
            schedule = make_schedule(stage, BATCH, 4, kind)
            losses = [pipeline_step(schedule, stage, BATCH)]
            keep_tied(stage)
            found[name, kind] = losses, {k: p.grad.clone() for k, p in stage.named_parameters()}
            stage.zero_grad()
            losses = [pipeline_step(schedule, stage, UNLABELLED)]
            keep_tied(stage)
            assert losses[0] in (None, 0.0) and not any(p.grad.any() for p in stage.parameters())
    torch.save(found, folder / f"{rank}.pt")


@pytest.mark.slow
def test_two_stages_have_the_loss_and_the_gradients_of_one_process(tmp_path):
    run_on_ranks(worker, tmp_path, timeout=300)
    found = [torch.load(tmp_path / f"{r}.pt") for r in range(2)]
    for name in SHAPES:
        model = model_of(name)
        loss = model(**BATCH).loss
        loss.backward()
        wanted = {k.replace("encoder.", ""): p.grad for k, p in model.named_parameters()}
        wanted["table"] = wanted["embeddings.tokens.weight"]
        for kind in ("gpipe", "1f1b"):
            assert found[1][name, kind][0][0] == pytest.approx(loss.item(), abs=1e-5)
            seen = set()
            for rank in range(2):
                for key, gradient in found[rank][name, kind][1].items():
                    torch.testing.assert_close(gradient, wanted[key], atol=1e-6, rtol=0)
                    seen.add(key)
            assert seen >= wanted.keys() - {"table"}
