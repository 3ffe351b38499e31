import asyncio, sys, time, json
from benchmarks.scale_operator.stage import *
from benchmarks.scale_operator.pushes import push, ask
from benchmarks.scale_operator.listening import listen
async def main(n):
    with crowded_job(n) as (job, crowd):
        w = Stopwatch()
        await job.running(); print(n, "started", w.read(), flush=True)
        print("listening", json.dumps(await listen(job, crowd, 15)), flush=True)
        await job.pause()
        print("ask", await ask(job), flush=True)
        print("resized", json.dumps(await push(job, 2, resized=True)), flush=True)
        print("ordinary", json.dumps(await push(job, 3, resized=False)), flush=True)
        await job.loop.stop()
asyncio.run(main(int(sys.argv[1])))
