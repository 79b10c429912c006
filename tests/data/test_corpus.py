"Documents, sources, the corpus and its tokenizer: nothing leaks, nothing runs, bad input gets one line."

import hashlib
import os
import random
import re
import string
import subprocess
import sys
import textwrap
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from bertlab.data.corpus import Corpus, embedded_corpus, load_corpus, make_corpus
from bertlab.data.documents import (
    Document,
    deduplicate,
    train_validation_split,
    normalized_words,
    choose_held_out,
    installed_documents,
    module_documents,
    ngram_overlap,
    parse_docstrings,
    python_files,
    drop_rules,
    sections,
    split_words,
    word_pattern,
    word_ngrams,
)
from bertlab.data.sources import SourceNotFound
from bertlab.data.tokenizers import (
    resolve_tokenizer,
    load_tokenizer,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def embedded() -> Corpus:
    return embedded_corpus()


@pytest.fixture(scope="module")
def tokenizer(embedded):
    return train_tokenizer(embedded.train_texts, 2000)


def python(code: str, *options: str, **environment: str) -> str:
    "What a new Python prints."
    command = [sys.executable, *options, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def only_line(error: pytest.ExceptionInfo) -> str:
    message = str(error.value)
    assert message and "\n" not in message
    return message


# --- docstrings -----------------------------------------------------------------------------------

NESTED = '''
"""Top."""
raise SystemExit("this was run")
if True:
    def in_if():
        """If."""
else:
    class InElse:
        """Else."""
        async def method(self):
            """Async."""
            def inner():
                """Inner."""
try:
    pass
except ValueError:
    def in_except():
        """Except."""
finally:
    def in_finally():
        """Finally."""
with open("x") as f:
    def in_with():
        """With."""
match 1:
    case 1:
        def in_case():
            """Case."""
def formatted():
    f"""No docstring: {formatted}."""
def in_bytes():
    b"""No docstring."""
def late():
    x = 1
    """No docstring."""
'''


def test_docstrings_are_found_in_any_statement():
    matches = [(d.source, d.text) for d in parse_docstrings(NESTED.encode(), "m")]
    assert matches == [
        ("m:", "Top."),
        ("m:in_if", "If."),
        ("m:InElse", "Else."),
        ("m:InElse.method", "Async."),
        ("m:InElse.method.inner", "Inner."),
        ("m:in_except", "Except."),
        ("m:in_finally", "Finally."),
        ("m:in_with", "With."),
        ("m:in_case", "Case."),
    ]


def test_docstrings_do_not_depend_on_the_encoding():
    # 3.13 strips indentation when it compiles; the text must be the same before and after that.
    code = '# coding: latin-1\r\ndef f():\r\n    """Grüße.\r\n\r\n    a\r\n        b\r\n    """\r\n'
    assert [d.text for d in parse_docstrings(code.encode("latin-1"), "m")] == ["Grüße.\n\na\n    b"]


@given(st.text(alphabet="ab \n*=-", max_size=300), st.integers(1, 100))
def test_cutting_a_page_loses_nothing_but_blank_lines(page, max_chars):
    assert "".join("".join(sections(page, max_chars)).split()) == "".join(page.split())


@pytest.mark.parametrize("mark", "+|-")
def test_a_line_that_is_almost_a_rule_takes_no_time(mark):
    assert drop_rules(f"{mark * 5000}x\n{mark * 5000}\n+{mark} {mark}++\na") == f"{mark * 5000}x\na"


def test_long_texts_are_read_in_pieces_with_the_same_words():
    text = "A cat, sleeps\non the (river) " * 20_000
    assert normalized_words(text).split() == ["a", "cat", "sleeps", "on", "the", "river"] * 20_000
    assert len(word_ngrams(text)) == 120_000 - 7 and len({*word_ngrams(text)}) == 6


def test_files_that_do_not_parse_are_counted(tmp_path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "dangling.py").symlink_to("missing.py")  # it is no file
    (tmp_path / "good.py").write_text('"""Good."""')
    (tmp_path / "null.py").write_bytes(b'"""Null."""\n\0')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "in_test.py").write_text('"""A test."""')
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text('"""Not of the library."""')
    notes = Counter()
    assert [d.text for d in module_documents(python_files(tmp_path), notes)] == ["Good."]
    assert notes == {"Python files that do not parse": 2}


def test_installed_packages_are_found_and_not_imported(tmp_path, monkeypatch):
    (tmp_path / "dangerous_package" / "deep").mkdir(parents=True)
    (tmp_path / "dangerous_package" / "__init__.py").write_text('"""Top."""\nraise SystemExit')
    (tmp_path / "dangerous_package" / "deep" / "a.py").write_text('"""Deep and internal."""')
    (tmp_path / "dangerous_package" / "z.py").write_text('"""Public."""')
    monkeypatch.syspath_prepend(tmp_path)
    notes = Counter()
    matches = list(
        installed_documents(notes, packages=["dangerous_package", "no_such_package_here"])
    )
    assert [d.text for d in matches] == ["Top.", "Public.", "Deep and internal."]
    assert matches[2].group == "dangerous_package.deep.a"
    assert "dangerous_package" not in sys.modules
    assert notes.total() == 1
    limited = installed_documents(notes, max_chars=12, packages=["dangerous_package"])
    assert [d.text for d in limited] == ["Top.", "Public."]


# --- copies and splits ----------------------------------------------------------------------------


def test_copies_differ_in_layout_case_and_punctuation_alone():
    same = ["Join two paths.", "join  two\npaths", "**Join** two paths!"]
    another = ["Join two path", "two paths join", "Join 2 paths.", "Join 3 paths."]
    assert len({normalized_words(text) for text in same}) == 1
    assert len({normalized_words(text) for text in same + another}) == 5
    dropped = Counter()
    unique = deduplicate((Document(t, "") for t in ["", *same, *another, "a"]), 2, dropped)
    assert [d.text for d in unique] == [same[0], *another]
    assert dropped == {"too short": 2, "duplicates": 2}


def test_word_runs_by_hand():
    assert word_ngrams("A b, c d", 3) == [("a", "b", "c"), ("b", "c", "d")]
    assert word_ngrams("A b", 3) == [("a", "b")]
    assert len(word_ngrams(" ".join(string.ascii_lowercase))) == 26 - 8 + 1


@given(
    st.text(
        alphabet=st.one_of(
            st.characters(max_codepoint=127), st.sampled_from("éßДé\u0301कि\u094dعً‘€한")
        ),
        max_size=40,
    )
)
@settings(derandomize=True, deadline=None, max_examples=100)
def test_words_are_letters_with_their_marks(text):
    marks = "".join(sorted(c for c in set(text) if unicodedata.category(c).startswith("M")))
    before = rf"\w[\w{marks}]*"
    assert split_words(text) == re.findall(before, text)
    assert split_words(text, signs=True) == re.findall(rf"{before}|[^\w\s]", text)
    assert [matches[0] for matches in word_pattern(signs=True).finditer(text)] == split_words(
        text, signs=True
    )
    words = normalized_words(text).split()
    for num_words in (1, 2, 8):
        runs = (
            [tuple(words[i : i + num_words]) for i in range(max(1, len(words) - num_words + 1))]
            if words
            else []
        )
        assert word_ngrams(text, num_words) == runs


PARAGRAPHS = {
    "chinese": "今天早上我和朋友一起坐火车去北京大学参观,那里的学生很多,图书馆也非常大,我们在湖边走了很久才回家。",
    "japanese": "わたしはきのう友だちと電車で大学へ行きました。図書館はとても大きくて、学生がたくさんいました。",
    "thai": "เมื่อวานนี้ฉันไปมหาวิทยาลัยกับเพื่อนด้วยรถไฟ ห้องสมุดใหญ่มากและมีนักศึกษาจำนวนมากนั่งอ่านหนังสือ",
}


@pytest.mark.parametrize("script", PARAGRAPHS)
def test_one_changed_letter_is_a_near_duplicate_in_any_script(script):
    text = PARAGRAPHS[script]
    changed = Document(text[:12] + text[20] + text[13:], "")
    assert text[12] != text[20] and 0.5 < ngram_overlap([Document(text, "")], [changed])[0] < 1
    alternatives = [
        Document(PARAGRAPHS[another], "") for another in PARAGRAPHS if another != script
    ]
    assert ngram_overlap([Document(text, "")], alternatives) == [0.0]


def test_overlap_of_a_long_text_is_that_of_a_part_of_its_runs():
    draw = random.Random(0)
    text = " ".join(str(draw.randrange(10**6)) for _ in range(400_000))
    half = Document(text[: len(text) // 2], "")
    assert len(text) > 2**21
    assert ngram_overlap([Document(text, "")], [half])[0] == pytest.approx(0.5, abs=1e-3)


def test_overlap_counts_runs_of_all_others_together():
    letters = list(string.ascii_lowercase)
    full = Document(" ".join(letters[:16]), "")  # 9 runs of 8
    first, last = Document(" ".join(letters[:10]), ""), Document(" ".join(letters[7:16]), "")
    assert ngram_overlap([full], [first]) == [3 / 9]
    assert ngram_overlap([full], [first, last]) == [5 / 9]
    assert ngram_overlap([first], [full]) == [1.0]
    assert ngram_overlap([full], []) == [0.0]


sizes_of_groups = st.dictionaries(
    st.text(string.ascii_lowercase, min_size=1), st.integers(1, 1000), max_size=60
)


@given(sizes_of_groups, st.floats(0, 0.9), st.randoms(use_true_random=False))
def test_what_is_held_out_fits_and_does_not_depend_on_the_order(sizes, fraction, random):
    held = choose_held_out(sizes, fraction)
    shuffled = list(sizes.items())
    random.shuffle(shuffled)
    assert choose_held_out(dict(shuffled), fraction) == held
    assert sum(sizes[name] for name in held) <= fraction * sum(sizes.values())


def test_groups_are_held_out_in_the_order_of_a_hash():
    names = [f"module{i}" for i in range(40)]
    order = sorted(names, key=lambda name: hashlib.blake2b(name.encode(), digest_size=16).digest())
    assert choose_held_out(dict.fromkeys(names, 10), 0.1) == set(order[:4])


def documents_in(files: dict[str, int], chars: int = 10) -> list[Document]:
    "So many documents in each file, all of them different."
    return [
        Document(f"{file} {i} ".ljust(chars, "x"), f"{file}:{i}")
        for file, n in files.items()
        for i in range(n)
    ]


@pytest.mark.parametrize(
    "files, at_least, full",
    [
        ({f"f{i}": 5 for i in range(60)}, 4, True),  # many files: several are held out
        ({f"f{i}": 50 for i in range(12)}, 1, True),  # ten of equal size: one is
        ({"one": 100}, None, False),  # a single file: documents
        ({"a": 50, "b": 50}, None, False),  # two equal files: neither is a tenth
    ],
)
def test_whole_files_are_held_out_where_that_is_possible(files, at_least, full):
    documents = documents_in(files)
    train, apart, grouped = train_validation_split(documents, 0.1, lambda d: d.group)
    assert grouped is full and sorted(d.source for d in train + apart) == sorted(
        d.source for d in documents
    )
    groups = {d.group for d in apart}
    if full:
        assert len(groups) >= at_least and not groups & {d.group for d in train}
    assert 0.05 <= len(apart) / len(documents) <= 0.11


@given(st.lists(st.text("abc ", max_size=6), max_size=60), st.sampled_from([0.1, 0.3, 0.5]))
@settings(max_examples=60)
def test_duplicates_never_straddle(texts, fraction):
    try:
        corpus = make_corpus(
            "x", [Document(t, f"f{i % 7}:{i}") for i, t in enumerate(texts)], fraction
        )
    except ValueError:
        return
    words = [
        [" ".join(re.findall(r"\w+", text.lower())) for text in part]
        for part in (corpus.train_texts, corpus.validation_texts)
    ]
    assert not set(words[0]) & set(words[1])
    assert len(corpus.train) + len(corpus.validation) + corpus.num_dropped.total() == len(texts)


def test_near_duplicates_of_training_texts_are_not_held_out():
    common = " ".join(f"word{i}" for i in range(40))
    documents = [Document(f"{common} {i}", f"f{i}:1") for i in range(20)]
    documents += [Document(f"{i} {i + 1} {i + 2}", f"g{i}:1") for i in range(1000)]
    corpus = make_corpus("x", documents, 0.3)
    assert not any(text.startswith("word0") for text in corpus.validation_texts)
    assert corpus.num_dropped["held out, but half or more is in training"] > 0


def test_repetitive_text_is_kept_and_said_to_be():
    template = "On day {} the pump of the northern station ran without any fault at all."
    documents = [Document(template.format(i), f"log:{i}") for i in range(200)]
    corpus = make_corpus("x", documents)
    assert len(corpus.train) + len(corpus.validation) == 200 and corpus.validation
    assert f"{len(corpus.validation)} held-out documents with a near duplicate" in corpus.describe()


# --- the embedded corpus --------------------------------------------------------------------------


def test_a_top_level_module_is_on_one_side(embedded):
    sides = [
        {d.source.split(":")[0].split(".")[0] for d in part}
        for part in (embedded.train, embedded.validation)
    ]
    assert not sides[0] & sides[1]
    assert len(sides[1]) >= 10, "validation on a few modules would measure these modules"
    assert "pydoc_data" in sides[0]
    sizes = Counter()
    for document in embedded.validation:
        sizes[document.group.split(".")[0]] += len(document.text)
    assert max(sizes.values()) < 0.3 * sizes.total()


def test_no_held_out_document_is_half_in_the_training_text(embedded):
    def words(text):
        return "".join(c.lower() if c.isalnum() or c == "_" else " " for c in text).split()

    train = [words(text) for text in embedded.train_texts]
    full = {" ".join(w) for w in train}
    eights = {" ".join(w[i : i + 8]) for w in train for i in range(len(w) - 7)}
    for text in embedded.validation_texts:
        ngrams = words(text)
        assert " ".join(ngrams) not in full, text
        if len(ngrams) >= 8:
            runs = [" ".join(ngrams[i : i + 8]) for i in range(len(ngrams) - 7)]
            assert sum(run in eights for run in runs) < len(runs) / 2, text


def test_the_corpus_is_the_same_in_every_process():
    code = """
    import sys
    from bertlab.data.corpus import embedded_corpus
    print(embedded_corpus().sha256, {"turtle", "tkinter", "this", "antigravity", "pydoc_data"} & set(sys.modules))
    """
    plain = python(code, PYTHONHASHSEED="1")
    assert plain == python(code, "-OO", PYTHONHASHSEED="2")  # -OO strips docstrings, of what is run
    assert plain.endswith("set()")


def test_reading_a_corpus_loads_nothing_heavy():
    code = """
    import sys
    from bertlab.data.corpus import load_corpus
    load_corpus("settings.ini", sample_by="line")
    load_corpus(max_documents=500)
    heavy = {"torch", "transformers", "datasets", "tokenizers", "pyarrow", "pandas", "numpy", "huggingface_hub"}
    print(heavy & set(sys.modules))
    """
    assert python(code) == "set()"


def test_the_larger_level_holds_out_the_same_modules(embedded, monkeypatch):
    held = embedded.validation[0]
    extra = [
        Document(f"A tensor of {i} numbers in a row of its own.", "torch.functional:f")
        for i in range(50)
    ]
    copy = Document(held.text, "transformers.copies:f")
    monkeypatch.setattr("bertlab.data.corpus.installed_documents", lambda notes: [*extra, copy])
    larger = embedded_corpus("installed")
    assert {d.group for d in larger.validation} == {d.group for d in embedded.validation}
    assert set(larger.validation_texts) == set(embedded.validation_texts)
    assert len(larger.train) == len(embedded.train) + 50 and larger.num_dropped["duplicates"] > 0
    assert larger.sha256 != embedded.sha256


# --- sources --------------------------------------------------------------------------------------


def all_texts(corpus: Corpus) -> list[str]:
    return sorted(corpus.train_texts + corpus.validation_texts)


def test_a_row_that_is_one_long_document_is_read(tmp_path):
    long = "word " * 60_000  # csv's own limit is 131,072 characters
    (tmp_path / "a.csv").write_text(f"text\nshort\n{long}\n")
    corpus = load_corpus(tmp_path / "a.csv", validation_fraction=0)
    assert corpus.train_texts == ["short", long]


def test_a_moved_directory_is_split_by_file_as_before(tmp_path):
    def fill(root: Path) -> Path:
        for i in range(60):
            path = root / f"part{i % 3}" / f"{i}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(f"{i} sentence {n}" for n in range(40)))
        (root / "picture.png").write_bytes(b"\x89PNG")
        return root

    corpus = load_corpus(fill(tmp_path / "here"))
    moved = load_corpus(fill(tmp_path / "elsewhere" / "deeper"))
    assert corpus.sha256 == moved.sha256
    train, validation = ({d.group for d in part} for part in (corpus.train, corpus.validation))
    assert len(validation) >= 4 and not train & validation and len(train | validation) == 60
    assert "1 files of other kinds, not read (1 .png)" in corpus.describe()


# --- datasets -------------------------------------------------------------------------------------


def rows(n: int, column: str = "text") -> dict:
    return {"label": list(range(n)), column: [f"Row {i} of a dataset." for i in range(n)]}


def test_a_hub_name_goes_to_datasets_with_its_options(monkeypatch):
    import datasets

    seen = []

    def load_dataset(*arguments, **options):
        seen.append((arguments, options))
        return datasets.Dataset.from_dict(rows(2500, "body"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = load_corpus("owner/name", "body", split="train[:50%]", config_name="en")
    assert seen == [(("owner/name", "en"), {"split": "train[:50%]", "streaming": False})]
    assert all_texts(corpus) == sorted(rows(2500)["text"])
    assert "owner/name:2500" in {d.source for d in corpus.train + corpus.validation}


def test_a_stream_without_an_end_is_read_as_far_as_asked(monkeypatch):
    import datasets

    count = 0

    def endless():
        nonlocal count
        while True:
            count += 1
            yield {"text": f"Row {count} of a dataset."}

    stream = datasets.IterableDataset.from_generator(endless)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, streaming, **k: stream if streaming else None
    )
    corpus = load_corpus("name", streaming=True, max_documents=60)
    assert len(all_texts(corpus)) == 60 and count <= 3000
    with pytest.raises(ValueError, match="max_documents"):
        load_corpus("name", streaming=True)


def test_a_dataset_saved_to_disk_is_read_by_its_split(tmp_path):
    import datasets

    train, test = (
        datasets.Dataset.from_dict(rows(50)),
        datasets.Dataset.from_dict({"text": ["of the test split"]}),
    )
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "saved")
    assert all_texts(load_corpus(tmp_path / "saved")) == sorted(rows(50)["text"])
    train.save_to_disk(tmp_path / "single")
    assert all_texts(load_corpus(tmp_path / "single")) == sorted(rows(50)["text"])
    for name in (
        "saved",
        "single",
    ):  # of the second all rows are there, and none of them is for validation
        with pytest.raises(SourceNotFound, match="'validation'"):
            load_corpus(tmp_path / name, split="validation")
    with pytest.raises(ValueError, match="'label', 'text'"):
        load_corpus(tmp_path / "saved", "body")


@pytest.fixture
def unplugged(monkeypatch):
    "A machine without a network, whose hub client does not know that yet."
    from huggingface_hub import constants

    def refuse(*arguments, **options):
        raise OSError("no route")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("bertlab.data.sources.getproxies", dict)
    return constants


def test_without_a_network_the_hub_fails_at_once(monkeypatch, unplugged):
    import datasets

    def load_dataset(*arguments, **options):
        assert unplugged.HF_HUB_OFFLINE, "it would try for most of a minute"
        raise ConnectionError("Couldn't reach 'name' on the Hub\nwith more lines")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(SourceNotFound) as error:
        load_corpus("name")
    assert "name" in only_line(error) and "network" in str(error.value)
    assert unplugged.HF_HUB_OFFLINE is False, "what was switched must be switched back"


# --- bad input ------------------------------------------------------------------------------------


BAD = {
    "missing file": (lambda p: p / "no.txt", {}, "no.txt", "does not exist"),
    "empty file": (b"", {}, "a.txt", "no document"),
    "header alone": (("a.csv", b"text\n"), {}, "a.csv", "no document"),
    "copies of one document": (b"the same\n" * 50, {}, "documents (1)", "validation_fraction"),
    "broken gzip": (("a.txt.gz", b"\x1f\x8bnot gzip"), {}, "a.txt.gz", "decompressed"),
    "table without the column": (("a.csv", b"id,body\n1,x\n"), {}, "'text'", "'id', 'body'"),
    "no parquet": (("a.parquet", b"plain"), {}, "a.parquet", "Parquet"),
    "empty directory": (lambda p: p, {}, "has no file to read", ".jsonl"),
    "unknown level": (lambda p: None, {"level": "all"}, "level", "'all'"),
    "no documents": (b"a\nb\n", {"max_documents": 0}, "max_documents", "0"),
    "stream of a file": (b"a\n", {"streaming": True, "max_documents": 5}, "streaming=True"),
    "split of a file": (b"a\nb\n", {"split": "test"}, "split='test'", "hub"),
    "config of a file": (lambda p: None, {"config_name": "en"}, "config_name='en'", "hub"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_bad_input_gets_one_line_that_names_it(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    content, options, *words = case
    if callable(content):
        source = content(tmp_path)
    elif isinstance(content, bytes):
        source = tmp_path / "a.txt"
        source.write_bytes(content)
    else:
        source = tmp_path / content[0]
        source.write_bytes(content[1])
    options = {"source": source, **options}
    with pytest.raises(ValueError) as error:
        load_corpus(**options)
    message = only_line(error)
    for word in words:
        assert word in message


def test_a_file_without_permission_is_named(tmp_path, monkeypatch):
    def forbid(*arguments):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.txt").write_text("some text")
    # root may read everything, so chmod would not do
    monkeypatch.setattr("bertlab.data.readers.open", forbid, raising=False)
    with pytest.raises(ValueError, match="a.txt.*permission"):
        load_corpus(tmp_path / "a.txt")


# --- the tokenizer --------------------------------------------------------------------------------

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def test_the_vocabulary_does_not_depend_on_the_order_of_texts(embedded):
    texts = embedded.train_texts[:800]
    vocabularies = [
        train_tokenizer(t, 1000).get_vocab() for t in (texts, texts[::-1], texts, texts)
    ]
    assert all(vocabulary == vocabularies[0] for vocabulary in vocabularies)


def longest_match(word: str, vocabulary: dict[str, int]) -> list[str]:
    "WordPiece by its definition."
    remaining, matches = word, []
    while remaining:
        mark = "##" if matches else ""
        length = next(
            (n for n in range(len(remaining), 0, -1) if mark + remaining[:n] in vocabulary), 0
        )
        if not length:
            return ["[UNK]"]
        matches.append(mark + remaining[:length])
        remaining = remaining[length:]
    return matches


@given(word=st.text("abcdefghijklmnopqrstuvwxyzñ0123456789", min_size=1, max_size=20))
@settings(max_examples=100)
def test_a_word_is_cut_as_wordpiece_is_defined(tokenizer, word):
    plain = word.replace("ñ", "n")  # lower-casing takes accents off
    assert tokenizer.tokenize(word) == longest_match(plain, tokenizer.get_vocab())


def test_special_tokens_frame_texts_and_pairs(tokenizer):
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 4]) == SPECIAL
    assert sorted(tokenizer.get_vocab().values()) == list(range(2000))
    single, pair = tokenizer("the value"), tokenizer("the", "value")
    assert list(single) == ["input_ids", "attention_mask"]
    the, value = tokenizer.get_vocab()["the"], tokenizer.get_vocab()["value"]
    assert single.input_ids == [2, the, value, 3] and pair.input_ids == [2, the, 3, value, 3]
    assert pair.sequence_ids() == [None, 0, None, 1, None]
    padded = tokenizer(["the value", "the"], padding=True)
    assert padded.input_ids[1] == [2, the, 3, 0] and padded.attention_mask[1] == [1, 1, 1, 0]
    assert tokenizer("[MASK]").input_ids == [2, 4, 3]
    assert len(tokenizer("the " * 1000, truncation=True).input_ids) == 512


@pytest.mark.parametrize("lowercase", [True, False])
def test_case_survives_a_reload_where_it_is_kept(tmp_path, lowercase):
    strips = {"strip_accents": True} if lowercase else {}  # of 19 letters, one is too many
    tokenizer = train_tokenizer(
        ["The cat É sat", "the Cat sat"] * 9, 100, lowercase=lowercase, **strips
    )
    tokenizer.save_pretrained(tmp_path)
    expected = ["the", "cat", "e"] if lowercase else ["The", "Cat", "É"]
    assert tokenizer.tokenize("The Cat É") == expected
    loaded = load_tokenizer(tmp_path)
    assert loaded.tokenize("The Cat É") == expected and loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.model_max_length == 512 and loaded.padding_side == "right"
    assert list(loaded("the", "cat")) == ["input_ids", "attention_mask"]


def test_the_smallest_vocabulary_has_all_characters():
    texts = ["ab ba", "c"]
    exact = train_tokenizer(texts, 10)
    assert sorted(exact.get_vocab(), key=exact.get_vocab().get) == [
        *SPECIAL,
        "a",
        "b",
        "c",
        "##a",
        "##b",
    ]
    assert exact.tokenize("ab c") == ["a", "##b", "c"]
    for vocab_size in (9, 5, 4, 0, -1):
        with pytest.raises(ValueError) as error:
            train_tokenizer(texts, vocab_size)
        assert f"vocab_size={vocab_size}" in only_line(error) and "10 or more" in str(error.value)


def test_rare_characters_are_left_out():
    texts = ["aaa bb cc d e"]
    tokenizer = train_tokenizer(texts, 50, limit_alphabet=4)
    assert tokenizer.tokenize("a d e ae") == ["a", "d", "[UNK]", "[UNK]"]
    assert not any("e" in token for token in set(tokenizer.get_vocab()) - set(SPECIAL))
    many = ["".join(map(chr, range(0x4E00, 0x4E00 + 5000)))]
    assert len(train_tokenizer(many, 1100)) <= 1100
    with pytest.raises(ValueError, match="limit_alphabet"):
        train_tokenizer(texts, 50, limit_alphabet=0)


def test_a_missing_tokenizer_is_named_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "socket.create_connection", lambda *a, **k: pytest.fail("asked the network")
    )
    (tmp_path / "file.txt").write_text("no directory")
    for name in (tmp_path / "missing", tmp_path / "file.txt", "./missing"):
        with pytest.raises(SourceNotFound) as error:
            load_tokenizer(name)
        assert "directory" in only_line(error)


def test_tokenizers_are_resolved_in_a_fixed_order(tmp_path, tokenizer):
    for name in ("named", "model", "kept"):
        tokenizer.model_max_length = {"named": 11, "model": 12, "kept": 13}[name]
        tokenizer.save_pretrained(tmp_path / name)
    named_dir, model, unique = (tmp_path / name for name in ("named", "model", "kept"))
    train = lambda: "trained"  # noqa: E731
    assert (
        resolve_tokenizer([None, named_dir, str(named_dir)], model, unique, train).model_max_length
        == 11
    )
    assert resolve_tokenizer([None], model, unique, train).model_max_length == 12
    assert resolve_tokenizer([], None, unique, train).model_max_length == 13
    assert resolve_tokenizer([], None, tmp_path / "missing", train) == "trained"
    assert resolve_tokenizer([tokenizer, tokenizer]) is tokenizer
    with pytest.raises(ValueError, match="named.*model|model.*named"):
        resolve_tokenizer([named_dir, model])
    with pytest.raises(ValueError, match="tokenizer"):
        resolve_tokenizer([None, None])
