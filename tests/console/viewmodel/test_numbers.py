"""Numbers as text: units, unknown, zero, small, restarts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from console.viewmodel import numbers


class TestDuration:
    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (None, "--"),
            (float("nan"), "--"),
            (float("inf"), "--"),
            (0.0, "0 ms"),
            (0.000001, "<0.01 ms"),
            (0.00041, "0.41 ms"),
            (0.0088, "8.8 ms"),
            (0.0442, "44.2 ms"),
            (0.812, "812 ms"),
            (0.9996, "1.00 s"),
            (2.84, "2.84 s"),
            (9.999, "10.0 s"),
            (59.99, "1 min 00 s"),
            (72, "1 min 12 s"),
            (3840, "1 h 04 min"),
            (97 * 3600, "4 d 01 h"),
            (-0.024, "-24 ms"),
        ],
    )
    def test_three_digits_and_the_unit_that_fits(self, seconds: float | None, text: str) -> None:
        assert numbers.duration(seconds) == text


class TestCounts:
    @pytest.mark.parametrize(
        ("value", "text"),
        [(None, "--"), (0, "0"), (12288, "12,288"), (999_999, "999,999"), (1_234_567, "1.23 M")],
    )
    def test_full_with_commas_then_millions(self, value: float | None, text: str) -> None:
        assert numbers.count(value) == text

    def test_percent_has_one_decimal_and_small_is_not_zero(self) -> None:
        assert numbers.percent(0.581) == "58.1 %"
        assert numbers.percent(0.0) == "0.0 %"
        assert numbers.percent(0.0003) == "<0.1 %"
        assert numbers.percent(None) == "--"
        assert numbers.points(0.031) == "+3.1 pp"

    def test_ratio(self) -> None:
        assert numbers.times(25.3) == "25x"
        assert numbers.times(1.0) == "1.0x"


class TestBytes:
    def test_stored_is_iec_and_moved_is_si(self) -> None:
        assert numbers.stored_bytes(512 * 2**20) == "512 MiB"
        assert numbers.moved_bytes(28_800_000_000) == "28.8 GB"
        assert numbers.moved_rate(6.3e9) == "6.3 GB/s"
        assert numbers.stored_bytes(None) == "--"

    def test_never_a_thousand_of_the_smaller_unit(self) -> None:
        assert numbers.moved_bytes(999_999) == "1 MB"
        assert numbers.stored_bytes(1023.9 * 2**20) == "1 GiB"

    def test_used_of_capacity_shares_the_unit(self) -> None:
        tib = 2**40
        assert numbers.used_of(1.52 * tib, 1.88 * tib) == "1.52/1.88 TiB"
        assert numbers.used_of(None, 160 * 2**30) == "--/160 GiB"
        assert numbers.used_of(1, None) == "--"
        assert numbers.used_of(0, 0) == "0 B"


class TestRates:
    def test_e34_one_request_in_the_window_is_one_a_minute(self) -> None:
        increments: list[float | None] = [0, 0, 1, 0, 0, 0]
        rate = numbers.rate_per_minute(increments, 60)
        assert rate == 1.0
        assert numbers.per_minute(rate) == "1"

    def test_nothing_known_is_unknown_not_zero(self) -> None:
        assert numbers.rate_per_minute([None, None], 60) is None
        assert numbers.per_minute(None) == "--"

    def test_e06_a_rate_is_never_negative(self) -> None:
        assert numbers.per_second(-5.0) == "0/s"
        assert numbers.per_minute(-5.0) == "0"
        assert numbers.per_second(0.01) == "<0.1/s"


class TestTime:
    def test_zone_and_offset_are_the_viewers(self) -> None:
        zone = timezone(timedelta(hours=1))
        at = datetime(2026, 11, 29, 13, 7, 32, tzinfo=UTC)
        assert numbers.clock(at, zone) == "14:07:32"
        assert numbers.offset(at.timestamp(), zone) == "+01:00"

    def test_a_date_appears_when_it_is_not_today(self) -> None:
        now = datetime(2026, 11, 29, 13, 0, tzinfo=UTC)
        assert numbers.stamp(now - timedelta(minutes=1), now.timestamp(), UTC) == "12:59:00"
        assert numbers.stamp(now - timedelta(days=2), now.timestamp(), UTC) == "11-27 13:00"

    def test_ids_show_eight_characters(self) -> None:
        assert numbers.short_id("req-7f3a9c21deadbeef") == "7f3a9c21"
        assert numbers.short_id("7f3a9c21") == "7f3a9c21"
        assert numbers.short_id("x") == "x"
