"""The part of the control API that sidecars use among themselves: tier reports in, verdicts out."""

from __future__ import annotations

import asyncio

from aiohttp import web

from tiercheck_sidecar.api import answer, sentence
from tiercheck_sidecar.board import SidecarState
from tiercheck_sidecar.coordinator import BadReport, Coordinator, NotNow, StaleReport
from tiercheck_sidecar.decoding import Malformed, decode
from tiercheck_sidecar.watermark import TierReport, TierVerdict


def routes(board: SidecarState, coordinator: Coordinator) -> list[web.RouteDef]:
    """`POST /v1/tiers` and `PUT /v1/watermarks`."""

    async def tiers(request: web.Request) -> web.StreamResponse:
        try:
            report = decode(await request.read(), TierReport)
        except Malformed as error:
            return sentence(422, f"not a tier report: {error}")
        if report.job_uid != board.config.job_uid:
            return sentence(403, f"this sidecar belongs to job {board.config.job_uid}")
        try:
            return answer(await asyncio.to_thread(coordinator.hear, report))
        except StaleReport as error:
            return sentence(409, str(error))
        except BadReport as error:
            return sentence(422, str(error))
        except NotNow as error:
            return sentence(503, str(error))

    async def watermarks(request: web.Request) -> web.StreamResponse:
        try:
            verdict = decode(await request.read(), TierVerdict)
        except Malformed as error:
            return sentence(422, f"not a verdict: {error}")
        reason = board.follow(verdict)
        return sentence(409, reason) if reason else answer(board.verdict)

    return [web.post("/v1/tiers", tiers), web.put("/v1/watermarks", watermarks)]
