"""Kills at random points of tokenizing and of training on two processes: is anything lost, is every loss the same?

    python benchmarks/kills.py [--kills 50] [--seed 0] [--quick]

Half of the kills hit `bertlab tokenize` with two workers, half `bertlab pretrain` as two processes that torchrun's
variables tell who they are. A chain is one job: it is started, killed (SIGKILL) at a random moment of its life, started
again to go on, killed again, until it reaches its end, and then compared with the job that nobody disturbed. Moments are
drawn uniformly from the seconds that the undisturbed job took. Victims of tokenizing are one worker, the command alone
(its workers live on for a moment), or all; of training one process or both; where one is killed nobody else ends the
others. Every draw comes from the seed, and each kill is recorded with its victim, its second and the files that were
there. A job that ended before its kill was due has not been killed, and is not counted. Where one of two has died before
they met, the other waits for it, as long as torch lets it; torchrun would end it, and after `--patience` seconds so does
this script, and counts how often.

Jobs fork from a server that has done the imports, so that no kill is spent on them.

What must hold: tokens and documents equal, each once, and checksums right; losses of all steps and the last weights equal
to the last bit.
"""

import csv
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
from sides import BenchmarkParser, environment, judge, machine, say, write_result

MODEL = "{hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: 2}"
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["bertlab.cli.pretrain", "bertlab.data.tokenize", "bertlab.train.modules", "datasets",
                                  "lightning.pytorch", "transformers.models.modernbert.modeling_modernbert"])  # fmt: skip


def work(words: list[str], more: dict[str, str], folder: str, log: str) -> None:
    "The command line of `bertlab`, in a session of its own."
    os.setsid()
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update({**environment(1), **more})
    os.chdir(folder)
    import torch

    from bertlab.cli.main import main

    torch.set_num_threads(1)
    sys.exit(main(words))


class Tokenizing:
    "Text to shards, by two workers."

    name, sign = "tokenizing", "*.shard"

    def __init__(self, folder: Path, size: int):
        from bertlab.data.corpus import embedded_corpus
        from bertlab.data.tokenizers import train_tokenizer

        texts = embedded_corpus().train_texts[:400]
        self.folder, self.calm = folder, folder / "calm"
        train_tokenizer(texts, 1000).save_pretrained(folder / "tokenizer")
        (folder / "text").mkdir()
        for n in range(
            2 * size
        ):  # of more than a megabyte, so that each is a part of its own, and two workers have work
            lines, length = [], 0
            for copy in count():
                if length > 1_100_000:
                    break
                lines += [json.dumps({"text": f"{n} {copy} {text}"}) + "\n" for text in texts]
                length = sum(map(len, lines))
            (folder / "text" / f"{n}.jsonl").write_text("".join(lines), encoding="utf-8")

    victims = ("worker", "command", "all")

    def commands(
        self, output: Path
    ) -> list[tuple[list[str], dict[str, str]]]:  # to begin and to go on
        return [(["tokenize", str(self.folder / "text"), "--tokenizer", str(self.folder / "tokenizer"),
                  "--output", str(output), "--workers", "2", "--shard_tokens", "50000"], {})]  # fmt: skip

    def differences(self, output: Path) -> list[str]:
        "What is not as in the undisturbed directory."
        from bertlab.data.shards import load_tokens

        ours, theirs = load_tokens(output), load_tokens(self.calm)
        ours.verify()
        left = [path.name for path in output.glob(".*")]
        return [*(["tokens"] * (not np.array_equal(ours.tokens, theirs.tokens))),
                *(["documents"] * (not np.array_equal(ours.offsets, theirs.offsets))),
                *([f"temporary files: {left}"] * bool(left))]  # fmt: skip


