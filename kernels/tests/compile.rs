//! The compiler and the reader of its output, on the smallest kernel there is.
#![allow(clippy::print_stdout, reason = "says which tests were not run")]

use gemma4_format::plan::Count;
use gemma4_kernels::{Amount, Arch, Kernel, Source, compile::Nvrtc};

fn tiny(text: &'static str) -> Kernel {
    Kernel {
        source: Source { name: "tiny.cu", text },
        defines: vec![("N", "3".to_owned())],
        symbol: "tiny",
        grid: [Count::Fixed(1); 3],
        block: 32,
        shared: 0,
        args: vec![],
        dependent_launch: false,
        bytes: Amount::default(),
        operations: Amount::default(),
    }
}

#[test]
fn resources_of_a_known_kernel() {
    let Ok(nvrtc) = Nvrtc::find() else {
        return println!("not run: no CUDA compiler (make cuda-toolchain)");
    };
    let kernel = tiny(
        "#include \"common.cuh\"\n\
         extern \"C\" __global__ void tiny(float* x, int i) {\n\
             __shared__ float s[256]; float local[64];\n\
             for (int k = 0; k < 64; k++) local[k * i % 64] = x[k];\n\
             s[threadIdx.x] = local[i]; __syncthreads(); x[i] = s[threadIdx.x ^ N];\n\
         }",
    );
    for arch in Arch::ALL {
        let module = nvrtc.cubin(&kernel, arch).unwrap();
        let [tiny] = &module.resources[..] else { panic!("{:?}", module.resources) };
        assert_eq!(tiny.symbol, "tiny");
        // sm_90 and later reserve 1 KiB of each block's shared memory for the system.
        assert!(tiny.shared == 1024 || tiny.shared == 2048, "{tiny:?}");
        assert_eq!(tiny.local, 256, "{arch}");
        assert!(tiny.registers > 0, "{arch}");
        assert_eq!(module.cubin, nvrtc.cubin(&kernel, arch).unwrap().cubin, "{arch}");
    }
    assert!(nvrtc.ptx(&kernel).unwrap().starts_with(b"//"));
}

#[test]
fn refusal_carries_the_log() {
    let Ok(nvrtc) = Nvrtc::find() else {
        return println!("not run: no CUDA compiler (make cuda-toolchain)");
    };
    let error =
        nvrtc.cubin(&tiny("extern \"C\" __global__ void tiny() { nothing(); }"), Arch::Sm80);
    let text = error.unwrap_err().to_string();
    assert!(text.contains("tiny.cu") && text.contains("nothing"), "{text}");
}
