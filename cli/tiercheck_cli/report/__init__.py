"""Shows what a run went through: one record in, a page, two pictures and a terminal table out."""

from tiercheck_cli.report.page import Rendered, render
from tiercheck_cli.report.record import FaultRecord, RunRecord, StepRecord, WatermarkSample
from tiercheck_cli.report.words import faults_table, verdict_line

__all__ = [
    "FaultRecord",
    "Rendered",
    "RunRecord",
    "StepRecord",
    "WatermarkSample",
    "faults_table",
    "render",
    "verdict_line",
]
