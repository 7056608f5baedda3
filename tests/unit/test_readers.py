"""Readers of untrusted data: a value within bounds, or InvalidData."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.common.readers import (
    InvalidData,
    finite_number,
    integer_within,
    is_lfs_pointer,
    lines_of,
    open_regular,
    parse_json,
    parse_yaml,
    plain_file_name,
    read_regular,
)
from tests import hostile

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(_JSON)
def test_json_round_trips(value):
    assert json.dumps(parse_json(json.dumps(value))) == json.dumps(value)


@pytest.mark.slow
@hostile.BOUNDED
@given(hostile.messages({"prompt": "2+3=", "answer": [5, {"a": None}]}), hostile.texts())
def test_any_json_or_yaml_is_bounded_or_invalid(data, text):
    for parse in (parse_json, parse_yaml):
        for document in (data.decode(errors="replace"), text):
            try:
                json.dumps(parse(document), default=str)  # a RecursionError where it is too deep
            except InvalidData as error:
                assert str(error)


@hostile.BOUNDED
@given(hostile.values())
def test_readers_of_values_return_their_type_or_fail(value):
    number, integer = finite_number(value), integer_within(value, 0, 100)
    assert number is None or (type(number) is float and math.isfinite(number))
    assert integer is None or (type(integer) is int and 0 <= integer <= 100)
    try:
        assert Path(plain_file_name(value)).name == value
    except InvalidData as error:
        assert str(error)


@pytest.mark.parametrize("open_, close", [("[", "]"), ('{"a":', "}")])
def test_json_deeper_than_64_is_refused(open_, close):
    def nested(levels):
        return open_ * levels + "1" + close * levels

    parse_json(nested(64))
    for levels in (65, 900, 100_000):
        with pytest.raises(InvalidData, match="deeper than 64"):
            parse_json(nested(levels))


def test_json_with_many_shallow_brackets_is_read():
    assert len(parse_json(json.dumps([[1]] * 1000))) == 1000
    assert parse_json(json.dumps("[" * 1000)) == "[" * 1000


@pytest.mark.parametrize("text", ["9" * 5000, "{", "\\ud800", b"\xff", "", "1 2", "nul"])
def test_invalid_json_is_refused(text):
    with pytest.raises(InvalidData):
        parse_json(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 20_000,
        "- " * 20_000 + "a",
        "&a [*a]",
        "a: !!python/object/apply:os.system [true]",
        "a: 2020-99-99",
        "1" * 5000,
        "? {a: 1}\n: b",
        "a: b: c",
        "a: 1\nb: 2\na: 3",
        "a: {b: 1, 'b': 2}",
        "a\0b",
    ],
)
def test_yaml_beyond_plain_data_is_refused(text):
    with pytest.raises(InvalidData):
        parse_yaml(text)


def test_yaml_aliases_are_counted_as_they_expand():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    assert parse_yaml("\n".join(lines[:4]))["a3"][0] == parse_yaml("\n".join(lines[:3]))["a2"]
    with pytest.raises(InvalidData, match="aliases"):
        parse_yaml("\n".join(lines))


def test_yaml_merges_are_counted_as_they_expand():
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, x: 2, y: 3}")["b"] == {"x": 2, "y": 3}
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 30)]
    with pytest.raises(InvalidData, match="values"):
        parse_yaml("\n".join(lines))


def test_numbers_are_finite_and_of_their_type():
    assert [finite_number(value) for value in (1, -2.5, 10**300)] == [1.0, -2.5, 1e300]
    for value in (10**400, math.nan, math.inf, True, None, "1", [1]):
        assert finite_number(value) is None
    assert integer_within(3, 0, 3) == 3
    for value in (4, -1, 3.0, True, None, "3"):
        assert integer_within(value, 0, 3) is None


def test_plain_file_name_stays_in_its_folder():
    assert plain_file_name("model-00001-of-00002.safetensors") == "model-00001-of-00002.safetensors"
    bad = ["", ".", "..", "../a", "/etc/passwd", "a/b", "a\\b", "a\0", "a" * 256, None, 3, []]
    for value in bad:
        with pytest.raises(InvalidData):
            plain_file_name(value)


def test_long_lines_are_cut_and_keep_their_ends(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"ab\n\n" + b"c" * 100 + b"\n" + b"d" * 8 + b"\n" + b"e" * 100)
    assert list(lines_of(path, 8)) == [b"ab\n", b"\n", b"c" * 7 + b"\n", b"d" * 7 + b"\n", b"e" * 8]


def test_only_regular_files_and_links_to_them_are_read(tmp_path):
    """A pipe would block, and a device would never end."""
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(file)
    assert read_regular(file, 5) == read_regular(tmp_path / "link") == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        read_regular(file, 4)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="it is not a regular file"):
            open_regular(path)
    assert not is_lfs_pointer(tmp_path / "pipe") and not is_lfs_pointer(tmp_path / "gone")
