//! Plans of 31B's shapes, without a compiler.

mod fusions;

use gemma4_format::encoding::ZeroType;
use gemma4_format::plan::{self, Argument, Launch, Lowered, Place, Plan};
use gemma4_format::{DType, Encoding, Offset, Op, Program, Source, TextDefaults, Weight};
use gemma4_kernels::Arch;

use super::schedule::Schedule;
use super::stages::Stages;
use super::{Fusions, Target};
use crate::methods::trace;
use crate::model::Config;
use crate::trace::WeightSpec;

/// 31B with INT4 projections, as traced.
fn program() -> Program {
    let int4 = Encoding::Quantized {
        bits: 4,
        group: 32,
        scale: DType::BF16,
        offset: Offset::Zero(ZeroType::Nibble),
    };
    program_of(int4, Encoding::Dense(DType::BF16))
}

/// 31B with its projections and its embedding, which is the head too, in these encodings.
fn program_of(projections: Encoding, embedding: Encoding) -> Program {
    let config = Config::parse(include_str!("../../configs/gemma-4-31b.json")).unwrap();
    let describe = |name: &str, wanted: Option<&[u32]>| {
        let encoding = match name {
            "embed_tokens.weight" => embedding,
            _ if name.contains("_proj") => projections,
            _ => Encoding::Dense(DType::BF16),
        };
        Some(WeightSpec { dims: wanted?.to_vec(), encoding })
    };
    let traced = trace(&config, 512, describe).unwrap();
    Program {
        source: Source::default(),
        text: TextDefaults::default(),
        vocab_size: config.vocab_size,
        max_context: 4096,
        weights: traced
            .weights
            .into_iter()
            .map(|(name, dims, encoding)| Weight { name, dims, encoding, digest: [0; 32] })
            .collect(),
        buffers: traced.buffers,
        methods: traced.methods,
        data_header: [0; 32],
        data_length: 0,
    }
}

#[test]
fn nothing_but_products_touches_the_scratch_that_they_keep_zero() {
    let program = program();
    let stages = Stages::find(&program).unwrap();
    assert_eq!(stages.layers.len(), 60);
    // One word for each multiprocessor.
    let kept = 132 * 4;
    let lacking = Fusions::NAMES.map(|name| Fusions::without(name).unwrap());
    for fusions in lacking.into_iter().chain([Fusions::default()]) {
        let schedule = Schedule::new(&program, &stages, Arch::Sm90a, 132, fusions).unwrap();
        let lists = schedule.methods.iter().map(|m| &m.launches).chain([&schedule.sample]);
        let mut products = 0;
        for launch in lists.flatten() {
            let symbol = schedule.kernels[launch.kernel as usize].symbol;
            for argument in &launch.arguments {
                let offset = match argument {
                    Argument::Address(Place::Scratch, offset) => *offset,
                    Argument::LastRow { place: Place::Scratch, offset, .. } => *offset,
                    _ => continue,
                };
                if offset < kept {
                    assert_eq!(symbol, "linear_many");
                    products += 1;
                }
            }
        }
        assert_eq!(products, 4 * 60);
    }
}

/// The places at which a form of `verify` leaves logits, in bytes, each with its rows if the form
/// says how many they are.
fn logits_of(schedule: &Schedule, form: &Lowered) -> Vec<(u64, Option<u32>)> {
    let head = |launch: &Launch| {
        let [_, _, Argument::Address(Place::Logits, offset), rows, _] = launch.arguments[..] else {
            return None;
        };
        assert_eq!(schedule.kernels[launch.kernel as usize].symbol, "linear_few");
        let rows = if let Argument::U32(rows) = rows { Some(rows) } else { None };
        Some((offset, rows))
    };
    form.launches.iter().filter_map(head).collect()
}

#[test]
fn verify_has_a_form_for_every_number_of_rows_and_logits_of_each() {
    let mut program = program();
    let vocabulary = u64::from(program.vocab_size);
    for most in [1, 2, 3, 6, 8] {
        let verify = program.methods.iter_mut().find(|m| m.name == "verify").unwrap();
        verify.max_rows = most;
        let stages = Stages::find(&program).unwrap();
        for target in Target::DEFAULT {
            let sms = target.multiprocessors();
            let schedule =
                Schedule::new(&program, &stages, target.arch(), sms, Fusions::default()).unwrap();
            let forms = schedule.methods.iter().filter(|form| form.method == "verify");
            let mut next = 1;
            for form in forms {
                assert_eq!(form.min_rows, next);
                next = form.max_rows + 1;
                let mut row = 0;
                for (offset, rows) in logits_of(&schedule, form) {
                    assert_eq!(offset, row * vocabulary * 4);
                    row += u64::from(rows.unwrap_or(form.max_rows));
                }
                assert_eq!(row, u64::from(form.max_rows));
            }
            assert_eq!(next, most + 1);
            let plan = plan(target, schedule);
            gemma4_format::plan::verify(&plan, &program, 1).unwrap();
        }
    }
}

