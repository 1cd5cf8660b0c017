//! The kernels for many rows compile for every architecture, fit it, and keep out of local memory.
#![allow(clippy::print_stdout, reason = "a test that did not run says so")]

use gemma4_format::encoding::{DType, Encoding, Offset, ZeroType};
use gemma4_kernels::compile::Nvrtc;
use gemma4_kernels::{
    Arch, AttentionPrefill, Geglu, Heads, Kernel, Keys, LinearMany, ManyOutput, Output, Packed,
    ToPanels,
};

fn quantized(bits: u8, group: u32, offset: Offset) -> Encoding {
    Encoding::Quantized { bits, group, scale: DType::BF16, offset }
}

fn kernels(arch: Arch) -> Vec<Kernel> {
    let nibble = quantized(4, 32, Offset::Zero(ZeroType::Nibble));
    let geglu = Geglu { width: 21504, splits: 1, output: Output::Panels { room: 512 } };
    let mut kernels = vec![ToPanels { k: 5376 }.kernel().unwrap(), geglu.kernel().unwrap()];
    let products = [
        (nibble, 16384, 5376, ManyOutput::F32),
        (nibble, 43008, 5376, ManyOutput::Geglu),
        (nibble, 5376, 21504, ManyOutput::Bf16),
        (quantized(4, 32, Offset::Zero(ZeroType::BF16)), 5376, 8192, ManyOutput::F32),
        (quantized(4, 128, Offset::Symmetric), 5376, 8192, ManyOutput::F32),
        (quantized(8, 8192, Offset::Symmetric), 5376, 8192, ManyOutput::F32),
        (Encoding::Dense(DType::BF16), 5376, 8192, ManyOutput::F32),
    ];
    let gguf = |bits, group, offset| Encoding::Quantized { bits, group, scale: DType::F32, offset };
    let minimum = Offset::Minimum(DType::F32);
    let (q4_k, q6_k) = (gguf(4, 32, minimum), gguf(6, 16, Offset::Symmetric));
    let mut weights: Vec<(Packed, ManyOutput)> = products
        .into_iter()
        .map(|(encoding, n, k, output)| (Packed::new(encoding, n, k).unwrap(), output))
        .collect();
    for (encodings, n, k, output) in [
        (&[q4_k][..], 43008, 5376, ManyOutput::Geglu),
        (&[gguf(5, 32, minimum)], 5376, 8192, ManyOutput::F32),
        (&[q6_k], 5376, 21504, ManyOutput::F32),
        (&[q4_k, q6_k], 16384, 5376, ManyOutput::F32),
    ] {
        weights.push((Packed::common(encodings, n, k).unwrap(), output));
    }
    for (weight, output) in weights {
        for rows in [32, 64, 129, 417, 512] {
            kernels.push(LinearMany::choose(weight, rows, output, arch).kernel().unwrap());
        }
    }
    for (q_heads, kv_heads, d, keys, window) in [
        (32, 16, 256, Keys::Whole, Some(1024)),
        (32, 4, 512, Keys::Whole, None),
        (32, 4, 512, Keys::Rotated(64), None),
        (8, 4, 32, Keys::Whole, Some(32)),
        (4, 2, 64, Keys::Whole, Some(128)),
        (4, 1, 128, Keys::Whole, None),
        (4, 1, 128, Keys::Rotated(16), None),
    ] {
        let heads = Heads { q_heads, kv_heads, d, keys, window };
        let attention = AttentionPrefill::choose(heads, arch);
        kernels.push(attention.kernel().unwrap());
    }
    kernels
}

#[test]
fn kernels_fit_and_do_not_spill() {
    let Ok(nvrtc) = Nvrtc::find() else {
        return println!("not run: no CUDA compiler (make cuda-toolchain)");
    };
    let mut misfits = Vec::new();
    for arch in Arch::ALL {
        for kernel in kernels(arch) {
            let module = nvrtc.cubin(&kernel, arch).unwrap();
            for resources in &module.resources {
                let what = format!("{arch} {resources:?} {:?}", kernel.defines);
                let fits = resources.local == 0
                    && kernel.shared + resources.shared <= arch.shared_per_block()
                    && resources.registers * kernel.block <= 65536;
                if !fits {
                    misfits.push(what);
                }
            }
        }
    }
    assert!(misfits.is_empty(), "{}", misfits.join("\n"));
}

#[test]
fn impossible_dims_are_refused_with_a_reason() {
    let nibble = quantized(4, 32, Offset::Zero(ZeroType::Nibble));
    let odd = Packed::new(nibble, 20, 64).unwrap();
    let error = LinearMany::choose(odd, 9, ManyOutput::F32, Arch::Sm80).kernel().unwrap_err();
    assert!(error.to_string().contains("20 features"), "{error}");
    let refused = |kv_heads, d, keys, arch| {
        let heads = Heads { q_heads: 8, kv_heads, d, keys, window: None };
        AttentionPrefill::choose(heads, arch).kernel().unwrap_err().to_string()
    };
    let head = refused(4, 96, Keys::Whole, Arch::Sm80);
    assert!(head.contains("96 columns"), "{head}");
    let ratio = refused(3, 64, Keys::Whole, Arch::Sm80);
    assert!(ratio.contains("8 query heads over 3"), "{ratio}");
    let keys = refused(4, 64, Keys::Rotated(8), Arch::Sm80);
    assert!(keys.contains("Rotated(8) of heads of 64 columns"), "{keys}");
    let hopper = refused(4, 256, Keys::Rotated(32), Arch::Sm90a);
    assert!(hopper.contains("Rotated(32)"), "{hopper}");
}
