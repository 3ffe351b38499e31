"""One colour per meaning, in every picture. All are of Okabe and Ito's palette, which colour-blind people can tell apart."""

PHASES = (("detect", "#999999"), ("restore", "#E69F00"), ("start", "#56B4E9"))
"""The parts of a recovery, in order of time."""
PHASE_WORDS = {"detect": "noticed", "restore": "state restored", "start": "first new step"}
TIERS = {"local": "#009E73", "peer": "#0072B2", "remote": "#CC79A7"}
DASHES: dict[str, tuple[int, tuple[int, ...]]] = {
    "local": (0, (2, 2)),
    "peer": (0, (6, 2)),
    "remote": (0, (8, 2, 2, 2)),
}
"""By tier: the three lines often lie on each other, and must be told apart in print too."""
FAULT = "#D55E00"
RUN = "#1c1f23"
PALE = "#bfbfbf"
"""The uninterrupted run."""
AGAIN = "#f8e7c0"
DOWN = "#dfdfdf"
SOFT = "#5d646d"
RULE = "#e2e0db"
ON_FAULT = "#ffffff"

OF_PAGE = {
    **{colour: tier for tier, colour in TIERS.items()},
    FAULT: "fault", RUN: "run", PALE: "pale", AGAIN: "again", DOWN: "down", SOFT: "soft", RULE: "rule", ON_FAULT: "card",
}  # fmt: skip
"""By colour: the variable of the page's style that says how it looks in a light and in a dark room."""
