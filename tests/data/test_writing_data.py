"Prompts stay clean, ends count for one word, and the loss divides by what may be written."

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data.collators import MaskedDiffusionCollator
from bertlab.data.diffusion import DiffusionRule, find_parts, share_tokens, weigh_times, writing_rows
from bertlab.data.packing import PackedDataset
from bertlab.data.rows import Vocabulary
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedDiffusion
from bertlab.train.modules import PretrainingModule

torch.set_num_threads(1)
PAD, CLS, SEP, MASK = 0, 2, 3, 1
WORDS = Vocabulary(12, pad_token_id=PAD, mask_token_id=MASK, special_token_ids=(CLS, SEP))


def by_hand(document: list[int]) -> list[float]:  # shares, from the form [CLS] (prompt [SEP])? text [SEP]*
    stop = len(document)
    while document[stop - 1] == SEP:
        stop -= 1
    ends = len(document) - stop - 1  # the last one closes the document
    inner = [i for i in range(stop) if document[i] == SEP]
    begin = inner[0] + 1 if inner else 0
    shares = [0.0] * len(document)
    for i in range(begin, stop):
        shares[i] = float(document[i] not in (CLS, SEP, PAD, MASK))
    for i in range(stop, stop + ends):
        shares[i] = 1 / ends
    return shares


