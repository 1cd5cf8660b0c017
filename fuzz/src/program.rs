//! A small program that an edit script changes: its graph, dims, encodings, plan and stored bytes.
//! What is accepted is loaded and run on the CPU, twice with the same result.

use std::fs;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock};

use gemma4_format::ptd::Layout;
use gemma4_format::pte::{self, Pte};
use gemma4_format::{Extents, Fact, Program};
use gemma4_runtime::cpu::Cpu;
use gemma4_runtime::{Device, LoadedProgram, Result, Sampling, Session, SessionOptions};

use super::edit::{Script, edit};
use super::files::directory;
use super::plan;
use super::pte::describe;
use super::small::{Config, Model, Random, int8, random_parts};

/// Bytes of weights, and numbers of values and buffers, of a program that is run. Larger ones are
/// no different, but slow.
const MOST: u64 = 1 << 20;
/// Tokens of context of a session.
const CONTEXT: u32 = 24;
/// Rows of a call.
const ROWS: u32 = 6;
/// Changes of one program.
const EDITS: usize = 32;

/// Two layers, a ring of 6 rows, 24 tokens.
pub(crate) fn small_config() -> Config {
    Config {
        vocabulary: 24,
        hidden: 32,
        inner: 32,
        window: 3,
        ring: 3 + 4 - 1,
        chunk: 4,
        max_context: 32,
        embedding: int8(32),
        ..Config::default()
    }
}

static MODEL: LazyLock<Model> = LazyLock::new(|| Model::new(&small_config()));

/// Runs the target on an input.
pub fn run(input: &[u8]) {
    let mut script = Script(input);
    let sampling = Sampling {
        temperature: script.real(),
        top_k: script.number(),
        top_p: script.real(),
        seed: u64::from(script.number()),
    };
    let mut program = MODEL.program.clone();
    let mut plan = plan::plan(&program);
    let mut stored = Vec::new();
    for _ in 0..EDITS {
        match script.byte() % 8 {
            _ if script.is_over() => break,
            0 => plan::edit(&mut script, &mut plan),
            1 => stored.push((script.byte(), script.byte(), script.number(), script.byte())),
            _ => edit(&mut script, &mut program),
        }
    }
    let Some(data) = store(&mut program, &stored) else {
        // Weights that are impossible or too large to be stored here are looked at all the same.
        let _ = gemma4_format::verify::verify(&program);
        return;
    };
    let mut pte = Pte {
        program,
        tokenizer: b"{}".to_vec(),
        chat_template: String::new(),
        plans: vec![plan],
        modules: vec![vec![0]],
    };
    let Ok(bytes) = pte::encode(&pte).or_else(|_| {
        pte.plans.clear();
        pte::encode(&pte)
    }) else {
        return;
    };
    describe(&pte.program);
    if too_large(&pte.program) {
        return;
    }
    let dir = directory("program");
    let paths = [dir.join("model.pte"), dir.join("model.ptd")];
    fs::write(&paths[0], bytes).expect("room for the program");
    fs::write(&paths[1], data).expect("room for the weights");
    let loaded = LoadedProgram::open(&paths[0], &paths[1], &|_, _| {});
    let loaded = Arc::new(loaded.expect("a program that was encoded with its data"));
    let Ok(cpu) = Cpu::with_threads(loaded, 1) else { return };
    let talks = [(); 2].map(|()| talk(&cpu, &sampling).map_err(|error| error.to_string()));
    assert!(talks[0] == talks[1], "two runs differ");
}

/// The data file of the program, whose digests are set; `None` if there can't be one or it is too
/// large. Each of `changes` is a weight, a part of it, a byte of that and its new value.
fn store(program: &mut Program, changes: &[(u8, u8, u32, u8)]) -> Option<Vec<u8>> {
    let bytes = program.weights.iter().map(|w| w.encoding.bytes(&w.dims).ok());
    let bytes = bytes.sum::<Option<u64>>()?;
    if bytes > MOST {
        return None;
    }
    let named = program.weights.iter().map(|w| (w.name.clone(), w.dims.clone(), w.encoding));
    let layout = Layout::new(&named.collect::<Vec<_>>()).ok()?;
    let mut data = vec![0; usize::try_from(layout.length).ok()?];
    data[..layout.header.len()].copy_from_slice(&layout.header);
    for (at, (weight, placed)) in program.weights.iter_mut().zip(&layout.weights).enumerate() {
        let model = &*MODEL;
        let same = model
            .program
            .weights
            .get(at)
            .is_some_and(|base| base.dims == weight.dims && base.encoding == weight.encoding);
        let mut parts = match same {
            true => model.parts[at].clone(),
            false => random_parts(&mut Random(at as u64), weight.encoding, &weight.dims, 0.3),
        };
        for (id, part, byte, value) in changes {
            if usize::from(*id) % model.parts.len() == at {
                let count = parts.len();
                let part = &mut parts[usize::from(*part) % count];
                let byte = *byte as usize % part.len();
                part[byte] = *value;
            }
        }
        let mut hasher = blake3::Hasher::new();
        for ((_, offset), bytes) in placed.iter().zip(&parts) {
            data[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
            hasher.update(bytes);
        }
        weight.digest = *hasher.finalize().as_bytes();
    }
    program.data_header = layout.header_digest();
    program.data_length = layout.length;
    Some(data)
}

fn too_large(program: &Program) -> bool {
    let extents = |rows: u32| Extents { rows, context: CONTEXT };
    let elements = |fact: &Fact, rows| fact.elements(extents(rows)).unwrap_or(u64::MAX);
    let buffers = program.buffers.iter().map(|b| elements(&Fact::f32(b.dims.clone()), 1));
    let values = program.methods.iter().flat_map(|method| {
        // `verify` has room for all its rows.
        let rows = if method.name == "verify" { method.max_rows } else { ROWS };
        let values = program.values(method).unwrap_or_default();
        values.into_iter().map(move |fact| elements(&fact, rows)).collect::<Vec<_>>()
    });
    buffers.chain(values).fold(0, u64::saturating_add) > MOST
}

/// Reads tokens in every way that there is and draws some; the bits of all logits, and the tokens.
fn talk(cpu: &Cpu, sampling: &Sampling) -> Result<Vec<u32>> {
    let program = Arc::clone(cpu.program());
    let program = program.program();
    let chunk = program.method("prefill").map_or(1, |method| method.max_rows);
    let options = SessionOptions {
        max_context: Some(CONTEXT.min(program.max_context)),
        prefill_chunk: Some(ROWS.min(chunk)),
    };
    let mut session = Session::new(cpu, options)?;
    let token = |at: u32| at % program.vocab_size;
    let mut seen = Vec::new();
    let note = |session: &mut Session, seen: &mut Vec<u32>| -> Result<()> {
        seen.extend(session.logits()?.iter().map(|x| x.to_bits()));
        Ok(())
    };
    session.prefill(&[token(1)])?;
    note(&mut session, &mut seen)?;
    session.decode(token(2))?;
    note(&mut session, &mut seen)?;
    let rows = session.verify_rows().min(3) as usize;
    if rows > 0 {
        session.verify(&[3, 4, 5].map(token)[..rows])?;
        note(&mut session, &mut seen)?;
        session.rewind(session.position() - 1);
    }
    session.prefill(&[6, 7, 8, 9, 10, 11, 12].map(token))?;
    note(&mut session, &mut seen)?;
    let stop = AtomicBool::new(false);
    for token in session.generate(*sampling, 4, &stop)? {
        seen.push(token?);
    }
    Ok(seen)
}
