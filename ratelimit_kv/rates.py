"""Rates and the windows they count in: "100/h", "5/30s", "1000/day".

A plain rate counts in windows of equal length, aligned to the Unix epoch in UTC: "per day" ends at midnight
UTC, and whole weeks start on Monday. A rate of days, weeks or months that was given a time zone counts in
calendar windows, which start at local midnight and are as long as the calendar there makes them.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import lru_cache
from math import floor
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

__all__ = [
    "MAX_CONCURRENT",
    "MAX_COUNT",
    "MAX_PERIOD",
    "Rate",
    "RateError",
    "Window",
    "ceil_seconds",
    "parse_bare",
    "parse_duration",
    "parse_rate",
]

MAX_COUNT = 2**53 - 1
"""The largest limit: the largest integer that JSON and Lua keep exact."""
MAX_PERIOD = 3653 * 86400
"""The longest period in seconds: ten years with their leap days."""
MAX_CONCURRENT = 1000
"""The largest rate of a concurrent scope: each hit in flight takes room in the value of its counter."""

_SECONDS = {"week": 604_800, "day": 86_400, "h": 3600, "m": 60, "s": 1}
_MONTH = 31 * 86_400  # nominal: the longest there is, for lifetimes of keys and for headers
_MAX_MONTHS = 120
_CALENDAR = ("day", "week", "month")
_WORDS = {"h": "hour", "m": "minute", "s": "second"}
_UNITS = {
    alias: unit
    for unit, aliases in {
        "s": "s sec second seconds",
        "m": "m min minute minutes",
        "h": "h hour hours",
        "day": "d day days",
        "week": "w week weeks",
        "month": "month months",
    }.items()
    for alias in aliases.split()
}

# Multiples count from the epoch in both kinds of windows: "2day" is the same with the zone UTC and without.
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_EPOCH_MONDAY = date(1969, 12, 29).toordinal()
_EPOCH_MONDAY_SHIFT = (_EPOCH_DAY - _EPOCH_MONDAY) * 86_400

_RATE = re.compile(r"\s*(\d+(?:_\d+)*)\s*/\s*(\d*)\s*([a-z]+)\s*", re.ASCII)
_DURATION = re.compile(r"\s*(\d+)\s*([a-z]+)\s*", re.ASCII)
_CALENDAR_PERIOD = re.compile(r"([2-9]|[1-9]\d{1,3})?(day|week|month)", re.ASCII)

_HOW_RATE = "Write <limit>/<multiple><unit> with a unit of s, m, h, d, w or month: '100/h', '5/30s' or '1000/day'."
_HOW_BARE = f"Write how many may be in flight at once, from 0 to {MAX_CONCURRENT}: '5'."
_HOW_DURATION = "Write <number><unit> with a unit of s, m, h, d or w: '90s', '1h', '1d'; or an int of seconds."
_HOW_ZONE = "Write an IANA name such as 'Europe/Rome'."


class RateError(ValueError):
    """No usable rate or duration: the message quotes it, says what is wrong and how to write it."""


@dataclass(frozen=True, slots=True)
class Window:
    """One slice of time that a rate counts in: ``start <= now < end``."""

    number: int
    """Differs for each window of a rate and grows with time; 0 is the window of the epoch in UTC."""
    start: int
    """Seconds since the epoch."""
    end: int
    """Seconds since the epoch: the start of the window after."""


@dataclass(frozen=True, slots=True)
class Rate:
    """So many hits in so long. Made by :func:`parse_rate`; raises RateError for values out of range."""

    limit: int
    """Hits, from 0 (which denies every hit that costs something) to MAX_COUNT."""
    period: int
    """Seconds, from 1 to MAX_PERIOD. Nominal for calendar windows: a day is 86400, a month 2678400."""
    calendar: str = ""
    """Empty for plain windows, else "day", "week" or "month", after its multiple if that is not 1: "2day"."""
    timezone: str = ""
    """IANA name of the zone of calendar windows, empty for plain windows."""

    label: str = field(init=False, repr=False, compare=False)
    """What tells the windows of this rate from those of others in a key: "60" or "day@Europe/Rome"."""
    _multiple: int = field(init=False, repr=False, compare=False)
    _unit: str = field(init=False, repr=False, compare=False)
    _shift: int = field(init=False, repr=False, compare=False)
    _latest: list[Window] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_range("the limit", self.limit, 0, MAX_COUNT, _HOW_RATE)
        shift = 0
        if self.calendar:
            match = _CALENDAR_PERIOD.fullmatch(self.calendar)
            if match is None:
                raise _error(self.calendar, "this is no calendar period", "Write 'day', '2week' or 'month'.")
            multiple, unit = int(match[1] or 1), match[2]
            nominal = multiple * _SECONDS.get(unit, _MONTH)
            _check_range(f"the period of {self.calendar!r}", self.period, nominal, nominal, _HOW_RATE)
            _zone(self.timezone)
            label = f"{self.calendar}@{self.timezone}"
        else:
            if self.timezone:
                raise _error(self.timezone, "only a calendar period has a time zone", "Write ''.")
            _check_range("the period", self.period, 1, MAX_PERIOD, _HOW_RATE)
            unit, size = next((unit, size) for unit, size in _SECONDS.items() if self.period % size == 0)
            multiple, label = self.period // size, str(self.period)
            # The epoch was a Thursday.
            shift = _EPOCH_MONDAY_SHIFT if unit == "week" else 0
        object.__setattr__(self, "label", label)
        object.__setattr__(self, "_multiple", multiple)
        object.__setattr__(self, "_unit", unit)
        object.__setattr__(self, "_shift", shift)
        object.__setattr__(self, "_latest", [Window(0, 0, 0)])

    def window(self, now: float) -> Window:
        """The window that holds ``now``, in seconds since the epoch (years 1 to 9999)."""
        # Almost every call is about the current window, so each rate remembers one. Reading or replacing
        # an item of a list is atomic: threads need no lock, at worst two of them work out the same window.
        latest = self._latest[0]
        if latest.start <= now < latest.end:
            return latest
        second = floor(now)
        if self.calendar:
            window = _calendar_window(self._unit, self._multiple, self.timezone, second)
        else:
            number, gone = divmod(second + self._shift, self.period)
            window = Window(number, second - gone, second - gone + self.period)
        if window.start > latest.start:  # a look at the window before does not push out the current one
            self._latest[0] = window
        return window

    def __str__(self) -> str:
        """The canonical text, "5/30s" or "100/day", which ``parse_rate`` reads back, given the time zone."""
        return f"{self.limit}/{'' if self._multiple == 1 else self._multiple}{self._unit}"

    @property
    def phrase(self) -> str:
        """The rate for people, in English: "100 per day", "5 per 30 seconds"."""
        word = _WORDS.get(self._unit, self._unit)
        return f"{self.limit} per {word if self._multiple == 1 else f'{self._multiple} {word}s'}"


# --------------------------------------------------------------------------------------------------- calendar


def _calendar_window(unit: str, multiple: int, timezone: str, second: int) -> Window:
    today = datetime.fromtimestamp(second, _zone(timezone)).date()
    number = _number(unit, multiple, today)
    start, end = _start(unit, multiple, timezone, number), _start(unit, multiple, timezone, number + 1)
    # Where clocks go back from just after midnight, an hour of the old date comes again after the new day has
    # begun: it belongs to the new day.
    if second >= end:
        number += 1
        start, end = end, _start(unit, multiple, timezone, number + 1)
    return Window(number, start, end)


def _number(unit: str, multiple: int, day: date) -> int:
    if unit == "month":
        count = (day.year - 1970) * 12 + day.month - 1
    elif unit == "week":
        count = (day.toordinal() - _EPOCH_MONDAY) // 7
    else:
        count = day.toordinal() - _EPOCH_DAY
    return count // multiple


def _first_day(unit: str, multiple: int, number: int) -> date:
    count = number * multiple
    if unit == "month":
        return date(1970 + count // 12, count % 12 + 1, 1)
    if unit == "week":
        return date.fromordinal(_EPOCH_MONDAY + 7 * count)
    return date.fromordinal(_EPOCH_DAY + count)


@lru_cache(maxsize=1024)  # a handful of rates, each with the windows before, now and after
def _start(unit: str, multiple: int, timezone: str, number: int) -> int:
    """The first second of a window: local midnight, the first of two, or the clock change that skipped it."""
    zone = _zone(timezone)
    day = _first_day(unit, multiple, number)
    # PEP 495: the two readings of a wall time differ where it happens twice (the first is earlier) or never
    # (the first is later: it has the offset from before the change, and the change lies between the two).
    first, second = (int(datetime(day.year, day.month, day.day, tzinfo=zone, fold=fold).timestamp()) for fold in (0, 1))
    if first <= second:
        return first
    return second + bisect_left(
        range(second, first), True, key=lambda at: datetime.fromtimestamp(at, zone).date() >= day
    )


def _zone(name: str) -> ZoneInfo:
    if not isinstance(name, str):
        raise _error(name, f"a time zone is a text, not {_kind(name)}", _HOW_ZONE)
    return _load_zone(name)


@lru_cache(maxsize=128)  # ZoneInfo itself keeps eight
def _load_zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # unknown; not a name; a directory
        known = {zone.lower(): zone for zone in available_timezones()}
    if not known:
        raise _error(name, "this system has no time zones", "Install the package 'tzdata'.") from None
    lower = name.strip().lower().replace(" ", "_")
    close = [zone for zone in sorted(known) if lower and (zone == lower or zone.endswith(f"/{lower}"))]
    close = close or difflib.get_close_matches(lower, known, n=1)
    guess = known[close[0]] if close else ""
    raise _error(name, "this is no time zone that this system knows", _HOW_ZONE, guess) from None


# ---------------------------------------------------------------------------------------------------- parsing


def parse_rate(text: str, *, timezone: str = "") -> Rate:
    """The rate that a text such as "100/h" means.

    ``<limit>/<multiple><unit>``, the multiple being optional, with the units s sec second(s), m min
    minute(s), h hour(s), d day(s), w week(s) and month(s), in lower case, spaces allowed: from 1 second to 10
    years. With a ``timezone``, an IANA name, days, weeks and months are those of the calendar there; months
    need one.

    Raises RateError for anything else.
    """
    if not isinstance(text, str):
        raise _error(text, f"a rate is a text, not {_kind(text)}", _HOW_RATE)
    if timezone:
        _zone(timezone)  # also for rates that have no use for it: a misspelt setting does not lie dormant
    return _parse_rate(text, timezone)


@lru_cache(maxsize=1024)  # a callable may return the text at every request
def _parse_rate(text: str, timezone: str) -> Rate:
    match = _RATE.fullmatch(text)
    if match is None:
        raise _error(text, *_explain(text))
    limit = _integer(match[1].replace("_", ""))
    if limit > MAX_COUNT:
        raise _error(text, f"the limit is above {MAX_COUNT}", _HOW_RATE)
    multiple, unit, seconds = _period(text, match[2], match[3], _HOW_RATE, match[1])
    if not timezone or unit not in _CALENDAR:
        if unit == "month":
            raise _error(
                text,
                "months differ in length, so they need a time zone",
                f"Set TIMEZONE, or count days: '{match[1]}/{31 * multiple}d'.",
            )
        return Rate(limit, seconds)
    if unit == "day" and multiple % 7 == 0:
        unit, multiple = "week", multiple // 7
    return Rate(limit, seconds, f"{multiple if multiple > 1 else ''}{unit}", timezone)


def parse_bare(text: str | int) -> int:
    """The rate of a concurrent scope: a bare number, "5" or 5, from 0 to MAX_CONCURRENT. Raises RateError."""
    if isinstance(text, str) and re.fullmatch(r"\s*\d+\s*", text, re.ASCII):
        number = _integer(text.strip())
    elif type(text) is int:
        number = text
    elif isinstance(text, str):
        limit = re.match(r"\s*(\d+)\s*/", text, re.ASCII)
        problem = "the rate of a concurrent scope has no period" if limit else "this is not a whole number"
        raise _error(text, problem, _HOW_BARE, limit[1] if limit else "")
    else:
        raise _error(text, f"the rate of a concurrent scope is a number, not {_kind(text)}", _HOW_BARE)
    if not 0 <= number <= MAX_CONCURRENT:
        raise _error(text, f"this is not from 0 to {MAX_CONCURRENT}", _HOW_BARE)
    return number


def parse_duration(text: str | int) -> int:
    """Seconds, from 1 to MAX_PERIOD, of a text such as "1h", "90s" or "1d" or an int. Raises RateError."""
    if type(text) is int:
        if not 1 <= text <= MAX_PERIOD:
            raise _error(text, f"this is not from 1 to {MAX_PERIOD} seconds (10 years)", _HOW_DURATION)
        return text
    if not isinstance(text, str):
        raise _error(text, f"a duration is a text or an int, not {_kind(text)}", _HOW_DURATION)
    match = _DURATION.fullmatch(text)
    if match is None:
        stripped = text.strip().lower()
        if not stripped:
            problem, guess = "the text is empty", ""
        elif re.fullmatch(r"\d+", stripped, re.ASCII):
            problem, guess = "the unit is missing", f"{stripped}s"
        elif stripped in _UNITS:
            problem, guess = "the number is missing", f"1{stripped}"
        else:
            lower = _DURATION.fullmatch(stripped)
            problem = "units are written in lower case" if lower else "this is not a whole number and a unit"
            guess = f"{lower[1]}{_close_unit(lower[2])}" if lower and text.strip()[-1:] != "M" else ""
        raise _error(text, problem, _HOW_DURATION, guess)
    multiple, unit, seconds = _period(text, match[1], match[2], _HOW_DURATION)
    if unit == "month":
        raise _error(text, "months differ in length", _HOW_DURATION, f"{31 * multiple}d")
    return seconds


def _period(text: str, digits: str, word: str, how: str, limit: str = "") -> tuple[int, str, int]:
    """(multiple, unit, seconds), nominal for months, of a number that may be missing and a unit."""
    unit = _UNITS.get(word)
    if unit is None:
        close = _close_unit(word)
        guess = f"{limit}{'/' if limit else ''}{digits}{close}" if close else ""
        raise _error(text, f"the unit '{word[:20]}' is unknown", how, guess)
    multiple = _integer(digits or "1")
    if not multiple:
        raise _error(text, "the period is 0", how)
    seconds = multiple * _SECONDS.get(unit, _MONTH)
    if multiple > _MAX_MONTHS if unit == "month" else seconds > MAX_PERIOD:
        raise _error(text, "the period is longer than 10 years", how)
    return multiple, unit, seconds


def _integer(digits: str) -> int:
    # Python refuses to read thousands of digits, and nothing here needs more than sixteen.
    return int(digits) if len(digits) <= 100 else MAX_COUNT + 1


# ----------------------------------------------------------------------------------------------------- errors


def _explain(text: str) -> tuple[str, str, str]:
    """(what is wrong, how to write it, what may be meant) of a text that is no rate."""
    stripped = text.strip()
    unit = stripped.rpartition("/")[2].strip(" 0123456789")
    if not stripped:
        return "the text is empty", _HOW_RATE, ""
    if stripped[0] in "-\N{MINUS SIGN}":
        return "a limit is not negative: 0 denies every hit, None is unlimited", _HOW_RATE, ""
    if unit == "M":
        return "'M' may be minutes or months", _HOW_RATE, _guess(stripped[:-1] + "min")
    guess = _guess(stripped)
    if not stripped.isascii():
        return "only ASCII letters and digits are read", _HOW_RATE, guess
    if unit != unit.lower():
        return "units are written in lower case", _HOW_RATE, guess
    if "/" not in stripped:
        return "there is no '/' between limit and period", _HOW_RATE, guess
    limit, _, period = stripped.partition("/")
    if not re.fullmatch(r"\s*\d+(_\d+)*\s*", limit, re.ASCII):
        return "the limit is not a whole number", _HOW_RATE, guess
    if not period.strip() or period.strip().isdigit():
        return "the unit is missing", _HOW_RATE, guess
    return "the period is not a whole number and a unit", _HOW_RATE, guess


def _guess(text: str) -> str:
    """The rate that was probably meant, "" when that is anybody's guess."""
    match = re.fullmatch(
        r"(\d+(?:_\d+)*)\s*(?:(?:requests?|hits?|times)?\s*(?:/|:|\bper|\bevery|\bin)\s*)(\d*)\s*([a-z]*)",
        text[:100].lower(),
        re.ASCII,
    )
    if match is None or not (match[2] or match[3]):
        return ""
    unit = _close_unit(match[3]) if match[3] else "s"
    return f"{match[1]}/{match[2]}{unit}" if unit else ""


