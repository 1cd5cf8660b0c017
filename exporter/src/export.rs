//! From an open checkpoint or GGUF file to `model.pte` and `model.ptd`.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use gemma4_format::pte::{self, Pte};
use gemma4_format::{DType, Encoding, Program, Source, TextDefaults, Weight, ptd};

use crate::generation::Generation;
use crate::lower::{Fusions, Lowered, Target, lower};
use crate::methods::{Traced, trace};
use crate::model::Config;
use crate::output::{
    Item, Monitor, Pending, persist_all, random_digests, write_random_weights, write_weights,
};
use crate::quantize::{HEAD, QuantizeOn, Quantizer, Recipe, Treatment};
use crate::source::ModelSource;
use crate::trace::WeightSpec;
use crate::{Error, Result};

/// Context length of a program where nobody asks for another, unless the model's is shorter.
pub const DEFAULT_CONTEXT: u32 = 4096;
/// Rows of a `prefill` call where nobody asks for another.
pub const DEFAULT_CHUNK: u32 = 512;

const PRODUCER: &str = concat!("gemma4-export ", env!("CARGO_PKG_VERSION"));

/// What can be chosen about a program.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Longest context in tokens; at most the model's.
    pub max_seq_len: Option<u32>,
    /// Most tokens of one `prefill` call; at most the context.
    pub max_prefill_chunk: Option<u32>,
    /// Quantize dense weights on the way.
    pub recipe: Option<Recipe>,
    /// What does that.
    pub quantize_on: QuantizeOn,
    /// Chat template instead of the checkpoint's.
    pub chat_template: Option<String>,
    /// Text of a generation_config.json instead of the checkpoint's.
    pub generation_config: Option<String>,
    /// GPUs to compile for; none for a program of the CPU alone.
    pub targets: Vec<Target>,
    /// What these may do in one launch instead of two.
    pub fusions: Fusions,
}

/// The files that were written.
#[derive(Clone, Debug)]
pub struct Exported {
    /// `model.pte`.
    pub program: PathBuf,
    /// `model.ptd`.
    pub data: PathBuf,
    /// Bytes of both.
    pub bytes: u64,
}

/// Exports a checkpoint into a directory, which is made if need be.
///
/// Both files appear by rename when both are complete, the data first. Weights are streamed:
/// memory does not grow with the model. Equal checkpoints and options give equal bytes.
pub fn export(
    checkpoint: &dyn ModelSource,
    options: &Options,
    output_dir: &Path,
    monitor: &Monitor,
) -> Result<Exported> {
    let Prepared { mut program, items, tokenizer, chat_template } = prepare(checkpoint, options)?;
    // Before the long work, so that what is missing is known at once.
    let quantizer = match options.recipe {
        Some(_) => options.quantize_on.open(&|text| monitor.note(text))?,
        None => Quantizer::Cpu,
    };
    let Lowered { plans, modules } = compile(&program, options, monitor)?;
    let data = output_dir.join("model.ptd");
    let written = write_weights(checkpoint, &items, &data, &quantizer, monitor)?;
    for (weight, digest) in program.weights.iter_mut().zip(written.digests) {
        weight.digest = digest;
    }
    program.data_header = written.header;
    program.data_length = written.length;
    let bytes = pte::encode(&Pte { program, tokenizer, chat_template, plans, modules })?;
    let total = written.length + bytes.len() as u64;
    let program = output_dir.join("model.pte");
    persist_all([written.file, Pending::with_bytes(&program, &bytes)?])?;
    Ok(Exported { program, data, bytes: total })
}

/// All that an export knows before it reads a weight.
pub(crate) struct Prepared {
    /// Without digests.
    pub(crate) program: Program,
    /// The program's weights, in its order.
    pub(crate) items: Vec<Item>,
    /// The bytes of tokenizer.json; none if there is none.
    pub(crate) tokenizer: Vec<u8>,
    chat_template: String,
}

