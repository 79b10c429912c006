"The causal twin: nothing looks ahead, packed is alone, and it learns."

import pytest
import torch

from bertlab.model.config import bert_tiny, modernbert_tiny
from bertlab.model.heads import BertLabForCausalLM

V = 40
SHAPE = dict(vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
             max_position_embeddings=48, initializer_range=0.3)  # fmt: skip
CONFIGS = {"modernbert": lambda: modernbert_tiny(**SHAPE), "bert": lambda: bert_tiny(**SHAPE),
           "windows": lambda: modernbert_tiny(**{**SHAPE, "num_hidden_layers": 4}, local_attention=8)}  # fmt: skip


def twin(name="modernbert"):
    torch.manual_seed(0)
    return BertLabForCausalLM(CONFIGS[name]()).eval()


def ids(rows=2, length=20, seed=0):
    return torch.randint(5, V, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["modernbert", "bert"])
def test_no_score_knows_its_own_token_or_a_later_one(name):
    model, text = twin(name), ids()
    for position in (1, 7, 19):
        changed = text.clone()
        changed[:, position] = (changed[:, position] - 4) % (V - 5) + 5
        with torch.no_grad():
            moved = (model(text).logits - model(changed).logits).abs().amax((0, 2))
        assert moved[: position + 1].max() < 1e-6
        assert position == 19 or moved[position + 1] > 1e-4


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_kernel_masks_later_tokens_and_other_documents(name, kernel):
    model, text = twin(name), ids(2, 20)
    documents = torch.tensor([[1] * 20, [1] * 9 + [2] * 8 + [0] * 3])
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(text, documents, output_attentions=True)
        model.set_attn_implementation(kernel)
        got = model(text, documents).logits
    torch.testing.assert_close(got[documents > 0], want.logits[documents > 0], rtol=0, atol=1e-4)
    for weights_BHLL in want.attentions:
        assert weights_BHLL[0].triu(1).max() == 0 and weights_BHLL[1, :, :17].triu(1).max() == 0
        assert weights_BHLL[1, :, 9:17, :9].max() == 0  # nothing of another document


def test_packed_documents_have_the_gradients_of_each_alone():
    model, text, gradients = twin(), ids(1, 18), []
    documents = torch.tensor([[1] * 7 + [2] * 8 + [0] * 3])
    labels = text.masked_fill(documents == 0, -100)
    alone = [(text[:, a:b], None, labels[:, a:b]) for a, b in ((0, 7), (7, 15))]
    for parts in ([(text, documents, labels)], alone):
        model.zero_grad()
        outputs = [model(a, m, labels=b) for a, m, b in parts]
        sum(output.loss_sum for output in outputs).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        # the first token of a document has no label
        assert sum(int(output.num_labels) for output in outputs) == 6 + 7
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*gradients))
