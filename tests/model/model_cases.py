"What tests of models share: random numbers, a small shape, and weights that have moved."

import pytest
import torch

from bertlab.model.config import BertLabConfig, modernbert_tiny


torch.set_num_threads(1)


@pytest.fixture(autouse=True)  # in the files that import it
def same_start_for_every_test():
    torch.manual_seed(0)


def small(**overrides) -> BertLabConfig:
    "A shape whose windows are narrower than the rows of the tests."
    shape = dict(vocab_size=50, hidden_size=16, intermediate_size=20, num_hidden_layers=2,
                 num_attention_heads=2, local_attention=4)  # fmt: skip
    return modernbert_tiny(**{**shape, **overrides})


def lively(model: torch.nn.Module) -> torch.nn.Module:  # in evaluation mode
    "Move every weight, norms and biases too, so that nothing hides."
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.12 * torch.randn(weight.shape))
    return model.eval()
