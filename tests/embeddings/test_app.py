"A folder becomes passages, pairs, an index that follows its files, and a page for this machine alone."

import html.parser
import http.client
import json
import os
import re
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from app_cases import FILES, make_index, serving, small_model, write_files
from embedding_cases import draw_pairs

from bertlab.embeddings.app import (MAX_CHARS, MAX_QUERY, Passage, SearchServer, best_system, compare_models, follow_changes,
                                    held_out_task, load_read, passage_pairs, read_folder, read_passages, save_read,
                                    split_pairs)  # fmt: skip
from bertlab.embeddings.pairs import PairDataset

PASSAGES = {
    "alpha.md": [
        (("Alpha",), "line 3", "alpha beta gamma"),
        (("Alpha", "North"), "line 7", "north wind east\n\n```\n# no heading\n```"),
        (("Alpha", "North", "Red"), "line 15", "red green blue"),
    ],
    "notes/beta.txt": [(("A title",), "line 3", "omega psi chi.\n\nphi upsilon tau.")],
    "web.html": [(("Web & more", "South"), "paragraph 3", "south west")],
    "faq.csv": [
        (("what is red?",), "line 2", "a colour like blue"),
        (("what is two?",), "line 3", "a number after one"),
    ],
    "rows.jsonl": [
        (("Mu",), "line 1", "mu nu xi omicron pi"),
        ((), "line 2", "city: rho\nsize: 7"),
    ],
    "tools.py": [
        (("tools", "split"), "split", "Cut a text <img src=x onerror=alert(1)> into words."),
        (("tools", "Box"), "Box", "A box."),
    ],
}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    index = make_index(tmp_path_factory.mktemp("app"))
    index.update()
    return index


@pytest.mark.parametrize("name", FILES)
def test_files_become_passages_with_their_place(tmp_path, name):
    path = write_files(tmp_path) / name
    assert [tuple(passage) for passage in read_passages(path, name)] == [
        (name, *rest) for rest in PASSAGES[name]
    ]


def test_long_texts_are_cut_and_short_ones_joined(tmp_path):
    words = [f"w{n}" for n in range(1200)]
    paragraphs = [
        " ".join(words[:1000]),
        *(" ".join(words[i : i + 20]) for i in range(1000, 1200, 20)),
    ]
    (tmp_path / "a.md").write_text("# T\n\n" + "\n\n".join(paragraphs))
    passages = read_passages(tmp_path / "a.md", "a.md")
    assert " ".join(p.body for p in passages).split() == words
    assert all(len(p.body) <= MAX_CHARS for p in passages) and len(passages) < 9
    assert {p.headings for p in passages} == {("T",)}


@pytest.mark.parametrize(
    "name, pairs",
    [
        (
            "alpha.md",
            [("Alpha: North", "north wind east"), ("Alpha: North: Red", "red green blue")],
        ),
        ("web.html", [("Web & more: South", "south west")]),
        ("faq.csv", [("what is red?", "a colour like blue")]),
        ("rows.jsonl", [("Mu", "mu nu xi omicron pi")]),
        ("tools.py", [("tools: Box", "A box.")]),
    ],
)
def test_each_kind_of_file_offers_its_pairs(tmp_path, name, pairs):
    passages = read_passages(write_files(tmp_path) / name, name)
    dataset = passage_pairs(passages, min_chars=1)
    texts = [
        (query, body.split("\n")[0]) for query, body in zip(dataset.queries, dataset.positives)
    ]
    assert {*pairs} <= {*texts}


def test_text_without_headings_offers_first_sentences():
    body = "This is the first sentence. And here is all of the rest that follows after it."
    pairs = passage_pairs([Passage("a.txt", (), "line 1", body)])
    assert (pairs.queries, pairs.positives) == ([body[:27]], [body[28:]])


def test_only_a_section_s_first_passage_is_a_pair():
    passages = [Passage("a.md", ("T",), f"line {n}", f"passage number {n} of it") for n in (1, 5)]
    assert passage_pairs(passages).positives == ["passage number 1 of it"]


