import dataclasses, functools, time, traceback
import jax, jax.numpy as jnp
import pallas_gpu as plgpu
from benchmarks import collectives as B
from pallas_gpu.ops import collectives as c, MatmulConfig
from pallas_gpu.ops.collectives import gathered_product as gp, scattered_product as sp
auto = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=auto)
D, C = jax.P("d"), jax.P(None, "d")
start = time.time()
B._ROUNDS = 6
F = functools.partial
def part(f):
    try: f()
    except Exception: traceback.print_exc(limit=-3)
    print(f"-- {f.__name__} {time.time()-start:.0f} s", flush=True)
def show(label, fs, ins, out, args):
    res = B._measure({k: B._Program(mesh, f, ins, out) for k, f in fs.items()}, args)
    print(label, {k: round(v, 1) for k, v in res.items()}, flush=True)
def blocks():
    x = B._random(mesh, (mesh.size*(1 << 21)//2,), D)
    fs = {str(b): F(c.all_gather, axis_name="d", num_blocks=b) for b in (16, 32, 64, 132)}
    show("all_gather of 2 MiB", {"lax": F(c.all_gather, axis_name="d", method="lax"), **fs}, D, D, (x,))
    x = B._random(mesh, (mesh.size*(1 << 27)//2,), D)
    fs = {str(b): F(c.all_gather, axis_name="d", num_blocks=b) for b in (16, 32, 64, 264)}
    show("all_gather of 128 MiB", {"lax": F(c.all_gather, axis_name="d", method="lax"), **fs}, D, D, (x,))
    for name in B.COLLECTIVES:
        B._collective(mesh, name, (1 << 14, 1 << 20, 1 << 22, 1 << 25, 1 << 28), start + 500)
def products():
    m, k, N = 16384, 4096, 14336
    args = (B._random(mesh, (m, k), D), B._random(mesh, (k, N), C))
    def cfg(tm, tn, cl, st=4): return MatmulConfig(tile_m=tm, tile_n=tn, epilogue_n=32, stages=st, cluster=cl, blocks=132)
    fs = {f"{tm}x{tn} {cl}": F(c.all_gather_matmul, axis_name="d", method="kernel", config=cfg(tm, tn, cl)) for tm, tn, cl in ((64, 256, None), (64, 256, "m"), (64, 256, "n"), (128, 128, None), (128, 128, "m"), (128, 128, "n"))}
    show(f"gather {m} {k} {N}", fs | {"lax": B._gather_then_matmul, "upstream": B._upstreams}, (D, C), C, args)
    args = (B._random(mesh, (m, N), C), B._random(mesh, (N, k), D))
    fs = {f"{tm}x{tn} {cl}": F(c.matmul_reduce_scatter, axis_name="d", method="kernel", config=cfg(tm, tn, cl)) for tm, tn, cl in ((64, 256, None), (64, 256, "m"), (64, 256, "n"), (128, 128, None), (128, 128, "n"))}
    show(f"scatter {m} {N} {k}", fs | {"lax": B._matmul_then_scatter}, (C, D), D, args)
for f in (products, blocks): part(f)
