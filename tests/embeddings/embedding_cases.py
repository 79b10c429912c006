"What tests of embeddings share: a small model, its tokenizer, and pairs."

from functools import lru_cache

import numpy as np
import torch

from bertlab.data.tokenizers import train_tokenizer
from bertlab.embeddings.module import EmbeddingModule
from bertlab.embeddings.pairs import EmbeddingDataModule, PairDataset
from bertlab.model.config import bert_tiny, modernbert_tiny
from bertlab.train.trainer import make_trainer, seed_everything

WORDS = ("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon phi chi "
         "psi omega north south east west red green blue white black one two three four five six seven").split()  # fmt: skip


def draw_pairs(
    count: int = 48, negatives: int = 0, seed: int = 0, scores: bool = False
) -> PairDataset:
    "Queries of some words, whose documents hold these words among others."
    rng, rows = np.random.default_rng(seed), []
    for index in range(count):
        words = rng.choice(WORDS, 3, replace=False)
        document = [*words, *rng.choice(WORDS, rng.integers(1, 6))]
        rng.shuffle(document)
        wrong = [" ".join(rng.choice(WORDS, 5)) + f" {n}" for n in range(negatives)]
        teacher = [1.0, *rng.uniform(0, 0.5, negatives)] if scores else []
        rows.append(
            (
                f"{' '.join(words)} {index % 7}",
                f"{' '.join(document)} {index % 5}",
                wrong,
                teacher,
            )
        )
    queries, positives, wrong, teacher = map(list, zip(*rows))
    return PairDataset(queries, positives, wrong, teacher if scores else None)


@lru_cache
def small_tokenizer():
    return train_tokenizer([" ".join(WORDS), "0 1 2 3 4 5 6 7 8 9"], 260)


def small_config(family: str = "modernbert", dropout: float = 0.0) -> dict:
    make = {"modernbert": modernbert_tiny, "bert": bert_tiny}[family]
    options = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    if dropout:
        options |= {
            "attention_dropout": dropout,
            "mlp_dropout": dropout,
            "embedding_dropout": dropout,
        }
    tokenizer = small_tokenizer()
    return make(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **options
    ).to_diff_dict()


def small_data(pairs: PairDataset | None = None, batch: int = 8, **options) -> EmbeddingDataModule:
    data = EmbeddingDataModule(small_tokenizer(), max_sequence_length=16, train_batch_size=batch, val_batch_size=16,
                               row_length=options.pop("row_length", 24), validation_fraction=0.25, **options)  # fmt: skip
    data.set_datasets(pairs or draw_pairs())
    return data


def small_module(
    seed: int = 0, dropout: float = 0.0, family: str = "modernbert", **options
) -> EmbeddingModule:
    seed_everything(seed)
    settings = {"learning_rate": 3e-3, "model_config_kwargs": small_config(family, dropout)}
    module = EmbeddingModule(
        **settings | options, pretrained_tokenizer_name_or_path=small_tokenizer()
    )
    module.configure_model()
    return module


def fit(module, data, steps: int = 4, **options):
    trainer = make_trainer(steps, "32-true", accelerator="cpu", gradient_clip_val=None, **options)
    trainer.fit(module, data)
    return trainer


def weights_of(module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])