def draw(count):
    texts = [f"query {n}" for n in range(count)], [f"answer number {n}" for n in range(count)]
    return PairDataset(*texts, [[] for _ in texts[0]])


def test_no_text_is_in_two_splits():
    splits = split_pairs(draw(400))
    texts = [{*pairs.texts()} for pairs in splits.values()]
    assert sum(map(len, texts)) == len(set.union(*texts)) == 800 and all(texts)
    assert len(split_pairs(draw(50))["test"]) == 50  # too few to train on


def test_held_out_queries_search_among_other_texts():
    task = held_out_task(draw(3), ["answer number 1", "another", "third"], max_documents=4)
    assert task.documents == ["answer number 0", "answer number 1", "answer number 2", "another"]
    results = compare_models(task, {"given": small_model()})
    assert [*results] == ["BM25", "given", "given + 0.3 BM25", "given + 1 BM25"]
    assert results["BM25"]["recall_1"].mean() == 1  # the numbers are words of query and text


def test_only_what_changed_is_read_and_encoded(tmp_path, monkeypatch):
    index, encoded, opened = make_index(tmp_path), [], []
    stream = index.model.encode_stream

    def count(texts, *arguments, **options):
        yield from stream((encoded.append(text) or text for text in texts), *arguments, **options)

    monkeypatch.setattr("bertlab.embeddings.app.read_passages", lambda path, *more: opened.append(path.name) or read_passages(path, *more))  # fmt: skip

    monkeypatch.setattr(index.model, "encode_stream", count)

    def update():
        num_encoded = index.update()
        texts = [text for text in encoded if text in {p.text for p in index.index.passages}]
        names = sorted(opened)
        encoded.clear(), opened.clear()
        assert num_encoded == len(texts)
        return texts, names

    assert len(update()[0]) == 11 and not index.has_changed()
    assert update() == ([], [])
    faq = tmp_path / "docs/faq.csv"
    faq.write_text(
        "id,question,answer\n0,new one?,it is new\n" + FILES["faq.csv"].split("\n", 1)[1]
    )
    assert index.has_changed()
    assert update() == (["new one?\nit is new"], ["faq.csv"])  # the old rows only moved
    os.rename(tmp_path / "docs/alpha.md", tmp_path / "docs/renamed.md")
    assert update() == ([], ["renamed.md"])
    (tmp_path / "docs/web.html").unlink()
    assert update() == ([], []) and not [p for p in index.index.passages if p.file == "web.html"]
    vectors = index.model.encode_document([p.text for p in index.index.passages])
    assert np.allclose(index.index.vectors_ND, vectors, atol=1e-5)  # each passage has its own


def test_a_second_start_reads_and_encodes_nothing(tmp_path, monkeypatch):
    first = make_index(tmp_path)
    first.update()
    monkeypatch.setattr(
        "bertlab.embeddings.app.read_passages", lambda *_: pytest.fail("read again")
    )
    second = type(first)(small_model(), tmp_path / "docs", tmp_path / "index")
    assert second.update() == 0 and second.search("red") == first.search("red")


def test_another_model_is_refused(tmp_path):
    make_index(tmp_path).update()
    with pytest.raises(ValueError, match="vectors"):
        make_index(tmp_path, small_model(seed=1)).update()


def test_deleted_texts_leave_the_directory(tmp_path):
    index = make_index(tmp_path, files={"a.txt": "omega psi chi", "b.txt": "red green blue"})
    index.update()
    (tmp_path / "docs/a.txt").unlink()
    index.update()
    stored = b"".join(p.read_bytes() for p in (tmp_path / "index").rglob("*") if p.is_file())
    assert b"omega" not in stored and b"green" in stored


