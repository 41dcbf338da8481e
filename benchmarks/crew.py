"""The parent's side of the workers: starting them, ordering, taking turns."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.adapters import Backend, NotSupported
from benchmarks.worker import Spent, serve

PATIENCE = 120.0
"""Seconds that an order may take before its worker is given up."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.worker", "django.core.handlers.wsgi", "django.core.cache", "redis"])
_indexes = itertools.count()


class Failed(Exception):
    """A worker could not do what it was told."""


class Worker:
    """A handle on one process: ``worker.hit(...)`` is ``order`` and ``answer`` in one."""

    def __init__(self, name: str, backend: Backend) -> None:
        self.name = name
        self.index = next(_indexes)
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=serve, args=(theirs, name, backend, self.index), daemon=True)
        self._process.start()
        theirs.close()

    def order(self, method: str, *args: Any) -> None:
        self._pipe.send((method, args))

    def answer(self, patience: float = PATIENCE) -> Any:
        try:
            if not self._pipe.poll(patience):
                self._process.kill()
                raise Failed(f"no answer within {patience:.0f} s")
            outcome, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise Failed("its process ended") from error
        if outcome == "not supported":
            raise NotSupported(value)
        if outcome == "failed":
            raise Failed(value)
        return value

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> Any:
            self.order(method, *args)
            return self.answer()

        return call

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(3)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


@contextlib.contextmanager
def workers(names: Sequence[str], backend: Backend) -> Iterator[tuple[list[Worker], dict[str, str]]]:
    """A worker for each of these adapters, and why some of them have none. All are ended with the block."""
    crew = [Worker(name, backend) for name in names]
    failed: dict[str, str] = {}
    try:
        ready = []
        for worker in crew:  # they start side by side; tables are made one after the other
            try:
                worker.answer()
                worker.prepare()
                ready.append(worker)
            except Failed as error:
                failed[worker.name] = str(error)
        yield ready, failed
    finally:
        for worker in crew:
            worker.stop()


@dataclass
class Times:
    """What the rounds of one worker in one situation took, each beside a round of the unit."""

    calls: int
    """Calls a round."""
    limited: list[Spent] = field(default_factory=list)
    bare: list[Spent] = field(default_factory=list)
    units: list[Spent] = field(default_factory=list)

    def add(self, limited: Spent, bare: Spent, unit: Spent) -> None:
        self.limited.append(limited)
        self.bare.append(bare)
        self.units.append(unit)

    def summary(self) -> dict[str, float | int]:
        """``added`` is what the limit adds to the bare view, in microseconds; ratios are in units."""
        rounds = list(zip(self.limited, self.bare, self.units, strict=True))
        added = [limited.median - bare.median for limited, bare, _ in rounds]
        best = min(s.median for s in self.limited) - min(s.median for s in self.bare)
        return {
            "ratio": round(statistics.median(a / u.median for a, (_, _, u) in zip(added, rounds, strict=True)), 3),
            "ratio_of_bests": round(best / min(s.median for s in self.units), 3),
            "ratio_of_means": round(statistics.median((li.mean - b.mean) / u.mean for li, b, u in rounds), 3),
            "added_us": round(statistics.median(added), 2),
            "added_best_us": round(best, 2),
            "bare_best_us": round(min(s.median for s in self.bare), 2),
            "calls_a_round": self.calls,
            "rounds": len(rounds),
        }
