"""Hostile JSON is refused with a typed error; honest JSON is what the standard library reads."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadkit.errors import ConfigFileError, FormatError
from loadkit.json_safe import parse_json


def parse(data: bytes, **options: Any) -> Any:
    return parse_json(data, file="x.json", max_bytes=1 << 24, **options)


def refused(data: bytes, **options: Any) -> FormatError:
    with pytest.raises(FormatError) as caught:
        parse(data, **options)
    assert caught.value.file == "x.json"
    return caught.value


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(JSON, st.booleans())
def test_honest_json_is_read_as_the_standard_library_reads_it(value: Any, ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert parse(data) == json.loads(data)


@pytest.mark.parametrize(
    ("data", "code", "offset"),
    [
        pytest.param(b'{"\xff\xfe":1}', "E_UTF8", 2, id="S07"),
        pytest.param(b"\xef\xbb\xbf{}", "E_JSON", 0, id="S11"),
        pytest.param(b'{"w":1,"v":2,"w":3}', "E_DUPLICATE", None, id="S16"),
        pytest.param(b'{"a":{"k":1,"k":1}}', "E_DUPLICATE", None, id="S17-nested"),
        pytest.param(b'{"w":[NaN]}', "E_JSON", None, id="S25-unless-allowed"),
        pytest.param(b"[-Infinity]", "E_JSON", None, id="infinity"),
        pytest.param(b"[1e999]", "E_JSON", None, id="float-out-of-range"),
        pytest.param(b"[" * 100_000 + b"]" * 100_000, "E_JSON", None, id="S43-lists"),
        pytest.param(b'{"a":' * 5_000 + b"1" + b"}" * 5_000, "E_JSON", None, id="S43-objects"),
        pytest.param(b"[" * 16_000_000, "E_JSON", None, id="S43-never-closed"),
        pytest.param(b'{"\\ud800":1}', "E_JSON", 2, id="S52-high"),
        pytest.param(b'["\\uDC00\\ud800"]', "E_JSON", 2, id="S52-wrong-order"),
        pytest.param(b'["\\ud83d\\ude00\\ud83d"]', "E_JSON", 14, id="S52-after-a-pair"),
        pytest.param(b'["\\\\\\ud800"]', "E_JSON", 4, id="S52-after-a-backslash"),
        pytest.param(b'["\xed\xa0\x80"]', "E_UTF8", 2, id="S52-raw"),
        pytest.param(b"[" + b"1" * 5_000 + b"]", "E_JSON", None, id="S59"),
        pytest.param(b"", "E_JSON", 0, id="empty"),
        pytest.param(b'"a\nb"', "E_JSON", 2, id="control-character"),
        pytest.param('["é",}'.encode(), "E_JSON", 6, id="offset-counts-bytes"),
        pytest.param(b"{} x", "E_JSON", 3, id="extra-data"),
        pytest.param(b"\x00" * 64, "E_JSON", 0, id="zeros"),
        pytest.param(b" " * (1 << 24) + b"1", "E_LIMIT", None, id="too-many-bytes"),
    ],
)
def test_hostile_json_is_refused_within_two_seconds(
    data: bytes, code: str, offset: int | None
) -> None:
    start = time.thread_time()
    error = refused(data)
    assert time.thread_time() - start < 2
    assert error.code == code
    assert error.offset == offset
    assert len(str(error)) < 400
    assert str(error).isprintable()


def test_depth_is_counted_exactly_and_not_inside_strings() -> None:
    for depth, good in ((64, True), (65, False)):
        data = b'[{"[{": ' * (depth // 2) + b"[" * (depth % 2)
        data += b"1" + b"]" * (depth % 2) + b"}]" * (depth // 2)
        if good:
            parse(data)
        else:
            assert "64 levels" in str(refused(data))
    strings = json.dumps(["[" * 500, '"' + "{" * 500, "\\" * 7 + '"[' * 300]).encode()
    assert parse(strings) == json.loads(strings)
    many = b"[" + b"[[]]," * 5_000 + b"0]"
    assert len(parse(many)) == 5_001


def test_depth_across_the_borders_of_chunks() -> None:
    filler = '"' + "x[" * (600_000) + '"'
    value = f"[{filler}," * 3 + "[]" + "]" * 3
    parse(value.encode(), max_depth=4)
    assert refused(value.encode(), max_depth=3).code == "E_JSON"


def test_little_stack_left_is_no_recursion_error() -> None:
    caught: list[BaseException] = []

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
            return
        parse(b"[" * 60 + b"]" * 60)

    def run() -> None:
        for levels in range(800, 1000, 5):
            try:
                deep(levels)
            except FormatError as error:
                caught.append(error)
            except RecursionError:  # our own frames did not fit: nothing to see
                return

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert all(isinstance(error, FormatError) for error in caught)


def test_integers_are_bounded_even_where_the_process_lifted_the_limit() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        assert refused(b"[" + b"1" * 4_301 + b"]").code == "E_JSON"
        assert parse(b"[" + b"1" * 4_300 + b"]") == [int("1" * 4_300)]
    finally:
        sys.set_int_max_str_digits(before)


def test_constants_can_be_allowed() -> None:
    assert parse(b"[Infinity, 1e999]", allow_nan=True) == [float("inf"), float("inf")]
    assert str(parse(b"NaN", allow_nan=True)) == "nan"


def test_the_offset_counts_from_where_the_json_begins_in_the_file() -> None:
    assert refused(b'{"\xff":1}', base=8).offset == 10


def test_another_class_keeps_its_own_code_and_names_the_rule() -> None:
    with pytest.raises(ConfigFileError) as caught:
        parse(b'{"a":1,"a":2}', error=ConfigFileError)
    assert caught.value.code == "E_CONFIG"
    assert caught.value.detail == {"rule": "E_DUPLICATE", "key": "a"}


def test_a_surrogate_pair_and_an_escaped_backslash_are_fine() -> None:
    data = rb'["\ud83d\ude00", "\\ud800", "\\\\ud800"]'
    assert parse(data) == json.loads(data)


def test_the_duplicate_key_is_shown_escaped_and_short() -> None:
    key = json.dumps("\x1b]0;pwn\x07" + "y" * 5_000)
    error = refused(f"{{{key}:1,{key}:2}}".encode())
    assert "\x1b" not in str(error)
    assert len(str(error)) < 400