#[test]
fn a_plan_without_a_form_for_some_rows_is_refused() {
    let program = program();
    let stages = Stages::find(&program).unwrap();
    for (missing, rows) in [(1, 1), (2, 2), (4, 3), (8, 5)] {
        let schedule =
            Schedule::new(&program, &stages, Arch::Sm90a, 132, Fusions::default()).unwrap();
        let mut plan = plan(Target::Machine(Arch::Sm90a), schedule);
        plan.methods.retain(|form| form.method != "verify" || form.max_rows != missing);
        let error = gemma4_format::plan::verify(&plan, &program, 1).unwrap_err().to_string();
        assert!(error.contains(&format!("no form for {rows} rows")), "{error}");
    }
}

/// A plan whose modules are not compiled.
fn plan(target: Target, schedule: Schedule) -> Plan {
    let kernel = |kernel: &gemma4_kernels::Kernel| plan::Kernel {
        module: 0,
        symbol: kernel.symbol.to_owned(),
        block: kernel.block,
        shared: kernel.shared,
        overlaps: kernel.dependent_launch,
    };
    Plan {
        target: target.to_string(),
        compiler: String::new(),
        kernels: schedule.kernels.iter().map(kernel).collect(),
        packed: schedule.packed,
        packs: schedule.packs,
        resident: schedule.resident,
        position_bytes: schedule.position_bytes,
        multiprocessors: target.multiprocessors(),
        scratch: schedule.scratch,
        methods: schedule.methods,
        sample: schedule.sample,
    }
}

#[test]
fn methods_that_are_not_the_same_model_are_named() {
    let mut program = program();
    let first_norm = program.methods[0].nodes[2].args[1];
    let verify = program.methods.iter_mut().find(|m| m.name == "verify").unwrap();
    let norm = verify.nodes.iter_mut().rev().find(|n| matches!(n.op, Op::RmsNorm { .. }));
    norm.unwrap().args[1] = first_norm;
    let error = Stages::find(&program).unwrap_err().to_string();
    assert!(error.contains("`verify`"), "{error}");
}

#[test]
fn a_projection_stored_in_another_way_is_named() {
    let mut program = program();
    let odd = program.weights.iter_mut().find(|w| w.name == "layers.3.self_attn.k_proj.weight");
    odd.unwrap().encoding = Encoding::Dense(DType::BF16);
    let stages = Stages::find(&program).unwrap();
    let error = Schedule::new(&program, &stages, Arch::Sm80, 108, Fusions::default())
        .map(|_| ())
        .unwrap_err();
    assert!(error.to_string().contains("layers.3.self_attn.k_proj.weight"), "{error}");
}

#[test]
fn no_kernel_takes_more_shared_memory_than_its_gpu_has() {
    let program = program();
    let stages = Stages::find(&program).unwrap();
    for target in Arch::ALL.map(Target::Machine).into_iter().chain([Target::Ptx]) {
        let arch = target.arch();
        let schedule =
            Schedule::new(&program, &stages, arch, target.multiprocessors(), Fusions::default())
                .unwrap();
        // PTX is to run where blocks have least.
        let room = if target == Target::Ptx { 99 * 1024 } else { arch.shared_per_block() };
        for kernel in &schedule.kernels {
            assert!(kernel.shared <= room, "{target}: {} takes {}", kernel.symbol, kernel.shared);
        }
    }
}

#[test]
fn what_recipes_can_say_has_kernels() {
    let codes =
        |bits, group, offset| Encoding::Quantized { bits, group, scale: DType::BF16, offset };
    let (nibble, fraction) = (Offset::Zero(ZeroType::Nibble), Offset::Zero(ZeroType::BF16));
    let row = 5376;
    for group in [32, 64, 128] {
        for (projections, embedding) in [
            (codes(4, group, nibble), codes(4, group, nibble)),
            (codes(4, group, fraction), codes(6, group, Offset::Symmetric)),
            (codes(6, group, Offset::Symmetric), codes(6, row, Offset::Symmetric)),
            (codes(8, group, Offset::Symmetric), codes(8, row, Offset::Symmetric)),
        ] {
            let program = program_of(projections, embedding);
            let stages = Stages::find(&program).unwrap();
            for arch in Arch::ALL {
                let schedule = Schedule::new(&program, &stages, arch, 100, Fusions::default());
                assert!(schedule.is_ok(), "{} {}", projections.describe(), embedding.describe());
            }
        }
    }
}

