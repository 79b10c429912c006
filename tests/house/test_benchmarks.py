"The comparisons are fair and their arithmetic is right; how fast anything is, benchmarks/ says itself."

import json
import math
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import ceiling  # noqa: E402
import finetuning_trainer  # noqa: E402
import minutes  # noqa: E402
import pretraining  # noqa: E402
import scaling  # noqa: E402
import sides  # noqa: E402
import suite  # noqa: E402

from speedrun import TRACKS  # noqa: E402
from bertlab.model.huggingface import to_huggingface  # noqa: E402
from bertlab.data.corpus import make_corpus  # noqa: E402
from bertlab.data.tokenizers import train_tokenizer  # noqa: E402
from bertlab.data.documents import Document  # noqa: E402
from bertlab.model.huggingface import to_family_config, their_class  # noqa: E402
from bertlab.finetuning.data import FinetuningDataModule  # noqa: E402
from bertlab.model.heads import BertLabForMaskedLM  # noqa: E402
from bertlab.finetuning.tasks import BuiltinDataset  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def text():
    "A corpus of 60 documents, two of which are longer than a row, and its tokenizer."
    words = "zero one two three four five six seven eight nine ten".split()
    texts = [
        " ".join(words[(n * k) % 11] for k in range(1, 200 if n % 30 == 7 else 5 + n))
        for n in range(1, 61)
    ]
    corpus = make_corpus("numbers", [Document(text, f"n:{n}") for n, text in enumerate(texts)])
    return corpus, train_tokenizer(corpus.train_texts, 120)


def test_a_quick_run_never_writes_over_the_full_result(tmp_path, capsys):
    parser = sides.common_parser("what", "delivery", rounds=5)
    full, kept = sides.RESULTS / "delivery.json", ["--kept", str(tmp_path)]
    assert parser.parse_args(kept).output == full
    assert parser.parse_args([*kept, "--quick"]).output == tmp_path / "quick/delivery.json"
    assert parser.parse_args([*kept, "--quick", "--output", "x.json"]).output == Path("x.json")
    with pytest.raises(SystemExit):
        parser.parse_args(["--quick", "--output", str(full)])
    assert "delivery.json holds the full result" in capsys.readouterr().err


@pytest.fixture
def chosen_output(monkeypatch):
    "Where a benchmark that is called with these words writes, of which nothing is run."

    class Read(Exception):
        pass

    def stop(self, *words, parse=sides.BenchmarkParser.parse_known_args, **options):
        raise Read(parse(self, *words, **options)[0].output)

    def ask(script: str, *words: str) -> Path | None:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *words])
        with pytest.raises(Read) as found:
            import_module(script).main()
        return found.value.args[0]

    monkeypatch.setattr(sides.BenchmarkParser, "parse_known_args", stop)
    return ask


@pytest.mark.parametrize("words", [
    "finetuning build/demo --limit 8", "finetuning build/demo --tasks docstring-area", "precision --steps 1",
    "overhead --rounds 1", "demo --runs 1", "demo --steps 9", "heads --runs 1", "checkpointing --runs 1", "kills --kills 4",
    "shards --tokens 1000", "shards --skip-tokenizing", "ceiling --models short", "embeddings build/demo --only train",
    "records --only first_demo_in_half", "records --text LICENSE --rounds 1", "scaling --parts ways", "half_hour --theirs 1",
    "pretraining --models short --rounds 1", "pretraining --seconds 5", "adapters --size 64", "larger_recipe --sides muon",
    "ablations --arms muon --seeds 1", "ablations --steps 20"])  # fmt: skip
def test_a_part_or_a_rehearsal_is_written_only_where_a_file_is_named(words, chosen_output, capsys):
    assert chosen_output(*words.split()) is None
    assert capsys.readouterr().out == "a part or a rehearsal: nothing is written without --output\n"
    assert chosen_output(*words.split(), "--output", "x.json") == Path("x.json")


@pytest.mark.parametrize("words, file", [
    ("finetuning build/demo", "finetuning"), ("overhead", "overhead"), ("demo --runs 5", "demo"), ("precision --threads 2", "precision"),
    ("embeddings build/demo", "embeddings"), ("records --rounds 3", "records/laptop"), ("shards --skip-cache", "shards"),
    ("records --only first_demo_in_half muon_two_layers muon_wide_batch", "records/laptop"),
    ("ablations --arms muon --seeds 5", "ablations"),
    ("pretraining --models short --kinds bert --seconds 0", "pretraining"), ("minutes --at-once 2", "minutes")])  # fmt: skip
def test_a_whole_measurement_and_one_that_keeps_the_other_parts_go_to_the_results(
    words, file, chosen_output, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)  # the place does not depend on where it is called
    assert chosen_output(*words.split()) == ROOT / "benchmarks" / "results" / f"{file}.json"


IN_PARTS = {  # script -> what measures, how often before a part is there, its figures, words of a call with two parts
    "finetuning": ("measure_task", 1, {"metric": "f1"}, "demo --tasks docstring-area doc-words"),
    "heads": ("run_case", 6, {"peak_resident_bytes": 2, "bytes_above_start": 1, "seconds": 1.0}, "--runs 2"),
    "checkpointing": ("run_case", 8, {"loss": 1.0, "seconds": 1.0, "live_bytes": 2}, "--runs 2"),
    "gpu": ("measure", 1, {}, "--small --track 0")}  # fmt: skip


