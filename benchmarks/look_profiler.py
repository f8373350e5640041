"""A look."""

import base64
import time
import traceback
import zlib

import jax
import numpy as np

import pallas_gpu as plgpu
from benchmarks import profiler, timing, tutorial_matmul, tutorial_profile


def part(f):
    t = time.time()
    try:
        f()
    except Exception:
        traceback.print_exc(limit=8)
    print(f"--- {f.__name__} {time.time() - t:.1f} s", flush=True)


@part
def tutorial():
    print(timing.environment())
    for name, picture, text in tutorial_profile.pictures():
        print(name, len(picture))
        print(text)
        packed = base64.b64encode(zlib.compress(picture.encode(), 9)).decode()
        print("SVG", name, packed, flush=True)


@part
def clocks():
    f = profiler.product()
    keys = jax.random.split(jax.random.key(0))
    a, b = (tutorial_matmul.normal(k) for k in keys)
    import pallas_gpu.timeline.record as record

    old = record.decode
    seen = []
    record.decode = lambda records: (seen.extend(records), old(records))[1]
    p = plgpu.testing.profile(f)(a, b)
    words = np.asarray(seen[-1].words)
    rows = words.reshape(-1, words.shape[-1])
    first = np.sort(record._wide(rows, 0))
    print("steps of globaltimer", np.unique(np.diff(first))[:12])
    took = record._wide(rows, 4) - record._wide(rows, 0)
    cycles = record._wide(rows, 6) - record._wide(rows, 2)
    rate = cycles / took
    print("GHz", rate.mean(), rate.std(), took.mean())
    one = p.spans[(p.spans["cta"] == 0) & (p.spans["lane"] == 0)]
    print(one[:12], one["end"].max())
    x = p.spans[p.spans["name"] == "wgmma_wait"]
    print("median wait", np.median(x["end"] - x["begin"]))


@part
def cost():
    timing.report("cost", profiler.measure_all(), profiler.NOTES, False)
