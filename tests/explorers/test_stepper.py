"The stepper shows what the sampler did at each position."

import math
import re

import numpy as np
import pytest
import torch

from bertlab.data.tokenizers import train_tokenizer
from bertlab.explorers.stepper import step_cells, step_html, stepper
from bertlab.model.config import modernbert_tiny
from bertlab.model.generation import generate_with_steps
from bertlab.model.heads import BertLabForMaskedDiffusion

torch.set_num_threads(1)
TOKENIZER = train_tokenizer(["the cat sat on the mat <b> bold"] * 20, vocab_size=80)
torch.manual_seed(0)
MODEL = BertLabForMaskedDiffusion(modernbert_tiny(vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                                  num_attention_heads=1, max_position_embeddings=40, initializer_range=0.4))  # fmt: skip
MASK = TOKENIZER.mask_token_id


@pytest.mark.parametrize("sampler", ["confidence", "remask", "ancestral"])
def test_the_fate_of_a_token_follows_from_the_states(sampler):
    writing = generate_with_steps(
        MODEL,
        TOKENIZER,
        ["the [MASK] sat [MASK] [MASK] [MASK] mat"],
        sampler=sampler,
        num_steps=9,
        remask=1.0,
        seed=3,
    )[0]
    seen = set()
    for step in range(10):
        now, before = writing.states[step][1:-1], writing.states[max(0, step - 1)][1:-1]
        for i, cell in enumerate(step_cells(TOKENIZER, writing, step)):
            is_given = writing.states[0][1:-1][i] != MASK
            right = ("given" if is_given else "new" if now[i] != MASK and before[i] == MASK
                     else "written" if now[i] != MASK else "taken back" if before[i] != MASK else "open")  # fmt: skip
            assert cell.fate == right
            assert math.isnan(cell.confidence) == (right in ("given", "open"))
            token = before[i] if right == "taken back" else now[i]
            assert cell.token == (
                "" if right == "open" else TOKENIZER.convert_ids_to_tokens(int(token))
            )
            seen.add(right)
    assert ("taken back" in seen) == (sampler == "remask") and {"given", "open", "new"} <= seen


def test_a_step_shows_words_and_their_confidence():
    writing = generate_with_steps(MODEL, TOKENIZER, ["the [MASK] [MASK] mat"], seed=1)[0]
    [position] = np.flatnonzero(writing.states[0] != writing.states[1])
    drawn = step_html(TOKENIZER, writing, 1)
    sure = writing.confidence[1, position]
    word = TOKENIZER.convert_ids_to_tokens(int(writing.states[1, position]))
    assert f"wrote <bdi>{word}</bdi> ({sure:.0%}); 1 open" in drawn.replace("&#x27;", "'").replace(
        "&lt;", "<"
    ).replace("&gt;", ">")
    assert f"new, probability {sure:.1%}" in drawn
    with pytest.raises(ValueError, match="step must be from 0 to 2, got 3"):
        step_html(TOKENIZER, writing, 3)


def test_the_static_form_has_every_step_without_a_script():
    static = stepper(MODEL, TOKENIZER, "the [MASK] [MASK] [MASK]", num_steps=3).static_html
    assert len(re.findall("<figure>", static)) == 4 and "<script" not in static
    assert [int(n) for n in re.findall(r"(\d) open", static)] == [3, 2, 1, 0]
