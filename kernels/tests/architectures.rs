//! Every kernel compiles for every architecture and stays within its limits.
#![allow(clippy::print_stdout, reason = "says which tests were not run")]

use std::sync::Mutex;

use gemma4_format::encoding::{DType, Encoding, Offset, ZeroType};
use gemma4_kernels::compile::Nvrtc;
use gemma4_kernels::{
    AddNorm, Arch, AttentionFew, Codes, Embed, Epilogue, Geglu, Heads, Kernel, Keys, LinearFew,
    Order, Output, Pack, Packed, PackedOffset, Randomize, Rope, Sample, measure,
};

const INT4: Encoding = Encoding::Quantized {
    bits: 4,
    group: 32,
    scale: DType::BF16,
    offset: Offset::Zero(ZeroType::Nibble),
};

fn int8(k: u32) -> Encoding {
    Encoding::Quantized { bits: 8, group: k, scale: DType::BF16, offset: Offset::Symmetric }
}

/// Types of GGUF, as they are stored.
const Q4_K: Encoding = gguf(4, 32, Offset::Minimum(DType::F32));
const Q5_K: Encoding = gguf(5, 32, Offset::Minimum(DType::F32));
const Q6_K: Encoding = gguf(6, 16, Offset::Symmetric);

const fn gguf(bits: u8, group: u32, offset: Offset) -> Encoding {
    Encoding::Quantized { bits, group, scale: DType::F32, offset }
}

/// The kernels of a decode step over weights of GGUF's types, at the largest shapes.
fn gguf_products(arch: Arch) -> Vec<Kernel> {
    let mut kernels = Vec::new();
    for (encodings, n, k, epilogue) in [
        (&[Q4_K][..], 43008, 5376, Epilogue::Partial),
        (&[Q5_K], 16384, 5376, Epilogue::Partial),
        (&[Q6_K], 5376, 21504, Epilogue::Partial),
        (&[Q6_K], 262_144, 5376, Epilogue::SoftCap),
        (&[Q4_K, Q6_K], 16384, 5376, Epilogue::Partial),
        (&[Q4_K, Q6_K], 1024, 512, Epilogue::Geglu),
    ] {
        let weight = Packed::common(encodings, n, k).unwrap();
        for rows in [1, 2, 4, 8] {
            if let Ok(linear) = LinearFew::choose(weight, rows, epilogue, true, arch, 132) {
                kernels.push(linear.kernel().unwrap());
                let output = Output::Split(linear.split());
                kernels.push(Geglu { width: k, splits: 3, output }.kernel().unwrap());
            } else {
                // A head whose activations do not fit is multiplied in pieces of the rows.
                assert!(rows > 1 && epilogue == Epilogue::SoftCap, "{arch} {rows} {weight:?}");
            }
        }
        kernels.push(Embed { weight }.kernel());
        kernels.push(Randomize { weight }.kernel());
    }
    kernels
}

/// The kernels of a decode step, at the largest shapes.
fn hot(arch: Arch) -> Vec<Kernel> {
    let mut kernels = Vec::new();
    for rows in [1, 2, 4, 8] {
        for (encoding, n, k, epilogue) in [
            (INT4, 16384, 5376, Epilogue::Partial),
            (INT4, 5376, 21504, Epilogue::Partial),
            (int8(5376), 262_144, 5376, Epilogue::SoftCap),
            (Encoding::Dense(DType::BF16), 5376, 8192, Epilogue::Partial),
        ] {
            let weight = Packed::new(encoding, n, k).unwrap();
            let linear = LinearFew::choose(weight, rows, epilogue, true, arch, 132).unwrap();
            kernels.push(linear.kernel().unwrap());
            if epilogue == Epilogue::SoftCap {
                kernels.push(Embed { weight }.kernel());
            }
            if n == 5376 {
                let next = Some(Output::Split(linear.split()));
                let norm = AddNorm {
                    h: k.min(8192),
                    splits: 6,
                    scalar: true,
                    next,
                    weight: DType::BF16,
                    cluster: AddNorm::cluster(arch),
                };
                // And those of plans that lack a fusion.
                let alone = AddNorm { splits: 0, scalar: false, ..norm };
                let last = AddNorm { next: None, ..norm };
                let floats = AddNorm { next: Some(Output::Floats), ..norm };
                if k == 8192 {
                    kernels.extend([norm, alone, last, floats].map(|n| n.kernel().unwrap()));
                }
                kernels.push(LinearFew { split_input: false, ..linear }.kernel().unwrap());
                let geglu = Geglu { width: k, splits: 3, output: Output::Split(linear.split()) };
                kernels.push(geglu.kernel().unwrap());
            }
        }
        for (q_heads, kv_heads, d, keys, window) in [
            (32, 16, 256, Keys::Whole, Some(1024)),
            (32, 4, 512, Keys::Whole, None),
            (32, 4, 512, Keys::Rotated(64), None),
            (4, 1, 128, Keys::Rotated(16), None),
            (8, 4, 32, Keys::Whole, Some(16)),
        ] {
            let heads = Heads { q_heads, kv_heads, d, keys, window };
            let attention = AttentionFew::choose(heads, rows, Output::Floats, (arch, 132));
            kernels.extend([attention.kernel().unwrap(), attention.join().unwrap()]);
            let frequencies = Rope::frequencies(1e6, d, d / 8, 1.0);
            let shared_kv = window.is_none();
            let weight = DType::BF16;
            let rope =
                Rope { q_heads, kv_heads, d, frequencies, shared_kv, keys, splits: 2, weight };
            kernels.push(rope.kernel().unwrap());
        }
    }
    let sample = Sample { vocabulary: 262_144 };
    kernels.extend([sample.maxima().unwrap(), sample.kernel().unwrap()]);
    kernels.extend(measure(arch));
    kernels.extend(gguf_products(arch));
    kernels
}

