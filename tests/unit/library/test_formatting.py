"""Numbers for people have units, and never exponents."""

import re
from pathlib import Path

import pytest

import longleaf
from longleaf.formatting import human_angle, human_bytes, human_count, human_number, human_rounded, human_seconds


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (0, "0 s"),
        (1e-7, "0 s"),
        (0.00052, "520 µs"),
        (0.0009999, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.692, "692 ms"),
        (0.99999, "1 s"),
        (1.8712, "1.87 s"),
        (5, "5 s"),
        (59.96, "60 s"),
        (60, "1 min"),
        (119.7, "2 min"),
        (1870, "31 min 10 s"),
        (3600, "1 h"),
        (7507, "2 h 5 min"),
        (86_400 * 1.5, "1 d 12 h"),
        (86_400 * 36_500.0, "36,500 d"),
    ],
)
def test_durations_have_suitable_units(seconds: float, message: str) -> None:
    assert human_seconds(seconds) == message


@pytest.mark.parametrize("power", range(-9, 16))
def test_durations_have_no_exponent(power: int) -> None:
    assert all("e" not in human_seconds(digit * 10.0**power) for digit in (1.0, 1.234567, 9.99999))


@pytest.mark.parametrize(("size", "message"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")])
def test_sizes_have_suitable_units(size: float, message: str) -> None:
    assert human_bytes(size) == message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "0"),
        (1870, "1,870"),
        (2**63 - 1, "9,223,372,036,854,775,807"),
        (0.05, "0.05"),
        (1870.0, "1,870"),
        (-2.5, "-2.5"),
    ],
)
def test_numbers_are_written_in_full(value: float, message: str) -> None:
    assert human_number(value) == message


@pytest.mark.parametrize(
    ("value", "message"),
    [(0.0, "0"), (3.178e-5, "0.0000318"), (7.6e-6, "0.0000076"), (0.5, "0.5"), (12345.6, "12,300"), (10.0, "10")],
)
def test_rounded_numbers_keep_their_zeros(value: float, message: str) -> None:
    assert human_rounded(value) == message


@pytest.mark.parametrize(
    ("radians", "message"),
    [
        (0.0, "0 rad"),
        (0.123, "0.12 rad"),
        (0.064, "64 mrad"),
        (6e-5, "60 µrad"),
        (6e-8, "60 nrad"),
        (9e-16, "0.9 frad"),
        (4.0, "4 rad"),
    ],
)
def test_angles_have_suitable_units(radians: float, message: str) -> None:
    assert human_angle(radians) == message


ROOT = Path(longleaf.__file__).parent.parent


@pytest.mark.parametrize("package", ["longleaf", "coordinator", "workers"])
def test_messages_format_times_and_numbers_with_helpers(package: str) -> None:
    bare = re.compile(r"\} seconds|:[.\d]*[eg]\}")
    files = [
        path for path in (ROOT / package).rglob("*.py") if path.name != "formatting.py" and "_pb2" not in path.name
    ]
    found = {path.name for path in files if bare.search(path.read_text(encoding="utf-8"))}
    assert found == set()


def test_count_of_one_is_singular():
    assert [human_count(count, "context") for count in (0, 1, 1200)] == ["0 contexts", "1 context", "1,200 contexts"]
