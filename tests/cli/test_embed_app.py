"`bertlab embed app`: from a folder to an index in one command, which continues, updates, and names mistakes in a line."

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from app_cases import small_model, write_files
from embedding_cases import draw_pairs
from test_reranker import save_head

from bertlab.cli import embed
from bertlab.cli.embed import _open_app, embed_app
from bertlab.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A folder with 130 sections, and a model."
    folder = tmp_path_factory.mktemp("docs")
    pairs = draw_pairs(130)
    sections = [
        f"## {query} {n}\n\n{text} {n}\n" for n, (query, text, *_) in enumerate(pairs.rows())
    ]
    write_files(folder / "docs", {"words.md": "# Words\n\n" + "\n".join(sections)})
    small_model().save(folder / "model")
    return folder


@pytest.fixture(scope="module")
def built(folder):
    assert main(build_words(folder, folder / "built")) == 0
    return folder / "built"


def build_words(folder, output, *more):
    words = ["embed", "app", folder / "docs", "--model", folder / "model", "--output", output]
    return [str(word) for word in [*words, "--train_pairs", "130", "--serve", "false", *more]]


def refuse(capsys, *words):
    "The one line of a mistake."
    status = main(["embed", "app", *map(str, words)])
    errors = capsys.readouterr().err
    assert status == 2 and errors.count("\n") == 1, errors
    return errors


def test_a_folder_is_trained_on_measured_and_indexed(built):
    report = json.loads((built / "report.json").read_text())
    names = ["BM25"]
    names += [f"{n}{w}" for n in ("given", "trained") for w in ("", " + 0.3 BM25", " + 1 BM25")]
    assert [*report["results"]][:7] == names and report["chosen"] in names[1:]
    assert f"{report['chosen']} - BM25" in report["results"]
    assert (built / "model/modules.json").is_file()
    splits = [(built / f"{split}.jsonl").read_text() for split in ("train", "validation", "test")]
    lines = [line for split in splits for line in split.splitlines()]
    assert len(lines) == len({*lines}) == 130 and all(splits)


def test_a_second_start_only_encodes_what_changed(folder, built, capsys, tmp_path, monkeypatch):
    shutil.copytree(built, tmp_path / "app")
    shutil.copytree(folder / "docs", tmp_path / "docs")
    monkeypatch.setattr(embed, "finetune_embeddings", lambda *_, **__: pytest.fail("trained again"))
    monkeypatch.setattr(embed, "compare_models", lambda *_: pytest.fail("measured again"))
    words = [
        "embed",
        "app",
        str(folder / "docs"),
        "--output",
        str(tmp_path / "app"),
        "--serve",
        "false",
    ]
    assert main(words) == 0 and "\nindex    0 passages encoded now" in capsys.readouterr().out
    (folder / "docs/more.txt").write_text("one more text\n\nof two paragraphs.\n")
    try:
        assert main(words) == 0 and "\nindex    1 passages encoded now" in capsys.readouterr().out
    finally:
        (folder / "docs/more.txt").unlink()


def test_other_settings_need_overwrite(folder, built, capsys, tmp_path):
    shutil.copytree(built, tmp_path / "app")
    (tmp_path / "other").mkdir()
    common = ["--output", tmp_path / "app", "--serve", "false"]
    for words, name in [([folder / "docs", "--train_pairs", "7"], "train_pairs=130"),
                        ([folder / "docs", "--model", tmp_path / "other"], "model="),
                        ([tmp_path / "other"], "folder=")]:  # fmt: skip
        if name == "model=":
            shutil.copytree(folder / "model", tmp_path / "other", dirs_exist_ok=True)
        message = refuse(capsys, *words, *common)
        assert name in message and "--overwrite" in message
    assert main(build_words(folder, tmp_path / "app", "--overwrite")[:-3] + ["--train_pairs", "0", "--overwrite", "--serve", "false"]) == 0  # fmt: skip
    assert not (tmp_path / "app/model").exists()


def test_a_reranker_is_measured_and_remembered(folder, capsys, tmp_path):
    save_head(tmp_path / "head", num_labels=1, problem_type="regression")
    words = build_words(folder, tmp_path / "app", "--train_pairs", "0")
    words = [word for n, word in enumerate(words) if "130" not in words[n : n + 2]]
    assert main([*words, "--reranker", str(tmp_path / "head")]) == 0
    report = json.loads((tmp_path / "app/report.json").read_text())
    assert any(name.endswith(", reranked") for name in report["results"])
    assert main(words) == 0 and "0 passages encoded now" in capsys.readouterr().out
    message = refuse(capsys, *words[2:], "--reranker", folder / "model")
    assert "reranker=" in message and "--overwrite" in message


