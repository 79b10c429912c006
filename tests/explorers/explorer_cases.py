"""Every explorer, built from small real objects, with the actions of a user and the text they must show.

The browser tests make one notebook of these cases. The source of a case names its explorer `explorer`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Act:
    "An action of a user, and the text that the explorer must show then and did not before."

    control: str  # its description, as the user reads it
    # Keys: "press" keys, separated by spaces; "type". Mouse: "click" a button; "drag" a slider to a
    # share of its length; "play". "choose" from a list.
    how: str
    what: str
    shows: str  # regular expression, found in the text of the explorer's drawing


@dataclass(frozen=True)
class Case:
    "An explorer, actions in their order, and steps of its static form with what each must show."

    source: str
    acts: tuple[Act, ...]
    steps: dict[str, str] = field(default_factory=dict)  # label of a step -> regular expression
    # Description, value, words of the message; no words: a value for the next ones.
    messages: tuple[tuple[str, object, str], ...] = ()


def find_widgets(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from find_widgets(child)


def make_room() -> dict:
    "Return the names that the sources of the cases use: a tokenizer and small models."
    room: dict = {}
    exec(SETUP, room)
    return room


SETUP = """
import pydoc_data.topics

import torch

from bertlab.model.config import BertLabConfig
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.heads import BertLabForMaskedLM

TEXT = "Return True if all characters in the string are digits and there is at least one character."
tokenizer = train_tokenizer([*pydoc_data.topics.topics.values(), TEXT], vocab_size=1500)


def small_model(seed):
    torch.manual_seed(seed)
    config = BertLabConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                           vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id,
                           max_position_embeddings=64)
    return BertLabForMaskedLM(config)
"""

CASES = {
    "mask_dial": Case(
        """
from bertlab.explorers.widgets import mask_dial

explorer = mask_dial(tokenizer, TEXT, probability=0.3)
""",
        (
            Act("dial", "press", "ArrowRight ArrowRight", r"of 18: \d+%, asked 40%"),
            Act("probability", "type", "0.75", r"of 18: \d+%, asked 75%"),
            Act("probability", "type", "2", r"mlm_probability=2(\.0)? must be in \(0, 1\]"),
            Act("probability", "type", "0.5", r"of 18: \d+%, asked 50%"),
            # Of 18 tokens, a budget of one half is 9; and the recipe is always 80/10/10.
            Act(
                "hide",
                "click",
                "spans",
                r"chosen 9 of 18: 50%, asked 50%; hidden .*80%; .* asked 10%; .* asked 10%",
            ),
            Act("dial", "drag", "1", r"chosen 18 of 18: 100%, asked 100%"),
            Act("sentence", "type", "Return the name of the file.", r"chosen 7 of 7: 100%"),
            Act("sentence", "type", "", r"type a sentence"),
            Act("sentence", "type", "a b c d", r"chosen 4 of 4: 100%"),
            Act(
                "objective",
                "choose",
                "enhanced_mlm",
                r"hidden 0 of 4: 0%, asked 0%; .*; kept 4 of 4: 100%, asked 100%",
            ),
        ),
        {"15%": r"of 18: \d+%, asked 15%", "spans, 30%": r"chosen 5 of 18: 28%, asked 30%"},
        (
            ("probability", 2.0, "mlm_probability=2.0 must be in (0, 1]"),
            ("probability", float("nan"), "mlm_probability=nan must be in (0, 1]"),
            ("sentence", "  ", "type a sentence"),
        ),
    ),
    "stepper": Case(
        """
from bertlab.explorers.stepper import stepper

