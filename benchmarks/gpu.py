"""Training throughput of BERT-base and ModernBERT-base shapes on a GPU, beside transformers' own models.

    python benchmarks/gpu.py [--rows N] [--rounds 5] [--steps 10] [--output FILE]
    python benchmarks/gpu.py --sides bertlab "bertlab, varlen"    these sides alone, and nothing is written
    python benchmarks/gpu.py --losses 600     and what a stream in 16 bits does to the loss, after so many steps
    python benchmarks/gpu.py --small          the same path on a CPU, tiny shapes, no figures to quote

Needs torch and bertlab with what it depends on; for the rates nothing is downloaded, and the file runs from
any folder. For each shape, in bfloat16 (autocast, weights in float32), in one process, taking turns:

- bertlab: documents packed into rows of 512, labels-only head, compiled layers. With the attention
  kernel that "auto" takes; and the same with BERT's stream in 16 bits between the norms
  (`residual_in_fp32=False`). Where they are named: with torch's own attention and a written mask; with
  varlen attention on unpadded tokens; with FlexAttention, whose shapes are static; and with FlexAttention
  and CUDA graphs (mode="reduce-overhead"), which pays where kernels are shorter than their launch
- transformers: BertForMaskedLM or ModernBertForMaskedLM with SDPA, one document in a row, padded to
  the longest of the batch, so that most positions hold nothing; about as many positions as bertlab's
- transformers, grouped: bertlab's own rows, full, read as if each were one text, as group_texts makes them;
  as the model is, and compiled whole. ModernBERT has its labels-only head (`sparse_prediction`) on all sides

All without dropout, with the fused AdamW, clipping and pinned batches that are copied without waiting.
Real tokens (no padding) per second are medians over rounds, behind one that is not counted. MFU is the
work that the real tokens need (forward and backward, `flops_per_token`), over the best rate of matrix
products measured before and after; recomputed or padded work counts for nothing. Where the time goes is a
profile of a step with each batch: milliseconds of a step in kernels of a kind, and "none", when no kernel
ran. Memory is what a side takes on the GPU at its peak beyond what was there before it was built. A side
that fails is named with its error, and the others go on. Behind BERT-base stand lines of verdict: each
target, and whether it is reached as bertlab is and with the stream in 16 bits.

Then the track `gpu-hour` of `speedrun.py` is run for two minutes instead of an hour, compiling
included: a first figure, and no entry of the track. Its text comes from the hub; without a network it is the
embedded corpus.

With --losses a BERT of 4 layers of 256 is trained on the embedded corpus from the same three starts, with
its stream in 32 and in 16 bits; the losses are those of all held-out rows at the end.

What there is after each shape goes into FILE.part.json, so that a machine that is lent for minutes leaves what it
measured; FILE is written when all is done.
"""

import argparse
import itertools
import json
import math
import re
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, BertConfig, ModernBertConfig

import bertlab
from bertlab.data.collators import MaskedLanguageModelingCollator
from bertlab.model.config import bert_base, modernbert_base
from bertlab.data.corpus import embedded_corpus
from bertlab.data.tokenizers import train_tokenizer
from bertlab.core.devices import find_devices, benchmark_matmul, wait_function
from bertlab.core.files import atomic_write
from bertlab.model.heads import BertLabForMaskedLM
from bertlab.data.module import build_packed_dataset
from bertlab.model.losses import LossConfig
from bertlab.train.modules import BATCH_KEYS, compile_model
from bertlab.optim.groups import parameter_groups
from bertlab.optim.optimizers import get_optimizer
from bertlab.explorers.profiling import host_reads

