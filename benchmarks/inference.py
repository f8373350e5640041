# SPDX-License-Identifier: Apache-2.0
"""Layout inference on large kernels, on a CPU: seconds, and table entries computed.

python -m benchmarks.inference
"""

from __future__ import annotations

import time

from tests.support.inferred import large_kernel


def main() -> None:
    """Prints a row per size. Seconds are CPU time of this process."""
    large_kernel(10)()  # fills the caches
    print(f"{'operations':>10} {'seconds':>8} {'entries':>9} {'per op':>7}  exact")
    for count in (500, 1000, 2000, 4000):
        infer = large_kernel(count)
        start = time.process_time()
        found = infer().assignment
        seconds = time.process_time() - start
        each = found.entries / count
        print(f"{count:10} {seconds:8.2f} {found.entries:9} {each:7.0f}  {found.exact}")


if __name__ == "__main__":
    main()