@pytest.mark.parametrize("script", IN_PARTS)
def test_a_benchmark_that_is_stopped_leaves_the_earlier_result_as_it_was(
    script, monkeypatch, tmp_path, capsys
):
    module, (measure, count, figures, words) = import_module(script), IN_PARTS[script]
    path, part = tmp_path / f"{script}.json", tmp_path / f"{script}.part.json"
    if script == "gpu":
        monkeypatch.setattr(module, "embedded_corpus", lambda **_: SimpleNamespace(train_texts=[]))
        monkeypatch.setattr(module, "train_tokenizer", lambda *_: None)
        monkeypatch.setattr(module, "benchmark_matmul", lambda *_: 1e9)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *words.split(), "--output", str(path)])
    path.write_text("the earlier result")
    left = [figures] * count

    def one(*_) -> dict:
        if not left:
            raise KeyboardInterrupt
        return dict(left.pop())

    monkeypatch.setattr(module, measure, one)
    with pytest.raises(KeyboardInterrupt):
        module.main()
    assert (
        path.read_text() == "the earlier result"
        and json.loads(part.read_text())
        and not list(tmp_path.glob("*.png"))
    )
    left += [figures] * 2 * count
    module.main()
    assert json.loads(path.read_text()) and not part.exists()


@pytest.mark.parametrize("script", ["collators", "optimizer_race"])
def test_a_result_that_cannot_be_written_whole_leaves_the_earlier_one_as_it_was(
    script, monkeypatch, tmp_path, capsys
):
    module, path = import_module(script), tmp_path / "result.json"
    if script == "collators":
        monkeypatch.setattr(module, "time_calls", lambda *_: 1.0)
        monkeypatch.setattr(module, "machine", lambda _: object())  # JSON knows none
    else:
        monkeypatch.setattr(module, "read_race", lambda: {"held_batches": [{"labels": torch.tensor([1, 2])}], "tokenizer": "abcd",
                                                          "build": lambda _: SimpleNamespace(num_parameters=object)})  # fmt: skip
        monkeypatch.setattr(module, "race_one", lambda *_: {})
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--output", str(path)])
    path.write_text("the earlier result")
    with pytest.raises(TypeError, match="JSON"):
        module.main()
    assert path.read_text() == "the earlier result" and list(tmp_path.iterdir()) == [path]


def test_nothing_is_written_where_no_file_was_chosen(capsys):
    sides.write_result(None, {})
    assert capsys.readouterr().out == ""