def test_hidden_files_links_and_unreadable_files(tmp_path):
    folder = write_files(
        tmp_path / "docs", {"a.txt": "seen text", ".hidden.txt": "hidden", "b.exe": "x"}
    )
    (folder / "loop").symlink_to(folder)
    (folder / "gone.txt").symlink_to("nowhere")
    (tmp_path / "far").mkdir()
    (tmp_path / "far/c.txt").write_text("behind a link")
    (folder / "link").symlink_to(tmp_path / "far")
    (folder / "bad.txt").write_bytes(b"\x00\x01\xff" * 50)
    (folder / "bad.json").write_text("{")
    (folder / "bad.py").write_text("def (")
    notes = Counter()
    read = read_folder(folder, notes=notes)
    bodies = sorted(p.body for file in read.values() for p in file.passages)
    assert bodies == ["behind a link", "seen text"]
    lines = sorted(notes)
    assert len(lines) == 5 and not [line for line in lines if "\n" in line]
    assert [re.search(r"bad\.\w+|\.exe|links", line)[0] for line in lines] == [
        ".exe", "bad.json", "bad.py", "bad.txt", "links"]  # fmt: skip


def test_what_was_read_is_stored_exactly(tmp_path):
    (tmp_path / "docs").mkdir()
    rows = [{"title": "half \ud83d", "text": 'a "b" \u2028 c\nd'}, {"text": "\U0001f600 emoji"}]
    (tmp_path / "docs/a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = read_folder(tmp_path / "docs")
    save_read(tmp_path / "read.jsonl", read)
    assert load_read(tmp_path / "read.jsonl") == read and len(read["a.jsonl"].passages) == 2


def test_pdf_pages_or_how_to_read_them(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4")
    with pytest.raises(ValueError, match="pip install"):
        read_passages(tmp_path / "a.pdf", "a.pdf")


def test_a_pdf_is_read_page_by_page(tmp_path):
    pytest.importorskip("pypdf")
    figure = __import__("matplotlib.figure", fromlist=["Figure"])
    from matplotlib.backends.backend_pdf import PdfPages

    with PdfPages(tmp_path / "a.pdf") as pdf:
        for text in ("alpha beta", "gamma delta"):
            page = figure.Figure()
            page.text(0.1, 0.5, text + " " * 5 + "word " * 120, wrap=False)
            pdf.savefig(page)
    passages = read_passages(tmp_path / "a.pdf", "a.pdf")
    assert passages[0].position == "page 1" and "alpha beta" in passages[0].body
    (tmp_path / "a.pdf").write_bytes((tmp_path / "a.pdf").read_bytes()[:200])
    with pytest.raises(ValueError, match=r"^a\.pdf: "):
        read_passages(tmp_path / "a.pdf", "a.pdf")


def test_words_and_vectors_are_searched_together(index):
    assert index.search("what is red?")[0].headings == ("what is red?",)
    vector = index.search(index.index.passages[3].text)[0]
    assert vector == index.index.passages[3] and len(index.search("zzz", top_k=4)) == 4


def test_a_reranker_orders_the_best_and_leaves_the_rest(index):
    shortest = SimpleNamespace(score=lambda pairs: np.array([-len(text) for _, text in pairs]))
    without = index.search("what is red?", top_k=99)
    index.reranker, index.rerank_k = shortest, 4
    try:
        reranked = index.search("what is red?", top_k=99)
    finally:
        index.reranker = None
    by_length = sorted(without[:4], key=lambda passage: len(passage.text))
    assert reranked[:4] == by_length != without[:4]
    assert reranked[4:] == without[4:] and len(without) > 5


def test_a_reranker_is_measured_on_the_best_system_or_the_named_one():
    task = held_out_task(PairDataset.from_rows(draw_pairs(30).rows()))
    answers = dict(zip(task.queries, (task.documents[d[0]] for d in task.relevant)))
    score = lambda pairs: np.array([float(answers[query] == text) for query, text in pairs])
    oracle, models = SimpleNamespace(score=score), {"small": small_model()}
    best = best_system(compare_models(task, models))
    for named in (None, "small"):
        results = compare_models(task, models, oracle, named, len(task.documents))
        assert results[f"{named or best}, reranked"]["recall_1"].mean() == 1
    assert best_system(results) == "small, reranked"


def test_a_folder_without_words_can_be_searched(tmp_path):
    index = make_index(tmp_path, files={"a.txt": "???\n"})
    assert index.update() == 1 and index.search("red")[0].body == "???"
    (tmp_path / "docs/a.txt").unlink()
    index.update()
    assert index.search("red") == []


def test_changes_are_followed_and_mistakes_survived(tmp_path):
    index, lines, stop = make_index(tmp_path), [], threading.Event()
    index.update()

    def report(line):
        lines.append(line)
        if len(lines) == 1:
            os.rename(tmp_path / "docs", tmp_path / "away")
            (tmp_path / "docs").write_text("a file in its place")
        elif len(lines) == 2:
            stop.set()

    (tmp_path / "docs/new.txt").write_text("brand new text\n")
    follow_changes(index, stop, report, seconds=0.01)
    assert "1 of them" in lines[0] and len(lines) == 2


# --- the server ---------------------------------------------------------------------------------------


def ask(server, path, method="GET", host=None, **headers):
    "Status, headers and text of an answer; the path goes out as it is."
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


@pytest.fixture(scope="module")
def server(index):
    with serving(index, "BM25 <b>0.5</b>") as server:
        yield server


def test_the_server_answers_on_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1" and server.url.startswith("http://127.0.0.1:")
    status, headers, text = ask(server, "/search?q=what+is+red%3F")
    answer = json.loads(text)
    assert status == 200 and answer["hits"][0]["body"] == "a colour like blue"
    assert answer["hits"][0].keys() == {"file", "headings", "position", "body"}
    assert headers["Content-Type"].startswith("application/json")
    assert "Access-Control-Allow-Origin" not in headers
    assert ask(server, "/search?q=red", host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1.evil.example:{port}", "localhost:1", "evil.example:{port}"])  # fmt: skip
def test_other_hosts_are_refused(server, host):
    for path in ("/", "/search?q=red"):
        status, _, text = ask(server, path, host=host.format(port=server.server_port))
        assert status == 403 and "red" not in text and "docs" not in text


@pytest.mark.parametrize("path", ["/../index/passages.jsonl", "//etc/passwd", "/alpha.md", "/docs/alpha.md", "/%2e%2e/alpha.md",
                                  "/search/../alpha.md", "/favicon.ico", "http://evil.example/", "/search/"])  # fmt: skip
def test_no_path_is_a_file(server, path):
    status, _, text = ask(server, path)
    assert status == 404 and "alpha" not in text


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_sites_may_not_search(server, site):
    assert ask(server, "/search?q=red", Sec_Fetch_Site=site)[0] == 404
    assert ask(server, "/search?q=red", Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize("query", ["", "+", "q", "x" * (MAX_QUERY + 1)])
def test_bad_questions_are_refused_in_json(server, query):
    status, _, text = ask(server, f"/search?q={query}" if query != "q" else "/search")
    assert status == 400 and "question" in json.loads(text)["error"]


@pytest.mark.parametrize(
    "query", ["%00", "%ff%fe", "a&q=b", "%3Cscript%3E", "x" * MAX_QUERY, "%ED%A0%BD", "%E6%9D%B1"]
)
def test_any_question_has_an_answer(server, query):
    status, _, text = ask(server, f"/search?q={query}")
    assert status == 200 and len(json.loads(text)["hits"]) == 10


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_other_methods_are_refused(server, method):
    assert ask(server, "/", method)[0] == 501


def test_the_page_is_escaped_and_loads_nothing(server):
    status, headers, text = ask(server, "/?q=red")
    policy = headers["Content-Security-Policy"]
    assert status == 200 and "{{" not in text and "BM25 &lt;b&gt;0.5" in text
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"

    class Reader(html.parser.HTMLParser):
        loaded, labels, ids = [], [], []

        def handle_starttag(self, tag, attributes):
            values = dict(attributes)
            self.loaded += [values[name] for name in ("src", "href") if name in values]
            self.labels += [values["for"]] if tag == "label" else []
            self.ids += [values["id"]] if "id" in values else []
            assert not [name for name in values if name.startswith("on") or name == "style"]

    Reader().feed(text)
    assert Reader.loaded == ["data:,"] and set(Reader.labels) <= set(Reader.ids)
    assert "innerHTML" not in text and "eval(" not in text and "http:" not in text


def test_a_port_in_use_is_named(server):
    with pytest.raises(ValueError, match=f"port={server.server_port} cannot be used"):
        SearchServer(server.server_port)