LENGTH, MASKED = 512, 0.15
ROWS = {
    "BERT-base": 128,
    "ModernBERT-base": 64,
}  # in a batch: what both sides hold in 80 GB of memory
NO_DROPOUT = dict.fromkeys(("embedding_dropout", "attention_dropout", "hidden_dropout"), 0.0)
TINY = dict(
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
)
# BERT's vocabulary of 30,522 rounded up to a multiple of 64, as tensor cores want it; for both sides.
SHAPES = {"BERT-base": (lambda **o: bert_base(**{"vocab_size": 30528, **NO_DROPOUT, **o}), BertConfig,
                        dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
          "ModernBERT-base": (modernbert_base, ModernBertConfig, dict.fromkeys(
              ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")) | {"sparse_prediction": True})}  # fmt: skip
NARROW = "bertlab, stream in 16 bits"
SIDES = {  # name -> (attention kernel, options of torch.compile)
    "bertlab": ("auto", {}),
    NARROW: ("auto", {}),
    "bertlab, sdpa": ("sdpa", {}),
    "bertlab, varlen": ("varlen", {}),
    "bertlab, flex": ("flex", {"dynamic": False}),
    "bertlab, flex, CUDA graphs": ("flex", {"dynamic": False, "mode": "reduce-overhead"}),
    "transformers": None,
    "transformers, grouped": None,
    "transformers, grouped, compiled": None,
}
FIRST = [
    "bertlab",
    NARROW,
    "transformers",
    "transformers, grouped",
    "transformers, grouped, compiled",
]
# Not among them: varlen, and FlexAttention with static shapes or CUDA graphs, at most 1 % faster on an H100.
ON_CUDA_ALONE = [
    name for name in SIDES if "varlen" in name or "flex" in name
]  # on a CPU: no backward pass
KERNELS = {  # of a step -> how the names of its kernels are known; the first that fits
    "attention": r"flex_attention|flash|fmha",
    "matrix products": r"nvjet|gemm|cutlass|splitKreduce",
    "loss": r"(?i)softmax|nll_loss",
    "norms": r"(?i)layer_?norm|GammaBeta",
    "activation": r"(?i)gelu",
    "optimizer and clipping": r"multi_tensor|lpnorm",
    "copies and fills": r"^Mem",
}
TARGETS = {  # of BERT-base: (what, at least)
    "mfu": ("BERT-base's share of the measured ceiling (MFU)", 0.45),
    "times_transformers": ("BERT-base's real tokens per second by those of transformers", 2.0),
}


def make_batches(
    rows: int, options: argparse.Namespace, kind: str, texts, tokenizer, count: int | None
) -> list[dict]:
    "So many batches of the same documents, or all rows once: packed, grouped or padded (one in a row)."
    padded = kind == "padded"
    dataset = build_packed_dataset(texts, tokenizer, LENGTH, packing=not padded)
    collate = MaskedLanguageModelingCollator.from_tokenizer(
        tokenizer, mlm_probability=MASKED, max_sequence_length=LENGTH,
        pad_to_multiple_of=8 if padded else None)  # fmt: skip
    if padded:  # as many positions as the other side has
        some = collate([dataset[0, i] for i in range(min(64, len(dataset)))])
        rows = max(8, rows * LENGTH // some["input_ids"].shape[1] // 8 * 8)
    order = itertools.cycle(range(len(dataset))) if count else iter(range(len(dataset)))
    parts = iter(lambda: list(itertools.islice(order, rows)), [])
    batches = [collate([dataset[0, i] for i in part]) for part in itertools.islice(parts, count)]
    if kind != "packed":
        batches = [{"input_ids": b["input_ids"], "attention_mask": (b["attention_mask"] > 0).long(),
                    "labels": b["labels"]} for b in batches]  # fmt: skip
    else:
        batches = [{name: b[name] for name in BATCH_KEYS if name in b} for b in batches]
    pin = options.device.type == "cuda"
    return [{k: t.pin_memory() if pin else t for k, t in batch.items()} for batch in batches]


def mean_context(batches: list[dict]) -> float:
    "Tokens that a token may attend to: sum(n * n) / sum(n) over the documents."
    sizes = [torch.bincount(row[row > 0]) for batch in batches for row in batch["attention_mask"]]
    sizes = torch.cat(sizes).double()
    return float((sizes**2).sum() / sizes.sum())


class Side:
    "A model that trains on its batches."

    def __init__(self, name: str, shape: str, options: argparse.Namespace, batches: list[dict]):
        ours, theirs, more = SHAPES[shape]
        size, self.device = TINY if options.small else {}, options.device
        if name == NARROW:
            size = {**size, "residual_in_fp32": False}
        self.config, self.batches, self.turn = ours(**size), batches, 0
        torch.manual_seed(0)
        if SIDES[name] is None:
            config = theirs(
                **{"vocab_size": self.config.vocab_size, **size, **more}, pad_token_id=0
            )
            self.model = AutoModelForMaskedLM.from_config(config, attn_implementation="sdpa")
            if name.endswith("compiled") and options.compile:
                self.model.compile()  # of torch: its forward pass, in place
        else:
            kernel, compiling = SIDES[name]
            self.model = BertLabForMaskedLM(ours(**size, attn_implementation=kernel))
            if options.compile:
                compile_model(self.model, **compiling)
        self.model.to(self.device).train()
        self.loss = {} if SIDES[name] is None else {"loss_config": LossConfig(loss_only=True)}
        self.graphs = bool(SIDES[name]) and "mode" in SIDES[name][1]
        self.optimizer = get_optimizer(
            "adamw", parameter_groups(self.model, weight_decay=0.01), {"lr": 1e-4}
        )
        self.rates, self.kernel, self.last_loss = [], "sdpa", None

    def step(self) -> None:
        "Copy, forward, backward, clip, update; nothing is read back."
        batch = self.batches[self.turn % len(self.batches)]
        self.turn += 1
        if self.graphs:  # what the last step's graphs returned is no longer needed
            torch.compiler.cudagraph_mark_step_begin()
        batch = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(**batch, **self.loss).loss
        self.last_loss = loss.detach()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, steps: int) -> None:
        "Note the real tokens per second of some steps."
        wait = wait_function(self.device)
        numbers = range(self.turn, self.turn + steps)
        real = sum(
            int((self.batches[n % len(self.batches)]["attention_mask"] > 0).sum()) for n in numbers
        )
        wait()
        start = time.perf_counter()
        for _ in numbers:
            self.step()
        wait()
        self.rates.append(real / (time.perf_counter() - start))


def count_waits(step: Callable[[], None]) -> dict[str, int]:  # what waited -> times
    "Count where the host waits for the GPU in a step, as CUDA's own debug mode sees it."
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    waits = (w for w in said if "called a synchronizing" in str(w.message))
    places = (f"{Path(w.filename).name}:{w.lineno}" for w in waits)
    return dict(Counter(places))


def time_by_kind(side: Side, step: float) -> dict:  # milliseconds of a step
    "Where the GPU's time goes, and the kernels that are of no kind; nothing where no profile can be had."
    names, steps = (
        [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA],
        len(side.batches),
    )
    try:
        with torch.profiler.profile(activities=names) as profile:
            for _ in range(steps):
                side.step()
            torch.cuda.synchronize()
    except RuntimeError as error:  # of the driver
        print(f"no profile: {error}", flush=True)
        return {}
    found, others = Counter(), Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kind = next(
                (kind for kind, known in KERNELS.items() if re.search(known, event.name)), "other"
            )
            found[kind] += event.self_device_time_total / steps / 1000
            others[event.name[:80]] += (
                event.self_device_time_total / steps / 1000 * (kind == "other")
            )
    if not found:
        return {}
    return {"milliseconds": {"step": step, **dict(found.most_common()), "none": step - found.total()},
            "others": dict(others.most_common(5))}  # fmt: skip


def build(name: str, shape: str, options, batches: list[dict]) -> tuple[Side | None, dict]:
    "A side, warm, and what is known of it so far; None and the error where it fails."
    on_gpu = options.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    try:
        side = Side(name, shape, options, batches)
        for _ in range(len(batches)):  # compiles, also for the last new shape
            side.step()
        if hasattr(side.model, "encoder") and SIDES[name]:
            with torch.autocast(options.device.type, torch.bfloat16):
                side.kernel = side.model.encoder.attention_kernel(options.device, LENGTH)[0]
        reads = count_waits(side.step) if on_gpu else host_reads(side.step)
    except Exception as error:  # of a compiler, a driver, a kernel: whatever this device lacks
        print(
            f"{shape}, {name}: failed: {type(error).__name__}: {str(error).splitlines()[0]}",
            flush=True,
        )
        return None, {"error": f"{type(error).__name__}: {error}"[:2000]}
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
    return side, {"kernel": side.kernel, "peak_memory_bytes": peak, "host_waits": reads}


def measure(shape: str, options, texts, tokenizer, ceilings: list[float]) -> dict[str, dict]:
    "All sides of a shape, in turns; the rate of products is measured again behind them."
    rows = options.rows or (2 if options.small else ROWS[shape])
    count = 2 if options.small else 8
    kinds = {
        "transformers": "padded",
        **{name: "grouped" for name in SIDES if "grouped" in name},
    }  # others: packed
    batches = {
        kind: make_batches(rows, options, kind, texts, tokenizer, count)
        for kind in ("packed", "grouped", "padded")
    }
    sides, found = {}, {}
    if (
        options.compile
    ):  # torch compiles a function for so many models and shapes, and then runs it as it is
        torch.compiler.reset()
    for name in options.sides:
        if (
            options.small
            and name in ON_CUDA_ALONE
            or name == NARROW
            and SHAPES[shape][0]().norm_position != "post"
        ):
            continue
        sides[name], found[name] = build(name, shape, options, batches[kinds.get(name, "packed")])
    able = {name: side for name, side in sides.items() if side is not None}
    for number in range(options.rounds + 1):
        for name in list(able)[:: 1 if number % 2 else -1]:
            able[name].run(options.steps)
    for side in able.values():
        del side.rates[0]  # four times as slow, where sides have just been built
    ceilings.append(benchmark_matmul("bf16-mixed", 0.2 if options.small else 2.0, options.device))
    ceiling = max(ceilings)
    for name, side in able.items():
        if not math.isfinite(float(side.last_loss)):  # a kernel that is fast and wrong has no rate
            print(f"{shape}, {name}: failed: the loss is {float(side.last_loss)}", flush=True)
            found[name]["error"] = f"the loss is {float(side.last_loss)} after {side.turn} steps"
            continue
        labels = sum(int((b["labels"] != -100).sum()) for b in side.batches)
        tokens = sum(int((b["attention_mask"] > 0).sum()) for b in side.batches)
        positions = sum(b["attention_mask"].numel() for b in side.batches)
        rate = statistics.median(side.rates)
        cost = side.config.flops_per_token(mean_context(side.batches), labels / tokens)
        found[name] |= {
            "tokens_per_second": rate, "tokens_per_second_of_rounds": side.rates, "mfu": rate * cost / ceiling,
            "flops_per_token": cost, "real_share": tokens / positions,
            "rows": len(side.batches[0]["input_ids"]), "mean_context": mean_context(side.batches),
            "last_loss": float(side.last_loss)}  # fmt: skip
        print(
            f"{shape:16} {name:28} {rate:10,.0f} tokens/s  MFU {found[name]['mfu']:5.1%}  "
            f"{(found[name]['peak_memory_bytes'] or 0) / 2**30:6.2f} GiB  {side.kernel:7} "
            f"{tokens / positions:4.0%} real  waits of the host: {found[name]['host_waits'] or 'none'}",
            flush=True,
        )
    for name, side in (
        able.items() if not options.small else ()
    ):  # behind all rates, for profiles take their time
        if "tokens_per_second" not in found[name]:
            continue
        step = (
            1000
            * sum(int((b["attention_mask"] > 0).sum()) for b in side.batches)
            / len(side.batches)
            / found[name]["tokens_per_second"]
        )
        found[name] |= time_by_kind(side, step)
        print(f"{shape:16} {name}: where {step:.2f} ms of a step go", flush=True)
        for kind, spent in found[name].get("milliseconds", {}).items():
            print(f"{'':16} {spent:8.2f} ms  {spent / step:5.1%}  {kind}", flush=True)
    base = found.get("transformers", {}).get("tokens_per_second")
    for name in able:
        rate = found[name].get("tokens_per_second")
        found[name]["times_transformers"] = base and rate and rate / base
    return found


def compare_streams(options: argparse.Namespace, corpus, tokenizer) -> dict:
    "Held-out loss of a BERT with its stream in 32 and in 16 bits, from the same starts on the same batches."
    rows, steps, device = (2 if options.small else 32), options.losses, options.device
    shape = TINY if options.small else dict(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4)  # fmt: skip
    batches = make_batches(
        rows, options, "packed", corpus.train_texts, tokenizer, 2 if options.small else 150
    )
    held_out = make_batches(rows, options, "packed", corpus.validation_texts, tokenizer, None)
    losses = {name: [] for name in ("32 bits", "16 bits")}
    for name in losses:
        config = bert_base(
            **{
                **NO_DROPOUT,
                **shape,
                "vocab_size": len(tokenizer),
                "residual_in_fp32": name == "32 bits",
            }
        )
        model, plain = (
            BertLabForMaskedLM(config).to(device),
            BertLabForMaskedLM(config).to(device).eval(),
        )
        if options.compile:
            torch.compiler.reset()
            compile_model(model.train())
        for seed in range(3):
            torch.manual_seed(seed)
            for module in model.modules():
                model._init_weights(module)
            optimizer = get_optimizer(
                "adamw", parameter_groups(model, weight_decay=0.01), {"lr": 1e-3}
            )
            warm = max(1, steps // 10)
            rate = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda n: min((n + 1) / warm, (steps - n) / (steps - warm + 1)))  # fmt: skip
            for number in range(steps):
                scored(model, batches[number % len(batches)], device).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                rate.step()
            plain.load_state_dict(
                model.state_dict()
            )  # not compiled, which without gradients is another program
            with torch.no_grad():
                parts = [scored(plain, batch, device) for batch in held_out]
            losses[name].append(
                float(sum(p.loss_sum for p in parts) / sum(p.num_labels for p in parts))
            )
            print(
                f"stream in {name}, seed {seed}: {losses[name][-1]:.4f} nats held out after {steps} steps",
                flush=True,
            )
    return {"steps": steps, "rows": rows, "layers": model.config.num_hidden_layers, "width": model.config.hidden_size,
            "held_out_loss": losses}  # fmt: skip


def scored(model, batch: dict, device: torch.device):
    "What the model says of a batch, its products in bfloat16: `loss`, `loss_sum`, `num_labels`."
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    with torch.autocast(device.type, torch.bfloat16):
        return model(**batch, loss_config=LossConfig(loss_only=True))


def race(options: argparse.Namespace) -> dict:
    "A first figure of the track `gpu-hour`: its recipe with some of the seconds."
    from speedrun import TRACKS, load_recipe, run_seed

    track = replace(TRACKS["gpu-hour"], seconds=options.track)
    recipe = load_recipe(Path(__file__).with_name("gpu_hour.yaml"))
    recipe["model"]["scheduler_kwargs"]["budget"] = options.track
    here = replace(track, source=None, config_name=None, validation_fraction=0.1)
    if options.small:
        track = here = replace(
            here, accelerator="cpu", vocab_size=1024, max_sequence_length=128, max_documents=100
        )
        shape = {name: value for name, value in TINY.items() if name != "vocab_size"}
        recipe["model"] |= {"model_config_kwargs": shape, "compile_model": False}
        recipe["data"] |= {"train_batch_size": 4, "num_workers": 0}
    try:
        corpus = track.text()
    except (OSError, ValueError) as error:  # no network
        track, corpus = here, here.text()
        print(
            f"{error}\nso the race is on the embedded corpus, which a GPU knows by heart within a minute",
            flush=True,
        )
    with tempfile.TemporaryDirectory() as folder:
        found, _ = run_seed(track, recipe, Path(folder) / "run", 0, corpus)
    rate = found.tokens / found.train_seconds
    print(
        f"gpu-hour, in {found.train_seconds:.0f} s: {found.steps} steps, {rate:,.0f} tokens/s with compiling, "
        f"{found.validation_loss:.3f} nats held out, {found.bits_per_byte:.3f} bits per byte",
        flush=True,
    )
    return {"text": corpus.name, "seconds": found.train_seconds, "steps": found.steps, "tokens": found.tokens,
            "curve": found.curve[:: max(1, len(found.curve) // 20)], "validation_loss": found.validation_loss,
            "bits_per_byte": found.bits_per_byte, "recipe": recipe}  # fmt: skip


def judge(sides: dict[str, dict], small: bool) -> list[dict]:
    "Hold what a user gets without a setting against the targets, and the stream in 16 bits beside it."
    verdicts = []
    for (key, (what, least)), name in itertools.product(TARGETS.items(), ("bertlab", NARROW)):
        value = sides.get(name, {}).get(key)
        if not value:
            print(f"{what} ({name}): not measured")
            continue
        verdicts.append(
            {"what": what, "least": least, "value": value, "side": name, "reached": value >= least}
        )
        print(f"{what}: {value:.3g} ({name}), target {least:g} or more: {'' if value >= least else 'not '}reached"
              + (" (tiny shapes on a CPU: not what the target is about)" if small else ""))  # fmt: skip
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", type=int, help="of 512 in a batch (default: 128, or 64; 2 with --small)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, help="of a side in a round (default: 10; 1 with --small)"
    )
    parser.add_argument(
        "--shapes", nargs="*", choices=SHAPES, default=list(SHAPES), help="these alone"
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=FIRST, help="these alone")
    parser.add_argument("--track", type=float, metavar="SECONDS",
                        help="of a first race on the track gpu-hour (default: 120; 3 with --small); 0: none")  # fmt: skip
    parser.add_argument(
        "--losses",
        type=int,
        default=0,
        metavar="STEPS",
        help="compare the losses of both streams, too",
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny shapes on a CPU, to try the path"
    )
    parser.add_argument(
        "--output", help="(default: gpu.json in results, nowhere for a part or a rehearsal)"
    )
    options, begin = parser.parse_args(), time.perf_counter()
    whole = all(
        value == parser.get_default(name)
        for name, value in vars(options).items()
        if name not in ("losses", "output")
    )
    if not options.small and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here; --small tries the same path on the CPU")
    options.device = torch.device("cpu" if options.small else "cuda")
    options.compile = not options.small
    options.track = (3 if options.small else 120) if options.track is None else options.track
    options.steps = options.steps or (1 if options.small else 10)
    corpus = embedded_corpus(max_documents=100 if options.small else None)
    texts = corpus.train_texts
    tokenizer = train_tokenizer(texts, 1024 if options.small else 8192)
    ceilings = [benchmark_matmul("bf16-mixed", 0.2 if options.small else 2.0, options.device)]
    device = find_devices()[
        -1 if options.small else 0
    ]  # the last is the CPU, the first what a run takes
    print(
        f"{device.name}: {ceilings[0] / 1e12:.4g} TFLOP/s measured; table: {device.peak}",
        flush=True,
    )
    result = {
        "what": __doc__.splitlines()[0], "hardware": device.name,
        "ceiling_flops": ceilings, "table_peak": device.peak, "small": options.small, "row_length": LENGTH,
        "steps": options.steps, "rounds": options.rounds, "measured": time.strftime("%Y-%m-%d"),
        "torch": str(torch.__version__), "cuda": torch.version.cuda, "bertlab": bertlab.__version__,
        "verdicts": [], "shapes": {},
    }  # fmt: skip

    def write(whole: bool = False) -> None:
        result["seconds"] = round(time.perf_counter() - begin)
        if output:
            part = Path(output).with_suffix(".part.json")
            with atomic_write(Path(output) if whole else part) as temporary:
                temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            if whole:
                part.unlink(missing_ok=True)

    output = options.output or (
        str(Path(__file__).parent / "results" / "gpu.json") if whole else None
    )
    if output is None:
        print("a part or a rehearsal: nothing is written without --output", flush=True)
    for shape in options.shapes:
        result["shapes"][shape] = measure(shape, options, texts, tokenizer, ceilings)
        if shape == "BERT-base":
            result["verdicts"] = judge(result["shapes"][shape], options.small)
        write()
    if options.track:
        result["track"] = race(options)
        write()
    if options.losses:
        result["stream"] = compare_streams(options, corpus, tokenizer)
    write(whole=True)


if __name__ == "__main__":
    main()
