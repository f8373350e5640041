import functools, sys, time, traceback, dataclasses
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import pallas_gpu as plgpu
from benchmarks import collectives as B
from pallas_gpu import ops
from pallas_gpu.ops import collectives as c
from pallas_gpu.ops.collectives import gathered_product as gp, scattered_product as sp
from pallas_gpu.ops.gemm.problem import Problem
auto = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=auto)
n = mesh.size
D, C = jax.P("d"), jax.P(None, "d")
start = time.time()
def part(f):
    try: f()
    except Exception: traceback.print_exc(limit=-3)
    print(f"-- {f.__name__} {time.time()-start:.0f} s", flush=True)
def sm(f, i, o): return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=i, out_specs=o, check_vma=False))
def experts():
    T, H, E, K = 128, 7168, 64, 8
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((n*T, H)), jnp.bfloat16)
    e = np.argsort(rng.random((n*T, E)), axis=1)[:, :K].astype(np.int32)
    w = jnp.asarray(rng.random((n*T, K)), jnp.float32)
    out = {}
    for m in ("kernel", "lax"):
        def f(x, e, w, m=m):
            s = c.dispatch(x, e, "d", num_experts=E, method=m)
            return c.combine(s.rows, e, s.slots, w, "d", method=m)
        g = sm(f, D, D)
        out[m] = np.asarray(g(x, e, w).astype(jnp.float32))
        ts = []
        for _ in range(20):
            t = time.perf_counter(); jax.block_until_ready(g(x, e, w)); ts.append(time.perf_counter()-t)
        print("dispatch+combine", m, f"{np.median(ts)*1e6:.0f} us")
        if m == "kernel":
            for name, ms in plgpu.testing.kernel_times(lambda: jax.block_until_ready(g(x, e, w))): print("   ", name[:60], f"{ms*1e3:.1f} us")
    print("experts error", np.abs(out["kernel"]-out["lax"]).max(), np.abs(out["lax"]).max())
def ring():
    q = jax.random.normal(jax.random.key(0), (1, n*4096, 16, 128), jnp.bfloat16)
    r = {}
    for m in ("kernel", "lax"):
        g = sm(lambda q, m=m: c.ring_attention(q, q, q, "d", causal=True, method=m), C, C)
        r[m] = np.asarray(g(q).astype(jnp.float32))
        ts = []
        for _ in range(10):
            t = time.perf_counter(); jax.block_until_ready(g(q)); ts.append(time.perf_counter()-t)
        print("ring attention", m, f"{np.median(ts)*1e6:.0f} us")
    whole = np.asarray(jax.jit(lambda q: ops.attention(q, q, q, causal=True))(jax.device_put(np.asarray(q), jax.devices()[0])).astype(jnp.float32))
    print("ring error", np.abs(r["kernel"]-whole).max(), np.abs(r["lax"]-r["kernel"]).max())
def names():
    for size in (1 << 16, 1 << 22):
        x = B._random(mesh, (n*size//2,), D)
        for label, f in (("all_gather", lambda x: c.all_gather(x, "d", method="kernel")), ("one_shot", lambda x: c.all_reduce(x, "d", method="one_shot")), ("a2a", lambda x: c.all_to_all(x, "d", 0, 0, method="kernel"))):
            g = sm(f, D, D); jax.block_until_ready(g(x))
            print(label, size, [(k[:28], round(t*1e3, 1)) for k, t in plgpu.testing.kernel_times(lambda: [jax.block_until_ready(g(x)) for _ in range(3)])], flush=True)
def blocks():
    for label, f in (("all_gather", c.all_gather), ("one_shot", functools.partial(c.all_reduce, method="one_shot")), ("rs", c.reduce_scatter)):
        for size in (1 << 22, 1 << 27):
            x = B._random(mesh, (n*size//2,), D)
            res = B._measure({str(b) if b else "lax": B._Program(mesh, functools.partial(f, axis_name="d", num_blocks=b) if b else functools.partial(f if label != "one_shot" else c.all_reduce, axis_name="d", method="lax"), D, D, size) for b in (0, 32, 132, 396)}, (x,))
            print(label, size, {k: round(v, 1) for k, v in res.items()}, flush=True)
def products():
    for m, k, N in ((16384, 4096, 14336), (8192, 8192, 28672)):
        ins = (D, C); args = (B._random(mesh, (m, k), D), B._random(mesh, (k, N), C))
        p = Problem(m=m//n, n=N//n, k=k, dtype=jnp.dtype("bfloat16"), out_dtype=jnp.dtype("bfloat16"), batch=n, shared_b=True)
        base = gp.choose(p); print(base)
        cand = {"base": base, "none": dataclasses.replace(base, cluster=None), "n": dataclasses.replace(base, cluster="n")}
        fs = {k: functools.partial(c.all_gather_matmul, axis_name="d", method="kernel", config=v) for k, v in cand.items()}
        fs |= {"lax": B._gather_then_matmul, "upstream": B._upstreams, "matmul": lambda x, w: ops.matmul(jnp.concatenate([x, x]), w)}
        progs = {k: B._Program(mesh, f, ins, C, 1 << 24) for k, f in fs.items()}
        del progs["matmul"]
        print("gather", m, k, N, {k: round(v, 1) for k, v in B._measure(progs, args).items()}, flush=True)
        args = (B._random(mesh, (m, N), C), B._random(mesh, (N, k), D))
        fs = {"base": functools.partial(c.matmul_reduce_scatter, axis_name="d", method="kernel"), "separate": functools.partial(c.matmul_reduce_scatter, axis_name="d", method="separate"), "lax": B._matmul_then_scatter}
        progs = {k: B._Program(mesh, f, (C, D), D, 1 << 24) for k, f in fs.items()}
        print("scatter", m, N, k, {k: round(v, 1) for k, v in B._measure(progs, args).items()}, flush=True)
for f in (names, experts, products, ring, blocks): part(f)
