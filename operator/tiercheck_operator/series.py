"""Metrics of jobs, kept as plain numbers: there may be hundreds of jobs, each with dozens of series.

The library's own metrics take half a KiB for each series, with locks and times of creation: more for a job
than everything else that is known of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

Job = tuple[str, str]
"""Namespace and name."""
JOB_LABELS = ("namespace", "tiercheck_job")


class JobSeries(Collector):
    """One metric: a number for each job, and each value of its other labels.

    `shown`: what a scrape makes of a number.
    """

    def __init__(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        labels: Sequence[str] = (),
        shown: Callable[[float], float] = float,
    ) -> None:
        self.labels = (*JOB_LABELS, *labels)
        self._family, self._name, self._text, self._shown = family, name, text, shown
        self._numbers: dict[Job, dict[tuple[str, ...], float]] = {}

    def set(self, job: Job, number: float, *labels: str) -> None:
        self._numbers.setdefault(job, {})[labels] = number

    def add(self, job: Job, amount: float, *labels: str) -> None:
        """Also of nothing: then a counter is there, and its first event is an increase."""
        of_job = self._numbers.setdefault(job, {})
        of_job[labels] = of_job.get(labels, 0) + amount

    def forget(self, job: Job) -> None:
        self._numbers.pop(job, None)

    def describe(self) -> Iterable[Metric]:
        return [self._family(self._name, self._text, labels=self.labels)]

    def collect(self) -> Iterator[Metric]:
        found = self._family(self._name, self._text, labels=self.labels)
        for job, numbers in self._numbers.items():
            for labels, number in numbers.items():
                found.add_metric([*job, *labels], self._shown(number))
        yield found


class JobDurations(Collector):
    """One histogram for each job and value of one more label."""

    def __init__(self, name: str, text: str, label: str, bounds: Sequence[float]) -> None:
        self.labels = (*JOB_LABELS, label)
        self._name, self._text, self._bounds = name, text, tuple(bounds)
        self._counts: dict[Job, dict[str, list[int]]] = {}
        """How many there were up to each bound, and beyond the last, not counted in the ones before."""
        self._sums: dict[Job, dict[str, float]] = {}

    def begin(self, job: Job, label: str) -> None:
        """It is there, with nothing in it."""
        self._counts.setdefault(job, {}).setdefault(label, [0] * (len(self._bounds) + 1))
        self._sums.setdefault(job, {}).setdefault(label, 0.0)

    def observe(self, job: Job, seconds: float, label: str) -> None:
        self.begin(job, label)
        self._counts[job][label][bisect_left(self._bounds, seconds)] += 1
        self._sums[job][label] += seconds

    def forget(self, job: Job) -> None:
        self._counts.pop(job, None)
        self._sums.pop(job, None)

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._text, labels=self.labels)]

    def collect(self) -> Iterator[Metric]:
        found = HistogramMetricFamily(self._name, self._text, labels=self.labels)
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        for job, of_job in self._counts.items():
            for label, counts in of_job.items():
                upto = [sum(counts[: number + 1]) for number in range(len(counts))]
                buckets = list(zip(names, map(float, upto), strict=True))
                found.add_metric([*job, label], buckets, self._sums[job][label])
        yield found
