"""One colour per meaning, in every picture. All are of Okabe and Ito's palette, which colour-blind people can tell apart."""

PHASES = (("detect", "#CC79A7"), ("restore", "#E69F00"), ("start", "#56B4E9"))
"""The parts of a recovery, in order of time."""
PHASE_WORDS = {"detect": "noticed", "restore": "state restored", "start": "first new step"}
TIERS = {"local": "#009E73", "peer": "#0072B2", "remote": "#D55E00"}
FAULT = "#D55E00"
RUN = "#1c1f23"
