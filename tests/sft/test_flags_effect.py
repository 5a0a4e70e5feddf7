from __future__ import annotations
import time
from tests.sft.trainer import *
def test_a(sft):
    for kw in (dict(), dict(), dict(entry=as_watched_rank), dict(entry=as_watched_rank, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1), dict(entry=as_watched_rank, vit_gradient_checkpointing=True)):
        t=time.time()
        run = sft(train_iters=3, **kw).ok
        print(time.time()-t, run.losses)
        if kw: print(watched(run))
    print(saved_tensors(run.checkpoint(3)).keys())