class Training:
    "A run of two processes, with checkpoints every few steps."

    name, sign = "training", "checkpoints/step-*"

    def __init__(self, folder: Path, size: int):
        from bertlab.data.corpus import embedded_corpus

        self.folder, self.calm, self.steps = folder, folder / "calm", 40 * size
        (folder / "text.txt").write_text(
            "\n".join(embedded_corpus().train_texts[:400]) + "\n", encoding="utf-8"
        )

    victims = ("worker", "all")

    def commands(self, output: Path) -> list[tuple[list[str], dict[str, str]]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = ["pretrain",
                 "--model.model_config_kwargs", MODEL, "--data.train_dataset_name_or_path", str(self.folder / "text.txt"),
                 "--data.max_sequence_length", "64", "--data.train_batch_size", "8", "--trainer.max_steps", str(self.steps),
                 "--trainer.accelerator", "cpu", "--trainer.precision", "32-true", "--run.vocab_size", "500",
                 "--run.progress", "none", "--run.checkpoint_every_steps", "7", "--run.keep_last", "2",
                 "--run.val_every_steps", str(self.steps), "--run.measure_every_steps", "0", "--run.output", str(output),
                 *(["--resume"] if (output / "run.yaml").exists() else [])]  # fmt: skip
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                 "GROUP_RANK": "0", "NODE_RANK": "0", "TORCHELASTIC_RUN_ID": "kills"}  # fmt: skip
        return [(words, {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]

    def results(
        self, output: Path
    ) -> tuple[list[tuple[str, str]], dict]:  # losses as written; weights
        from bertlab.model.loading import read_torch_file

        with open(output / "history.csv", newline="", encoding="utf-8") as file:
            losses = [(row["step"], row["loss"]) for row in csv.DictReader(file)]
        last = max((output / "checkpoints").glob("step-*.ckpt"))
        return losses, read_torch_file(last, weights_only=False)["state_dict"]

    def differences(self, output: Path) -> list[str]:
        "What is not as in the undisturbed run, to the last bit."
        (losses, weights), (losses_2, weights_2) = self.results(output), self.results(self.calm)
        names = weights.keys() ^ weights_2.keys()
        names |= {
            name
            for name in weights.keys() & weights_2.keys()
            if not weights[name].equal(weights_2[name])
        }
        return [*(["losses"] * (losses != losses_2)), *sorted(names)[:3]]


def nothing() -> None:
    "What the server's first child does, so that its imports are nobody's time."


def begin(job, output: Path, log: Path) -> list[BaseProcess]:
    processes = [PROCESSES.Process(target=work, args=(words, more, str(job.folder), str(log)))
                 for words, more in job.commands(output)]  # fmt: skip
    for process in processes:
        process.start()
    return processes


def wait(processes: list[BaseProcess], seconds: float) -> bool:  # whether all have ended
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return all(process.exitcode is not None for process in processes)


def end_all(processes: list[BaseProcess]) -> None:
    "Kill whatever is left of a job, workers that nobody waits for too."
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
    wait(processes, 30)


def undisturbed(job) -> float:  # seconds
    "Run the job to its end."
    start, log = time.monotonic(), job.folder / "calm.log"
    processes = begin(job, job.calm, log)
    wait(processes, 1800)
    if any(process.exitcode for process in processes):
        raise SystemExit(f"{job.name} fails undisturbed:\n{log.read_text()[-3000:]}")
    return time.monotonic() - start


def workers_of(process: BaseProcess) -> list[int]:
    "Processes below one that still live, whichever of its threads began them: of several generations the youngest."
    found, new = [], [process.pid]
    while new:
        below = []
        for pid in new:
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                try:
                    below += map(int, path.read_text().split())
                except OSError:  # it ended just now
                    pass
        found, new = below or found, below
    return sorted(found)


def kill(processes: list[BaseProcess], victim: str, lots: random.Random) -> str:  # who was killed
    "Kill one, or all; all, where there is no worker."
    workers = (
        workers_of(processes[0]) if len(processes) == 1 else [process.pid for process in processes]
    )
    if victim == "command" or victim == "worker" and workers:
        os.kill(lots.choice(workers) if victim == "worker" else processes[0].pid, signal.SIGKILL)
        return victim
    end_all(processes)
    return "all"


def chain(job, number: int, seed: int, seconds: float, most: int, patience: float) -> dict:
    "One job, killed until it ends or `most` kills were done; and what differs at its end."
    lots, output, kills = (
        random.Random(f"{seed}-{job.name}-{number}"),
        job.folder / f"chain-{number}",
        [],
    )
    log, found = job.folder / f"chain-{number}.log", {"chain": number, "kills": kills}
    while True:
        victim, moment = lots.choice(job.victims), lots.uniform(0, seconds)
        started, processes = time.monotonic(), begin(job, output, log)
        if not wait(processes, moment if len(kills) < most else 20 * seconds + 120):
            if len(kills) == most:
                end_all(processes)
                return {**found, "wrong": ["the job that went on never ended"]}
            files = len(list(output.glob(job.sign)))
            whom, dead = kill(processes, victim, lots), time.monotonic()
            alone = not wait(processes, patience)
            if alone:
                end_all(processes)
            kills.append({"victim": whom, "second": round(dead - started, 2), "of_seconds": round(moment, 2), "files": files,
                          "seconds_until_all_ended": round(time.monotonic() - dead, 2), "left_waiting": alone})  # fmt: skip
            continue
        statuses = [process.exitcode for process in processes]
        passed = b"already passed" in log.read_bytes()[-3000:]  # it was killed after its last step
        wrong = (
            [f"exit statuses {statuses}: {log.read_text()[-600:]}"]
            if any(statuses) and not passed
            else []
        )
        return {**found, "wrong": wrong or job.differences(output)}


def measure(job, kills: int, seed: int, in_chain: int, patience: float) -> dict:
    "Chains until so many kills were done."
    seconds, chains = undisturbed(job), []
    print(f"{job.name}: {seconds:.1f} s undisturbed", flush=True)
    while (done := sum(len(c["kills"]) for c in chains)) < kills:
        found = chain(job, len(chains), seed, seconds, min(in_chain, kills - done), patience)
        chains.append(found)
        print(
            f"  chain {found['chain']}: {len(found['kills'])} kills, {found['wrong'] or 'as undisturbed'}",
            flush=True,
        )
        shutil.rmtree(job.folder / f"chain-{found['chain']}", ignore_errors=True)
        if len(chains) > 3 * kills:
            raise SystemExit(f"{job.name} ends before it can be killed: give it more to do")
    every = [one for found in chains for one in found["kills"]]
    return {"seconds_undisturbed": seconds, "kills": len(every), "wrong": sum(bool(found["wrong"]) for found in chains),
            "victims": {name: sum(one["victim"] == name for one in every) for name in job.victims},
            "left_waiting": sum(one["left_waiting"] for one in every), "longest_wait_s": max(one["seconds_until_all_ended"] for one in every), "chains": chains}  # fmt: skip


def main() -> None:
    parser = BenchmarkParser("kills", free=["patience"], description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="of both jobs together (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of moments and victims (default: 0)")
    parser.add_argument(
        "--in-chain", type=int, default=5, help="most kills of one job (default: 5)"
    )
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds in which all must end (default: 60)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="4 kills of small jobs, to see that it runs"
    )
    options = parser.parse_args()
    kills, size = (4, 1) if options.quick else (options.kills, 3)
    first = PROCESSES.Process(target=nothing)
    first.start()
    first.join()
    result = {"what": __doc__.splitlines()[0], "machine": machine(threads=1), "seed": options.seed}
    for job, share in ((Tokenizing, kills // 2), (Training, kills - kills // 2)):
        with tempfile.TemporaryDirectory() as folder:
            result[job.name] = measure(
                job(Path(folder), size), share, options.seed, options.in_chain, options.patience
            )
    both = [result[name] for name in ("tokenizing", "training")]
    result["judged"] = [
        judge("kills", sum(one["kills"] for one in both), at_least=kills),
        judge(
            "jobs that ended otherwise than undisturbed",
            sum(one["wrong"] for one in both),
            at_most=0,
        ),
    ]
    write_result(options.output, result)
    say(result["judged"])
    if any(one["wrong"] for one in both):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
