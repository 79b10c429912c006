"The directory of a web page is complete, and exact about what it loads."

import base64
import dataclasses
import hashlib
import html.parser
import json
import re

import pytest

pytest.importorskip("onnxruntime")

from page_cases import EXAMPLES, TEXTS, make_model

from bertlab.core.files import check_new_output
from bertlab.train import web_page
from bertlab.train.export import OnnxModel
from bertlab.train.web_page import PACKAGES, RUNTIME_BYTES, copy_packages, export_web_page

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("web")
    make_model(path / "my <model>")
    export_web_page(path / "my <model>", path / "page", examples=EXAMPLES, texts=TEXTS)
    return path


@pytest.fixture(scope="module")
def page(folder):
    return json.loads((folder / "page/page.json").read_text())


def sri(content):
    return "sha384-" + base64.b64encode(hashlib.sha384(content).digest()).decode()


def test_every_loaded_file_exists_with_the_stated_hash(folder, page):
    for file in page["files"].values():
        assert sri((folder / "page" / file["url"]).read_bytes()) == file["integrity"]
    for file in page["packages"].values():
        assert re.fullmatch(
            r"https://[\w.]+/npm/(@\w+/)?[\w-]+@\d+\.\d+\.\d+/dist/[\w.-]+", file["url"]
        )
        assert len(base64.b64decode(file["integrity"].removeprefix("sha384-"))) == 48
    loaded = sum((folder / "page" / file["url"]).stat().st_size for file in page["files"].values())
    assert page["bytes"] == RUNTIME_BYTES + loaded
    displayed = [
        path for path in (folder / "page").iterdir() if path.suffix in (".html", ".css", ".js")
    ]
    assert {path.name for path in displayed} == {
        "index.html",
        "page.css",
        "begin.js",
        "page.js",
        "model.js",
        "draw.js",
    }
    assert sum(path.stat().st_size for path in [*displayed, folder / "page/page.json"]) < 300_000
    assert not (folder / "page/model.onnx").exists(), "the large file is of no use to the page"


def test_the_html_is_filled_and_loads_nothing_else(folder):
    text = (folder / "page/index.html").read_text()
    assert "{{" not in text and "my &lt;model&gt;" in text and "<model>" not in text
    assert '<textarea id="text" dir="auto"' in text and '<p dir="auto">the red ___ sees' in text

    class Reader(html.parser.HTMLParser):
        loaded, ids, opened = [], [], []

        def handle_starttag(self, tag, attributes):
            values = dict(attributes)
            self.ids += [values["id"]] if "id" in values else []
            if tag in ("script", "link", "img", "iframe"):
                self.loaded.append(values.get("src") or values.get("href"))
            assert not [
                name for name in values if name.startswith("on") or name == "style"
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


def test_the_first_answer_is_that_of_the_file(folder, page):
    exported = OnnxModel(folder / "page/model_quantized.onnx", make_model(folder / "again"))
    first, expected = page["first"], exported.fill_mask([EXAMPLES[0]], 5)[0]
    assert [[word for word, *_ in first["guesses"][str(gap)]] for gap in first["gaps"]] == [
        [word for word, _ in guesses] for guesses in expected]  # fmt: skip
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
    def note(path, created, *parts, **options):
        check_new_output(created)
        created.mkdir()
        raise ValueError(f"made for {options['name']}")

    monkeypatch.setattr(web_page, "export_model", note)
    with pytest.raises(ValueError) as refused:
        export_web_page(
            folder / "my <model>", tmp_path / "page", examples=EXAMPLES, name=name, texts=TEXTS
        )
    assert str(refused.value) == f"made for {name}" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "source, target, options, word",
    [
        ("my <model>", "page", {}, "exists"),
        ("my <model>", "new", {"examples": ["nothing here"]}, "nothing here"),
        ("my <model>", "new", {"examples": []}, "examples"),
        ("slow", "new", {}, "tokenizer.json"),
        ("nowhere", "new", {}, "config.json"),
        ("my <model>", "new", {"packages": "nowhere"}, "npm install"),
    ],
)
def test_mistakes_are_named_before_work_starts(folder, monkeypatch, source, target, options, word):
    monkeypatch.setattr(web_page, "export_model", lambda *_, **__: pytest.fail("work started"))
    if not (folder / "slow").exists():
        make_model(folder / "slow")
        (folder / "slow/tokenizer.json").unlink()
    with pytest.raises(ValueError, match=word):
        export_web_page(folder / source, folder / target, **options)
    assert not (folder / "new").exists()


def test_only_the_known_files_of_packages_are_copied(tmp_path, monkeypatch):
    content, (package, *_) = b"answer(42)", [p for p in PACKAGES if "tokenizers" in p.name]
    path = next(iter(package.files.values()))[0]
    files = {"tokenizers": (path, sri(content))}
    package_files = dataclasses.replace(package, files=files)
    monkeypatch.setattr(web_page, "PACKAGES", [package_files])
    file = tmp_path / package.name / path
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    copy_packages(tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / file.name).read_bytes() == content
    assert package.license in (tmp_path / "out/README.txt").read_text()
    file.write_bytes(b"alert(1)")
    with pytest.raises(ValueError, match=package.version):
        copy_packages(tmp_path, tmp_path / "other")