def test_mistakes_are_one_line(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "binary", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "binary/a.txt").write_bytes(b"\x00\x01\xff" * 50)
    (tmp_path / "binary/b.exe").write_bytes(b"x")
    (tmp_path / "binary/.hidden.txt").write_text("hidden")
    (tmp_path / "full/notes.txt").write_text("my notes\n")
    model = ["--model", folder / "model", "--serve", "false"]
    assert "no text to search in" in refuse(capsys, "empty", *model)
    message = refuse(capsys, "binary", *model)
    assert "a.txt" in message and ".exe" in message and "hidden" not in message
    assert "nowhere" in refuse(capsys, "nowhere", *model)
    assert "name the folder" in refuse(capsys, tmp_path / "full/notes.txt", *model)
    assert "inside of" in refuse(capsys, "full", *model, "--output", "full/index")
    assert "other files" in refuse(capsys, folder / "docs", *model, "--output", "full")
    assert "port" in refuse(capsys, "full", *model, "--port", "70000")
    assert (tmp_path / "full/notes.txt").exists()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = refuse(capsys, "full", "--model", folder / "model", "--port", port)
    assert f"port={port}" in message and not (tmp_path / "full-search").exists()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", ["save_read", "split_pairs", "_train_app", "_measure_app", "compare_models"])  # fmt: skip
def test_it_continues_after_a_kill_at_any_step(folder, built, tmp_path, monkeypatch, moment):
    def kill(*_, **__):
        raise Killed

    arguments = [str(folder / "docs"), str(folder / "model"), str(tmp_path / "app"), 130]
    with monkeypatch.context() as patched:
        patched.setattr(embed, moment, kill)
        with pytest.raises(Killed):
            embed_app(*arguments, serve=False)
    embed_app(*arguments, serve=False)
    for name in ("report.json", "train.jsonl", "passages.jsonl"):
        assert (tmp_path / "app" / name).read_text() == (built / name).read_text()


def test_encoding_continues_after_a_kill(folder, built, tmp_path, monkeypatch):
    shutil.copytree(built, tmp_path / "app")
    shutil.rmtree(tmp_path / "app/vectors")
    from bertlab.embeddings import search

    append, encoded = search._Parts.append, []
    monkeypatch.setattr("bertlab.embeddings.app.cached_vectors", lambda *a, **o: search.cached_vectors(*a, part_size=50, **o))  # fmt: skip

    def kill_third(parts, documents, vectors):
        if len(encoded) == 2:
            raise Killed
        encoded.append(len(documents))
        append(parts, documents, vectors)

    monkeypatch.setattr(search._Parts, "append", kill_third)
    arguments = [str(folder / "docs"), str(folder / "model"), str(tmp_path / "app"), 130]
    with pytest.raises(Killed):
        embed_app(*arguments, serve=False)
    monkeypatch.setattr(search._Parts, "append", lambda parts, d, v: (encoded.append(len(d)), append(parts, d, v)))  # fmt: skip
    embed_app(*arguments, serve=False)
    assert encoded == [50, 50, 30]


@pytest.mark.slow
def test_the_program_serves_until_ctrl_c_and_starts_again(folder, built, tmp_path):
    shutil.copytree(built, tmp_path / "app")
    words = [sys.executable, "-m", "bertlab.cli", "embed", "app", folder / "docs", "--output", tmp_path / "app", "--port", "0"]  # fmt: skip
    for _ in range(2):
        process = subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, text=True)
        line = next(line for line in process.stdout if line.startswith("open "))
        port = int(re.search(r"127\.0\.0\.1:(\d+)", line)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/search?q=alpha")
        assert len(json.loads(connection.getresponse().read())["hits"]) == 10
        process.send_signal(signal.SIGINT)
        assert "ended" in process.stdout.read() and process.wait(60) == 0


def test_an_overwrite_that_was_killed_can_be_repeated(tmp_path, monkeypatch):
    def kill(path):
        raise KeyboardInterrupt

    given = {"folder": "texts", "model": None}
    _open_app(tmp_path, False, given, {"model": "first"})
    (tmp_path / "model").mkdir()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", kill)
        patch.setattr(Path, "iterdir", lambda self: iter(sorted(self.glob("*"))))  # app.json first
        _open_app(tmp_path, True, given, {"model": "second"})
    assert _open_app(tmp_path, True, given, {"model": "second"})["model"] == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["app.json"]