/// Checks config and options and traces the model.
pub(crate) fn prepare(checkpoint: &dyn ModelSource, options: &Options) -> Result<Prepared> {
    let config = Config::parse(checkpoint.config_json())?;
    let (max_context, max_chunk) = lengths(&config, options)?;
    let text = text_defaults(&config, checkpoint, options)?;
    let tokenizer = checkpoint.tokenizer_json()?.unwrap_or_default();
    let chat_template = match &options.chat_template {
        Some(template) => template.clone(),
        None => checkpoint.chat_template()?.unwrap_or_default(),
    };

    let items = Item::all(checkpoint, checkpoint.names(), options.recipe.as_ref())?;
    let items: HashMap<&str, &Item> = items.iter().map(|item| (item.name.as_str(), item)).collect();
    let describe = |name: &str, _: Option<&[u32]>| {
        let Item { dims, encoding, .. } = items.get(name)?;
        Some(WeightSpec { dims: dims.clone(), encoding: *encoding })
    };
    let traced = trace(&config, max_chunk, describe)?;
    let used: BTreeSet<&str> = traced.weights.iter().map(|(name, ..)| name.as_str()).collect();
    checkpoint.refuse_unused(&used)?;
    let ordered: Vec<Item> = traced
        .weights
        .iter()
        .filter_map(|(name, ..)| items.get(name.as_str()).copied().cloned())
        .collect();
    let source = source(&config, checkpoint, options);
    let program = assemble(&config, source, text, max_context, traced);
    Ok(Prepared { program, items: ordered, tokenizer, chat_template })
}

/// Exports a program of this config with random weights of a seed, of any size, in little memory.
///
/// Equal configs, seeds and options give equal bytes. There is no tokenizer.
pub fn export_random(
    config_json: &str,
    seed: u64,
    options: &Options,
    output_dir: &Path,
    monitor: &Monitor,
) -> Result<Exported> {
    let (mut program, weights) = random_program(config_json, options)?;
    let Lowered { plans, modules } = compile(&program, options, monitor)?;
    let data = output_dir.join("model.ptd");
    let written = write_random_weights(&weights, seed, &data, monitor)?;
    for (weight, digest) in program.weights.iter_mut().zip(written.digests) {
        weight.digest = digest;
    }
    let (tokenizer, chat_template) = (Vec::new(), String::new());
    let bytes = pte::encode(&Pte { program, tokenizer, chat_template, plans, modules })?;
    let total = written.length + bytes.len() as u64;
    let program = output_dir.join("model.pte");
    persist_all([written.file, Pending::with_bytes(&program, &bytes)?])?;
    Ok(Exported { program, data, bytes: total })
}

/// The program of [`export_random`] alone: for the data file that the same seed gives elsewhere,
/// or, without a seed, for none, since `gemma4-bench` can fill a GPU's memory with random weights.
pub fn export_without_data(
    config_json: &str,
    seed: Option<u64>,
    options: &Options,
    output_dir: &Path,
    monitor: &Monitor,
) -> Result<PathBuf> {
    let (mut program, weights) = random_program(config_json, options)?;
    let Lowered { plans, modules } = compile(&program, options, monitor)?;
    if let Some(seed) = seed {
        let digests = random_digests(&weights, seed, monitor)?;
        for (weight, digest) in program.weights.iter_mut().zip(digests) {
            weight.digest = digest;
        }
    }
    let (tokenizer, chat_template) = (Vec::new(), String::new());
    let bytes = pte::encode(&Pte { program, tokenizer, chat_template, plans, modules })?;
    let path = output_dir.join("model.pte");
    persist_all([Pending::with_bytes(&path, &bytes)?])?;
    Ok(path)
}

/// Names, dims and encodings of weights.
type Weights = Vec<(String, Vec<u32>, Encoding)>;

