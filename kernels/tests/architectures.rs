//! Every kernel compiles for every architecture and stays within its limits.

use gemma4_format::encoding::{DType, Encoding, Offset, ZeroType};
use gemma4_kernels::compile::Nvrtc;
use gemma4_kernels::{Arch, Epilogue, Kernel, LinearFew, Order, Pack, Packed};

const INT4: Encoding = Encoding::Quantized {
    bits: 4,
    group: 32,
    scale: DType::BF16,
    offset: Offset::Zero(ZeroType::Nibble),
};

fn int8(k: u32) -> Encoding {
    Encoding::Quantized { bits: 8, group: k, scale: DType::BF16, offset: Offset::Symmetric }
}

/// The kernels of one architecture that must not touch local memory.
fn hot(arch: Arch) -> Vec<Kernel> {
    let mut kernels = Vec::new();
    for rows in [1, 2, 4, 8] {
        for (encoding, n, k) in [
            (INT4, 16384, 5376),
            (INT4, 5376, 21504),
            (int8(5376), 262144, 5376),
            (Encoding::Dense(DType::BF16), 5376, 8192),
        ] {
            let weight = Packed::new(encoding, n, k).unwrap();
            let linear = LinearFew::choose(weight, rows, Epilogue::Partial, arch, 132).unwrap();
            kernels.push(linear.kernel().unwrap());
        }
    }
    kernels
}

#[test]
fn hot_kernels_fit_and_do_not_spill() {
    let Ok(nvrtc) = Nvrtc::find() else {
        return println!("not run: no CUDA compiler (make cuda-toolchain)");
    };
    for arch in Arch::ALL {
        for kernel in hot(arch) {
            let module = nvrtc.cubin(&kernel, arch).unwrap();
            for resources in &module.resources {
                println!("{arch} {resources:?} + {} {:?}", kernel.shared, kernel.defines);
                if resources.local > 0 {
                    println!("SPILL");
                }
                assert!(kernel.shared + resources.shared <= arch.shared_per_block());
                assert!(resources.registers * kernel.block <= 65536);
            }
        }
    }
}

#[test]
fn pack_compiles_for_every_encoding() {
    let Ok(nvrtc) = Nvrtc::find() else {
        return println!("not run: no CUDA compiler (make cuda-toolchain)");
    };
    for encoding in [INT4, int8(256), Encoding::Dense(DType::BF16)] {
        let packed = Packed::new(encoding, 64, 256).unwrap();
        let pack = Pack { source: encoding, packed, order: Order::Rows, rows: 64 };
        nvrtc.cubin(&pack.kernel().unwrap(), Arch::Sm80).unwrap();
    }
}
