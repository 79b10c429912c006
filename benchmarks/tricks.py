"""Ideas that the library does not have, each as small as it can be, for the ablations.

An idea that pays moves into the library; one that does not stays here with its figures. Models are
named in a recipe as any model of one's own (`model.objective: tricks.SoftCapped`), callbacks likewise.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from bertlab.data.masking import place_labels
from bertlab.data.rows import IGNORE_INDEX
from bertlab.model.heads import BertLabForMaskedLM, MaskedLMHead
from bertlab.model.layers import Projection
from bertlab.optim.budgets import BatchSizeWarmup
from bertlab.optim.muon import _SIZES, MuonWithAdamW, BatchedMuon, _rounds_dtype
from bertlab.train.stopping import BatchSizeScheduler


class ZeroOutputs(BertLabForMaskedLM):
    "What adds to the residual stream begins at zero, so that a fresh model hands its embeddings on."

    @torch.no_grad()
    def __init__(self, config):
        super().__init__(config)
        for part in self.encoder.blocks.modules():
            if isinstance(part, Projection) and part.residual:
                part.weight.zero_()


class CappedHead(MaskedLMHead):
    "Scores between -cap and cap: cap tanh(score / cap) (Gemma 2, 2024, sec. 2)."

    cap = 15.0

    def forward(self, x: Tensor, embedding_VD: Tensor) -> Tensor:
        return self.cap * torch.tanh(super().forward(x, embedding_VD) / self.cap)


class SoftCapped(BertLabForMaskedLM):
    def __init__(self, config):
        super().__init__(config)
        self.head = CappedHead(config)
        self.post_init()


class ScaledHead(MaskedLMHead):
    "One learnt number that the scores are multiplied with; it begins at `scale`."

    scale = 1.0

    def __init__(self, config):
        super().__init__(config)
        self.factor = nn.Parameter(torch.tensor(self.scale))

    def init_weights_(self, config) -> None:
        super().init_weights_(config)
        nn.init.constant_(self.factor, self.scale)

    def forward(self, x: Tensor, embedding_VD: Tensor) -> Tensor:
        return super().forward(x * self.factor, embedding_VD)


class ScaledScores(BertLabForMaskedLM):
    def __init__(self, config):
        super().__init__(config)
        self.head = ScaledHead(config)
        self.post_init()


class Mix(nn.Module):
    "x and the embedding, mixed by two learnt numbers; it begins as x alone."

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))  # begins at 1, as every weight that is no matrix
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x_BLD: Tensor, first_BLD: Tensor) -> Tensor:
        return self.weight * x_BLD + self.bias * first_BLD


class EmbeddingSkips(BertLabForMaskedLM):
    "Each block reads the embedding again, by a learnt share (the skips of the fastest small decoders)."

    def __init__(self, config):
        super().__init__(config)
        self.mixes = nn.ModuleList(Mix() for _ in self.encoder.blocks)
        self._first: list[Tensor | None] = [None]
        self.encoder.embeddings.register_forward_hook(
            lambda part, given, x: self._first.__setitem__(0, x)
        )
        for block, mix in zip(self.encoder.blocks, self.mixes):
            block.register_forward_pre_hook(
                lambda part, given, mix=mix: (mix(given[0], self._first[0]), *given[1:])
            )
        self.post_init()


class ValueEmbeddings(BertLabForMaskedLM):
    "The first and the last block add a vector of each token's own to its values (Zhou et al. 2024, and later)."

    def __init__(self, config):
        super().__init__(config)
        D, last = config.hidden_size, config.num_hidden_layers - 1
        self.values = nn.ModuleDict(
            {str(i): nn.Embedding(config.vocab_size, D) for i in dict.fromkeys((0, last))}
        )
        self.shares = nn.ModuleDict({i: Mix() for i in self.values})
        self._ids: list[Tensor | None] = [None]
        self.encoder.embeddings.register_forward_pre_hook(
            lambda part, given: self._ids.__setitem__(0, given[0])
        )
        for i, table in self.values.items():
            self.encoder.blocks[int(i)].attention.qkv.register_forward_hook(
                lambda part, given, y, table=table, mix=self.shares[i]: self._add(y, table, mix)
            )
        self.post_init()

    def _add(self, y_BLX: Tensor, table: nn.Embedding, mix: Mix) -> Tensor:
        D = self.config.hidden_size
        rest, values_BLD = y_BLX.split((y_BLX.shape[-1] - D, D), dim=-1)
        return torch.cat((rest, mix(values_BLD, table(self._ids[0]).to(values_BLD.dtype))), dim=-1)


class BranchScales(BertLabForMaskedLM):
    "A learnt number for each width of what a block adds; it begins at 0.1 (LayerScale, Touvron et al. 2021)."

    def __init__(self, config):
        super().__init__(config)
        for block in self.encoder.blocks:
            block.post_attention_norm, block.post_mlp_norm = Scale(config), Scale(config)
        self.post_init()


class Scale(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.factor_D = nn.Parameter(torch.ones(config.hidden_size))

    def init_weights_(self, config) -> None:
        nn.init.constant_(self.factor_D, 0.1)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD * self.factor_D


class FallingMasks(Callback):
    "The share of hidden tokens falls from `first` to `last` over the run; validation keeps its own."

    def __init__(self, first: float = 0.5, last: float = 0.2):
        self.first, self.last = first, last

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        done = trainer.global_step / trainer.max_steps
        collator = trainer.datamodule.batches.collator
        collator.rule = replace(
            collator.rule, mlm_probability=self.first + (self.last - self.first) * done
        )


class GrowingWindows(Callback):
    "Local layers see `first` tokens at step 0, and the configuration's number from half of the run on."

    def __init__(self, first: int = 16):
        self.first = first

    def on_fit_start(self, trainer, module) -> None:
        self.full = module.config.local_attention

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        share = min(1.0, 2 * trainer.global_step / trainer.max_steps)
        module.config.local_attention = 2 * round(
            (self.first + share * (self.full - self.first)) / 2
        )

    def on_validation_start(self, trainer, module) -> None:
        module.config.local_attention = self.full


class ShortRowsFirst(Callback):
    "Rows are cut into shorter ones, whose documents do not see each other, until a share of the run is over."

    def __init__(self, length: int = 64, until: float = 0.7):
        self.length, self.until = length, until

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if trainer.global_step >= self.until * trainer.max_steps:
            return
        for name in ("input_ids", "attention_mask", "position_ids", "labels"):
            batch[name] = batch[name].reshape(-1, self.length)
        labelled_BL = (batch["labels"] != IGNORE_INDEX).numpy()
        batch["label_positions"] = torch.from_numpy(
            place_labels(labelled_BL, labelled_BL.sum(1).max())
        )
        dropped_B = batch["num_dropped_labels"]
        batch["num_dropped_labels"] = torch.cat(
            (dropped_B, dropped_B.new_zeros(len(labelled_BL) - len(dropped_B)))
        )


class DoublingBatch(BatchSizeScheduler):
    "Two micro-batches a step from half of the tokens on, which is two thirds of the steps."

    def __init__(self, tokens_per_micro_batch: int = 1024):
        super().__init__(BatchSizeWarmup(1, 2, 1, tokens_per_micro_batch=tokens_per_micro_batch))

    def on_train_start(self, trainer, module) -> None:
        single = round(2 * trainer.max_steps / 3)
        self.warmup = replace(
            self.warmup, warmup_tokens=single * self.warmup.tokens_per_micro_batch
        )
        super().on_train_start(trainer, module)


class GrowingDepth(Callback):
    "The first blocks train alone; then each later block begins as a copy of one of them (Gong et al. 2019, stacking)."

    def __init__(self, first: int = 2, until: float = 0.5):
        self.first, self.until, self.blocks = first, until, None

    def on_train_start(self, trainer, module) -> None:
        encoder = module.model.encoder
        self.blocks, encoder.blocks = encoder.blocks, encoder.blocks[: self.first]

    @torch.no_grad()
    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if self.blocks is None or trainer.global_step < self.until * trainer.max_steps:
            return
        for number, block in enumerate(self.blocks):
            origin = dict(self.blocks[number % self.first].named_parameters())
            for name, weight in block.named_parameters():
                if name in origin:  # the first block has no norm in front of its attention
                    weight.copy_(origin[name])
        module.model.encoder.blocks, self.blocks = self.blocks, None

    def on_train_end(self, trainer, module) -> None:
        if self.blocks is not None:
            raise ValueError("the run was over before the model had grown")


class EasyFirst(Callback):
    "The first epoch goes from rows of frequent tokens to rows of rare ones; later ones are shuffled (Bengio et al. 2009)."

    def on_fit_start(self, trainer, module) -> None:
        dataset = trainer.datamodule.train_dataset
        rows = dataset.build([(0, index) for index in range(len(dataset))])
        ids = [np.asarray(row["input_ids"]) for row in rows]
        counts_V = np.bincount(np.concatenate(ids), minlength=module.config.vocab_size)
        nats_V = -np.log(np.maximum(counts_V, 1) / counts_V.sum())
        order, build = np.argsort([nats_V[row].mean() for row in ids], kind="stable"), dataset.build

        def easy_first(keys):
            pairs = [key if isinstance(key, tuple) else (dataset.epoch, key) for key in keys]
            return build(
                [(epoch, int(order[index]) if epoch == 0 else index) for epoch, index in pairs]
            )

        dataset.build = easy_first


def best_quintic(low: float, high: float) -> tuple[float, float, float]:
    "The odd polynomial of degree 5 that stays closest to 1 between two numbers, by Remez' exchange of points."
    inner = np.array([3 * low + high, low + 3 * high]) / 4
    for _ in range(60):
        points = np.array([low, *inner, high])
        matrix = np.stack((points, points**3, points**5, [1, -1, 1, -1]), axis=1)
        a, b, c, _ = np.linalg.solve(matrix, np.ones(4))
        root = np.sqrt(9 * b * b - 20 * a * c)  # where the polynomial turns
        moved = np.sqrt(np.array([-3 * b - root, -3 * b + root]) / (10 * c))
        if np.abs(moved - inner).max() < 1e-12:
            break
        inner = moved
    return float(a), float(b), float(c)


SAFETY = 1.01  # beyond its interval a polynomial grows without bound, and bfloat16 rounds


@cache
def polar_rounds(rounds: int, low: float = 1e-3) -> tuple[tuple[float, float, float], ...]:
    "A polynomial for each round, best for the singular values that the rounds before have left (Amsel et al. 2025)."
    found, high = [], 1.0
    for _ in range(rounds):
        a, b, c = best_quintic(low, high)
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
        found.append((a, b, c))
    return tuple(found)


def polar(matrices: Tensor, rounds: int) -> Tensor:
    "Like `orthogonalized`, with a polynomial of its own for each round."
    X = matrices.to(_rounds_dtype(matrices.device))  # as `orthogonalized` does
    tall = X.shape[-2] > X.shape[-1]
    X = X.mT if tall else X
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for a, b, c in polar_rounds(rounds):
        X = X / SAFETY
        gram = X @ X.mT
        X = a * X + (b * gram + c * gram @ gram) @ X
    return X.mT if tall else X


class StackedPolar(BatchedMuon):
    def turn(self, stacked: Tensor, parameters: list[Tensor], group: dict) -> Tensor:
        return polar(stacked, group["ns_steps"])


class PolarMuon(MuonWithAdamW):
    "Muon whose rounds each have the best polynomial (Amsel et al. 2025, *Polar Express*)."

    hidden_class = StackedPolar


class StackedNor(BatchedMuon):
    beta2 = 0.95

    def turn(self, stacked: Tensor, parameters: list[Tensor], group: dict) -> Tensor:
        made = super().turn(stacked, parameters, group).float()
        moves = made if len(parameters) > 1 else [made]
        scaled = []
        for parameter, move in zip(parameters, moves):
            state = self.state[parameter]
            squares_R1 = move.square().mean(-1, keepdim=True)
            if "row_squares" not in state:
                state["row_squares"] = torch.zeros_like(squares_R1)
            mean_R1 = state["row_squares"].lerp_(squares_R1, 1 - self.beta2)
            even = move / (mean_R1.sqrt() + 1e-8)
            scaled.append(even * (move.norm() / even.norm().clamp(min=1e-8)))  # as large as it was
        return torch.stack(scaled) if len(parameters) > 1 else scaled[0]


class NorMuon(MuonWithAdamW):
    "Muon whose rows move alike, by a mean of their squares (Li et al. 2025, *NorMuon*)."

    hidden_class = StackedNor


class StackedParts(BatchedMuon):
    """Muon on queries, keys and values one by one, where one matrix holds them (Jordan et al. 2024 do so).

    They are told by their shape: three times as many rows as columns.
    """

    def parts(self, rows: int, columns: int) -> int:
        return 3 if rows == 3 * columns else 1

    def turn(self, stacked: Tensor, parameters: list[Tensor], group: dict) -> Tensor:
        rows, columns = stacked.shape[-2:]
        parts = self.parts(rows, columns)
        if parts == 1:
            return super().turn(stacked, parameters, group)
        apart = stacked.reshape(-1, rows // parts, columns)
        made = super().turn(apart, parameters, group).reshape(stacked.shape)
        # The caller's factor is that of the whole: its numbers are as large on average as those of a part.
        rule = _SIZES[group["adjust_lr_fn"]]
        return made * (rule(rows // parts, columns) / rule(rows, columns))


class MuonOfParts(MuonWithAdamW):
    hidden_class = StackedParts


class StackedPartsAndGates(StackedParts):
    "The two halves of a gated MLP's first matrix one by one, too: taller than wide, and no third of it is square."

    def parts(self, rows: int, columns: int) -> int:
        return 2 if columns < rows != 3 * columns else super().parts(rows, columns)


class MuonOfAllParts(MuonWithAdamW):
    hidden_class = StackedPartsAndGates
