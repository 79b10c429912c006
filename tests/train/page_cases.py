"A small model whose page the tests open, and a server for its folder."

import contextlib
import functools
import http.server
import threading

import numpy as np
import torch

from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import modernbert_tiny
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.huggingface import save_model

WORDS = (
    "red green blue bird cat dog fish sees finds likes the a and is Zürich naïve don't 42".split()
)
TEXTS = [" ".join(np.random.default_rng(n).choice(WORDS, 4 + n % 9)) + "." for n in range(60)]
EXAMPLES = ["the red [MASK] sees the dog.", "a [MASK] likes <b>the</b> [MASK] & it's 42."]
SENTENCES = [
    "the red [MASK] sees the dog.",
    "[MASK]",
    "a [MASK] likes the [MASK].",
    "The RED bird [MASK] a naïve cat, and don't [MASK] it!",
    'Zürich is [MASK] (42 fish); "the" [MASK]...',
    "  spaces   around\tand\u00a0between [MASK]  ",
    "unknown signs: \u4e2d\u6587 \u0645\u0631\u062d\u0628\u0627 \U0001f600 [MASK]",
    "cafe\u0301 e\u0301 [MASK] \u00bd \ufb01sh",
    "the[MASK]dog",
    "a fish " * 20 + "[MASK].",
]


def make_model(folder, algorithm="wordpiece"):
    "A model with random weights, large enough that its guesses differ from gap to gap."
    tokenizer = train_tokenizer(TEXTS, 400 if algorithm != "wordpiece" else 120, kind=algorithm)
    torch.manual_seed(0)
    model = BertLabForMaskedLM(modernbert_tiny(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=128, initializer_range=0.4))  # fmt: skip
    save_model(model.eval(), tokenizer, folder)
    return tokenizer


@contextlib.contextmanager
def served(folder):
    "The address of a static server, and the list of the paths that were asked for."
    requested = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            requested.append(self.path)

        def copyfile(self, source, target):
            with contextlib.suppress(ConnectionError):
                super().copyfile(source, target)

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=folder)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", requested
    finally:
        server.shutdown()
        server.server_close()
