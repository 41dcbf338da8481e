"""``manage.py ratelimit_inspect``: who is limited now, what is in force, and what the store can do."""

from __future__ import annotations

import csv
import json
import shutil
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser, DjangoHelpFormatter

from ...conf import Config, get_config
from ...inspection import (
    Listing,
    LiveCounter,
    ScopeInForce,
    State,
    StoreFacts,
    duration,
    fullest,
    remove,
    scopes_in_force,
    store_facts,
    unseen,
)
from ...limiter import aliases
from ...stores import CannotList, StoreError, get_store

UNREACHABLE = 2
CANNOT_KNOW = 3

COLUMNS = ("scope", "identity", "count", "limit", "window", "remaining", "resets_in", "state")
"""Of csv, and the names of json."""

EXIT_CODES = """\
exit codes:
  0   done
  1   wrong settings, scope or identity; nothing removed
  2   a cache does not answer, or an option is unknown
  3   a cache cannot tell: it cannot list, or its counters live inside each server
      process. What other caches told is printed all the same.

examples:
  ratelimit_inspect --over                     everybody who is limited now
  ratelimit_inspect --scope login --identity ip:203.0.113.9 --reset
  ratelimit_inspect --format json | jq '.[] | select(.state == "banned")'
"""


class _Formatter(DjangoHelpFormatter, RawDescriptionHelpFormatter):
    """Django's, with the lines of the epilog as they are."""


