import asyncio, sys, time, json
from benchmarks.scale_operator.stage import *
from benchmarks.scale_operator.pushes import push, settle
async def main(n):
    with crowded_job(n) as (job, crowd):
        w = Stopwatch()
        await job.running(); print(n, "started", w.read(), flush=True)
        await settle(job)
        await job.pause()
        w = Stopwatch(); c = crowd.cpu(); await asyncio.sleep(10); wall, cpu = w.read(); print("listening: CPU/s", cpu / wall, "crowd", (crowd.cpu() - c) / wall, flush=True)
        for resized in (False, True, True):
            c = crowd.cpu(); print(resized, json.dumps(await push(job, resized=resized)), "crowd cpu", crowd.cpu() - c, flush=True)
        await job.loop.stop()
asyncio.run(main(int(sys.argv[1])))
