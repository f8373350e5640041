import sys, unittest.mock as um
import jax, jax.numpy as jnp
import benchmarks.pipelines as p
import pallas_gpu as plgpu
from pallas_gpu.pipeline import division, compute, producer
from pallas_gpu.primitives import tma
m=n=k=4096
row=((128,256,64),3,8,True)
def make(row=row): return jax.jit(p.threaded_matmul(m,n,k,*row))
c={"cublas":jax.jit(jnp.matmul),"plain":make(((128,256,64),3,8,False)),"persistent":make()}
a,b=(jax.random.normal(jax.random.key(i),(4096,4096),jnp.bfloat16) for i in (0,1))
def warm(name,f):
    try:
        f(a,b).block_until_ready(); c[name]=f
    except Exception as e: print(name, "failed", str(e)[:300])
with um.patch.object(division,"set_max_registers",lambda *a,**k:None): warm("no setmaxnreg",make())
with um.patch.object(compute.tma,"wait_smem_to_gmem",lambda *a,**k:None): warm("no store wait",make())
orig=compute.Compute._finish
def no_finish(self,written):
    return
with um.patch.object(compute.Compute,"_finish",no_finish): warm("no store",make())
warm("4 stages of 32", make(((128,256,32),6,8,True)))
warm("128x128", make(((128,128,64),5,8,True)))
from benchmarks import timing
for r in p._rows("4096", timing.on_device(c,[(a,b)])): print(r)
for name,row in (("persistent",((128,256,64),3,8,True)),("plain",((128,256,64),3,8,False))):
    try:
        t=plgpu.testing.profile(p.threaded_matmul(m,n,k,*row))(a,b)
        print(name); print(str(t)[:6000])
    except Exception as e: print("profile",e)