explorer = stepper(small_model(3), tokenizer, "the [MASK] of the [MASK] [MASK]", num_steps=4, seed=1)
""",
        (
            # Three gaps in four steps: 3 * 3/4, 3 * 1/2, 3 * 1/4 and 0 are open, rounded half up.
            Act("step", "press", "ArrowRight", r"step 1 of 4; wrote \S+ \(\d+%\); 2 open"),
            Act("step", "press", "End", r"step 4 of 4; wrote \S+ \(\d+%\); 0 open"),
            Act("step", "press", "Home", r"step 0 of 4; the prompt; 3 open"),
            Act("step", "drag", "1", r"step 4 of 4; wrote \S+ \(\d+%\); 0 open"),
            # Another prompt is shown at the same step, so that two can be compared.
            Act("step", "press", "Home", r"step 0 of 4; the prompt; 3 open"),
            Act("prompt", "type", "the [MASK]", r"step 0 of 4; the prompt; 1 open"),
            Act("prompt", "type", " ", r"type a prompt, such as"),
            Act("prompt", "type", "in the", r"step 0 of 4; the prompt; 12 open"),
            Act("step", "press", "ArrowRight", r"step 1 of 4; wrote .*; 9 open"),
        ),
        {"step 0": r"the prompt; 3 open", "step 4": r"wrote \S+ \(\d+%\); 0 open"},
        (("prompt", "", "type a prompt"),),
    ),
    "packing_visualiser": Case(
        """
from bertlab.explorers.packing import packing_visualiser

explorer = packing_visualiser([60, 50, 40, 50], capacity=100)
""",
        (
            # Two rows hold 60 + 40 and 50 + 50; next-fit opens a row for the first 50 and one for the last.
            Act(
                "packer",
                "click",
                "next-fit",
                r"200 of 300 positions in use, 100 wasted; efficiency 66\.7%",
            ),
            Act(
                "packer",
                "click",
                "padded",
                r"200 of 400 positions in use, 200 wasted; efficiency 50\.0%",
            ),
            Act(
                "packer",
                "click",
                "best-fit",
                r"200 of 200 positions in use, 0 wasted; efficiency 100\.0%",
            ),
            Act(
                "documents",
                "press",
                "ArrowLeft",
                r"3 of 4 documents: 160 of 200 positions in use, 40 wasted",
            ),
            Act("capacity", "type", "55", r"lengths\[0\] = 60 is outside 0 to 55"),
            Act("capacity", "type", "200", r"3 of 4 documents: 160 of 200 .* efficiency 80\.0%"),
            Act("documents", "drag", "0", r"0 of 4 documents: .* no row is open yet"),
            Act("deal", "play", "", r"[1-4] of 4 documents: "),
            Act("lengths", "type", "100 100", r"2 of 2 documents: 200 of 200 positions"),
            Act("lengths", "type", "many", r"'many' is not a length"),
        ),
        {
            "padded, 4 of 4": r"efficiency 50\.0%",
            "next-fit, 4 of 4": r"efficiency 66\.7%",
            "best-fit, 4 of 4": r"efficiency 100\.0%",
        },
        (
            ("lengths", "", "type the lengths"),
            ("lengths", "3 -4", "'-4' is not a length"),
            ("lengths", "1 " * 201, "201 lengths are too many"),
            ("capacity", 0, "capacity=0 must be 1 or more"),
            ("capacity", 59, "lengths[0] = 60 is outside 0 to 59"),
        ),
    ),
    "document_mask_viewer": Case(
        """
from bertlab.data.packing import PackedDataset
from bertlab.explorers.packing import document_mask_viewer

# 5 + 3 + 2 tokens and two special ones each: 7 + 5 + 4 places, then 4 of padding.
row = PackedDataset([range(10, 15), range(20, 23), range(30, 32)], 20, pad_token_id=tokenizer.pad_token_id,
                    cls_token_id=tokenizer.cls_token_id, sep_token_id=tokenizer.sep_token_id, shuffle=False)[0]
