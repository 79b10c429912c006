"YAML and JSON are read as they were written, and errors name the file."

import pytest
import yaml

from bertlab.core.serialization import (
    dump_yaml,
    load_json,
    load_yaml,
    one_line,
    parse_yaml,
    save_run_file,
)

TEXTS = ["08", "010", "1e3", "12e4567", "1_000", "0x1F", "1:30", "no", "true", "null", "~", "", ".5", ".inf", "2020-01-01",
         "a: b", "[x]", "plain", "+7", "=", "<<", "ü", "two\nlines"]  # fmt: skip
VALUES = [0, -8, 10**20, 1.0, 1e-5, 2.5e300, float("inf"), True, False, None, [], {}]


def test_yaml_is_read_as_written_by_both_versions():
    value = {"texts": TEXTS, "values": VALUES, **{text: "a name" for text in TEXTS}}
    written = dump_yaml(value)
    for content in (parse_yaml(written, "it"), yaml.safe_load(written)):
        assert content == value
        assert list(map(type, content["values"])) == list(map(type, VALUES))
    assert parse_yaml(dump_yaml(value, default_flow_style=True), "it") == value


@pytest.mark.parametrize(
    "text, value",
    [("010", 10), ("-012", -12), ("1e-4", 1e-4), ("0x1F", "0x1F"), ("no", "no"), ("", None)],
)
def test_plain_words_are_those_of_yaml_1_2(text, value):
    assert parse_yaml(text, "it") == value


@pytest.mark.parametrize(
    "text, words",
    [
        ("rate: 1\nsteps: 2\nrate: 3", "run.yaml.*line 3.*'rate'"),
        ("a: [1, 2", "run.yaml.*line"),
        ("a: !!python/object/apply:os.mkdir ['x']", "run.yaml.*python"),
        ("a: !!int ''", "run.yaml"),
    ],
)
def test_wrong_yaml_is_one_line_that_names_the_file(text, words):
    with pytest.raises(ValueError, match=words) as error:
        parse_yaml(text, "run.yaml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "load, content", [(load_json, b'{"a": 1'), (load_json, b"[]"), (load_yaml, b"- a"), (load_yaml, b"a: \xff")]
)  # fmt: skip
def test_a_wrong_file_is_named(tmp_path, load, content):
    (tmp_path / "file.x").write_bytes(content)
    with pytest.raises(ValueError, match="file.x"):
        load(tmp_path / "file.x")


def test_an_error_fits_into_one_line():
    assert one_line(ValueError("a\n  b")) == "a b" and one_line(KeyError()) == "KeyError"
    assert len(one_line(ValueError("x" * 400))) == 303


SECRETS = {"password": "x", "api_key": "y", "aws_secret_access_key": "z", "token": "t", "hf_token": "u",
           "url": "https://me:word@example.org/a", "note": "uses hf_abcdefghijklmnopqrstuvwxyz",
           "Authorization": "v", "account_key": "v", "sas_token": "v", "refresh-token": "v",
           "header": "Bearer abcdefghijklmnopqrst", "signed": "https://example.org/a?n=1&X-Amz-Signature=b",
           "pem": "-----BEGIN RSA PRIVATE KEY-----", "jwt": "eyJhbGciOi.eyJzdWIi.abc"}  # fmt: skip
ORDINARY = {"max_tokens": "10B", "mask_token": "[MASK]", "batch_tokens": 64, "cls_token_id": 2, "key": "a/b",
            "prompt": "/imagine a [MASK]", "root": "/", "url": "https://example.org/a?page=2", "seed": None,
            "title": "The Bearer of news", "tokens_per_step": "8K", "load_key_mapping": "a"}  # fmt: skip


def test_run_files_name_no_directory_and_no_secret(tmp_path):
    run = tmp_path / "run"
    paths = {
        "text": str(tmp_path / "a/my.txt"),
        "more": [str(tmp_path / "a/*.txt"), "b.txt"],
        "output": str(run),
    }
    save_run_file(run, {"data": {**paths, **ORDINARY}, "logger": {"init_args": SECRETS}})
    text = (run / "run.yaml").read_text()
    assert str(tmp_path) not in text and "my.txt" in text
    assert not any(
        value in text for value in ("me:word", "hf_abc", ": x\n", ": y\n", ": z\n", ": t\n")
    )
    loaded = load_yaml(run / "run.yaml")
    assert loaded["data"] == {**paths, **ORDINARY}
    assert loaded["logger"]["init_args"] == dict.fromkeys(SECRETS)
    (run / ".directories.json").unlink()  # as where the file alone is sent to somebody
    assert load_yaml(run / "run.yaml")["data"]["text"] == "my.txt"