/// The encodings of GGUF types, of projections and of the embedding, which is the head too.
#[test]
fn types_of_gguf_have_kernels() {
    for (name, encoding) in [
        ("Q4_0", gguf(4, 32, DType::F16, Offset::Symmetric)),
        ("Q4_1", gguf(4, 32, DType::F16, Offset::Minimum(DType::F16))),
        ("Q5_0", gguf(5, 32, DType::F16, Offset::Symmetric)),
        ("Q5_1", gguf(5, 32, DType::F16, Offset::Minimum(DType::F16))),
        ("Q8_0", gguf(8, 32, DType::F16, Offset::Symmetric)),
        ("Q4_K", gguf(4, 32, DType::F32, Offset::Minimum(DType::F32))),
        ("Q5_K", gguf(5, 32, DType::F32, Offset::Minimum(DType::F32))),
        ("Q6_K", gguf(6, 16, DType::F32, Offset::Symmetric)),
    ] {
        for (projections, embedding) in
            [(encoding, Encoding::Dense(DType::BF16)), (encoding, encoding)]
        {
            let program = program_of(projections, embedding);
            let stages = Stages::find(&program).unwrap();
            for target in Arch::ALL.map(Target::Machine).into_iter().chain([Target::Ptx]) {
                let sms = target.multiprocessors();
                let schedule =
                    Schedule::new(&program, &stages, target.arch(), sms, Fusions::default());
                assert!(schedule.is_ok(), "{target} {name}: {:?}", schedule.map(|_| ()));
            }
        }
    }
}

fn gguf(bits: u8, group: u32, scale: DType, offset: Offset) -> Encoding {
    Encoding::Quantized { bits, group, scale, offset }
}

/// As in Q4_K_M files: the embedding, some v_proj and some down_proj are Q6_K, all else Q4_K. Here some
/// up_proj are, too.
#[test]
fn matrices_of_one_product_may_be_stored_in_different_ways() {
    let q4_k = gguf(4, 32, DType::F32, Offset::Minimum(DType::F32));
    let q6_k = gguf(6, 16, DType::F32, Offset::Symmetric);
    let mut program = program_of(q4_k, q6_k);
    for name in ["3.self_attn.v_proj", "3.mlp.down_proj", "4.mlp.up_proj"] {
        let name = format!("layers.{name}.weight");
        program.weights.iter_mut().find(|w| w.name == name).unwrap().encoding = q6_k;
    }
    let stages = Stages::find(&program).unwrap();
    let schedule = Schedule::new(&program, &stages, Arch::Sm90a, 132, Fusions::default()).unwrap();
    let plan = plan(Target::Machine(Arch::Sm90a), schedule);
    gemma4_format::plan::verify(&plan, &program, 1).unwrap();
    // Bits of a number in memory, of the weight into which a stored one goes.
    let bits = |name: &str| {
        let name = format!("layers.{name}.weight");
        let id = program.weights.iter().position(|w| w.name == name).unwrap() as u32;
        let into = plan.packs.iter().find(|pack| pack.sources.contains(&id)).unwrap();
        let packed = &plan.packed[into.packed as usize];
        packed.bytes * 8 / (u64::from(into.total_rows) * u64::from(packed.columns))
    };
    assert_eq!(["2.self_attn.q_proj", "3.mlp.up_proj"].map(bits), [6, 6]);
    assert_eq!(bits("3.mlp.down_proj"), 10);
    // Codes of 8 bits, and a scale and a minimum of 32 for 16 columns.
    let mixed = ["3.self_attn.q_proj", "3.self_attn.v_proj", "4.mlp.gate_proj", "4.mlp.up_proj"];
    assert_eq!(mixed.map(bits), [12; 4]);
    let gate = plan.packs.iter().filter(|pack| pack.rows_per_tile == 8);
    assert_eq!(gate.filter(|pack| pack.sources.len() == 1).count(), 2);
    let whole: u64 = plan.packed.iter().map(|packed| packed.bytes).sum();
    assert_eq!(gemma4_format::stats::packed_bytes_per_token(&plan), whole);
}
