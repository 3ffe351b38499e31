"""Sets one colour per meaning in every picture, and the page's look in light, dark and print.

The colours are Okabe and Ito's, which colour-blind people can tell apart. The page loads nothing from
anywhere.
"""

from __future__ import annotations

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
    FAULT: "fault", RUN: "run", PALE: "pale", AGAIN: "again", DOWN: "down", SOFT: "soft", RULE: "rule",
    ON_FAULT: "card",
}  # fmt: skip
"""By colour: the variable of the page's style that says how it looks in a light and in a dark room."""


CSS = """
:root { color-scheme: light dark; --paper: #fbfaf8; --card: #ffffff; --ink: #1c1f23; --soft: #5d646d;
  --rule: #e2e0db;
  --local: #009E73; --peer: #0072B2; --parity: #0072B2; --remote: #CC79A7;
  --pale: #cfd3d8; --run: #1c1f23; --fault: #c24e00; --good: #0a7a52; --bad: #b3261e; --again: #E69F0040;
  --down: #80808038; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --card: #1d2126; --ink: #e8e9eb;
  --soft: #a3abb5;
  --local: #35c99b; --peer: #56B4E9; --parity: #56B4E9; --remote: #e3a3c8; --rule: #343a42; --pale: #4b535d;
  --run: #f2f3f5; --fault: #ff9a5c; --good: #4fd1a1; --bad: #ff8a80;
  --again: #E69F0038; --down: #a0a0a030; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 1.2rem; margin: 44px 0 6px; }
p { margin: 6px 0 12px; max-width: 75ch; }
.soft { color: var(--soft); }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 16px;
  overflow-x: auto; }
.verdict { border-left: 6px solid var(--good); margin: 24px 0; padding: 14px 18px; font-size: 1.08rem; }
.verdict.bad { border-left-color: var(--bad); }
.verdict strong { color: var(--good); display: block; font-size: 1.3rem; }
.verdict.bad strong { color: var(--bad); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 0; }
.figures div { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 12px 14px; }
.figures dt { color: var(--soft); font-size: .85rem; }
.figures dd { margin: 0; font-size: 1.45rem; font-weight: 650; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: .82rem; }
th, td { padding: 8px 10px; border-bottom: 1px solid var(--rule); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
.wide { width: 100%; min-width: 170px; }
.number { text-align: right; font-variant-numeric: tabular-nums; } td.number { white-space: nowrap; }
.chip { display: inline-block; border-radius: 20px; padding: 1px 10px; margin: 1px 4px 1px 0;
  white-space: nowrap;
  font-size: .84rem; border: 1.5px solid; }
.count { display: inline-block; width: 22px; height: 22px; border-radius: 50%; background: var(--fault);
  color: var(--card);
  text-align: center; font-weight: 700; font-size: .8rem; line-height: 22px; }
.key { display: flex; flex-wrap: wrap; gap: 6px 20px; font-size: .88rem; color: var(--soft); margin: 0 0 8px;
  padding: 0; }
.key li { list-style: none; display: flex; align-items: center; gap: 7px; }
.swatch { width: 22px; height: 10px; border-radius: 2px; display: inline-block; }
.swatch.dashed { height: 0; border-top: 2.5px dashed; border-radius: 0; }
svg { display: block; width: 100%; min-width: 640px; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
dl.guide dt { font-weight: 650; margin-top: 10px; } dl.guide dd { margin: 0; max-width: 75ch;
  color: var(--soft); }
code { font-size: .88em; overflow-wrap: anywhere; }
@media print { main { padding: 0; } .card { break-inside: avoid; } }
"""