explorer = document_mask_viewer(row, tokenizer.convert_ids_to_tokens(row["input_ids"]), window=2)
""",
        (
            Act("layer", "click", "window", r"reaches 3 tokens: positions 0 to 2 "),
            Act(
                "token",
                "press",
                "ArrowRight",
                r"position 1 of document 1, reaches 4 tokens: positions 0 to 3 ",
            ),
            Act("window", "type", "1", r"reaches 3 tokens: positions 0 to 2 "),
            Act("window", "type", "-1", r"window=-1 must be 0 or more"),
            Act("layer", "click", "global", r"reaches 7 tokens: positions 0 to 6 "),
            Act("token", "press", "End", r"is padding: it reaches 0 tokens"),
        ),
        {},
        (("layer", "window", ""), ("window", -1, "window=-1 must be 0 or more")),
    ),
    "fill_mask_box": Case(
        """
from bertlab.explorers.fill_mask import compare_guesses

texts = ["return the [MASK] of the string.", "the [MASK] of the [MASK]."]
explorer = compare_guesses({"one": (small_model(1), tokenizer), "two": (small_model(2), tokenizer)}, texts, top_k=3)
""",
        (
            Act("sentence", "type", "[MASK] the [MASK] of [MASK].", r"two, gap 3 of 3"),
            Act("guesses", "press", "ArrowRight", r"(?:one, gap 1 of 3)\s+(?:\S+\s+[\d.]+%\s+){4}"),
            Act("sentence", "type", "no gap", r"the sentence needs a gap"),
            Act("sentence", "type", "a [MASK]", r"two, gap 1 of 1"),
            Act("guesses", "drag", "0", r"two, gap 1 of 1\s+\S+\s+[\d.]+%\s*$"),
        ),
        {"sentence 1": r"one, gap 1 of 1", "sentence 2": r"two, gap 2 of 2"},
        (
            ("sentence", "", "type a sentence with a gap"),
            ("sentence", "no gap", "the sentence needs a gap"),
            ("sentence", "[MASK] " * 80, "the model reads 64"),
        ),
    ),
    "schedule_designer": Case(
        """
from bertlab.explorers.schedules import rate_designer

explorer = rate_designer(num_steps=1000, learning_rate=1e-3)
""",
        (
            # A warmup of 50 is worth 25.5 updates, a cooldown of 200 100.5, and 750 are flat: 876.
            Act("cooldown", "choose", "1-sqrt", r"area: 842\.7 updates"),
            Act("cooldown", "choose", "linear", r"area: 876\.0 updates"),
            Act(
                "warmup updates",
                "press",
                "ArrowRight ArrowRight",
                r"area: 875\.0 updates .*\n.*52 of warmup",
            ),
            Act("peak rate", "type", "0", r"must be above 0"),
            Act("peak rate", "type", "0.01", r"flat rate of the same area, 0\.00875"),
            Act("run (updates)", "type", "100", r"do not fit into"),
            Act("run (updates)", "type", "2000000", r"of 2,000,000\)"),
            Act("run (updates)", "type", "1000", r"of 1,000\)"),
            Act("cooldown to", "press", "End", r"area: 974\.5 updates"),
            Act("cooldown to", "drag", "0", r"area: 875\.0 updates"),
        ),
        {
            "trapezoid": r"area: 876\.0 updates[\s\S]*scheduler_cooldown_steps: 200",
            "no warmup, flat": r"1,000\.0 updates",
        },
        (
            ("peak rate", 0.0, "must be above 0"),
            ("peak rate", float("nan"), "must be above 0"),
            ("run (updates)", 0, "total_steps=0"),
            ("run (updates)", 100, "do not fit into"),
            ("cooldown updates", 1000, "do not fit into"),
            ("cooldown", "exponential", "cooldown_decay=0.0"),
        ),
    ),
    "optimizer_race": Case(
        """
from bertlab.explorers.optimizers import OptimizerRun, optimizer_race

falling = [5 - n / 10 for n in range(20)]
runs = [OptimizerRun(rule, 0.01, seed, falling, [size] * 20, {1: [4.0, 1.0], 10: [4.0, third, 3.0]})
        for rule, size, third in (("adamw", 0.5, 1.0), ("muon", 0.25, 3.0)) for seed in range(2)]