def _close_unit(word: str) -> str:
    if word in _UNITS:
        return word
    # Letters alone don't suggest these; one or two of them are too few to compare.
    if known := {"hr": "h", "hrs": "h", "wk": "w", "wks": "w", "mo": "month", "mon": "month"}.get(word):
        return known
    return next(iter(difflib.get_close_matches(word[:20], [u for u in _UNITS if len(u) > 2], 1, 0.75)), "")


def _check_range(what: str, value: int, low: int, high: int, how: str) -> None:
    if type(value) is not int or not low <= value <= high:
        raise _error(value, f"{what} is not a whole number from {low} to {high}", how)


def _error(given: object, problem: str, how: str, guess: str = "") -> RateError:
    hint = f" Did you mean '{guess}'?" if guess else ""
    return RateError(f"{_quote(given)}: {problem}.{hint} {how}")


def _quote(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _kind(given: object) -> str:
    return "None" if given is None else type(given).__name__


# --------------------------------------------------------------------------------------------------- rounding


def ceil_seconds(seconds: float) -> int:
    """A wait in whole seconds, rounded up, at least 1: what ``Retry-After`` says (RFC 9110 section 10.2.3).

    The wait is read to the nearest microsecond, the grain in which counters are decided. So 10.000001 is 11,
    since 10 would be too early by a grain; but 10.0000000001 is 10: a float of today's clock is right to a
    quarter of a microsecond, and less than that is noise, which would keep a client away a second too long.

    Raises ValueError for NaN and OverflowError for infinity.
    """
    return max(1, -(-round(seconds * 1_000_000) // 1_000_000))
