"The folder of a web page: whole, exact about what it loads, and refused where it cannot be."

import base64
import hashlib
import html.parser
import json
import re
import tarfile

import pytest

pytest.importorskip("onnxruntime")

from page_cases import EXAMPLES, TEXTS, make_model

from bertlab.train import web_page
from bertlab.train.export import OnnxModel, check_output
from bertlab.train.web_page import PACKAGES, RUNTIME_BYTES, export_web_page, unpack_package

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("web")
    make_model(place / "my <model>")
    export_web_page(place / "my <model>", place / "page", examples=EXAMPLES, texts=TEXTS)
    return place


@pytest.fixture(scope="module")
def page(folder):
    return json.loads((folder / "page/page.json").read_text())


def sri(content):
    return "sha384-" + base64.b64encode(hashlib.sha384(content).digest()).decode()


def test_every_file_that_the_page_loads_is_there_and_has_the_number_that_is_stated(folder, page):
    for file in page["files"].values():
        assert sri((folder / "page" / file["url"]).read_bytes()) == file["integrity"]
    for file in page["packages"].values():
        assert re.fullmatch(
            r"https://[\w.]+/npm/(@\w+/)?[\w-]+@\d+\.\d+\.\d+/dist/[\w.-]+", file["url"]
        )
        assert len(base64.b64decode(file["integrity"].removeprefix("sha384-"))) == 48
    loaded = sum((folder / "page" / file["url"]).stat().st_size for file in page["files"].values())
    assert page["bytes"] == RUNTIME_BYTES + loaded
    shown = [
        path for path in (folder / "page").iterdir() if path.suffix in (".html", ".css", ".js")
    ]
    assert {path.name for path in shown} == {
        "index.html",
        "page.css",
        "begin.js",
        "page.js",
        "model.js",
        "draw.js",
    }
    assert sum(path.stat().st_size for path in [*shown, folder / "page/page.json"]) < 300_000
    assert not (folder / "page/model.onnx").exists(), "the large file is of no use to the page"


def test_the_html_is_filled_names_are_text_and_nothing_comes_from_elsewhere(folder):
    text = (folder / "page/index.html").read_text()
    assert "{{" not in text and "my &lt;model&gt;" in text and "<model>" not in text
    assert '<textarea id="text" dir="auto"' in text and '<p dir="auto">the red ___ sees' in text

    class Reader(html.parser.HTMLParser):
        loaded, ids, opened = [], [], []

        def handle_starttag(self, tag, attributes):
            given = dict(attributes)
            self.ids += [given["id"]] if "id" in given else []
            if tag in ("script", "link", "img", "iframe"):
                self.loaded.append(given.get("src") or given.get("href"))
            assert not [
                name for name in given if name.startswith("on") or name == "style"
            ]  # the policy forbids both
            self.opened.append(tag)

    Reader().feed(text)
    assert set(Reader.loaded) == {"page.css", "begin.js", "data:,"}
    script = "".join(
        (folder / "page" / name).read_text()
        for name in ("begin.js", "page.js", "draw.js", "model.js")
    )
    assert set(re.findall(r'at\("([\w-]+)"\)', script)) <= set(Reader.ids)
    assert (
        "http" not in script.replace("http.server", "")
        and "eval(" not in script
        and "innerHTML" not in script
    )


def test_the_first_answer_is_what_the_file_answers(folder, page):
    exported = OnnxModel(folder / "page/model_quantized.onnx", make_model(folder / "again"))
    first, wanted = page["first"], exported.fill_mask([EXAMPLES[0]], 5)[0]
    assert [[word for word, *_ in first["guesses"][str(gap)]] for gap in first["gaps"]] == [
        [word for word, _ in guesses] for guesses in wanted]  # fmt: skip
    assert first["text"] == EXAMPLES[0].replace("[MASK]", "___")
    assert (
        len(first["attention"]) == page["layers"] == 3
        and len(first["attention"][0]) == page["heads"] == 4
    )
    for layer in first["attention"]:
        for head in layer:
            for row in head:
                assert sum(row) == pytest.approx(1, abs=2e-3) and len(row) == len(first["pieces"])
    gap = str(first["gaps"][0])
    assert (
        len(first["lens"][gap]) == 4 and first["lens"][gap][-1][0][2] == first["guesses"][gap][0][2]
    )


@pytest.mark.parametrize("name", ["..", ".", "a/b", "\0", "long " * 60])
def test_any_title_is_a_title_and_never_a_path(folder, tmp_path, monkeypatch, name):
    def note(place, made, *parts, **options):
        check_output(made)
        made.mkdir()
        raise ValueError(f"made for {options['name']}")

    monkeypatch.setattr(web_page, "export_model", note)
    with pytest.raises(ValueError) as refused:
        export_web_page(
            folder / "my <model>", tmp_path / "page", examples=EXAMPLES, name=name, texts=TEXTS
        )
    assert str(refused.value) == f"made for {name}" and list(tmp_path.iterdir()) == []


def test_what_cannot_become_a_page_is_refused_before_work_starts(folder, tmp_path, monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("work was started")

    monkeypatch.setattr(web_page, "export_model", never)
    monkeypatch.setattr(web_page, "fetch_packages", never)
    model, new = folder / "my <model>", tmp_path / "new"
    make_model(tmp_path / "slow")
    (tmp_path / "slow/tokenizer.json").unlink()
    cases = {
        "exists": lambda: export_web_page(model, folder / "page"),
        "no gap": lambda: export_web_page(model, new, examples=["nothing here"]),
        "examples": lambda: export_web_page(model, new, examples=[]),
        "tokenizer.json": lambda: export_web_page(tmp_path / "slow", new),
        "config.json": lambda: export_web_page(tmp_path, new),
    }
    for word, work in cases.items():
        with pytest.raises(ValueError, match=word):
            work()
    monkeypatch.setattr(web_page.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="npm"):
        export_web_page(model, new, offline=True)
    assert not new.exists()


def test_a_package_that_is_another_one_is_refused_and_nothing_of_it_is_written(tmp_path):
    (tmp_path / "file").write_text("alert(1)")
    with tarfile.open(tmp_path / "package.tgz", "w:gz") as archive:
        archive.add(tmp_path / "file", "package/dist/tokenizers.min.mjs")
        archive.add(tmp_path / "file", "../outside")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="tokenizers"):
        unpack_package(tmp_path / "package.tgz", PACKAGES[1], tmp_path / "out")
    content = (tmp_path / "package.tgz").read_bytes()
    known = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
    with pytest.raises(ValueError, match="tokenizers.min.mjs"):
        unpack_package(
            tmp_path / "package.tgz",
            web_page.Package("p", "1.0.0", "MIT", known, PACKAGES[1].files),
            tmp_path / "out",
        )
    assert list((tmp_path / "out").iterdir()) == []
