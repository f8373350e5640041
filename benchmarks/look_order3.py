import jax, jax.numpy as jnp
from jax import lax
import benchmarks.pipelines as p
import pallas_gpu as plgpu
from benchmarks import timing
T64=[plgpu.TilingTransform((8,64)),plgpu.SwizzleTransform(128)]
def mm(m,n,k,tile,depth,strip,persistent,delay,out):
    tm,tn,tk=tile; rows=tm//2
    def epi_smem(o,mine,acc): o[mine]=acc[...].astype(o.dtype)
    def body(a,b,o,acc,*parts):
        mine=plgpu.ds(lax.axis_index("wg")*rows,rows)
        plgpu.wgmma(acc,a.at[mine],b); plgpu.wgmma_wait(delay)
        @plgpu.when(plgpu.program_id(2)==plgpu.num_programs(2)-1)
        def _():
            if out!="store": o[mine]=acc[...].astype(o.dtype)
            else:
                value=acc[...].astype(o.dtype); buf=parts[0].at[lax.axis_index("wg")]
                i=0
                for r in range(rows//64):
                    for c in range(tn//64):
                        s=buf.at[i%2]; i+=1
                        plgpu.wait_smem_to_gmem(1,wait_read_only=True)
                        s[...]=value[r*64:(r+1)*64,c*64:(c+1)*64]
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(s,o.at[plgpu.ds(lax.axis_index("wg")*rows+r*64,64),c*64:(c+1)*64])
                plgpu.wait_smem_to_gmem(0,wait_read_only=True)
    def spec(shape,im,d=0,ms=None):
        return plgpu.BlockSpec(shape,im,delay_release=d,memory_space=ms,transforms=() if ms is plgpu.GMEM else T64)
    scr=[plgpu.ACC((rows,tn))]+([plgpu.SMEM((2,2,64,64),jnp.bfloat16,transforms=T64)] if out=="store" else [])
    return plgpu.pallas_call(body,jax.ShapeDtypeStruct((m,n),jnp.bfloat16),grid=(m//tm,n//tn,k//tk),
      in_specs=[spec((tm,tk),lambda i,j,q:(i,q),delay),spec((tk,tn),lambda i,j,q:(q,j),delay)],
      out_specs=spec((tm,tn),lambda i,j,q:(i,j),0,None if out=="smem" else plgpu.GMEM),scratch_shapes=scr,num_threads=2,thread_name="wg",
      compiler_params=plgpu.CompilerParams(dimension_semantics=("parallel","parallel","arbitrary"),max_concurrent_steps=depth,strip=strip,persistent=persistent))
def main():
  for m,n,k in ((4096,4096,4096),(4096,8192,4096)):
    a=jax.random.normal(jax.random.key(0),(m,k),jnp.bfloat16); b=jax.random.normal(jax.random.key(1),(k,n),jnp.bfloat16)
    ref=(a[:256].astype(jnp.float32)@b.astype(jnp.float32))
    c={"cublas":jax.jit(jnp.matmul),"ops":jax.jit(plgpu.ops.matmul)}
    for row in (((128,256,64),3,8,False,1,"smem"),((128,256,64),3,8,False,0,"smem"),((128,256,64),3,8,True,0,"smem"),
                ((128,256,64),4,8,False,1,"gmem"),((128,256,64),4,8,True,1,"gmem"),((256,128,64),4,8,True,1,"gmem"),((128,256,64),4,8,True,0,"gmem"),
                ((128,256,64),4,8,True,1,"store"),((128,256,64),4,16,True,1,"store"),((128,256,64),4,8,False,1,"store"),((256,128,64),4,8,True,1,"store"),):
        try:
            row=(*row[:5],row[5]); f=jax.jit(mm(m,n,k,*row)); e=jnp.linalg.norm(f(a,b)[:256].astype(jnp.float32)-ref)/jnp.linalg.norm(ref)
            assert e<1e-2,e; c[str(row)]=f
        except Exception as e: print(row,"failed",str(e)[:200])
    for r in p._rows(f"{m}x{n}x{k}", timing.on_device(c,[(a,b)])): print(r)
if __name__=="__main__": main()