#[test]
fn hot_kernels_fit_and_do_not_spill() {
    let Ok(nvrtc) = Nvrtc::find() else {
        return println!("not run: no CUDA compiler (make cuda-toolchain)");
    };
    let work: Vec<_> = Arch::ALL
        .into_iter()
        .flat_map(|arch| hot(arch).into_iter().map(move |k| (arch, k)))
        .collect();
    let work = Mutex::new(work);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                while let Some((arch, kernel)) = { work.lock().unwrap().pop() } {
                    check(&nvrtc, arch, &kernel);
                }
            });
        }
    });
}

fn check(nvrtc: &Nvrtc, arch: Arch, kernel: &Kernel) {
    let module = nvrtc.cubin(kernel, arch).unwrap();
    let what = format!("{arch} {} {:?}", kernel.symbol, kernel.defines);
    let resources = module.resources.iter().find(|r| r.symbol == kernel.symbol).unwrap();
    assert_eq!(resources.local, 0, "local memory: {what}");
    assert!(kernel.shared + resources.shared <= arch.shared_per_block(), "shared: {what}");
    // A warp's registers come in units of 8 a thread.
    let registers = resources.registers.next_multiple_of(8) * kernel.block;
    assert!(registers <= 65536, "registers: {what}");
}

#[test]
fn pack_compiles_for_every_encoding() {
    let Ok(nvrtc) = Nvrtc::find() else {
        return println!("not run: no CUDA compiler (make cuda-toolchain)");
    };
    let pack = |source, packed, order| Pack { source, packed, order, rows: 64 };
    let alone = [INT4, int8(256), Encoding::Dense(DType::BF16), Q4_K, Q5_K, Q6_K];
    let mut packs: Vec<Pack> = alone
        .into_iter()
        .map(|source| pack(source, Packed::new(source, 64, 256).unwrap(), Order::Rows))
        .collect();
    let mixed = Packed::common(&[Q4_K, Q6_K], 128, 256).unwrap();
    packs.push(pack(Q4_K, mixed, Order::FirstTurns));
    packs.push(pack(Q6_K, mixed, Order::SecondTurns));
    let zeros = Packed::common(&[INT4, int8(256)], 64, 256).unwrap();
    packs.extend([INT4, int8(256)].map(|source| pack(source, zeros, Order::Rows)));
    for pack in packs {
        for arch in Arch::ALL {
            nvrtc.cubin(&pack.kernel().unwrap(), arch).unwrap();
        }
    }
}

#[test]
fn matrices_stored_in_different_ways_have_the_smallest_layout_that_holds_all() {
    let common = |encodings: &[Encoding]| Packed::common(encodings, 64, 256);
    let mixed = common(&[Q4_K, Q6_K, Q5_K]).unwrap();
    assert_eq!((mixed.codes, mixed.group, mixed.scale), (Codes::Byte, 16, DType::F32));
    assert_eq!(mixed.offset, PackedOffset::Minimum(DType::F32));
    // 8 bits, and of 16 columns two numbers of 32 bits.
    assert_eq!(mixed.bytes(), 64 * 256 * 12 / 8);
    assert_eq!(common(&[Q6_K, Q6_K]).unwrap(), Packed::new(Q6_K, 64, 256).unwrap());
    assert_eq!(common(&[INT4, int8(256)]).unwrap().offset, PackedOffset::Zero(DType::F32));
    assert_eq!(common(&[int8(256), int8(32)]).unwrap().group, 32);
    for beside in [INT4, Encoding::Dense(DType::BF16)] {
        let error = common(&[Q4_K, beside]).unwrap_err().to_string();
        assert!(error.contains("no layout holds both"), "{error}");
    }
    let turns = Pack {
        source: Q4_K,
        packed: Packed::new(Q4_K, 64, 256).unwrap(),
        order: Order::FirstTurns,
        rows: 32,
    };
    assert!(turns.kernel().unwrap_err().to_string().contains("share a byte"));
    let narrower = Pack { packed: Packed::new(Q6_K, 64, 256).unwrap(), ..turns };
    assert!(narrower.kernel().unwrap_err().to_string().contains("does not pack into"));
}

#[test]
fn what_is_not_supported_is_said() {
    let odd =
        Encoding::Quantized { bits: 4, group: 48, scale: DType::BF16, offset: Offset::Symmetric };
    let error = Packed::new(odd, 64, 96).unwrap_err().to_string();
    assert!(error.contains("groups of 48"), "{error}");
    let error = Packed::new(Encoding::Dense(DType::F32), 64, 96).unwrap_err().to_string();
    assert!(error.contains("must be BF16"), "{error}");
    let heads = Heads { q_heads: 8, kv_heads: 4, d: 96, keys: Keys::Whole, window: None };
    let attention = AttentionFew::choose(heads, 1, Output::Floats, (Arch::Sm80, 132));
    assert!(attention.kernel().unwrap_err().to_string().contains("96 columns"));
}