def test_figures_are_of_the_code_that_a_benchmark_imports(tmp_path):
    files = {
        "one": "def f():\n    from two import x\n",
        "two": "import json, three\n",
        "three": "",
        "four": "",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    found = [sides.fingerprint(tmp_path / "one.py")]
    for name in files:
        (tmp_path / f"{name}.py").write_text(files[name] + "# changed\n")
        found.append(sides.fingerprint(tmp_path / "one.py"))
    assert len(set(found)) == 4 and found[-1] == found[-2]  # nobody imports the last
    for name, other in (
        ("minutes", "adapters"),
        ("half_hour", "final_project"),
        ("startup", "pretraining"),
    ):
        assert ROOT / "benchmarks" / f"{other}.py" in sides.with_imports(
            [ROOT / "benchmarks" / f"{name}.py"]
        )


@pytest.fixture(params=["model name", "flags", "cores", "python", "torch", "tokenizers"])
def elsewhere(request, monkeypatch):
    "Changes one thing beside the code that figures depend on: of the processor, its number of cores, a version."

    def change() -> None:
        if request.param == "cores":
            monkeypatch.setattr(sides.os, "cpu_count", lambda: 1000)
        elif request.param == "python":
            monkeypatch.setattr(sides.platform, "python_version", lambda: "3.99")
        elif request.param in ("torch", "tokenizers"):
            monkeypatch.setattr(
                "importlib.metadata.version",
                lambda name: "99" if name == request.param else before(name),
            )
        else:
            monkeypatch.setattr(
                sides, "first_core", lambda name: "another" if name == request.param else said(name)
            )

    said, before = sides.first_core, import_module("importlib.metadata").version
    return change


def test_figures_of_another_machine_or_another_version_are_not_mixed_in(elsewhere, tmp_path):
    measured = []

    def ask() -> tuple[dict, bool]:
        ledger = sides.Ledger(tmp_path / "kept", sides.fingerprint(tmp_path / "one.py"))
        return ledger.ask("case", lambda: measured.append(1) or {"run": len(measured)})

    (tmp_path / "one.py").touch()
    assert [ask(), ask()] == [({"run": 1}, False), ({"run": 1}, True)]
    elsewhere()
    assert [ask(), ask()] == [({"run": 2}, False), ({"run": 2}, True)]


def test_a_benchmark_that_was_done_elsewhere_is_not_done(elsewhere, capsys):
    (part,) = (part for part in suite.PARTS if part.name == "data")
    words = {"data": ["python", str(part.script)]}
    done = {"data": suite.stamp(part, words["data"])}
    assert suite.plan([part], done, words, False) == []
    elsewhere()
    assert suite.plan([part], done, words, False) == [part]


def test_a_hash_is_of_what_is_in_a_file_or_in_all_of_a_directory(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("one")
    first = sides.hash_of([tmp_path / "a"])
    assert first == sides.hash_of([tmp_path / "a" / "b" / "file"])
    (tmp_path / "a" / "b" / "file").write_text("two")
    assert first != sides.hash_of([tmp_path / "a"])


def test_sides_take_turns_so_that_none_is_always_first():
    assert sides.in_turns(["A", "B"], 3) == [
        (0, "A"),
        (0, "B"),
        (1, "B"),
        (1, "A"),
        (2, "A"),
        (2, "B"),
    ]


def test_a_ratio_is_of_neighbours_in_time_and_its_median_is_not_a_ratio_of_medians():
    ours, theirs = [{"rate": r} for r in (10, 2, 9)], [{"rate": r} for r in (5, 2, 1)]
    assert sides.ratios(ours, theirs, "rate") == {"median": 2, "min": 1, "max": 9}
    with pytest.raises(ValueError, match="zip"):
        sides.ratios(ours, theirs[:2], "rate")


CHILD = """
import json, os, sys
case = json.loads(sys.argv[2])
with open(case["log"], "a") as log: log.write(case["name"] + os.environ["OMP_NUM_THREADS"] + " ")
if os.path.exists(case["log"] + ".broken") and case["name"] == "B": sys.exit("B is broken")
print("noise"); print(json.dumps({"rate": 1}))
"""


def test_what_bertlab_asks_of_openmp_is_not_asked_of_a_side_without_it(tmp_path, monkeypatch):
    script = tmp_path / "child.py"
    script.write_text("import json, os; print(json.dumps(os.environ.get('GOMP_SPINCOUNT')))")
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    found = {}
    for given in ({}, {"GOMP_SPINCOUNT": "1000"}):
        monkeypatch.setattr(sides, "GIVEN", given)
        found[bool(given)] = [
            sides.run_child(script, {"side": side}, 1) for side in ("ours", "grouped")
        ]
    assert found == {False: ["1000", None], True: ["1000", "1000"]}


def test_an_interrupted_benchmark_goes_on_where_it_stopped_and_changed_code_begins_anew(tmp_path):
    script, log, kept = tmp_path / "child.py", tmp_path / "log", tmp_path / "kept.json"
    script.write_text(CHILD)
    Path(f"{log}.broken").touch()
    cases = {name: {"name": name, "log": str(log)} for name in "AB"}
    run = lambda code, fresh=False: sides.alternate(
        script, cases, 2, 1, sides.Ledger(kept, code, fresh)
    )  # noqa: E731
    with pytest.raises(SystemExit, match="B is broken"):
        run("old")
    assert log.read_text() == "A1 B1 "
    Path(f"{log}.broken").unlink()
    assert run("old") == {"A": [{"rate": 1}] * 2, "B": [{"rate": 1}] * 2}
    assert log.read_text() == "A1 B1 B1 B1 A1 "  # B again, and then the second round, backwards
    run("old")
    assert log.read_text().count("1") == 5  # everything was kept
    run("new")
    assert log.read_text().count("1") == 9
    run("new", fresh=True)
    assert log.read_text().count("1") == 13


@pytest.mark.parametrize("bound, passed", [({"at_least": 2.5}, True), ({"at_least": 2.6}, False),
                                           ({"at_most": 2.5}, True), ({"at_most": 2.4}, False)])  # fmt: skip
def test_a_target_is_judged_on_the_right_side_of_its_bound(bound, passed, capsys):
    judged = sides.judge("this", 2.5, **bound)
    assert judged["passed"] is passed and judged.items() >= bound.items()
    sides.say([judged])
    assert capsys.readouterr().out.startswith("pass" if passed else "MISS")


def test_padding_steps_before_the_clock_and_validation_are_not_counted():
    class Model(torch.nn.Module):
        def forward(self, attention_mask):
            return attention_mask

    model = Model()
    meter = pretraining.Meter(model)
    for documents in ([[1, 1, 2, 2]], [[1, 1, 2, 0]], [[1, 0, 0, 0]]):
        model.train()(attention_mask=torch.tensor(documents))
        meter.step()
        model.eval()(attention_mask=torch.ones(9, 9))
    found = meter.figures(warm=1)
    assert (found["real_tokens"], found["steps"], found["fill"]) == (4, 2, 0.5)
    assert found["tokens_per_second"] == pytest.approx(4 / found["wall_seconds"])
    assert (
        found["mean_context"] == (2 + 2 + 1 + 1) / 4
    )  # a token sees the real tokens of its own document


def test_an_advantage_is_judged_alone_and_by_what_is_left_of_it_beside_busy_loops():
    part = lambda times: {
        "ratios": {"ours in fp32 over grouped in fp32": {"wall": {"median": times}}}
    }  # noqa: E731
    found = {"0": part(2.0), "1": part(1.6), "2": part(1.0)}
    assert [one["passed"] for one in pretraining.judge_busy("short, bert", found)] == [
        False,
        True,
        False,
    ]
    assert pretraining.judge_busy("small, bert", found) == []  # the target is of one shape


def test_what_is_used_of_the_machine_is_judged_for_our_side_alone():
    found = {side: {"useful_share": {"median": share}} for side, share in
             (("ours, fp32", 0.6), ("ours, bf16", 0.2), ("ours, auto", 0.2), ("grouped, fp32", 0.9))}  # fmt: skip
    assert [one["passed"] for one in pretraining.judge_shares("small", "bert", found)] == [
        True,
        False,
    ]
    assert not pretraining.judge_shares("short", "bert", found)  # nothing was promised
    assert not pretraining.judge_shares("base", "bert", {"ours, fp32": {}})  # an older result


def test_the_products_of_a_step_are_written_down_and_made_again():
    left, right, bias = torch.randn(6, 4), torch.randn(4, 5).requires_grad_(), torch.zeros(5)
    stacks = torch.randn(3, 2, 4), torch.randn(3, 4, 7)
    with ceiling.Products() as products:
        (torch.addmm(bias, left, right).sum() + torch.bmm(*stacks).sum()).backward()
    kinds = [str(op).split(".")[1] for op, *_ in products.calls]
    assert kinds == ["addmm", "bmm", "mm"]  # the last is the gradient for `right`
    assert products.flops() == 2 * (6 * 4 * 5 + 3 * 2 * 4 * 7 + 4 * 6 * 5)
    before = left.clone()
    assert products.seconds() > 0 and torch.equal(left, before)
    assert len(products.calls) == 3  # making them again writes nothing down


def test_minutes_choose_a_rate_by_validation_rows_and_score_by_test_rows():
    tried = [
        {"rate": 1e-3, "validation": 0.7, "test": 0.5},
        {"rate": 3e-3, "validation": 0.6, "test": 0.9},
    ]
    assert minutes.best(tried)["rate"] == 1e-3
    assert minutes.score(
        {"tasks": {"one": tried, "two": [{"rate": 1e-3, "validation": 0.1, "test": 0.7}]}}
    ) == pytest.approx(0.6)


@pytest.mark.parametrize(
    "name, file", [("first", "first_demo_in_half"), ("record", "muon_two_layers")]
)
def test_recipes_of_minutes_are_those_of_the_records(name, file):
    record = yaml.safe_load((ROOT / "benchmarks" / "records" / f"{file}.yaml").read_text())
    made = minutes.recipe_of(name, record["trainer"]["max_steps"])
    for part in ("scheduler_warmup_steps", "scheduler_cooldown_steps"):
        assert made["model"].pop(part) == pytest.approx(record["model"].pop(part), abs=1), part
    made.setdefault("data", {}), record.setdefault("data", {})
    assert made == record
    assert minutes.recipe_of(name, 0)["trainer"]["max_steps"] == 2


def test_the_minutes_that_ours_needs_lie_on_a_line_between_the_spans_that_were_run():
    from half_hour import minutes_needed

    ours = {"2": [5.0, 5.2, 4.0], "4": [4.0], "8": [3.0]}  # medians 5, 4, 3
    assert minutes_needed(ours, 3.5) == pytest.approx(4 * 2**0.5)  # the middle of a doubling
    assert (
        minutes_needed(ours, 3.0 + 1e-9) == pytest.approx(8) and minutes_needed(ours, 2.9) is None
    )
    assert minutes_needed(ours, 5.5) == pytest.approx(2)  # it is there already


def test_half_an_hour_of_another_machine_has_its_precision_and_its_steps(
    tmp_path, monkeypatch, capsys
):
    import half_hour

    paces = {
        "machine": {"computes_in": "bf16-mixed"},
        "steps_per_minute": {"theirs": 60.0, "ours": 100.0},
    }
    (tmp_path / "paces.json").write_text(json.dumps(paces))
    asked = []

    def run(script, case, threads):
        asked.append(case)
        return {
            "nats": 1.0 + abs(case.get("rate", 2e-3) - 2e-3) + (case["side"] == "theirs"),
            "steps_per_minute": 1.0,
        }

    monkeypatch.setattr(sides, "run_child", run)
    monkeypatch.setattr(half_hour, "device_name", str)
    monkeypatch.setattr(sys, "argv", ["half_hour.py", "--paces", str(tmp_path / "paces.json"), "--device", "cuda", "--spans", "0.5", "1",
                                      "2", "--kept", str(tmp_path), "--output", str(tmp_path / "out.json")])  # fmt: skip
    half_hour.main()
    assert {(case["device"], case["precision"]) for case in asked} == {
        ("cuda", "bf16-mixed")
    } and not any("probe" in c for c in asked)
    assert {case["steps"] for case in asked if case["side"] == "theirs"} == {300, 1800}
    assert {case["steps"] for case in asked if case["side"] == "ours"} == {200, 400, 800}
    found = json.loads((tmp_path / "out.json").read_text())
    assert (
        found["tuned"]["rate"] == 2e-3
        and list(found["losses"]["ours"]) == ["2", "4", "8"]
        and (tmp_path / "out.png").exists()
    )
    assert found["judged"][0]["passed"] and found["minutes_needed"] == pytest.approx(2)


def test_a_short_run_of_trainer_hides_the_larger_share(tmp_path, monkeypatch, capsys):
    import half_hour

    asked = []
    monkeypatch.setattr(
        sides,
        "run_child",
        lambda script, case, threads: asked.append(case) or {"steps_per_minute": 60.0},
    )
    monkeypatch.setattr(
        sys,
        "argv",
        ["half_hour.py", "--probe", str(tmp_path / "paces.json"), "--kept", str(tmp_path)],
    )
    half_hour.main()
    assert (
        {case["share"] for case in asked}
        == {0.3}
        == {json.loads((tmp_path / "paces.json").read_text())["probed_share"]}
    )
    assert all(case["probe"] for case in asked) and len(asked) == 6


def test_a_long_run_of_ours_has_no_time_limit_and_makes_all_steps_of_its_schedule(
    tmp_path, monkeypatch
):
    import half_hour

    import speedrun

    made, limits = [1509, 900], []

    def run(track, recipe, folder, seed, corpus):
        limits.append(speedrun.race_config(track, recipe, folder, seed)["run"].get("time_limit"))
        return SimpleNamespace(steps=made.pop(0), curve=[(1, 0.5, 3.0), (2, 0.75, 2.0)]), ""

    monkeypatch.setattr(speedrun, "run_seed", run)
    case = {"steps": 1509, "precision": "32-true", "device": "cpu", "seed": 0}
    ours = lambda: half_hour.train_ours(case, None, TRACKS["ten-minutes"], str(tmp_path))  # noqa: E731
    assert ours() == [0.5, 0.75]
    with pytest.raises(RuntimeError, match="900 of 1509 steps"):
        ours()
    assert limits == [None, None]


def test_figures_of_another_card_are_not_mixed_in(tmp_path, monkeypatch, capsys):
    import half_hour
    import larger_recipe

    paces = {
        "machine": {"computes_in": "32-true"},
        "steps_per_minute": {"theirs": 60.0, "ours": 100.0},
    }
    (tmp_path / "paces.json").write_text(json.dumps(paces))
    asked = []

    def run(script, case, threads):
        asked.append(case)
        return {
            "nats": 1.0 + abs(case["rate"] - 2e-3) if "rate" in case else 1.0,
            "bits_per_byte": 2.0,
            "steps_per_minute": 1.0,
        }

    monkeypatch.setattr(sides, "run_child", run)
    for module, words in (
        (half_hour, ["--paces", str(tmp_path / "paces.json")]),
        (larger_recipe, []),
    ):
        counts = []
        for card in ("one", "one", "another"):
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda card=card: card)
            monkeypatch.setattr(sys, "argv", ["x.py", *words, "--device", "cuda", "--kept", str(tmp_path), "--output",
                                              str(tmp_path / "out.json")])  # fmt: skip
            asked.clear()
            module.main()
            counts.append(len(asked))
        assert counts[0] == counts[2] > 0 == counts[1], module
        assert "another" in json.dumps(
            json.loads((tmp_path / "out.json").read_text())["trained_on"]
        )


def test_a_seed_that_the_clock_ended_is_named(tmp_path, monkeypatch, capsys):
    import final_project

    def run(script, case, threads):
        made = case["steps"] - (case["recipe"] == "record" and case["round"] == 1)
        return {"seed": case["round"], "steps": made, "planned_steps": case["steps"], "nats": [3.0, 2.9, 3.1], "line": 6.0,
                "train_seconds": 600.0, "text_sha256": "", "steps_per_second": 10.0}  # fmt: skip

    monkeypatch.setattr(sides, "run_child", run)
    monkeypatch.setattr(final_project, "run_child", run)
    monkeypatch.setattr(
        sys,
        "argv",
        ["final_project.py", "--kept", str(tmp_path), "--output", str(tmp_path / "out.json")],
    )
    final_project.main()
    said = [line for line in capsys.readouterr().out.splitlines() if "ended by the clock" in line]
    assert said == ["  record   seed 1: ended by the clock, 5,399 of 5,400 steps"]


def test_each_side_of_a_larger_recipe_has_its_own_rate_between_worse_ones(
    tmp_path, monkeypatch, capsys
):
    import larger_recipe

    best, asked = {"published": 5e-4, "shares": 2e-3, "muon": 32e-3}, []

    def run(script, case, threads):
        asked.append(case)
        off = abs(math.log2(case["rate"] / best[case["side"]]))
        return {
            "nats": 3 + off,
            "bits_per_byte": 2 + off - 0.1 * (case["side"] == "muon") + 0.01 * case["seed"],
            "steps_per_minute": 1.0,
        }

    monkeypatch.setattr(sides, "run_child", run)
    words = ["--device", "cpu", "--kept", str(tmp_path), "--output", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["larger_recipe.py", *words])
    larger_recipe.main()
    found = json.loads((tmp_path / "out.json").read_text())
    assert {side: one["rate"] for side, one in found["tuned"].items()} == pytest.approx(best)
    assert all(
        min(tried) < best[side] < max(tried)
        for side, one in found["tuned"].items()
        for tried in [[float(rate) for rate in one["tried"]]]
    )
    assert [case["seed"] for case in asked if case["rate"] == best["muon"]] == [0, 1, 2]
    assert found["gains"]["muon"] == pytest.approx({"median": 0.1, "min": 0.1, "max": 0.1})
    assert [one["passed"] for one in found["judged"]] == [True, True]
    muon, ours = (
        found["recipes"]["muon"],
        yaml.safe_load((ROOT / "configs" / "laptop.yaml").read_text()),
    )
    for name in ("optimizer_class", "optimizer_kwargs", "weight_decay"):
        assert muon["model"][name] == ours["model"][name], name
    assert muon["data"]["collator_kwargs"] == ours["data"]["collator_kwargs"]
    assert (
        muon["model"]["scheduler_cooldown_steps"] / 400
        == ours["model"]["scheduler_cooldown_steps"] / ours["trainer"]["max_steps"]
    )


@pytest.mark.parametrize("name", ["colab-gpu", "colab-tpu"])
def test_a_configuration_in_the_larger_shape_is_what_won_there(name):
    import larger_recipe

    theirs = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    found = json.loads((sides.RESULTS / "larger_recipe.json").read_text())
    won = max(found["gains"], key=lambda side: found["gains"][side]["min"])
    assert found["gains"][won]["min"] > 0
    steps = theirs["trainer"]["max_steps"]
    made = larger_recipe.recipe(
        {
            "side": won,
            "rate": found["tuned"][won]["rate"],
            "steps": steps,
            "device": "cuda",
            "quick": False,
        }
    )
    for option in ("optimizer_class", "weight_decay", "optimizer_kwargs", "scheduler_warmup_steps", "scheduler_cooldown_steps",
                   "learning_rate"):  # fmt: skip
        assert made["model"][option] == theirs["model"][option], option
    assert (
        theirs["model"]["model_config_kwargs"].items()
        <= made["model"]["model_config_kwargs"].items()
    )
    assert made["data"]["collator_kwargs"] == theirs["data"]["collator_kwargs"]
    assert (
        larger_recipe.ROWS * larger_recipe.LENGTH == theirs["run"]["batch_tokens"]
        and theirs["data"]["max_sequence_length"] == 256
    )


def test_busy_loops_end_with_their_block():
    with sides.busy_loops(2) as others:
        assert [other.poll() for other in others] == [None, None]
    assert all(other.poll() is not None for other in others)


def figures(*rates: float) -> list[dict]:
    return [{"tokens_per_second": r, "tokens_per_processor_second": 2 * r} for r in rates]


def test_equal_precision_takes_the_lesser_ratio_and_the_default_is_our_choice_against_float32():
    runs = {"ours, fp32": figures(30), "ours, bf16": figures(40), "ours, auto": figures(44),
            "grouped, fp32": figures(10), "grouped, bf16": figures(20), "padded, fp32": figures(4)}  # fmt: skip
    compared = pretraining.compare_rates(runs)
    wall = {name: found["wall"]["median"] for name, found in compared.items()}
    assert (
        wall["ours in fp32 over grouped in fp32"] == 3
        and wall["ours in bf16 over grouped in bf16"] == 2
    )
    assert wall["ours in auto over grouped in fp32"] == 4.4
    judged = {one["what"]: (one["measured"], one["at_least"]) for one in
              pretraining.judge_rates("small", "bert", compared)}  # fmt: skip
    assert judged == {
        "small, bert, padded: equal precision, the lesser of both": (7.5, 6.0),
        "small, bert, padded: auto against fp32": (11, 10.0),
        "small, bert, grouped: equal precision, the lesser of both": (2, 2.5),
        "small, bert, grouped: auto against fp32": (4.4, 4.0)}  # fmt: skip
    assert not pretraining.judge_rates("demo", "bert", compared)  # nothing was promised for it


class DroppedNumbers(TorchDispatchMode):
    "Adds up how many numbers pass through a dropout: torch's, or ours of 16 bits for each."

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        ours = str(function).startswith("aten.lt.") and args[0].dtype == torch.int16
        if ours or "dropout" in str(function) or "bernoulli" in str(function):
            self.total += args[0].numel()
        return function(*args, **(kwargs or {}))


def dropped_numbers(model: torch.nn.Module, ids: torch.Tensor) -> int:
    with DroppedNumbers() as found:
        model.train()(ids, attention_mask=torch.ones_like(ids))
    return found.total


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_both_sides_train_one_architecture_with_the_same_dropout(kind):
    config = pretraining.shape(kind, "tiny")
    ours = BertLabForMaskedLM(config)
    theirs = their_class(kind, "ForMaskedLM")(to_family_config(config, kind, "ForMaskedLM"))
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    ids = torch.randint(5, 2048, (2, 16))
    assert (
        dropped_numbers(ours, ids)
        == dropped_numbers(theirs, ids)
        == (2 * 2 * 16 * 16 + 3 * 2 * 16 * 32 if kind == "bert" else 0)
    )  # weights; embeddings, two sums
    theirs = to_huggingface(ours, kind)
    torch.testing.assert_close(ours.eval()(ids).logits, theirs(ids).logits, atol=1e-5, rtol=1e-5)


def test_one_evaluator_gives_equal_weights_of_both_sides_equal_losses(text, tmp_path):
    ours = BertLabForMaskedLM(pretraining.shape("bert", "tiny", vocab_size=len(text[1])))
    ours.save_pretrained(tmp_path / "ours")
    to_huggingface(ours, "bert").save_pretrained(tmp_path / "theirs")
    found = [
        pretraining.validation_loss(str(tmp_path / side), *text) for side in ("ours", "theirs")
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert found[0]["loss_apart"] != found[0]["loss_joined"]


def test_the_two_forms_of_rows_are_those_of_the_example_script(text):
    corpus, tokenizer = text
    whole = [tokenizer(one)["input_ids"] for one in corpus.train_texts]
    padded = pretraining.their_rows("padded", corpus.train_texts, tokenizer)["input_ids"]
    assert [len(row) for row in padded] == [min(len(row), 128) for row in whole]
    grouped = pretraining.their_rows("grouped", corpus.train_texts, tokenizer)["input_ids"]
    joined = [token for row in whole for token in row]
    assert [token for row in grouped for token in row] == joined[: len(joined) // 128 * 128]
    assert {len(row) for row in grouped} == {128}


def test_both_sides_get_the_same_number_of_real_tokens_a_step(text, tmp_path, monkeypatch):
    monkeypatch.setattr(pretraining, "shared_text", lambda *_: text)
    case = {"model": "tiny", "kind": "bert", "steps": 3, "warm": 1, "seconds": 0, "seed": 0, "warmup": 1,
            "documents": None, "kept": str(tmp_path), "precision": "fp32"}  # fmt: skip
    found = {
        side: pretraining.measure({**case, "side": side}) for side in ("ours", "padded", "grouped")
    }
    assert {side: f["steps"] for side, f in found.items()} == dict.fromkeys(found, 2)
    assert found["grouped"]["real_tokens"] == 2 * 4 * 128 and found["grouped"]["fill"] == 1
    assert 0.6 < found["ours"]["real_tokens"] / 1024 <= 1 and found["padded"]["fill"] < 0.9
    assert (
        0.6 < found["padded"]["real_tokens"] / 1024 < 1.4
    )  # rows of a batch follow the mean length
    assert found["ours"]["num_params"] == found["grouped"]["num_params"]


def rows_of(kind: str) -> list[dict]:
    if kind == "classification":
        return [{"text": "one two three", "label": "b"}, {"text": "four", "label": "a"}]
    if kind == "token_classification":
        return [{"text": ["seven", "onetwo", "ten"], "label": ["a", "b", "a"]}] * 2
    context = "one two three four five six seven " * 9
    answers = {"text": ["five six"], "answer_start": [context.index("five")]}
    return [{"question": "ten", "context": context, "answers": answers},
            {"question": "nine", "context": context, "answers": {"text": [], "answer_start": []}}]  # fmt: skip


@pytest.mark.parametrize("kind", list(finetuning_trainer.ENDINGS))
def test_fine_tuning_rows_and_labels_are_the_same_on_both_sides(kind, text):
    rows, names = rows_of(kind), () if kind == "question_answering" else ("a", "b")
    column = "question" if kind == "question_answering" else "text"
    task = BuiltinDataset(
        "toy", kind, "", column, "label", names, "f1", rows, rows, rows, max_sequence_length=64
    )
    theirs = finetuning_trainer.their_dataset(task, text[1])
    options = {"doc_stride": finetuning_trainer.STRIDE} if kind == "question_answering" else None
    data = FinetuningDataModule(kind, text[1], max_sequence_length=64, collator_kwargs=options)
    data.set_datasets(**task.splits)
    data.setup()
    ours = data.datasets["train"].rows
    assert [list(row["input_ids"]) for row in ours] == [list(row) for row in theirs["input_ids"]]
    if kind == "question_answering":
        spans = list(zip(theirs["start_positions"], theirs["end_positions"], strict=True))
        assert [tuple(row["answer_spans"][0].tolist()) for row in ours] == spans and (0, 0) in spans
        assert len(ours) > len(rows)  # windows
    else:
        listed = lambda labels: labels.tolist() if hasattr(labels, "tolist") else labels  # noqa: E731
        assert [listed(row["labels"]) for row in ours] == list(theirs["labels"])


def test_copies_of_the_corpus_have_the_same_words_and_no_double(tmp_path, monkeypatch):
    texts = [" ".join(f"word{n}-{k}" for k in range(12)) for n in range(5)]
    corpus = SimpleNamespace(train_texts=texts[:3], validation_texts=texts[3:])
    monkeypatch.setattr(scaling, "shared_text", lambda *_: (corpus, None))
    case = {"kept": str(tmp_path), "documents": None, "model": "tiny", "growth": 2, "copies": 5}
    parts = [
        scaling.some_copies(case, number, tmp_path).read_text().splitlines() for number in range(3)
    ]
    assert (
        parts[0] == parts[2] and len(set(parts[0] + parts[1])) == 20
    )  # two parts of two, then again
    for part in parts:
        assert Counter(" ".join(part).split()) == Counter(" ".join(texts).split() * 2)
    everything = scaling.some_copies({**case, "growth": 5}, 7, tmp_path).read_text()
    assert (
        everything == scaling.grown_file(case).read_text()
        and len(set(everything.splitlines())) == 25
    )


SLICED = """
import json, os, sys, time
case = json.loads(sys.argv[2])
if case.get("broken"): sys.exit("this one is broken")
def busy(seconds):
    start = time.process_time()
    while time.process_time() - start < seconds:
        with open(case["log"], "a") as log: log.write(json.dumps([case["name"], time.monotonic()]) + chr(10))
        sum(range(10_000))
print("a warning", flush=True)
busy(case["seconds"])
while case["again"]:
    print(json.dumps({"cost": 2.0}), flush=True)
    busy(case["seconds"])
print(json.dumps({"cost": 3.0}))
"""


def test_sizes_run_side_by_side_one_at_a_time_until_the_longest_is_through(tmp_path):
    (tmp_path / "child.py").write_text(SLICED)
    cases = {name: {"name": name, "log": str(tmp_path / "log"), "seconds": seconds}
             for name, seconds in (("short", 0.05), ("long", 0.6))}  # fmt: skip
    found = scaling.in_slices(cases, tmp_path / "child.py", seconds=0.2)
    assert found["short"].pop("runs") > 1 and found["long"].pop("runs") == 1
    assert found == {"short": {"cost": 2.0}, "long": {"cost": 3.0}}
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    names = [name for name, _ in sorted(log, key=lambda line: line[1])]
    turns = sum(a != b for a, b in zip(names, names[1:], strict=False))
    assert 2 <= turns < len(names) / 10  # long stretches of each: never both at once
    with pytest.raises(SystemExit, match="this one is broken"):
        scaling.in_slices(
            {**cases, "long": {**cases["long"], "broken": True}}, tmp_path / "child.py", 0.2
        )


def test_parts_that_a_call_does_not_measure_keep_their_figures_and_their_date(tmp_path):
    place = {**sides.machine(2), "measured": "2026-01-31"}
    settings = {"shapes": {"small": (4, 256)}}
    part, nothing = {"ratios": {}}, {"rates": {}, "races": {}, "busy": {}}
    path = tmp_path / "pretraining.json"
    assert pretraining.earlier_parts(path, place, settings) == nothing
    path.write_text(
        json.dumps(
            {"machine": place, "settings": settings, "rates": {"small, bert": part}, "races": {}}
        )
    )
    more = {"shapes": {**settings["shapes"], "short": (4, 128)}}  # one that is new spoils nothing
    for same in (settings, more):
        kept = pretraining.earlier_parts(path, {**place, "measured": "2026-02-01"}, same)
        assert kept == {**nothing, "rates": {"small, bert": {**part, "machine": place}}}
    elsewhere = (
        ({**place, "processor": "another"}, settings),
        ({**place, "torch": "2.99"}, settings),
    )
    for other in (*elsewhere, (place, {"shapes": {"small": (4, 128)}})):
        with pytest.raises(
            SystemExit, match="of another machine or other settings: choose another --output"
        ):
            pretraining.earlier_parts(path, *other)
        assert pretraining.earlier_parts(path, *other, fresh=True) == nothing


def test_the_suite_runs_what_is_not_done_with_this_code(tmp_path, capsys):
    options = SimpleNamespace(quick=False, only=["data", "pretraining"], threads=2, fresh=False, folder=tmp_path,
                              kept=tmp_path)  # fmt: skip
    parts = suite.chosen(options)
    words = {part.name: suite.command(part, options) for part in parts}
    assert words["pretraining"][2:] == ["--output", str(tmp_path / "pretraining.json"), "--kept", str(tmp_path),
                                        "--threads", "2"]  # fmt: skip
    done = {"data": suite.stamp(parts[0], words["data"])}
    assert [part.name for part in suite.plan(parts, done, words, False)] == ["pretraining"]
    assert "done with this code" in capsys.readouterr().out
    done["data"] = suite.stamp(parts[0], [*words["data"], "--repeats", "9"])
    assert len(suite.plan(parts, done, words, False)) == 2  # other flags, other figures


def test_the_suite_leaves_the_results_of_the_project_alone_and_tells_the_verdicts_of_what_it_has_run(
    tmp_path, monkeypatch, capsys
):
    runs = []

    def run(words, **_):
        runs.append(words)
        path = Path(words[words.index("--output") + 1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps(
                {"judged": [{"what": "rate", "at_least": 1.0, "measured": 2.0, "passed": True}]}
            )
        )
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(suite.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["suite.py", "--only", "data", "--kept", str(tmp_path)])
    suite.main()
    assert [words[words.index("--output") + 1] for words in runs] == [
        str(tmp_path / "results" / "data.json")
    ]
    assert "data: rate" in capsys.readouterr().out


def test_a_benchmark_whose_code_changed_while_it_ran_is_not_done(tmp_path, monkeypatch, capsys):
    code = ["begun with"]
    monkeypatch.setattr(suite, "fingerprint", lambda *_: code[-1])

    def run(words, **_):
        code.append("changed")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(suite.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["suite.py", "--only", "data", "--kept", str(tmp_path)])
    suite.main()
    suite.main()
    assert capsys.readouterr().out.count("== data took") == 2
    suite.main()
    assert "done with this code" in capsys.readouterr().out


def test_a_benchmark_is_not_done_when_what_it_reads_has_changed(tmp_path, monkeypatch):
    (records,) = (part for part in suite.PARTS if part.name == "records")
    monkeypatch.setattr(suite, "HERE", tmp_path)
    (tmp_path / "records").mkdir()
    (tmp_path / "records.py").touch()
    stamps = []
    for text in ("model: {learning_rate: 0.012}", "model: {learning_rate: 0.5}"):
        (tmp_path / "records" / "one.yaml").write_text(text)
        stamps.append(suite.stamp(records, ["python", "records.py"]))
    assert stamps[0] != stamps[1]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--only", "data", "demo"], "there is no quick way to run demo: "),
        (["--folder", str(sides.RESULTS)], "holds the full results"),
    ],
)
def test_a_quick_suite_refuses_what_has_no_quick_way_and_the_folder_of_full_results(
    words, said, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(sys, "argv", ["suite.py", "--quick", *words, "--kept", str(tmp_path)])
    with pytest.raises(SystemExit):
        suite.main()
    assert said in capsys.readouterr().err


def test_every_benchmark_of_the_suite_is_there_and_every_comparison_is_in_it():
    names = {part.name for part in suite.PARTS}
    assert all(part.script.exists() for part in suite.PARTS) and len(names) == len(suite.PARTS)
    assert len({part.output(ROOT) for part in suite.PARTS}) == len(
        names
    )  # none writes over another
    compares = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if "from sides import" in path.read_text()
    }
    by_hand = {"finetuning", "precision", "larger_recipe"}  # the last wants a GPU and a lot of text
    assert compares - {"suite"} - by_hand <= names


def test_verdicts_of_all_results_are_collected(tmp_path):
    one = sides.judge("this", 1.0, at_least=2.0)
    sides.write_result(tmp_path / "a.json", {"judged": [one]})
    (tmp_path / "b.json").write_text(json.dumps({"older": 1}))
    parts = [suite.Part(name, 1) for name in ("a", "b", "c")]
    assert suite.judgements(parts, tmp_path) == [one | {"what": "a: this"}]