class Command(BaseCommand):
    help = "Lists the live counters of the rate limiter, the fullest first; --reset removes them."
    requires_system_checks = ()  # the tool for finding out what is wrong does not refuse because something is

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        return super().create_parser(prog_name, subcommand, epilog=EXIT_CODES, formatter_class=_Formatter, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--scopes", action="store_true", help="Say which scopes are in force and where.")
        what.add_argument("--store", action="store_true", help="Say what the caches that hold counters can do.")
        what.add_argument(
            "--reset", action="store_true", help="Remove the counters of a --scope, of an --identity, or of both."
        )
        parser.add_argument("--scope", help="Only this scope, or family of scopes.")
        parser.add_argument(
            "--identity", help="Only this caller, as in the list or as people write it: user:42, ip:203.0.113.9."
        )
        parser.add_argument("--over", action="store_true", help="Only counters whose next hit is denied.")
        parser.add_argument(
            "--limit", type=int, default=1000, metavar="N", help="The N fullest counters at most. Default: 1000."
        )
        parser.add_argument(
            "--format",
            choices=("table", "json", "csv"),
            default="table",
            help="table shortens what is long; json and csv do not.",
        )
        parser.add_argument(
            "--no-input",
            "--noinput",
            action="store_false",
            dest="interactive",
            help="Do not ask before --reset.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            config = get_config()
            if options["scopes"]:
                self._scopes(scopes_in_force(config), options)
            elif options["store"]:
                self._stores([store_facts(alias) for alias in aliases(config)], options)
            elif options["reset"]:
                self._reset(config, options)
            else:
                self._list(config, options)
        except (ImproperlyConfigured, ValueError) as error:
            raise CommandError(str(error)) from error

    # ------------------------------------------------------------------------------------------------ live counters

    def _list(self, config: Config, options: dict[str, Any]) -> None:
        limit = options["limit"]
        if limit < 1:
            raise CommandError(f"--limit {limit}: write a number from 1.")
        progress = _Progress(self.stderr)
        listing = fullest(
            config, options["scope"], options["identity"], over=options["over"], limit=limit, watch=progress.show
        )
        progress.clear()
        if listing.rows or not listing.gaps:  # an empty list would say that there is nothing
            self._print(
                options["format"], listing.rows, COLUMNS, LiveCounter.as_dict, lambda rows: self._table(rows, listing)
            )
        if listing.total > len(listing.rows):
            self.stderr.write(
                f"These are the {len(listing.rows):,} fullest of {listing.total:,} counters. "
                "--limit N shows more, --over, --scope and --identity narrow it down.",
                style_func=self.style.NOTICE,
            )
        if listing.gaps:
            is_outage = any(gap.is_outage for gap in listing.gaps)
            raise CommandError(
                "\n".join(gap.message for gap in listing.gaps), returncode=UNREACHABLE if is_outage else CANNOT_KNOW
            )

    def _table(self, rows: Sequence[LiveCounter], listing: Listing) -> Iterator[str]:
        if not rows:
            yield "No live counters."
            return
        cells = [
            (
                row.scope,
                row.identity,
                "" if row.state is State.BANNED else f"{_number(row.count)}/{_number(row.limit)}",
                "" if row.state is State.BANNED else duration(row.window) if row.window else "at once",
                "" if row.percent is None else f"{row.percent}%",
                duration(row.resets_in),
                row.state.value,
            )
            for row in rows
        ]
        yield from _aligned(
            ("SCOPE", "IDENTITY", "USED", "PER", "%", "RESETS IN", "STATE"),
            cells,
            right={2, 4, 5},
            elastic=(0, 1),
            paint=[self._colour(row) for row in rows],
            heading=self.style.MIGRATE_HEADING,
        )

    def _colour(self, row: LiveCounter) -> Callable[[str], str]:
        if row.state is not State.WITHIN:
            return self.style.ERROR
        return self.style.WARNING if row.share >= 0.8 else str

    # -------------------------------------------------------------------------------------------------------- reset

    def _reset(self, config: Config, options: dict[str, Any]) -> None:
        scope, identity = options["scope"], options["identity"]
        if scope is None and identity is None:
            raise CommandError("--reset needs --scope, --identity or both.")
        if scope is not None:
            config.family(scope)
        whose = f"{identity or 'everybody'} in {f'the scope {scope}' if scope else 'every scope'}"
        if options["interactive"]:
            self._ask(f"Remove the counters of {whose}? [y/N] ")
        try:
            removed = remove(config, scope, identity)
        except StoreError as error:
            raise CommandError(f"A cache does not answer: {error.cause}.", returncode=UNREACHABLE) from error
        except CannotList as error:
            raise CommandError(str(error), returncode=CANNOT_KNOW) from error
        used = aliases(config) if scope is None else {one.cache for one in config.family(scope)}
        apart = [alias for alias in used if not get_store(alias).is_shared]
        if apart and not removed:
            raise CommandError("\n".join(map(unseen, apart)), returncode=CANNOT_KNOW)
        self.stdout.write(f"Removed {removed:,} counter{'' if removed == 1 else 's'} of {whose}.")

    def _ask(self, question: str) -> None:
        try:
            answer = input(question)
        except EOFError:
            raise CommandError("Nothing removed: nobody is there to answer. Pass --no-input.") from None
        if answer.strip().lower() not in ("y", "yes"):
            raise CommandError("Nothing removed.")

    # ---------------------------------------------------------------------------------------------- scopes and stores

    def _scopes(self, scopes: Sequence[ScopeInForce], options: dict[str, Any]) -> None:
        if options["scope"] is not None:
            names = {scope.name for scope in get_config().family(options["scope"])}
            scopes = [scope for scope in scopes if scope.scope in names]
        columns = tuple(ScopeInForce.__dataclass_fields__)
        self._print(options["format"], scopes, columns, ScopeInForce.as_dict, self._blocks)

    def _blocks(self, scopes: Sequence[ScopeInForce]) -> Iterator[str]:
        if not scopes:
            yield "No scopes are in force: RATELIMIT_KV['SCOPES'] is empty and no view is decorated."
        for scope in scopes:
            rates = scope.rate_function or ", ".join(scope.rates or ("no limit",))
            yield f"{self.style.MIGRATE_HEADING(scope.scope)}  {rates} by {scope.key}"
            for line in (*_where(scope), *_how(scope)):
                yield from _wrapped(line)

    def _stores(self, facts: Sequence[StoreFacts], options: dict[str, Any]) -> None:
        self._print(
            options["format"], facts, tuple(StoreFacts.__dataclass_fields__), StoreFacts.as_dict, self._store_blocks
        )

    def _store_blocks(self, facts: Sequence[StoreFacts]) -> Iterator[str]:
        for store in facts:
            yield f"{self.style.MIGRATE_HEADING(store.alias)}  {store.store}"
            for question, answer in (
                ("exact", store.exact),
                ("shared between processes", store.shared),
                ("survives a restart", store.survives_restart),
                ("can list", store.lists),
            ):
                yield f"    {question:<26}{self.style.SUCCESS('yes') if answer else self.style.WARNING('no')}"
            yield from _wrapped(f"{'round trips a request':<26}{store.round_trips}", 30)

    # ------------------------------------------------------------------------------------------------------- printing

    def _print(
        self,
        form: str,
        items: Sequence[Any],
        columns: Sequence[str],
        as_dict: Callable[[Any], dict[str, Any]],
        table: Callable[[Sequence[Any]], Iterable[str]],
    ) -> None:
        if form == "json":
            self.stdout.write(json.dumps([as_dict(item) for item in items], indent=2))
        elif form == "csv":
            writer = csv.DictWriter(self.stdout, columns, lineterminator="\n")
            writer.writeheader()
            for item in items:
                writer.writerow({name: _csv(value) for name, value in as_dict(item).items()})
        else:
            for line in table(items):
                self.stdout.write(line.rstrip())


class _Progress:
    """How many keys have been seen, on a terminal, on one line that goes away again."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream if stream.isatty() else None

    def show(self, seen: int) -> bool:
        if self.stream:
            self._write(f"\r{seen:,} counters seen ...")
        return True

    def clear(self) -> None:
        if self.stream:
            self._write(f"\r{' ' * 40}\r")

    def _write(self, text: str) -> None:
        assert self.stream is not None
        self.stream.write(text, style_func=str, ending="")
        self.stream.flush()


def _csv(value: Any) -> Any:
    """What a spreadsheet has in one cell: lists by spaces, nothing for None."""
    if isinstance(value, list | tuple):
        return json.dumps(value) if value and isinstance(value[0], dict) else " ".join(map(str, value))
    return value


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _where(scope: ScopeInForce) -> Iterator[str]:
    """Where a scope applies, a line each."""
    methods = "" if scope.methods is None else f" for {', '.join(scope.methods)}"
    if scope.paths:
        yield f"paths {', '.join(scope.paths)}{methods}"
    if scope.url_names:
        yield f"URL names {', '.join(scope.url_names)}{methods}"
    if exempt := (*scope.exempt_paths, *scope.exempt_url_names):
        yield f"but not {', '.join(exempt)}"
    for view in scope.views:
        only = "" if view.methods is None else f" for {', '.join(view.methods)}"
        yield f"view {view.view} at {view.route}{only}"
    if not (scope.paths or scope.url_names or scope.views):
        yield "where code asks for it: check(), hit()"


def _how(scope: ScopeInForce) -> Iterator[str]:
    """What is not as by default, on one line."""
    words = [
        f"{name} {value}"
        for name, value, usual in (
            ("algorithm", scope.algorithm, "fixed"),
            ("mode", scope.mode, "enforce"),
            ("on store errors", scope.on_error, "allow"),
            ("cost", scope.cost, 1),
            ("cache", scope.cache, "default"),
            ("ban", scope.ban, None),
        )
        if value != usual
    ]
    if words:
        yield "; ".join(words)


# -------------------------------------------------------------------------------------------------------------- layout


def _width() -> int:
    """Columns of the terminal, 80 where there is none."""
    return max(shutil.get_terminal_size().columns, 40)


def _wrapped(text: str, indent: int = 4) -> Iterator[str]:
    """Lines no wider than the terminal, broken at spaces."""
    line = "    "
    for word in text.split(" "):
        if len(line) + len(word) > _width() - 1 and line.strip():
            yield line
            line = " " * indent
        line += f"{word} "
    yield line


def _aligned(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: set[int],
    elastic: Sequence[int],
    paint: Sequence[Callable[[str], str]],
    heading: Callable[[str], str],
) -> Iterator[str]:
    """Columns, no wider together than the terminal. ``elastic`` columns give way, the widest first."""
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    for _ in range(sum(widths) + 2 * (len(widths) - 1) - _width()):
        widest = max(elastic, key=widths.__getitem__)
        widths[widest] = max(widths[widest] - 1, len(titles[widest]))

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            f"{_shortened(text, width):{'>' if column in right else '<'}{width}}"
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()

    yield heading(line(titles))
    for row, colour in zip(rows, paint, strict=True):
        yield colour(line(row))


def _shortened(text: str, width: int) -> str:
    """With its middle left out: the start says what it is, the end which one."""
    if len(text) <= width:
        return text
    tail = (width - 3) // 2
    return f"{text[: width - 3 - tail]}...{text[-tail:]}"
