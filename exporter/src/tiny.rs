//! Takes a tiny random model through the whole pipeline.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gemma4_runtime::cpu::Cpu;
use gemma4_runtime::{LoadedProgram, Session, SessionOptions};

use crate::checkpoint::Checkpoint;
use crate::export::{Options, export};
use crate::model::Config;
use crate::output::Monitor;
use crate::quantize::{Existing, Quantizer, Recipe, write_bundle};
use crate::reference::Reference;
use crate::source::decode_rows;
use crate::synthetic::{TINY_CONFIG, write_checkpoint};
use crate::trace::WeightSpec;
use crate::{Error, Result};

/// Largest difference of a logit that is accepted: float32 sums in another order.
const TOLERANCE: f32 = 1e-3;
/// Tokens that are read: more than twice around the ring.
const TOKENS: u32 = 60;
/// Prompt tokens that one call reads.
const CHUNK: u32 = 8;

/// What the test saw.
#[derive(Clone, Debug)]
pub struct Report {
    /// Largest difference between the runtime's logits and candle's.
    pub max_difference: f32,
    /// Positions compared.
    pub positions: u32,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ok: quantized, exported and run on the CPU; {} positions agree with candle, \
             largest difference of a logit {:.1e}",
            self.positions, self.max_difference
        )
    }
}

/// Makes a random checkpoint, quantizes it with the default recipe, exports the bundle, runs the
/// two files on the CPU and compares every logit with candle on the dequantized weights.
///
/// The two files stay in `output_dir` if one is given.
pub fn test(output_dir: Option<&Path>, monitor: &Monitor) -> Result<Report> {
    let scratch = tempfile::tempdir().map_err(Error::io("create a directory in", "TMPDIR"))?;
    let at = |name: &str| scratch.path().join(name);
    write_checkpoint(TINY_CONFIG, 1, &at("checkpoint"))?;
    let recipe = Recipe::named("default")?;
    let dense = Checkpoint::open(at("checkpoint"))?;
    write_bundle(&dense, &recipe, &at("bundle"), Existing::Refuse, &Quantizer::Cpu, monitor)?;
    let bundle = Checkpoint::open(at("bundle"))?;
    let output = output_dir.map_or_else(|| at("out"), PathBuf::from);
    let options = Options { max_prefill_chunk: Some(CHUNK), ..Options::default() };
    let exported = export(&bundle, &options, &output, monitor)?;

    let program = LoadedProgram::open(&exported.program, &exported.data, &|_, _| {})?;
    let program = Arc::new(program);
    let config = Config::parse(TINY_CONFIG)?;
    let reference = reference(&config, &program, TOKENS)?;
    let tokens: Vec<u32> = (0..TOKENS).map(|i| (i * 37 + 11) % config.vocab_size).collect();
    let expected =
        reference.run(&tokens, 0)?.logits.to_vec2::<f32>().map_err(crate::trace::Error::from)?;
    let device = Cpu::new(program)?;
    let mut session = Session::new(&device, SessionOptions::default())?;
    let mut max_difference = 0.0f32;
    for (token, expected) in tokens.iter().zip(&expected) {
        session.decode(*token)?;
        for (a, b) in session.logits()?.iter().zip(expected) {
            max_difference = max_difference.max((a - b).abs());
        }
    }
    session.reset();
    session.prefill(&tokens)?;
    let last = expected.last().into_iter().flatten();
    for (a, b) in session.logits()?.iter().zip(last) {
        max_difference = max_difference.max((a - b).abs());
    }
    if max_difference.is_nan() || max_difference > TOLERANCE {
        return Err(Error::Disagrees { difference: max_difference, tolerance: TOLERANCE });
    }
    Ok(Report { max_difference, positions: TOKENS })
}

/// candle's model over the weights of an exported program, dequantized.
///
/// The reference holds as many tokens as the program's context; a call may have `max_chunk`.
pub fn reference(config: &Config, program: &LoadedProgram, max_chunk: u32) -> Result<Reference> {
    let weights = &program.program().weights;
    let find = |name: &str| weights.iter().position(|w| w.name == name);
    let describe = |name: &str, _: Option<&[u32]>| {
        let weight = &weights[find(name)?];
        Some(WeightSpec { dims: weight.dims.clone(), encoding: weight.encoding })
    };
    let load = |name: &str| {
        let id = find(name).ok_or_else(|| "is not in the program".to_owned())?;
        let (weight, parts) = (&weights[id], program.weights().parts(id as u32));
        Ok(decode_rows(weight.encoding, weight.dims.last().copied().unwrap_or(1), &parts))
    };
    let context = program.program().max_context;
    Ok(Reference::new(config, max_chunk, context, describe, load)?)
}