documents = st.lists(st.lists(st.sampled_from([5, 6, 7, SEP]), min_size=1, max_size=8), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(documents, st.integers(0, 3))
def test_parts_are_found_in_packed_rows_as_in_each_document_alone(bodies, padding):
    rows = [[CLS, *body, SEP] for body in bodies]
    ids = np.array([[t for row in rows for t in row] + [PAD] * padding])
    numbers = np.array([[n for n, row in enumerate(rows, 1) for _ in row] + [0] * padding])
    shares = share_tokens({"input_ids": ids, "attention_mask": numbers}, WORDS, SEP)
    expected = [s for row in rows for s in by_hand(row)] + [0.0] * padding
    np.testing.assert_allclose(shares[0], expected, rtol=1e-6)
    prompt, ends = find_parts(ids, numbers, SEP)
    assert not (prompt & ends).any() and not (prompt | ends)[numbers == 0].any()


def test_packed_rows_mark_them_as_well():
    dataset = PackedDataset([[5, 6, SEP, 7, SEP, SEP], [8, 9]], 16, pad_token_id=PAD, cls_token_id=CLS,
                            sep_token_id=SEP, shuffle=False)  # fmt: skip
    collate = MaskedDiffusionCollator(PAD, MASK, 12, special_token_ids=[CLS, SEP], writing=True, end_token_id=SEP,
                                      num_steps=1, noise_eps=0.0)  # fmt: skip
    batch = collate([dataset[0, 0]])
    hidden = batch["labels"][0] >= 0
    kept = {tuple(batch["input_ids"][0][batch["attention_mask"][0] == n].tolist()) for n in (1, 2)}
    # The given prompt stays; the word and both ends are hidden at time 1.
    assert (CLS, 5, 6, SEP, MASK, MASK, MASK, SEP) in kept and (CLS, MASK, MASK, SEP) in kept
    assert batch["token_shares"].sum() == pytest.approx(1 + 1 + 2) and int(hidden.sum()) == 5


def test_ends_of_a_document_weigh_as_much_as_one_word_however_many_they_are():
    for count in (1, 4, 9):
        rule = DiffusionRule(end_token_id=SEP)
        ids = np.array([[CLS, 5, 6, *[SEP] * count, SEP]])
        shares = share_tokens({"input_ids": ids, "attention_mask": np.ones_like(ids)}, WORDS, rule.end_token_id)
        assert shares[ids == SEP].sum() == pytest.approx(1) and shares.sum() == pytest.approx(3)


def test_texts_for_writing_pass_a_tokenizer_and_come_back_as_parts():
    tokenizer = train_tokenizer(["the cat sat on the mat"] * 9, vocab_size=60)
    made = writing_rows(tokenizer, ["the cat", "sat on"], ["mat", "the mat"], max_ends=5, seed=3)
    counts = []
    for row, prompt, answer in zip(made, ["mat", "the mat"], ["the cat", "sat on"]):
        ids = np.array([[tokenizer.cls_token_id, *row, tokenizer.sep_token_id]])
        given_BL, ends_BL = find_parts(ids, np.ones_like(ids), tokenizer.sep_token_id)
        assert tokenizer.decode(ids[given_BL], skip_special_tokens=True) == prompt
        assert tokenizer.decode(ids[~given_BL & ~ends_BL], skip_special_tokens=True) == answer
        counts.append(int(ends_BL.sum()))
    assert all(1 <= c <= 5 for c in counts)
    end = tokenizer.sep_token_id
    many = [row.count(end) for row in writing_rows(tokenizer, ["the"] * 500, max_ends=5)]
    assert set(many) == {1, 2, 3, 4, 5} and min(many.count(n) for n in set(many)) > 60
    assert end not in writing_rows(tokenizer, ["the [SEP] cat"], max_ends=0)[0]  # it says the word
    with pytest.raises(ValueError, match="prompts must be as many"):
        writing_rows(tokenizer, ["x"], ["a", "b"])
    with pytest.raises(ValueError, match="max_ends"):
        writing_rows(tokenizer, ["x"], max_ends=-1)


@pytest.mark.parametrize("plain", [False, True])
def test_the_loss_divides_by_the_words_that_count(plain):
    torch.manual_seed(0)
    config = dict(vocab_size=12, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    module = PretrainingModule(config, objective="diffusion", plain_mean=plain)
    module.configure_model()
    collate = MaskedDiffusionCollator(PAD, MASK, 12, special_token_ids=[CLS, SEP], writing=True, end_token_id=SEP,
                                      max_sequence_length=16, seed=1)  # fmt: skip
    batch = collate([[CLS, 5, 6, SEP, 7, 8, 9, SEP, SEP, SEP, SEP], [CLS, 5, 8, 9, 10, 11, SEP, SEP]])
    parts = module.label_loss(batch)
    with torch.no_grad():
        logits = module.model(batch["input_ids"], batch["attention_mask"]).logits
    nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    labelled, shares = batch["labels"] >= 0, batch["token_shares"]
    weights = shares if plain else batch["loss_weights"]
    assert parts.loss_sum.item() == pytest.approx((nats * weights * labelled).sum().item(), rel=1e-4)
    assert parts.num_labels.item() == pytest.approx((shares * labelled).sum().item() if plain else 4 + 6)


def test_accumulating_two_rows_is_the_batch_of_both():
    torch.manual_seed(0)
    model = BertLabForMaskedDiffusion(modernbert_tiny(vocab_size=12, hidden_size=16, intermediate_size=16,
                                                      num_hidden_layers=1, num_attention_heads=1)).eval()  # fmt: skip
    collate = MaskedDiffusionCollator(PAD, MASK, 12, special_token_ids=[CLS, SEP], writing=True, end_token_id=SEP,
                                      max_sequence_length=12)  # fmt: skip
    rows = [[CLS, 5, SEP, 7, 8, SEP, SEP], [CLS, 5, 8, 9, 10, 11, SEP, SEP, SEP]]
    rows = [{"input_ids": row, "epoch": 0, "index": i} for i, row in enumerate(rows)]
    run = lambda some: model(**{k: v for k, v in collate(some).items()})  # noqa: E731
    both, parts = run(rows), [run([row]) for row in rows]
    assert both.loss_sum.item() == pytest.approx(sum(p.loss_sum.item() for p in parts), rel=1e-5)
    assert both.num_labels.item() == pytest.approx(sum(p.num_labels.item() for p in parts))


def test_the_cosine_schedule_hides_less_for_longer_and_its_weights_add_up_too():
    rule = dict(noise_eps=0.0, sampling_eps=0.0)
    ids = [[5] * 60] * 800
    found = {}
    for schedule in ("linear", "cosine"):
        collate = MaskedDiffusionCollator(PAD, MASK, 12, special_token_ids=[CLS, SEP], max_sequence_length=60,
                                          schedule=schedule, **rule)  # fmt: skip
        batch = collate([{"input_ids": row, "epoch": 0, "index": i} for i, row in enumerate(ids)])
        found[schedule] = (batch["labels"] >= 0).double().mean().item()
        # The mean weighted count is the integral of the share's slope: all tokens, once.
        sums = batch["loss_weights"].sum(1).double() / 60
        assert abs(sums.mean().item() - 1) < 5 * sums.std().item() / 800**0.5
    assert found["linear"] == pytest.approx(0.5, abs=0.01) and found["cosine"] == pytest.approx(1 - 2 / np.pi, abs=0.01)
    assert weigh_times(np.array([1.0]), "cosine")[0] == pytest.approx(np.pi / 2)


@pytest.mark.parametrize("options, said", [
    (dict(schedule="sine"), "schedule='sine' is unknown"), (dict(writing=True), "writing=True needs end_token_id"),
    (dict(end_token_id=3), "read with writing=True alone"),
])  # fmt: skip
def test_a_collator_that_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        MaskedDiffusionCollator(PAD, MASK, 12, special_token_ids=[CLS, SEP], **options)


def test_the_data_module_lays_ends_behind_texts_and_they_are_labels():
    from bertlab.data.module import PretrainingDataModule

    texts = [f"the cat sat on mat {n} and so on" for n in range(40)]
    tokenizer = train_tokenizer(texts, vocab_size=90)
    made = {}
    for most in (0, 6):
        data = PretrainingDataModule(None, tokenizer, "diffusion", 64, max_ends=most, train_batch_size=2,
                                     collator_kwargs=dict(num_steps=1, noise_eps=0.0))  # fmt: skip
        data.set_datasets(texts, texts[:4])
        data.setup()
        documents = data.train_dataset.documents
        made[most] = [documents[n].tolist() for n in range(len(documents))]
        batch = next(iter(data.train_dataloader()))
        assert ((batch["labels"] == tokenizer.sep_token_id).any().item()) == (most > 0)
    for before, after in zip(made[0], made[6], strict=True):
        ends = after[len(before) :]
        assert after[: len(before)] == before and 1 <= len(ends) <= 6 and set(ends) == {tokenizer.sep_token_id}
    for options in (dict(objective="mlm"), dict(objective="diffusion", streaming=True, name="a.txt")):
        with pytest.raises(ValueError, match="max_ends=3"):
            PretrainingDataModule(options.pop("name", None), tokenizer, max_ends=3, **options)