explorer = optimizer_race(runs)
""",
        (
            # Update 10 was made for the loss 5 - 0.9; above half of 4.0 are one, or all three.
            Act("update", "press", "ArrowRight", r"update 2\n"),
            Act("update", "press", "End", r"update 20\n"),
            Act("update", "press", "Home", r"update 1\n"),
            Act("update", "drag", "1", r"update 20\n"),
        ),
        {
            "update 10": r"update 10\s+rule\s.*\s+adamw\s+0\.01\s+4\.100\s+5\.00e-01\s+2 of 3\s+muon\s.*3 of 3",
            "update 20": r"3\.100",
        },
        (("adamw", False, ""), ("muon", False, "choose at least one rule")),
    ),
    "attention_browser": Case(
        """
from bertlab.explorers.models import attention_browser

explorer = attention_browser(small_model(3), tokenizer, TEXT)
""",
        (
            Act("layer", "press", "ArrowRight", r"this model, layer 1, head 0"),
            Act("head", "press", "ArrowRight", r"untrained twin, layer 1, head 1"),
            Act("token", "press", "Home", r"\[CLS\] \(position 0\) looks at"),
            Act("beside it", "choose", "shuffled words", r"shuffled words, layer 1, head 1"),
            Act("sentence", "type", "", r"type a sentence"),
            Act("sentence", "type", "a b", r"as if at [1-4]\.\d of 4 tokens"),
            Act("layer", "drag", "0", r"this model, layer 0, head 1"),
        ),
        {"layer 0, head 1": r"this model, layer 0, head 1[\s\S]*untrained twin, layer 0, head 1"},
        (
            ("sentence", " ", "type a sentence"),
            ("sentence", "a " * 60, "the sentence has 62 tokens, 32 fit"),
        ),
    ),
    "embedding_map": Case(
        """
from bertlab.explorers.models import embedding_map

explorer = embedding_map(small_model(4), tokenizer, ["the", "string"])
""",
        (
            Act("token", "type", "string", r"nearest to string: (\S+ -?[\d.]+(, )?){5}\n"),
            Act(
                "neighbours",
                "press",
                "ArrowLeft ArrowLeft",
                r"nearest to string: (\S+ -?[\d.]+(, )?){3}\n",
            ),
            Act("token", "type", "xylophone", r"is not in the vocabulary; its pieces are"),
            Act("token", "type", "the", r"nearest to the:"),
            Act("neighbours", "drag", "0", r"nearest to the: \S+ -?[\d.]+\n"),
        ),
        {"the": r"this model[\s\S]*nearest to the:[\s\S]*untrained twin[\s\S]*nearest to the:"},
        (("token", "", "type a token"), ("token", "no such words", "is not in the vocabulary")),
    ),
    "text_map": Case(
        """
from bertlab.embeddings.bi_encoder import BiEncoder
from bertlab.explorers.text_map import text_map

encoder = small_model(5).encoder.eval()
explorer = text_map({"this model": BiEncoder(encoder, tokenizer, max_sequence_length=16)},
                    ["the name of a file", "a string", "the list of names", "return a number", "an object", "close a file"],
                    ["the name", "a list"])
""",
        (
            Act("query", "type", "a number", r"query: a number\b"),
            Act("texts", "press", "ArrowLeft ArrowLeft", r"texts\s+3\s[\s\S]*query: a number"),
            Act("query", "type", "", r"type a query"),
            Act("query", "type", "close a file", r"query: close a file[\s\S]*1\.00 close a file"),
            # One text of six is left in the list.
            Act("texts", "drag", "0", r"query: close a file[\s\S]*1\.00 close a file\s*$"),
        ),
        {"query 1": r"query: the name", "query 2": r"query: a list"},
        (("query", " ", "type a query"),),
    ),
}
