"""Short rows first: loss by cost of a two-stage recipe beside long rows throughout; time and memory by length.

    python benchmarks/context.py [--quick]

A small encoder learns the embedded corpus on rows of 512 throughout, or on rows of 128 and then, for the last
tenth of its tokens, of 512, each for three seeds and for 60, 80 and 100 % of the steps, and is validated at its
end on rows of 512. A document is what a whole module says, for a docstring alone has 27 tokens in the median and
could teach nothing about length: nine tenths of the tokens stand in documents of more than 512. Both ways have one
schedule, which the change of length does not interrupt: a warmup, a plateau, and a fall to nothing over the second
half; the recipe's optimizer begins anew.

Judged: the share of the cost of the long run of all steps (processor seconds of training, which other work on the
machine does not change much; operations by the shape stand beside it) at which the recipe reaches its bits per
byte, on the line between two neighbouring shares. Then the needle test of both, and the seconds and bytes of a step
at lengths from 128 to 4,096 with each attention kernel that runs here.
"""

import json
import time
from pathlib import Path

from sides import Ledger, common_parser, fingerprint, judge, machine, say, write_result

import bertlab
from bertlab.core.plots import BLUE, GREY, new_axes

SHORT, LONG, ROWS = (
    128,
    512,
    8,
)  # positions; rows of 512 in a batch, and as many positions in short ones
RATE = 2e-3  # peak, of AdamW
SHAPE = dict(hidden_size=192, intermediate_size=384, num_hidden_layers=4, num_attention_heads=3, local_attention=64,
             max_position_embeddings=LONG, initializer_range=0.04, global_attention_every_n_layers=2)  # fmt: skip


def whole_modules(part: str) -> list[str]:
    "Texts of a part of the embedded corpus, one for each module."
    from bertlab.data.corpus import embedded_corpus

    found: dict[str, list[str]] = {}
    for document in getattr(embedded_corpus(), part):
        found.setdefault(document.group, []).append(document.text)
    return ["\n\n".join(texts) for texts in found.values()]


