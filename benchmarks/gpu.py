"""Training throughput of BERT-base and ModernBERT-base on a GPU, beside transformers' own models.

    python benchmarks/gpu.py [--rounds 5] [--steps 10] [--rows N]

All sides train in one process and take turns, in bfloat16 (autocast, weights in float32), without dropout,
with fused AdamW, clipping and pinned batches:

- bertlab: documents packed into rows of 512, scores at labels alone, layers compiled; and the same with
  BERT's residual stream in 16 bits between the norms (`residual_in_fp32=False`)
- transformers: one document per row, padded to the longest of its batch, about as many positions
- transformers, grouped: bertlab's full rows read as if each were one text; as the model is, and compiled

Reported are the real tokens per second, medians over rounds, and MFU: the operations that real tokens
need (`flops_per_token`) over the best rate of matrix products measured before and after.
"""

import itertools
import statistics
import time

import torch
from sides import common_parser, write_result
from transformers import AutoModelForMaskedLM, BertConfig, ModernBertConfig

import bertlab
from bertlab.core.devices import benchmark_matmul, find_devices
from bertlab.data.collators import MaskedLanguageModelingCollator
from bertlab.data.corpus import embedded_corpus
from bertlab.data.packing import PackedDataset, special_token_ids
from bertlab.data.tokenizers import train_tokenizer
from bertlab.model.config import bert_base, modernbert_base
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.model.losses import LossConfig
from bertlab.optim.groups import parameter_groups
from bertlab.optim.optimizers import get_optimizer
from bertlab.train.modules import compile_model
from bertlab.train.objectives import BATCH_KEYS

