"""The published formulas that the simulation is checked against."""

from __future__ import annotations

from math import exp, expm1


def first_order_ettr(failures_per_second: float, interval: float, overhead: float) -> float:
    """1 - rate x (overhead + interval / 2): on average half an interval is lost per failure, and the overhead.

    Expected effective training time ratio of a long run with rare failures: A. Kokolis et al., "Revisiting Reliability in
    Large-Scale Machine Learning Research Clusters", 2024 (arXiv:2410.21680), without time in the queue; in essence J. W. Young,
    "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. Seconds throughout.
    """
    return 1.0 - failures_per_second * (overhead + interval / 2.0)


def exact_ettr(failures_per_second: float, interval: float, overhead: float) -> float:
    """The same, exact for failures that are exponentially distributed and may hit the recovery as well.

    Training of one interval takes M e^(R/M) (e^(t/M) - 1) on average, with M the mean time between failures, t the interval
    and R the overhead: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3),
    2006, with nothing spent on saving. Seconds throughout.
    """
    if failures_per_second <= 0:
        return 1.0
    mean = 1.0 / failures_per_second
    return interval / (mean * exp(overhead / mean) * expm1(interval / mean))
