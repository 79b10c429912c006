"""Ideas that the library does not have, each as small as it can be, for the ablations.

An idea that pays moves into the library; one that does not stays here with its figures. Models are
named in a recipe as any model of one's own (`model.objective: tricks.SoftCapped`), callbacks likewise.
"""

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from bertlab.model.heads import BertLabForMaskedLM, MaskedLMHead


class ZeroOutputs(BertLabForMaskedLM):
    "What adds to the residual stream begins at zero, so that a fresh model hands its embeddings on."

    @torch.no_grad()
    def __init__(self, config):
        super().__init__(config)
        for part in self.encoder.blocks.modules():
            if getattr(part, "starts_narrow", False):
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

    def begin_(self, config) -> None:
        super().begin_(config)
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
        self.encoder.embeddings.register_forward_hook(lambda part, given, x: self._first.__setitem__(0, x))
        for block, mix in zip(self.encoder.blocks, self.mixes):
            block.register_forward_pre_hook(lambda part, given, mix=mix: (mix(given[0], self._first[0]), *given[1:]))
        self.post_init()


class ValueEmbeddings(BertLabForMaskedLM):
    "The first and the last block add a vector of each token's own to its values (Zhou et al. 2024, and later)."

    def __init__(self, config):
        super().__init__(config)
        D, last = config.hidden_size, config.num_hidden_layers - 1
        self.values = nn.ModuleDict({str(i): nn.Embedding(config.vocab_size, D) for i in dict.fromkeys((0, last))})
        self.shares = nn.ModuleDict({i: Mix() for i in self.values})
        self._ids: list[Tensor | None] = [None]
        self.encoder.embeddings.register_forward_pre_hook(lambda part, given: self._ids.__setitem__(0, given[0]))
        for i, table in self.values.items():
            self.encoder.blocks[int(i)].attention.qkv.register_forward_hook(
                lambda part, given, y, table=table, mix=self.shares[i]: self._add(y, table, mix))
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
            block.attention_end_norm, block.mlp_end_norm = Scale(config), Scale(config)
        self.post_init()


class Scale(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.factor_D = nn.Parameter(torch.ones(config.hidden_size))

    def begin_(self, config) -> None:
        nn.init.constant_(self.factor_D, 0.1)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD * self.factor_D


class FallingMasks(Callback):
    "The share of hidden tokens falls from `first` to `last` over the run; validation keeps its own."

    def __init__(self, first: float = 0.5, last: float = 0.2):
        self.first, self.last = first, last

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        from dataclasses import replace

        done = trainer.global_step / trainer.max_steps
        collator = trainer.datamodule.batches.collator
        collator.rule = replace(collator.rule, mlm_probability=self.first + (self.last - self.first) * done)


class GrowingWindows(Callback):
    "Local layers see `first` tokens at step 0, and the configuration's number from half of the run on."

    def __init__(self, first: int = 16):
        self.first = first

    def on_fit_start(self, trainer, module) -> None:
        self.full = module.config.local_attention

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        share = min(1.0, 2 * trainer.global_step / trainer.max_steps)
        module.config.local_attention = 2 * round((self.first + share * (self.full - self.first)) / 2)

    def on_validation_start(self, trainer, module) -> None:
        module.config.local_attention = self.full