LENGTH, MASKED = 512, 0.15
ROWS = {"BERT-base": 128, "ModernBERT-base": 64}  # in a batch: what 80 GB of memory hold
TINY = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
NO_DROPOUT = dict.fromkeys(("embedding_dropout", "attention_dropout", "hidden_dropout"), 0.0)
THEIR_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
SHAPES = {  # our config, theirs, and options of theirs
    # BERT's vocabulary of 30,522 rounded up to a multiple of 64, on both sides
    "BERT-base": (
        lambda **o: bert_base(**{"vocab_size": 30528, **NO_DROPOUT, **o}),
        BertConfig,
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "ModernBERT-base": (
        modernbert_base,
        ModernBertConfig,
        THEIR_IDS | {"sparse_prediction": True},
    ),
}
NARROW = "bertlab, stream in 16 bits"
SIDES = {  # name: its batches
    "bertlab": "packed",
    NARROW: "packed",
    "transformers": "padded",
    "transformers, grouped": "grouped",
    "transformers, grouped, compiled": "grouped",
}


def make_batches(rows: int, device, form: str, texts, tokenizer, count: int) -> list[dict]:
    "Return batches of the same documents: packed, grouped, or padded (one document per row)."
    padded = form == "padded"
    documents = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    special = special_token_ids(tokenizer)
    dataset = PackedDataset(documents, LENGTH, **special, packing=not padded)
    collate = MaskedLanguageModelingCollator.from_tokenizer(
        tokenizer,
        mlm_probability=MASKED,
        max_sequence_length=LENGTH,
        pad_to_multiple_of=8 if padded else None,
    )
    if padded:  # as many positions as the other side has
        sample = collate([dataset[0, i] for i in range(min(64, len(dataset)))])
        rows = max(8, rows * LENGTH // sample["input_ids"].shape[1] // 8 * 8)
    order, batches = itertools.cycle(range(len(dataset))), []
    for _ in range(count):
        batch = collate([dataset[0, next(order)] for _ in range(rows)])
        names = BATCH_KEYS if form == "packed" else ("input_ids", "attention_mask", "labels")
        batch = {name: batch[name] for name in names if name in batch}
        if form != "packed":
            batch["attention_mask"] = (batch["attention_mask"] > 0).long()
        pin = device.type == "cuda"
        batches.append({name: t.pin_memory() if pin else t for name, t in batch.items()})
    return batches


def real_tokens(batches: list[dict]) -> int:
    return sum(int((batch["attention_mask"] > 0).sum()) for batch in batches)


def mean_context(batches: list[dict]) -> float:
    "Return the tokens that a token may attend to: sum(n * n) / sum(n) over the documents."
    rows = (row for batch in batches for row in batch["attention_mask"])
    sizes = torch.cat([torch.bincount(row[row > 0]) for row in rows]).double()
    return float((sizes**2).sum() / sizes.sum())


class Side:
    "A model that trains on its batches."

    def __init__(self, name: str, shape: str, options, device, batches: list[dict]):
        our_config, their_config, their_options = SHAPES[shape]
        size = TINY if options.quick else {}
        size = {**size, "residual_in_fp32": False} if name == NARROW else size
        self.config, self.batches, self.device, self.turn = our_config(**size), batches, device, 0
        self.loss_options, self.rates = {}, []
        torch.manual_seed(0)
        if name.startswith("transformers"):
            vocabulary = {"vocab_size": self.config.vocab_size, "pad_token_id": 0}
            config = their_config(**{**vocabulary, **size, **their_options})
            self.model = AutoModelForMaskedLM.from_config(config, attn_implementation="sdpa")
            if name.endswith("compiled") and not options.quick:
                self.model.compile()
        else:
            self.model = BertLabForMaskedLM(self.config)
            self.loss_options = {"loss_config": LossConfig(loss_only=True)}
            if not options.quick:
                compile_model(self.model)
        self.model.to(device).train()
        groups = parameter_groups(self.model, weight_decay=0.01)
        self.optimizer = get_optimizer("adamw", groups, {"lr": 1e-4})

    def step(self) -> None:
        batch = self.batches[self.turn % len(self.batches)]
        self.turn += 1
        batch = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(**batch, **self.loss_options).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.last_loss = loss.detach()

    def run(self, steps: int) -> None:
        "Note the real tokens per second of some steps."
        numbers = range(self.turn, self.turn + steps)
        tokens = real_tokens([self.batches[n % len(self.batches)] for n in numbers])
        synchronize(self.device)
        start = time.perf_counter()
        for _ in numbers:
            self.step()
        synchronize(self.device)
        self.rates.append(tokens / (time.perf_counter() - start))

    def figures(self, ceiling: float) -> dict:
        "Return rate, MFU and how full the rows are."
        labels = sum(int((batch["labels"] != -100).sum()) for batch in self.batches)
        tokens = real_tokens(self.batches)
        flops = self.config.flops_per_token(mean_context(self.batches), labels / tokens)
        rate = statistics.median(self.rates)
        return {
            "tokens_per_second": rate,
            "tokens_per_second_of_rounds": self.rates,
            "mfu": rate * flops / ceiling,
            "real_share": tokens / sum(b["attention_mask"].numel() for b in self.batches),
            "rows": len(self.batches[0]["input_ids"]),
            "last_loss": float(self.last_loss),
        }


def synchronize(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(shape: str, options, device, texts, tokenizer, ceilings: list[float]) -> dict:
    "Measure all sides of a shape in turns."
    rows, count = options.rows or ROWS[shape], 2 if options.quick else 8
    batches = {
        form: make_batches(rows, device, form, texts, tokenizer, count)
        for form in set(SIDES.values())
    }
    sides, peaks = {}, {}
    torch.compiler.reset()
    for name, form in SIDES.items():
        if name == NARROW and shape != "BERT-base":
            continue
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        sides[name] = Side(name, shape, options, device, batches[form])
        for _ in range(count):  # compiles, and warms up
            sides[name].step()
        if device.type == "cuda":
            peaks[name] = torch.cuda.max_memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()
    for n in range(options.rounds + 1):
        for name in list(sides)[:: 1 if n % 2 else -1]:
            sides[name].run(options.steps)
    for side in sides.values():
        del side.rates[0]
    ceilings.append(benchmark_matmul("bf16-mixed", 0.2 if options.quick else 2.0, device))
    figures, base = {}, statistics.median(sides["transformers"].rates)
    for name, side in sides.items():
        figures[name] = side.figures(max(ceilings))
        rate, mfu = figures[name]["tokens_per_second"], figures[name]["mfu"]
        figures[name] |= {"times_transformers": rate / base, "peak_memory_bytes": peaks.get(name)}
        print(f"{shape:16} {name:32} {rate:10,.0f} tokens/s  MFU {mfu:5.1%}", flush=True)
    return figures


def main() -> None:
    parser = common_parser(__doc__, "gpu", rounds=5)
    parser.add_argument("--steps", type=int, default=10, help="of a round (default: 10)")
    parser.add_argument("--rows", type=int, help="in a batch (default: 128, of ModernBERT 64)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    info = find_devices()[0]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not options.quick:
        parser.error("torch finds no GPU; --quick runs tiny sizes on a CPU")
    if options.quick:
        options.rounds, options.steps, options.rows = 1, 1, 2
    texts = embedded_corpus(max_documents=500 if options.quick else None).train_texts
    tokenizer = train_tokenizer(texts, 1024 if options.quick else 30_522)
    ceilings = [benchmark_matmul("bf16-mixed", 0.2 if options.quick else 2.0, device)]
    result = {
        "hardware": info.name,
        "measured": time.strftime("%Y-%m-%d"),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "bertlab": bertlab.__version__,
        "row_length": LENGTH,
        "ceiling_flops": ceilings,
        "shapes": {},
    }
    for shape in options.shapes:
        result["shapes"][shape] = measure(shape, options, device, texts, tokenizer, ceilings)
        write_result(options, result)


if __name__ == "__main__":
    main()
