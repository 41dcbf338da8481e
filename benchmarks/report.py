"""Results as Markdown that also reads well in a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.adapters import ADAPTERS

HEADINGS = {
    "allowed": "allowed",
    "hot": "hot key",
    "denied": "denied",
    "denied-first": "first denial",
    "two": "2 limits",
    "three": "3 limits",
    "handler": "whole request",
    "async": "async",
    "exempt": "exempt path",
    "no-scope": "no scope",
}
STEPS = ("new caller", "known caller", "three limits", "denied", "denied again")


def markdown(results: dict[str, Any]) -> str:
    parts = [_introduction(results)]
    for name, section in SECTIONS.items():
        if results.get(name):
            parts.append(section(results[name]))
    return "\n\n".join(parts) + "\n"


def _introduction(results: dict[str, Any]) -> str:
    environment = results["environment"]
    servers = ", ".join(f"{name}: {what}" for name, what in environment["servers"].items())
    libraries = ", ".join(f"{name} {what}" for name, what in environment["libraries"].items())
    limiters = ", ".join(f"{name} {what}".strip() for name, what in environment["limiters"].items())
    return "\n".join(
        [
            f"# Benchmark results{' (quick)' if results['quick'] else ''}",
            "",
            f"Python {environment['python']}, Django {environment['django']}, {environment['machine']}.",
            f"{servers}.",
            f"{libraries}.",
            f"{limiters}.",
            f"The run took {results['seconds']} s. `python -m benchmarks` repeats it, its README explains.",
        ]
    )


def _times(times: dict[str, Any]) -> str:
    units = times["units_us"]
    evalsha, tcp = units["evalsha"], units["tcp"]
    parts = [
        "## Time that a limit adds to a view",
        "",
        "In units: one redis-py EVALSHA with hiredis (async: one redis.asyncio EVALSHA) in the same round; "
        "less is better. First the median of the rounds' ratios, in brackets the ratio of the best rounds. "
        "–: there is no such thing; ✗: see below the table.",
        "",
        "The units in µs, best (median): "
        + ", ".join(f"{name} {unit['best']} ({unit['median']})" for name, unit in units.items())
        + f". So one EVALSHA is {evalsha['best'] / tcp['best']:.1f} raw INCRs on a TCP socket.",
    ]
    for backend, limiters in times["backends"].items():
        used = [s for s in HEADINGS if any(isinstance(row.get(s), dict) for row in limiters.values())]
        notes: list[str] = []
        rows = []
        for name, row in limiters.items():
            if "error" in row:
                notes.append(f"{name}: {row['error']}")
                continue
            rows.append([_name(name, backend), *(_ratio(row.get(s)) for s in used)])
            notes += _why(name, {HEADINGS[s]: row[s] for s in used if isinstance(row.get(s), str)})
        parts += [
            "",
            f"### {backend}",
            "",
            table(["limiter", *(HEADINGS[s] for s in used)], rows),
            *_list(notes),
        ]
    parts += [
        "",
        "¹ by a client of its own, not the Django cache. ʰ with rate-limit headers on allowed responses.",
    ]
    return "\n".join(parts)


def _work(times: dict[str, Any]) -> str:
    parts = [
        "## Work that a limit adds to a view",
        "",
        "Bytecodes of Python, in brackets calls of functions, in the thread of the request: what `sys.monitoring` "
        "counts, so the same in every run. C code, the server and other threads are not in it.",
    ]
    for backend, limiters in times["backends"].items():
        used = [s for s in HEADINGS if any("bytecodes" in row.get(s, ()) for row in limiters.values())]
        rows = [[name, *(_counts(row.get(s)) for s in used)] for name, row in limiters.items()]
        if used:
            parts += ["", f"### {backend}", "", table(["limiter", *(HEADINGS[s] for s in used)], rows)]
    return "\n".join(parts)


def _counts(summary: Any) -> str:
    if isinstance(summary, dict):
        return f"{summary['bytecodes']} ({summary['calls']})" if "bytecodes" in summary else "–"
    return _ratio(summary)


def _name(name: str, backend: str) -> str:
    adapter = ADAPTERS[name]
    return f"{name}{'¹' if backend in adapter.own_client else ''}{'ʰ' if adapter.headers else ''}"


def _ratio(summary: Any) -> str:
    if isinstance(summary, dict):
        return f"{summary['ratio']:.2f} ({summary['ratio_of_bests']:.2f})"
    return "–" if summary is None or str(summary).startswith("not supported") else "✗"


def _why(name: str, reasons: dict[str, str]) -> list[str]:
    """Failures in one line each; what is just not supported needs no words."""
    real = {where: why for where, why in reasons.items() if not why.startswith("not supported")}
    return [f"{name}, {', '.join(w for w in real if real[w] == why)}: {why}" for why in dict.fromkeys(real.values())]


def _wire(wire: dict[str, Any]) -> str:
    parts = [
        "## Round trips and commands of one request",
        "",
        "Round trips first, then the commands in them. SQLite has no wire: its figures are statements.",
    ]
    for backend, limiters in wire.items():
        rows = []
        for name, row in limiters.items():
            cells = [row["error"]] if "error" in row else [_trips(*row[s]) for s in STEPS]
            rows.append([name, *cells])
        parts += ["", f"### {backend}", "", table(["limiter", *STEPS], rows)]
    return "\n".join(parts)


def _trips(trips: int, commands: str) -> str:
    """``3: GET 2×SET``: three round trips, in which these commands were sent."""
    words = [(word, len(list(same))) for word, same in itertools.groupby(commands.split())]
    return f"{trips}: {' '.join(word if n == 1 else f'{n}×{word}' for word, n in words)}" if words else str(trips)


def _exactness(exactness: dict[str, Any]) -> str:
    backends = list(exactness)
    names = list(dict.fromkeys(name for limiters in exactness.values() for name in limiters))
    rows = [[name, *(_answers(exactness[b].get(name), admitted_of=100) for b in backends)] for name in names]
    return "\n".join(
        [
            "## Admitted of 400 requests, limit 100",
            "",
            "8 processes × 50 requests of one caller at once. Exact is 100.",
            "",
            table(["limiter", *backends], rows),
        ]
    )


def _answers(answers: Any, admitted_of: int | None = None) -> str:
    if answers is None:
        return "–"
    if "error" in answers:
        return f"✗ {answers['error']}"
    admitted = answers.get("200", 0)
    other = {status: n for status, n in answers.items() if status not in ("200", "429")}
    text = f"**{admitted}**" if admitted == admitted_of else str(admitted)
    return text + "".join(f", {n} × {status}" for status, n in other.items())


def _leases(rows: list[dict[str, Any]]) -> str:
    cells = [
        [
            "20" if row["lease"] else "none",
            row["requests"],
            *((f"✗ {row['error']}", "") if "error" in row else (_answers(row["answers"]), row["store_calls"])),
        ]
        for row in rows
    ]
    return "\n".join(
        [
            "## Leases",
            "",
            "8 processes, one counter of 1000 for everyone, on django-redis.",
            "",
            table(["lease", "requests", "admitted", "store calls a request"], cells),
        ]
    )


def _outages(outages: dict[str, Any]) -> str:
    parts = [
        "## Redis does not answer",
        "",
        "Seconds for 20 requests, one after the other; the client's timeout is 0.25 s.",
    ]
    for kind in ("refused", "paused"):
        backends = outages[kind]
        names = list(dict.fromkeys(name for limiters in backends.values() for name in limiters))
        rows = [[name, *(_survived(limiters.get(name)) for limiters in backends.values())] for name in names]
        parts += ["", table([f"{kind} Redis", *backends], rows)]
    if outages["stall"]:
        rows = [
            [name, stall]
            if isinstance(stall, str)
            else [name, f"{stall['longest_ms']} ms; {_statuses(stall['answers'])}"]
            for name, stall in outages["stall"].items()
        ]
        heading = "longest stall of the event loop, Redis silent for 300 ms, 5 requests under way"
        parts += ["", table(["async", heading], rows)]
    return "\n".join(parts)


def _survived(result: Any) -> str:
    if result is None:
        return "–"
    if "error" in result:
        return f"✗ {result['error']}"
    done = sum(result["answers"].values())
    more = "" if done == 20 else f" for {done} requests, then given up"
    return f"{result['seconds']:.2f} s{more}; {_statuses(result['answers'])}"


def _statuses(answers: dict[str, int]) -> str:
    return ", ".join(f"{n} × {status}" for status, n in answers.items())


def _memory(memory: dict[str, Any]) -> str:
    rows = [
        [name, f"✗ {row['error']}", ""] if "error" in row else [name, row["bytes"], f"{row['keys']:,}"]
        for name, row in memory.items()
    ]
    return "\n".join(["## Redis memory of one identity", "", table(["limiter", "bytes", "keys in all"], rows)])


def _growth(growth: dict[str, Any]) -> str:
    grown = {backend: next(iter(limiters.values())) for backend, limiters in growth.items()}
    populations = list(dict.fromkeys(p for row in grown.values() for p in row if p != "error"))
    rows = [[backend, *(_ratio(row.get(p, row.get("error"))) for p in populations)] for backend, row in grown.items()]
    return "\n".join(
        [
            "## Cost among so many identities",
            "",
            "One allowed request of ours, in units of one EVALSHA in the same round.",
            "",
            table(["backend", *(f"{int(p):,}" for p in populations)], rows),
        ]
    )


def _server(server: dict[str, Any]) -> str:
    rows = [
        [name, f"✗ {row['error']}", ""] if "error" in row else [name, *row.values()] for name, row in server.items()
    ]
    return "\n".join(
        [
            "## Processor time of Redis for one allowed request, in µs",
            "",
            "8 processes send at once, on django-redis: how soon one core of Redis is full.",
            "",
            table(["limiter", "one limit", "3 limits"], rows),
        ]
    )


SECTIONS = {
    "times": lambda times: f"{_times(times)}\n\n{_work(times)}",
    "wire": _wire,
    "exactness": _exactness,
    "leases": _leases,
    "server": _server,
    "outages": _outages,
    "memory": _memory,
    "growth": _growth,
}


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table with its columns in line."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _list(notes: list[str]) -> list[str]:
    return ["", *(f"- {note}" for note in notes)] if notes else []
