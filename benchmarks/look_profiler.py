import base64
import zlib
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu

print(jax.devices())


def part(f):
    t = time.time()
    try:
        f()
    except Exception:
        traceback.print_exc(limit=8)
    print(f"--- {f.__name__} {time.time() - t:.1f} s", flush=True)


@part
def small():
    def body(x, y, s, full):
        wg = jax.lax.axis_index("wg")
        with jax.named_scope("outer"):

            @plgpu.when(wg == 0)
            def _():
                with jax.named_scope("copy"):
                    plgpu.copy_gmem_to_smem(x, s, full.at[0])

            plgpu.barrier_wait(full.at[0])
            with jax.named_scope("compute"):

                @plgpu.loop(0, 3)
                def _(i):
                    with jax.named_scope("sleep"):
                        plgpu.delay(1000)

        @plgpu.when(wg == 0)
        def _():
            y[...] = s[...] + 1

    x = jnp.ones((64, 64), jnp.float32)
    for sem in plgpu.LoweringSemantics:
        for scope in plgpu.TraceScope:
            k = plgpu.kernel(
                body,
                out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
                grid=(1,),
                grid_names=("i",),
                num_threads=2,
                thread_name="wg",
                scratch_types=[
                    plgpu.SMEM((64, 64), jnp.float32),
                    plgpu.Barrier(num_barriers=2),
                ],
                compiler_params=plgpu.CompilerParams(lowering_semantics=sem),
            )
            p = plgpu.testing.profile(k, trace_scope=scope)(x)
            print(
                sem, scope, p.has_times, len(p.spans), bool((p.results == x + 1).all())
            )
            if scope is plgpu.TraceScope.WARPGROUP:
                print(p.spans[:8])
                print(p.traces)
    p = plgpu.testing.profile(k, space=3)(x)
    print(p.spans, p.traces)
    import os

    k2 = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        grid=(1,),
        grid_names=("i",),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((64, 64), jnp.float32),
            plgpu.Barrier(num_barriers=2),
        ],
        compiler_params=plgpu.CompilerParams(profile_space=16, profile_dir="/tmp/prof"),
    )
    jax.jit(lambda x: k2(k2(x)))(x).block_until_ready()
    jax.effects_barrier()
    print(os.listdir("/tmp/prof"))


@part
def tutorial():
    from benchmarks import tutorial_profile, timing

    print(timing.environment())
    for name, picture, text in tutorial_profile.pictures():
        print(name, len(picture))
        print(text)
        print(
            "SVG",
            name,
            base64.b64encode(zlib.compress(picture.encode(), 9)).decode(),
            flush=True,
        )


@part
def cost():
    from benchmarks import profiler, timing

    timing.report("cost", profiler.measure_all(), profiler.NOTES, False)


@part
def waits():
    from benchmarks import profiler, tutorial_matmul

    f = profiler.product()
    a, b = (tutorial_matmul.normal(k) for k in jax.random.split(jax.random.key(0)))
    q = plgpu.testing.profile(f)
    q(a, b)
    p = q(a, b)
    print(p.launches, len(p.spans), p.traces["dropped"].sum(), p.traces["end"].max())
    for lane in range(3):
        s = p.spans[p.spans["lane"] == lane]
        t = p.traces[p.traces["lane"] == lane]
        total = (t["end"] - t["begin"]).sum()
        for n in sorted(set(s["name"])):
            x = s[s["name"] == n]
            print(
                lane,
                n,
                len(x),
                round((x["end"] - x["begin"]).sum() / total * 100, 2),
                "%",
            )
    print(
        "SMs", len(set(p.traces["sm"])), "first CTA", p.spans[p.spans["cta"] == 0][:40]
    )
    w = q  # raw header check
    starts = np.sort(p.traces["begin"])
    print("gaps of starts", np.unique(np.round(np.diff(starts), 1))[:20])
