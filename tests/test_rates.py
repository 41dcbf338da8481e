"""Rates: what a text means, and which window a moment falls in."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import threading
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ratelimit_kv import rates
from ratelimit_kv.rates import (
    MAX_CONCURRENT,
    MAX_COUNT,
    MAX_PERIOD,
    Rate,
    RateError,
    Window,
    ceil_seconds,
    parse_bare,
    parse_duration,
    parse_rate,
)

DAY = 86_400

unhurried = settings(deadline=None)  # the first look at a zone reads its file


def at(text: str, zone: str = "UTC") -> int:
    """Seconds since the epoch of a wall time; the earlier one where it happens twice."""
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp())


# --------------------------------------------------------------------------------------------------- the text


@pytest.mark.parametrize(
    ("text", "limit", "period"),
    [
        ("1/s", 1, 1),
        ("5/sec", 5, 1),
        ("5/second", 5, 1),
        ("5/seconds", 5, 1),
        ("5/30s", 5, 30),
        ("5/m", 5, 60),
        ("5/min", 5, 60),
        ("5/minute", 5, 60),
        ("5/minutes", 5, 60),
        ("100/h", 100, 3600),
        ("100/hour", 100, 3600),
        ("100/hours", 100, 3600),
        ("1000/d", 1000, DAY),
        ("1000/day", 1000, DAY),
        ("1000/days", 1000, DAY),
        ("7/w", 7, 7 * DAY),
        ("7/week", 7, 7 * DAY),
        ("7/weeks", 7, 7 * DAY),
        ("10 / min", 10, 60),
        ("  10/ 5 m ", 10, 300),
        ("10/5m", 10, 300),
        ("100/36h", 100, 36 * 3600),
        ("10_000/h", 10_000, 3600),
        ("0/m", 0, 60),
        ("007/m", 7, 60),
        ("5/3653d", 5, MAX_PERIOD),
        (f"{MAX_COUNT}/s", MAX_COUNT, 1),
    ],
)
def test_a_good_rate(text: str, limit: int, period: int) -> None:
    rate = parse_rate(text)
    assert (rate.limit, rate.period, rate.calendar, rate.timezone) == (limit, period, "", "")


BAD_RATES: list[tuple[Any, str]] = [
    ("", "empty"),
    ("   ", "empty"),
    ("abc/minute", "not a whole number"),
    ("/m", "not a whole number"),
    ("1.5/s", "not a whole number"),
    ("1e3/s", "not a whole number"),
    ("+5/m", "not a whole number"),
    ("10 0/m", "not a whole number"),
    ("1__0/m", "not a whole number"),
    ("-1/m", "not negative"),
    ("\N{MINUS SIGN}1/m", "not negative"),
    ("5", "no '/'"),
    ("5/", "unit is missing"),
    ("5/30", "Did you mean '5/30s'?"),
    ("5/M", "minutes or months. Did you mean '5/min'?"),
    ("5/2M", "Did you mean '5/2min'?"),
    ("5/H", "lower case. Did you mean '5/h'?"),
    ("5/Day", "Did you mean '5/day'?"),
    ("5/mins", "'mins' is unknown. Did you mean '5/min'?"),
    ("5/hr", "Did you mean '5/h'?"),
    ("5/mo", "Did you mean '5/month'?"),
    ("5/minuts", "Did you mean '5/minutes'?"),
    ("5 per minute", "Did you mean '5/minute'?"),
    ("10 requests per hour", "Did you mean '10/hour'?"),
    ("5:m", "Did you mean '5/m'?"),
    ("5/year", "'year' is unknown"),
    ("5/ms", "'ms' is unknown"),
    ("5/m/h", "period is not"),
    ("5/-1m", "period is not"),
    ("5/1.5h", "period is not"),
    ("5/0s", "period is 0"),
    ("5/3654d", "longer than 10 years"),
    ("5/87673h", "longer than 10 years"),
    ("\N{ARABIC-INDIC DIGIT FIVE}/m", "ASCII"),
    ("5/\N{SUPERSCRIPT TWO}m", "ASCII"),
    (f"{MAX_COUNT + 1}/s", "above 9007199254740991"),
    ("9" * 5000 + "/s", "above 9007199254740991"),
    ("5/" + "9" * 5000 + "s", "longer than 10 years"),
    ("5/month", "need a time zone. Set TIMEZONE, or count days: '5/31d'"),
    (None, "not None"),
    (5, "not int"),
    (True, "not bool"),
    (1.5, "not float"),
    (b"5/m", "not bytes"),
    (["5/m"], "not list"),
]


@pytest.mark.parametrize(("text", "wrong"), BAD_RATES)
def test_a_bad_rate_is_quoted_explained_and_shown_how_to_write(text: Any, wrong: str) -> None:
    with pytest.raises(RateError) as error:
        parse_rate(text)
    message = str(error.value)
    assert message.startswith(repr(text)[:80])
    assert wrong in message
    assert "'100/h'" in message or "TIMEZONE" in message
    assert len(message) < 400


@unhurried
@given(st.one_of(st.text(), st.from_regex(r"[\d_. ]{0,9}/[\d. -]{0,6}[a-zA-Z]{0,7}")))
def test_any_text_is_a_rate_or_a_rate_error(text: str) -> None:
    try:
        rate = parse_rate(text)
    except RateError as error:
        # What is suggested is right.
        if "Did you mean '" in str(error):
            suggestion = str(error).rpartition("Did you mean '")[2].partition("'")[0]
            assert suggestion.partition("/")[2]
    else:
        assert 0 <= rate.limit <= MAX_COUNT
        assert 1 <= rate.period <= MAX_PERIOD


@pytest.mark.parametrize("text", [case[0] for case in BAD_RATES if isinstance(case[0], str)])
def test_a_suggestion_is_a_good_rate(text: str) -> None:
    with pytest.raises(RateError) as error:
        parse_rate(text)
    _, found, rest = str(error.value).partition("Did you mean '")
    if found:
        parse_rate(rest.partition("'")[0], timezone="UTC")


def test_a_month_is_not_a_minute() -> None:
    with pytest.raises(RateError):
        parse_rate("5/month")
    assert parse_rate("5/month", timezone="Europe/Rome").period == 31 * DAY


@pytest.mark.parametrize(
    ("text", "calendar", "period"),
    [
        ("5/d", "day", DAY),
        ("5/2days", "2day", 2 * DAY),
        ("5/week", "week", 7 * DAY),
        ("5/7d", "week", 7 * DAY),
        ("5/14d", "2week", 14 * DAY),
        ("5/month", "month", 31 * DAY),
        ("5/3months", "3month", 93 * DAY),
        ("5/120months", "120month", 120 * 31 * DAY),
    ],
)
def test_with_a_zone_days_weeks_and_months_are_those_of_the_calendar(text: str, calendar: str, period: int) -> None:
    rate = parse_rate(text, timezone="Europe/Rome")
    assert (rate.calendar, rate.period, rate.timezone) == (calendar, period, "Europe/Rome")
    assert rate.label == f"{calendar}@Europe/Rome"


@pytest.mark.parametrize("text", ["5/s", "5/90m", "5/h", "5/24h", "5/86400s"])
def test_with_a_zone_what_is_written_in_hours_stays_plain(text: str) -> None:
    assert parse_rate(text, timezone="Europe/Rome") == parse_rate(text)


def test_months_end_at_ten_years_too() -> None:
    with pytest.raises(RateError, match="longer than 10 years"):
        parse_rate("5/121months", timezone="UTC")


@pytest.mark.parametrize(
    ("zone", "hint"),
    [
        ("Europe/Roma", "Did you mean 'Europe/Rome'?"),
        ("europe/rome", "Did you mean 'Europe/Rome'?"),
        ("rome", "Did you mean 'Europe/Rome'?"),
        ("new york", "Did you mean 'America/New_York'?"),
        ("Nowhere at all", "no time zone"),
        ("../../etc/passwd", "no time zone"),
        ("Europe", "no time zone"),
        (" ", "no time zone"),
        (7, "not int"),
        (["UTC"], "not list"),
    ],
)
@pytest.mark.parametrize("text", ["5/day", "5/m"])
def test_an_unknown_zone_is_an_error(zone: Any, hint: str, text: str) -> None:
    with pytest.raises(RateError) as error:
        parse_rate(text, timezone=zone)
    assert repr(zone) in str(error.value)
    assert hint in str(error.value)


def test_a_system_without_zones_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "available_timezones", set)
    with pytest.raises(RateError, match="tzdata"):
        parse_rate("5/day", timezone="Europe/Nowhere")


# ------------------------------------------------------------------------------------------------ other texts


@pytest.mark.parametrize(("text", "number"), [("5", 5), (" 7 ", 7), ("0", 0), (0, 0), (1000, 1000)])
def test_a_bare_number(text: str | int, number: int) -> None:
    assert parse_bare(text) == number


@pytest.mark.parametrize(
    "text", ["", "x", "-1", -1, MAX_CONCURRENT + 1, "9" * 5000, 5.0, True, None, b"5", "1_0", "\u0665", [5]]
)
def test_a_bad_bare_number(text: Any) -> None:
    with pytest.raises(RateError, match="Write how many may be in flight at once"):
        parse_bare(text)


def test_a_concurrent_rate_has_no_period() -> None:
    with pytest.raises(RateError, match="has no period"):
        parse_bare("5/m")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1h", 3600), ("90s", 90), ("1d", DAY), (" 2 weeks ", 14 * DAY), (30, 30), (MAX_PERIOD, MAX_PERIOD)],
)
def test_a_duration(text: str | int, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "empty"),
        ("30", "Did you mean '30s'?"),
        ("h", "Did you mean '1h'?"),
        ("1H", "lower case. Did you mean '1h'?"),
        ("1M", "lower case. Write"),
        ("2hrs", "Did you mean '2h'?"),
        ("1 parsec", "'parsec' is unknown"),
        ("1month", "Did you mean '31d'?"),
        ("1.5h", "not a whole number"),
        ("-1h", "not a whole number"),
        ("1h30m", "not a whole number"),
        ("0s", "0"),
        ("3654d", "longer than 10 years"),
        (0, "not from 1"),
        (-5, "not from 1"),
        (MAX_PERIOD + 1, "not from 1"),
        (1.5, "not float"),
        (True, "not bool"),
        (None, "not None"),
        (timedelta(hours=1), "not timedelta"),
    ],
)
def test_a_bad_duration(text: Any, wrong: str) -> None:
    with pytest.raises(RateError) as error:
        parse_duration(text)
    assert str(error.value).startswith(repr(text))
    assert wrong in str(error.value)
    assert "Write <number><unit>" in str(error.value)


# --------------------------------------------------------------------------------------------------- the rate


@pytest.mark.parametrize(
    ("text", "zone", "canonical", "phrase", "label"),
    [
        ("5/30s", "", "5/30s", "5 per 30 seconds", "30"),
        ("5/60s", "", "5/m", "5 per minute", "60"),
        ("100/1hour", "", "100/h", "100 per hour", "3600"),
        ("100/36h", "", "100/36h", "100 per 36 hours", "129600"),
        ("100/24h", "", "100/day", "100 per day", "86400"),
        ("100/14d", "", "100/2week", "100 per 2 weeks", "1209600"),
        ("1_000/d", "Asia/Tokyo", "1000/day", "1000 per day", "day@Asia/Tokyo"),
        ("3/2w", "Asia/Tokyo", "3/2week", "3 per 2 weeks", "2week@Asia/Tokyo"),
        ("3/1month", "Asia/Tokyo", "3/month", "3 per month", "month@Asia/Tokyo"),
    ],
)
def test_how_a_rate_is_written(text: str, zone: str, canonical: str, phrase: str, label: str) -> None:
    rate = parse_rate(text, timezone=zone)
    assert (str(rate), rate.phrase, rate.label) == (canonical, phrase, label)


units = st.sampled_from(["s", "m", "h", "d", "w"])


@unhurried
@given(st.integers(0, MAX_COUNT), st.integers(1, 520), units, st.sampled_from(["", "Europe/Rome"]))
def test_the_canonical_text_reads_back(limit: int, multiple: int, unit: str, zone: str) -> None:
    rate = parse_rate(f"{limit}/{multiple}{unit}", timezone=zone)
    assert parse_rate(str(rate), timezone=rate.timezone) == rate


def test_a_rate_is_a_value() -> None:
    rate = parse_rate("5/day", timezone="Europe/Rome")
    rate.window(at("2026-05-05"))
    same = Rate(5, DAY, "day", "Europe/Rome")
    assert rate == same
    assert hash(rate) == hash(same)
    assert rate != parse_rate("5/day")
    for twin in (pickle.loads(pickle.dumps(rate)), copy.deepcopy(rate)):
        assert twin == rate
        assert twin.window(at("2026-05-05")) == rate.window(at("2026-05-05"))
    assert (
        dataclasses.replace(rate, limit=6).window(at("2026-05-06")).number == 1 + rate.window(at("2026-05-05")).number
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        rate.limit = 6  # type: ignore[misc]


@pytest.mark.parametrize(
    "arguments",
    [
        (-1, 60),
        (True, 60),
        (1.0, 60),
        (MAX_COUNT + 1, 60),
        (1, 0),
        (1, -60),
        (1, 60.0),
        (1, MAX_PERIOD + 1),
        (1, 60, "", "Europe/Rome"),
        (1, DAY, "day"),
        (1, DAY, "day", "Europe/Roma"),
        (1, DAY, "1day", "Europe/Rome"),
        (1, DAY, "2day", "Europe/Rome"),
        (1, DAY, "fortnight", "Europe/Rome"),
    ],
)
def test_a_rate_that_makes_no_sense_cannot_be_made(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(RateError):
        Rate(*arguments)


# ---------------------------------------------------------------------------------------------- plain windows

moments = st.one_of(
    st.integers(-(2**33), 2**33),
    st.floats(-(2.0**33), 2.0**33, allow_nan=False),
    st.floats(1.7e9, 1.9e9),
)
periods = st.one_of(st.integers(1, MAX_PERIOD), st.sampled_from([1, 60, 3600, DAY, 7 * DAY, 14 * DAY]))


@unhurried
@given(moments, periods)
@example(1764000059.9999998, 60)
@example(-0.5, 60)
def test_windows_hold_their_time_and_join_without_gap(now: float, period: int) -> None:
    rate = Rate(5, period)
    window = rate.window(now)
    assert window.start <= now < window.end
    assert window.end - window.start == period
    after, before = rate.window(window.end), rate.window(window.start - 1)
    assert (after.number, after.start) == (window.number + 1, window.end)
    assert (before.number, before.end) == (window.number - 1, window.start)
    assert rate.window(now) == Rate(5, period).window(now) == window


@unhurried
@given(st.lists(moments, min_size=2), st.sampled_from(["5/s", "5/90m", "5/d", "5/2w"]))
def test_numbers_grow_with_time_in_whatever_order_they_are_asked(times: list[float], text: str) -> None:
    rate = parse_rate(text)
    numbers = {now: rate.window(now).number for now in times}
    ordered = [numbers[now] for now in sorted(numbers)]
    assert ordered == sorted(ordered)


def test_a_day_without_a_zone_ends_at_midnight_utc() -> None:
    rate = parse_rate("1000/day")
    late, early = rate.window(at("2026-03-01 23:59:59")), rate.window(at("2026-03-02 00:00:01"))
    assert late.end == early.start == at("2026-03-02")
    assert early.number == late.number + 1


@pytest.mark.parametrize("text", ["5/w", "5/7d", "5/168h", "5/3w"])
def test_whole_weeks_start_on_monday(text: str) -> None:
    for now in (0, at("2026-01-01"), at("2027-05-07 12:00")):
        start = datetime.fromtimestamp(parse_rate(text).window(now).start, UTC)
        assert (start.weekday(), start.hour, start.minute, start.second) == (0, 0, 0, 0)


def test_a_plain_window_number_is_the_count_of_periods() -> None:
    assert parse_rate("5/m").window(1_700_707_200.5) == Window(28_345_120, 1_700_707_200, 1_700_707_260)


# ------------------------------------------------------------------------------------------- calendar windows

ZONES = [
    "Europe/Rome",
    "America/New_York",
    "America/Santiago",  # clocks change at midnight
    "America/Havana",  # 00:00 comes twice
    "Asia/Beirut",  # 00:00 is skipped, and clocks go back over midnight
    "Africa/Cairo",  # the same, on a Friday
    "Asia/Kathmandu",  # +05:45
    "Australia/Lord_Howe",  # half an hour of summer time
    "Africa/Casablanca",  # clocks go back for Ramadan
    "Pacific/Kiritimati",  # +14
    "UTC",
]


def local_date(now: float, zone: str) -> date:
    return datetime.fromtimestamp(now, ZoneInfo(zone)).date()


def starts_by_brute_force(zone: str, first: date, last: date, step: int = 900) -> list[int]:
    """The first instant of each local date, found by looking at every quarter of an hour."""
    starts, seen = [], first - timedelta(days=1)
    now = int(datetime(first.year, first.month, first.day, tzinfo=UTC).timestamp()) - 2 * DAY
    stop = int(datetime(last.year, last.month, last.day, tzinfo=UTC).timestamp()) + 2 * DAY
    tz = ZoneInfo(zone)
    while now < stop:
        today = datetime.fromtimestamp(now, tz).date()
        if today > seen:
            starts.append(now)
            seen = today
            if today > last:
                break
        now += step
    return starts


@pytest.mark.parametrize("zone", ZONES)
def test_days_against_the_clock_on_the_wall_over_four_years(zone: str) -> None:
    starts = starts_by_brute_force(zone, date(2024, 1, 1), date(2027, 12, 31))
    assert len(starts) == 4 * 365 + 1 + 1
    rate = parse_rate("100/day", timezone=zone)
    number = rate.window(starts[0]).number
    lengths = set()
    for start, end in pairwise(starts):
        for now in (start, (start + end) / 2, end - 1, end - 0.001):
            assert rate.window(now) == Window(number, start, end)
        lengths.add((end - start) / 3600)
        number += 1
    changes = zone not in ("Asia/Kathmandu", "Pacific/Kiritimati", "UTC")
    half = zone == "Australia/Lord_Howe"
    assert lengths == ({24, 23.5, 24.5} if half else {23, 24, 25} if changes else {24})


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("text", ["5/week", "5/month", "5/3days", "5/2weeks", "5/2months", "5/12months"])
def test_longer_windows_are_whole_days_and_join(zone: str, text: str) -> None:
    days = {w.start for w in windows(parse_rate("5/day", timezone=zone), at("2023-01-01"), at("2029-06-01"))}
    rate = parse_rate(text, timezone=zone)
    for window in windows(rate, at("2024-01-01"), at("2027-12-31")):
        assert {window.start, window.end} <= days
        first = datetime.fromtimestamp(window.start, ZoneInfo(zone))
        if rate.calendar.endswith("week"):
            assert first.weekday() == 0
        if rate.calendar.endswith("month"):
            assert first.day == 1
        if rate.calendar == "12month":
            assert first.month == 1


def windows(rate: Rate, now: int, stop: int) -> list[Window]:
    found = [rate.window(now)]
    while found[-1].end < stop:
        found.append(rate.window(found[-1].end))
        assert found[-1].start == found[-2].end
        assert found[-1].number == found[-2].number + 1
    return found


@pytest.mark.parametrize(
    ("zone", "noon", "start", "hours"),
    [
        ("Europe/Rome", "2026-03-29 12:00", "2026-03-29 00:00", 23),
        ("Europe/Rome", "2026-10-25 12:00", "2026-10-25 00:00", 25),
        # No midnight: the day starts at 01:00.
        ("America/Sao_Paulo", "2018-11-04 12:00", "2018-11-04 01:00", 23),
        ("Asia/Beirut", "2026-03-29 12:00", "2026-03-29 01:00", 23),
        ("Africa/Cairo", "2026-04-24 12:00", "2026-04-24 01:00", 23),
        # The hour before midnight twice.
        ("America/Sao_Paulo", "2018-02-17 12:00", "2018-02-17 00:00", 25),
        ("Africa/Cairo", "2026-10-29 12:00", "2026-10-29 00:00", 25),
        # 00:00 twice: the first begins the day.
        ("America/Havana", "2026-11-01 12:00", "2026-11-01 00:00", 25),
        # Clocks go back at 00:01, to 23:01: 00:00 comes twice, on either side of an hour of yesterday.
        ("America/St_Johns", "2010-11-07 12:00", "2010-11-07 00:00", 25),
        # 23:30 to 00:30: midnight is inside the gap, the day starts at the change.
        ("America/Toronto", "1919-03-31 12:00", "1919-03-31 00:30", 23.5),
        # Leap day and the ends of years.
        ("Europe/Rome", "2024-02-29 12:00", "2024-02-29 00:00", 24),
        ("Europe/Rome", "2026-12-31 23:59:59", "2026-12-31 00:00", 24),
    ],
)
def test_a_day_with_a_change_of_clocks(zone: str, noon: str, start: str, hours: float) -> None:
    window = parse_rate("5/day", timezone=zone).window(at(noon, zone))
    assert window.start == at(start, zone)
    assert window.end - window.start == hours * 3600


def test_an_hour_of_yesterday_that_comes_again_after_midnight_belongs_to_the_new_day() -> None:
    zone = "America/St_Johns"
    rate = Rate(5, DAY, "day", zone)  # which remembers no window yet
    midnight = at("2010-11-07 00:00", zone)
    again = midnight + 1800
    assert local_date(again, zone) == date(2010, 11, 6)
    assert rate.window(again) == rate.window(midnight) == rate.window(at("2010-11-07 12:00", zone))
    assert rate.window(midnight - 1).end == midnight


@pytest.mark.parametrize(
    ("zone", "before", "after"),
    [("Pacific/Apia", "2011-12-29", "2011-12-31"), ("Pacific/Kwajalein", "1993-08-20", "1993-08-22")],
)
def test_a_day_that_never_was_has_no_window(zone: str, before: str, after: str) -> None:
    rate = parse_rate("5/day", timezone=zone)
    last, first = rate.window(at(f"{before} 12:00", zone)), rate.window(at(f"{after} 12:00", zone))
    assert last.end == first.start == at(after, zone)
    assert first.number == last.number + 2
    assert rate.window(last.end - 1) == last
    assert rate.window(first.start) == first


def test_months_and_years_end_where_the_calendar_says() -> None:
    rate = parse_rate("5/month", timezone="Europe/Rome")
    for month, days in [("2024-02", 29), ("2026-02", 28), ("2026-12", 31)]:
        window = rate.window(at(f"{month}-15", "Europe/Rome"))
        assert window.start == at(f"{month}-01", "Europe/Rome")
        assert window.end - window.start == days * DAY
    assert rate.window(at("2026-03-15", "Europe/Rome")).end == at("2026-04-01", "Europe/Rome")


def test_in_utc_a_calendar_window_is_the_plain_one() -> None:
    for text in ("5/day", "5/3d", "5/week", "5/2w"):
        plain, calendar = parse_rate(text), parse_rate(text, timezone="UTC")
        for now in (0, at("2026-01-04 23:59:59"), at("2026-01-05"), at("2031-07-07 07:07")):
            assert plain.window(now) == calendar.window(now)


@unhurried
@given(
    st.floats(-(2.0**31), 2.0**32),
    st.sampled_from([*ZONES, "America/Sao_Paulo", "America/St_Johns", "Pacific/Apia", "America/Toronto"]),
    st.sampled_from(["5/d", "5/2d", "5/w", "5/month", "5/5months"]),
)
def test_calendar_windows_hold_their_time_and_join_without_gap(now: float, zone: str, text: str) -> None:
    rate = parse_rate(text, timezone=zone)
    window = rate.window(now)
    assert window.start <= now < window.end
    after, before = rate.window(window.end), rate.window(window.start - 1)
    assert after.start == window.end
    assert before.end == window.start
    assert before.number < window.number < after.number
    assert rate.window(now) == window


def test_threads_at_a_boundary_see_the_right_window() -> None:
    rate = parse_rate("5/day", timezone="Europe/Rome")
    midnight = at("2026-05-05", "Europe/Rome")
    expected = {now: rate.window(now) for now in (midnight - 1, midnight, midnight + DAY)}
    wrong: list[tuple[int, Window]] = []

    def look() -> None:
        for _ in range(2000):
            wrong.extend((now, w) for now, right in expected.items() if (w := rate.window(now)) != right)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --------------------------------------------------------------------------------------------------- rounding


@pytest.mark.parametrize(
    ("seconds", "whole"),
    [
        (-5, 1),
        (0, 1),
        (0.000001, 1),
        (1, 1),
        (1.0000001, 1),
        (1.000001, 2),
        (1.5, 2),
        (9.999999999, 10),
        (10.000000000000002, 10),
        (1764000060 - 1764000050.0000002, 10),
        (1764000060 - 1764000049.9999998, 10),
        (1764000060 - 1764000049.999, 11),
        (60, 60),
        (1e9 + 0.25, 10**9 + 1),
    ],
)
def test_seconds_are_rounded_up(seconds: float, whole: int) -> None:
    assert ceil_seconds(seconds) == whole


@unhurried
@given(st.floats(0, MAX_PERIOD))
def test_rounding_is_never_too_early_and_never_a_second_too_late(seconds: float) -> None:
    whole = ceil_seconds(seconds)
    assert isinstance(whole, int)
    assert whole >= 1
    assert whole >= seconds - 0.6e-6
    assert whole == 1 or whole - seconds < 1


@unhurried
@given(st.integers(1, MAX_PERIOD * 1_000_000))
def test_a_wait_of_whole_microseconds_is_rounded_exactly(microseconds: int) -> None:
    assert ceil_seconds(microseconds / 1_000_000) == max(1, math.ceil(microseconds / 1_000_000))
    assert ceil_seconds(microseconds / 1_000_000) * 1_000_000 >= microseconds


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_what_is_no_wait_is_not_rounded(seconds: float) -> None:
    with pytest.raises((ValueError, OverflowError)):
        ceil_seconds(seconds)