def train(place: str, seed: int, lengths: list, share: float) -> dict:
    "Train by stages of (length, steps); processor and wall seconds, operations, and bits per byte at the end."
    from bertlab.data.module import PretrainingDataModule
    from bertlab.data.tokenizers import resolve_tokenizer, train_tokenizer
    from bertlab.model.huggingface import save_model
    from bertlab.train.modules import PretrainingModule
    from bertlab.train.trainer import make_trainer, seed_everything

    folder, texts = Path(place), {part: whole_modules(part) for part in ("train", "validation")}
    tokenizer = resolve_tokenizer([], None, folder / "tokenizer",
                                 lambda: train_tokenizer(texts["train"], 4096))  # fmt: skip
    tokenizer.save_pretrained(folder / "tokenizer")
    seconds, wall, flops, previous, found, done = 0.0, 0.0, 0.0, None, {}, 0
    total = sum(steps for _, steps in lengths)
    factor = lambda step: min(1.0, 2 * (1 - step / total))  # noqa: E731  of the peak, behind the warmup
    for number, (length, steps) in enumerate(lengths):
        seed_everything(seed + number)
        rows = ROWS * LONG // length
        data = PretrainingDataModule(
            None, tokenizer, max_sequence_length=length, train_batch_size=rows, seed=seed
        )
        data.set_datasets(texts["train"], texts["validation"])
        last, rate = number == len(lengths) - 1, RATE * factor(done)
        falling = min(steps, done + steps - total // 2)
        warmup = max(1, total // 20) if number == 0 else min(5, steps // 4)
        options = dict(learning_rate=rate, scheduler_warmup_steps=warmup,
                       scheduler_cooldown_steps=min(falling, steps - warmup),
                       scheduler_cooldown_decay=RATE * factor(done + steps) / rate)  # fmt: skip
        done += steps
        start = (
            {"pretrained_model_name_or_path": previous}
            if previous
            else {"model_config_kwargs": dict(SHAPE)}
        )
        module = PretrainingModule(**start, **options, pretrained_tokenizer_name_or_path=tokenizer)
        trainer = make_trainer(steps, "32-true")
        began, busy = time.perf_counter(), time.process_time()
        trainer.fit(module, data)
        wall, seconds = wall + time.perf_counter() - began, seconds + time.process_time() - busy
        flops += module.config.flops_per_token(length / 2, 0.3) * steps * ROWS * LONG
        if last:
            judge_data = PretrainingDataModule(
                None, tokenizer, max_sequence_length=LONG, train_batch_size=ROWS, seed=0
            )
            judge_data.set_datasets(texts["train"], texts["validation"])
            found = make_trainer(1, "32-true").validate(module, judge_data, verbose=False)[0]
        previous = str(
            save_model(module.model, tokenizer, folder / f"model-{seed}-{len(lengths)}-{share}")
        )
    return {"seconds": seconds, "wall_seconds": wall, "flops": flops, "bits_per_byte": found["val_bits_per_byte"],
            "model": Path(previous).name}  # fmt: skip


def cost_at(runs: list[dict], goal: float, figure: str) -> float | None:
    "The cost at which bits per byte fall to a goal, on the line between neighbours; None where they never do."
    mean = lambda one, name: sum(run[name] for run in one) / len(one)  # noqa: E731
    points = sorted((mean(one, figure), mean(one, "bits_per_byte")) for one in runs)
    if points[0][1] <= goal:
        return points[0][0]  # or less
    for (cheap, high), (dear, low) in zip(points, points[1:]):
        if low <= goal:
            return cheap + (dear - cheap) * (high - goal) / (high - low)
    return None


def needles(model: str) -> list:
    "The needle test of a trained model."
    from bertlab.data.tokenizers import load_tokenizer
    from bertlab.model.context import needle_test
    from bertlab.train.modules import load_encoder

    return needle_test(
        load_encoder(model), load_tokenizer(model), whole_modules("validation"), [128, 512]
    )


def step_cost(kernel: str, length: int, positions: int = 4096) -> dict:
    "Seconds of a step (of the processor, on a CPU), and bytes of its tensors."
    import torch

    from bertlab.model.activation_checkpointing import MemoryTracker
    from bertlab.model.config import modernbert_tiny
    from bertlab.model.heads import BertLabForMaskedLM

    torch.manual_seed(0)
    config = modernbert_tiny(**{**SHAPE, "max_position_embeddings": max(length, LONG)})
    config._attn_implementation = kernel
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = BertLabForMaskedLM(config).to(device).train()
    ids = torch.randint(5, config.vocab_size, (max(1, positions // length), length), device=device)
    places = torch.rand(ids.shape, device=device).argsort(1)[:, : int(0.3 * length)]
    best, clock = float("inf"), time.perf_counter if device == "cuda" else time.process_time
    for number in range(4):
        if number == 3:
            with MemoryTracker() as ledger:
                model(ids, labels=ids, label_positions=places).loss.backward()
            break
        began = clock()
        model(ids, labels=ids, label_positions=places).loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, clock() - began)
    return {
        "seconds_per_1000": 1000 * best / ids.numel(),
        "bytes_per_token": max(ledger.history) / ids.numel(),
    }


def draw(result: dict):
    "Bits per byte against cost."
    figure, axes = new_axes(
        "training (processor seconds)", "bits per byte of validation, rows of 512"
    )
    for name, colour, label in (
        ("long", GREY, "rows of 512 throughout"),
        ("recipe", BLUE, "rows of 128, then of 512"),
    ):
        by_share = sorted(result["cases"][name].values(), key=lambda runs: runs[0]["seconds"])
        means = [
            [sum(run[figure] for run in runs) / len(runs) for runs in by_share]
            for figure in ("seconds", "bits_per_byte")
        ]
        axes.plot(*means, color=colour, lw=1)
        runs = [run for found in by_share for run in found]
        axes.plot(
            [r["seconds"] for r in runs],
            [r["bits_per_byte"] for r in runs],
            "o",
            color=colour,
            ms=4,
            label=label,
        )
    axes.axhline(result["goal"], color="0.3", ls=":", lw=0.9, label="the goal")
    axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = common_parser(__doc__.splitlines()[0], "context", rounds=1)
    parser.add_argument("--steps", type=int, default=600, help="of the long run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 1024, 2048, 4096])
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seeds, options.lengths = 10, [0], [128]
    import torch

    from bertlab.model.attention import ATTENTION_KERNELS

    torch.set_num_threads(options.threads)
    ledger = Ledger(options.kept / "context.json", fingerprint(__file__), options.fresh)
    place = options.kept / "context"
    place.mkdir(parents=True, exist_ok=True)

    def ask(key: list, work) -> dict:
        return ledger.ask(json.dumps([options.steps, *key]), work)[0]

    cases = {"long": {}, "recipe": {}}
    for share in (1.0, 0.8, 0.6):  # of the long run's steps
        steps = round(share * options.steps)
        stages = [(SHORT, steps - max(1, steps // 10)), (LONG, max(1, steps // 10))]
        for name, lengths in (("long", [(LONG, steps)]), ("recipe", stages)):
            cases[name][str(share)] = [
                ask([name, share, seed], lambda: train(str(place), seed, lengths, share))
                for seed in options.seeds
            ]  # noqa: B023
            runs = cases[name][str(share)]
            print(f"  {name:7} {share:.0%} of the steps: {[round(r['bits_per_byte'], 3) for r in runs]} bits per byte, "
                  f"{[round(r['seconds']) for r in runs]} s", flush=True)  # fmt: skip
    target = cases["long"]["1.0"]
    goal = sum(run["bits_per_byte"] for run in target) / len(target)
    costs = {}
    for figure in ("seconds", "flops"):
        found = cost_at(list(cases["recipe"].values()), goal, figure)
        whole = sum(run[figure] for run in target) / len(target)
        costs[figure] = 99.0 if found is None else found / whole
    judged = [judge("least cost of the recipe that reaches the long run, share of its seconds",
                    costs["seconds"], at_most=0.6)]  # fmt: skip
    say(judged)
    kernels = [
        name for name in ATTENTION_KERNELS if name in ("eager", "sdpa") or torch.cuda.is_available()
    ]
    by_length = {name: {length: ask(["step", name, length], lambda: step_cost(name, length))  # noqa: B023
                        for length in options.lengths} for name in kernels}  # fmt: skip
    write_result(options.output, {
        "what": __doc__.splitlines()[0], "bertlab": bertlab.__version__, "machine": machine(options.threads),
        "steps": options.steps, "seeds": options.seeds, "judged": judged,
        "goal": goal, "share_of_operations": costs["flops"], "cases": cases,
        "needles": {name: needles(str(place / cases[name]["1.0"][0]["model"])) for name in cases},
        "by_length": by_length}, draw)  # fmt: skip


if __name__ == "__main__":
    main()
