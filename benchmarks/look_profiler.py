"""A look."""

import base64
import time
import traceback
import zlib

from benchmarks import profiler, timing, tutorial_profile


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
def cost():
    timing.report("cost", profiler.measure_all(), profiler.NOTES, False)
