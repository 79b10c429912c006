"What is written as YAML is read as it was, and plain numbers are those of YAML 1.2."

import pytest
import yaml

from bertlab.core.reading import check_utf8, dump_yaml, parse_json, parse_yaml

TEXTS = ["08", "010", "1e3", "12e4567", "1_000", "0x1F", "1:30", "no", "true", "null", "~", "", ".5", ".inf", "2020-01-01",
         "a: b", "[x]", "plain", "+7", "=", "<<", "ü", "two\nlines"]  # fmt: skip
VALUES = [0, -8, 10**20, 1.0, 1e-5, 2.5e300, float("inf"), True, False, None, [], {}]


def test_what_is_written_as_yaml_is_read_as_it_was_by_us_and_by_yaml_1_1():
    value = {"texts": TEXTS, "values": VALUES, **{text: "a name" for text in TEXTS}}
    written = dump_yaml(value)
    for found in (parse_yaml(written, "it"), yaml.safe_load(written)):
        assert found == value and list(map(type, found["values"])) == list(map(type, VALUES))
    assert parse_yaml(dump_yaml(value, default_flow_style=True), "it") == value


@pytest.mark.parametrize(
    "text, value", [("010", 10), ("08", 8), ("-012", -12), ("1e3", 1000.0), ("0x1F", "0x1F")]
)
def test_a_number_with_a_zero_in_front_is_decimal_as_in_yaml_1_2(text, value):
    assert parse_yaml(text, "it") == value


def test_infinity_is_no_number_of_json_however_it_is_written():
    for text in ('{"a": 1e999}', '{"a": Infinity}'):
        with pytest.raises(ValueError, match="is no number of JSON"):
            parse_json(text, "f")
    assert parse_json('{"a": 1e3}', "f") == {"a": 1000.0}


@pytest.mark.parametrize(
    "text", ["a \ud800 b", "caf\udce9"], ids=["a cut emoji", "a byte of Latin-1"]
)
def test_what_utf_8_cannot_write_is_named_with_its_place_and_its_letter(text):
    check_utf8("\U0001f600 é 北", "row 1")
    with pytest.raises(
        ValueError, match=r"row 2: the column 'text' holds half of a surrogate pair.*'\\u"
    ):
        check_utf8(text, "row 2: the column 'text'")
