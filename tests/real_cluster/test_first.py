import time
from stage import TRAINING, job
from training import Training

def test_it(stage, losses, report):
    t = Training(stage.testbed, losses, TRAINING, "gpt")
    s = time.time()
    t.apply(job("gpt"))
    t.wait_until_protected()
    print("protected after", time.time()-s, t.steps[-1], t.status)
    time.sleep(20)
    print(t.steps[-1], t.steps[0].time - s)
