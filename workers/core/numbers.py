"""Numbers as text, by one rule for messages, terminal, web and CLI.

`0` is zero, `<0.1 %` small, `--` unknown, `-` no traffic, `n/a` not offered. Stored bytes are IEC,
moved bytes SI. Nothing here returns "nan", "inf" or a negative rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

UNKNOWN = "--"
NO_TRAFFIC = "-"
NOT_OFFERED = "n/a"

_IEC = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SI = ("B", "kB", "MB", "GB", "TB", "PB")


def known(value: float | None) -> float | None:
    """The value, or None where it is missing, NaN or infinite."""
    if value is None or not math.isfinite(value):
        return None
    return float(value)


def three_digits(value: float) -> str:
    """At most three significant digits, no exponent, trailing zeros kept out: 1, 1.08, 44.2."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    text = f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".") or "0"


def count(value: float | None) -> str:
    """Full with commas up to 999,999, then `1.23 M`."""
    number = known(value)
    if number is None:
        return UNKNOWN
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if abs(number) >= size * 0.9999995:
            return f"{number / size:.2f} {unit}"
    return f"{number:,.0f}"


def percent(ratio: float | None, *, unit: bool = True) -> str:
    """One decimal: `58.1 %`; `unit=False` where the header carries the sign."""
    number = known(ratio)
    if number is None:
        return UNKNOWN
    suffix = " %" if unit else ""
    if 0 < number < 0.0005:
        return f"<0.1{suffix}"
    return f"{number * 100:.1f}{suffix}"


def points(difference: float | None) -> str:
    """Difference of two ratios: `+3.1 pp`."""
    number = known(difference)
    return UNKNOWN if number is None else f"{number * 100:+.1f} pp"


def times(ratio: float | None) -> str:
    """`25x`, `1.0x`."""
    number = known(ratio)
    if number is None:
        return UNKNOWN
    return f"{number:.0f}x" if number >= 9.95 else f"{number:.1f}x"


def duration(seconds: float | None) -> str:
    """`0.41 ms`, `8.8 ms`, `812 ms`, `2.84 s`, `1 min 12 s`, `1 h 04 min`, `3 d 04 h`."""
    number = known(seconds)
    if number is None:
        return UNKNOWN
    if number < 0:
        return "-" + duration(-number)
    if number < 0.9995:
        return _below_a_second(number)
    if number < 9.995:
        return f"{number:.2f} s"
    if number < 59.95:
        return f"{number:.1f} s"
    return _long(round(number))


def _below_a_second(seconds: float) -> str:
    if seconds == 0:
        return "0 ms"
    if seconds < 0.000005:
        return "<0.01 ms"
    return f"{three_digits(seconds * 1000)} ms"


def _long(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d} h"


def age(seconds: float | None) -> str:
    """Freshness: `0.4 s`, `38 s`, `2 min 05 s`."""
    number = known(seconds)
    if number is None:
        return UNKNOWN
    number = max(0.0, number)
    if number < 9.95:
        return f"{number:.1f} s"
    if number < 59.5:
        return f"{number:.0f} s"
    return _long(round(number))


def stored_bytes(value: float | None) -> str:
    """Memory and disk: `512 MiB`, `1.52 TiB`."""
    return _scaled(value, _IEC, 1024)


def moved_bytes(value: float | None) -> str:
    """What travels: `28.8 GB`."""
    return _scaled(value, _SI, 1000)


def moved_rate(bytes_per_second: float | None) -> str:
    """`6.3 GB/s`."""
    text = moved_bytes(bytes_per_second)
    return text if text == UNKNOWN else f"{text}/s"


def _scaled(value: float | None, units: tuple[str, ...], base: int) -> str:
    number = known(value)
    if number is None:
        return UNKNOWN
    step = 0
    # 999.5 would print as 1,000 of the smaller unit.
    while abs(number) >= base * 0.9995 and step < len(units) - 1:
        number /= base
        step += 1
    return f"{three_digits(number)} {units[step]}" if step else f"{number:.0f} B"


def used_of(used: float | None, capacity: float | None) -> str:
    """`1.52/1.88 TiB`: both in the capacity's unit."""
    whole = known(capacity)
    if whole is None:
        return UNKNOWN
    if whole == 0:
        return "0 B"
    part = known(used)
    step = 0
    size = whole
    while size >= 1024 * 0.9995 and step < len(_IEC) - 1:
        size /= 1024
        step += 1
    shown = UNKNOWN if part is None else three_digits(part / 1024**step)
    return f"{shown}/{three_digits(size)} {_IEC[step]}"


def per_second(rate: float | None) -> str:
    """`71/s`, `6.3/s`, `<0.1/s`, `0/s`."""
    number = known(rate)
    if number is None:
        return UNKNOWN
    number = max(0.0, number)
    if 0 < number < 0.05:
        return "<0.1/s"
    text = f"{number:.1f}" if number < 9.95 else f"{number:,.0f}"
    return ("0" if number == 0 else text) + "/s"


def per_minute(rate: float | None) -> str:
    """Bare number of a rate whose unit stands in the label: 1 is `1`, never 1.08."""
    number = known(rate)
    return UNKNOWN if number is None else three_digits(max(0.0, number))


def rate_per_minute(increments: Iterable[float | None], window_seconds: float) -> float | None:
    """Sum over the stated window, no extrapolation; None if nothing is known of it."""
    seen = [number for number in map(known, increments) if number is not None]
    if not seen or window_seconds <= 0:
        return None
    return sum(seen) * 60.0 / window_seconds


def window(seconds: float) -> str:
    """`15 min`, `5 min`, `1 h`, `24 h`, `30 s`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