/// The program of a config whose weights nobody made, and what they are to be.
fn random_program(config_json: &str, options: &Options) -> Result<(Program, Weights)> {
    let config = Config::parse(config_json)?;
    let (max_context, max_chunk) = lengths(&config, options)?;
    let (recipe, layers) = (options.recipe.as_ref(), config.layers.len() as u32);
    let describe = |name: &str, wanted: Option<&[u32]>| {
        let untied = name == HEAD && recipe.is_some_and(|recipe| recipe.untie_head);
        let dims = wanted.or(untied.then_some(&[]))?;
        let encoding = match recipe.map(|recipe| recipe.treatment(name, layers)) {
            Some(Treatment::Quantize(codes, _)) => {
                codes.encoding(dims.last().copied().unwrap_or(0))
            }
            _ => Encoding::Dense(DType::BF16),
        };
        Some(WeightSpec { dims: dims.to_vec(), encoding })
    };
    let traced = trace(&config, max_chunk, describe)?;
    let weights = traced.weights.clone();
    let layout = ptd::Layout::new(&weights)?;
    let source = Source {
        producer: PRODUCER.to_owned(),
        architecture: config.architecture.clone(),
        layout: "random".to_owned(),
        recipe: options.recipe.as_ref().map_or("none", |recipe| &recipe.name).to_owned(),
        identity: blake3::hash(config_json.as_bytes()).to_hex().to_string(),
        config: config_json.to_owned(),
    };
    let text = TextDefaults { top_p: 1.0, ..TextDefaults::default() };
    let mut program = assemble(&config, source, text, max_context, traced);
    program.data_header = layout.header_digest();
    program.data_length = layout.length;
    Ok((program, weights))
}

/// A program whose data file is still to be written.
fn assemble(
    config: &Config,
    source: Source,
    text: TextDefaults,
    max_context: u32,
    traced: Traced,
) -> Program {
    let weights = traced.weights.into_iter();
    Program {
        source,
        text,
        vocab_size: config.vocab_size,
        max_context,
        weights: weights
            .map(|(name, dims, encoding)| Weight { name, dims, encoding, digest: [0; 32] })
            .collect(),
        buffers: traced.buffers,
        methods: traced.methods,
        data_header: [0; 32],
        data_length: 0,
    }
}

/// Lowers a program for GPUs, if there are targets.
fn compile(program: &Program, options: &Options, monitor: &Monitor) -> Result<Lowered> {
    if options.targets.is_empty() {
        return Ok(Lowered::default());
    }
    let progress = |done, total| monitor.compiled(done, total);
    Ok(lower(program, &options.targets, options.fusions, &progress)?)
}

/// Context and chunk, in tokens.
fn lengths(config: &Config, options: &Options) -> Result<(u32, u32)> {
    let longest = config.max_position_embeddings;
    let context = options.max_seq_len.unwrap_or(DEFAULT_CONTEXT.min(longest));
    if context == 0 || context > longest {
        return Err(Error::Flag {
            flag: "--max-seq-len",
            why: format!("{context} is not between 1 and the model's {longest} positions"),
        });
    }
    let longest = context.min(gemma4_format::verify::MAX_ROWS);
    let chunk = options.max_prefill_chunk.unwrap_or(DEFAULT_CHUNK.min(longest));
    if chunk == 0 || chunk > longest {
        return Err(Error::Flag {
            flag: "--max-prefill-chunk",
            why: format!("{chunk} is not between 1 and {longest}"),
        });
    }
    Ok((context, chunk))
}

fn text_defaults(
    config: &Config,
    checkpoint: &dyn ModelSource,
    options: &Options,
) -> Result<TextDefaults> {
    let given = options.generation_config.as_deref().or(checkpoint.generation_config());
    let generation = Generation::parse(given)?;
    let mut stop_tokens = config.eos_token_ids.clone();
    stop_tokens.extend(&generation.eos_token_ids);
    stop_tokens.sort_unstable();
    stop_tokens.dedup();
    if let Some(id) = stop_tokens.iter().find(|id| **id >= config.vocab_size) {
        let why = format!("eos_token_id {id} is outside the vocabulary of {}", config.vocab_size);
        return Err(Error::GenerationConfig { why });
    }
    Ok(TextDefaults {
        bos_token: generation.bos_token_id.or(config.bos_token_id),
        stop_tokens,
        temperature: generation.temperature,
        top_k: generation.top_k,
        top_p: generation.top_p,
    })
}

fn source(config: &Config, checkpoint: &dyn ModelSource, options: &Options) -> Source {
    let chosen = options.recipe.as_ref().map(|recipe| recipe.name.as_str());
    Source {
        producer: PRODUCER.to_owned(),
        architecture: config.architecture.clone(),
        layout: checkpoint.layout().to_owned(),
        recipe: checkpoint.recipe().or(chosen).unwrap_or("none").to_owned(),
        identity: checkpoint.identity().to_owned(),
        config: checkpoint.config_json().to_owned(),
    }
}
