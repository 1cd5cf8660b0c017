//! Takes a model through every stage of an export and compares what each computes for one prompt.
//!
//! | stage | what runs | compared with | weights |
//! |---|---|---|---|
//! | 1 | the model, by candle in float32 | | of the source, not quantized |
//! | 2 | the same lines of model code | 1 | as the recipe or the source has quantized them |
//! | 3 | the traced graph, node by node, by candle | 2 | the same |
//! | 4 | the two files, written and read back, on the CPU device | 3 | of the files |
//! | 5 | nothing: the plan for each GPU architecture is made and checked | | |
//! | 6 | the two files on a GPU | 4 | of the files |
//!
//! The first three hold the weights of no more than one layer, the embedding and the head never as
//! a whole. A stage that parts from the one before by more than its [`Bound`] ends the validation
//! and names the first layer that differs.

mod compare;
mod eager;
mod files;
mod plans;
mod report;
mod traced;
mod weights;

use std::path::{Path, PathBuf};
use std::time::Instant;

use gemma4_format::Encoding;
use gemma4_runtime::{LoadedProgram, memory};

pub use compare::{Bound, Difference, Run};
pub use files::{run_on_cpu, run_on_gpu};
pub use report::{Report, StageReport, Status};
pub use traced::run_traced;
pub use weights::Weights;

use crate::export::{Options, Prepared, export, prepare};
use crate::model::Config;
use crate::output::Monitor;
use crate::quantize::Recipe;
use crate::source::ModelSource;
use crate::{Error, Result};

/// A GPU reads products' inputs and keys in bf16.
const GPU: Bound = Bound { divergence: 0.05, logit: 1.0, hidden: f64::INFINITY };

/// What is validated.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Ids of the prompt; not empty.
    pub tokens: Vec<u32>,
    /// How to export; its recipe quantizes a dense source.
    pub options: Options,
    /// Directory with `model.pte` and `model.ptd`, instead of an export of its own.
    pub files: Option<PathBuf>,
    /// Where an export of its own goes; it stays there.
    pub scratch: PathBuf,
    /// How far quantization may move the model.
    pub quantized: Bound,
}

/// Runs the stages, telling `progress` each when it has ended.
///
/// # Errors
/// Only what says that nothing can be validated, such as a config that can't be read. A stage that
/// fails is part of the report.
pub fn validate(
    source: &dyn ModelSource,
    settings: &Settings,
    monitor: &Monitor,
    progress: &mut dyn FnMut(&StageReport),
) -> Result<Report> {
    let config = Config::parse(source.config_json())?;
    check_tokens(&settings.tokens, config.vocab_size)?;
    let prepared = prepare(source, &settings.options)?;
    let mut stages = Stages { before: None, report: Report::new(&settings.tokens), progress };
    let tokens = &settings.tokens;

    let dense = is_dense(source)?;
    let recipe = settings.options.recipe.as_ref();
    let eager = |recipe: Option<&Recipe>| {
        eager::run(&config, &Weights::new(source, recipe)?, tokens, monitor)
    };
    match dense {
        true => stages.run(1, "the source's weights, by candle", None, || eager(None)),
        false => stages.skip(1, "the source's weights, by candle", "the source is quantized"),
    }
    let quantized = "quantized weights, by candle";
    match dense && recipe.is_none() {
        true => stages.skip(2, quantized, "nothing is quantized"),
        false => stages.run(2, quantized, Some(settings.quantized), || eager(recipe)),
    }
    stages.run(3, "the traced graph, by candle", Some(same(&config)), || {
        run_traced(&prepared.program, &Weights::new(source, recipe)?, tokens, monitor)
    });
    let mut loaded = None;
    stages.run(4, "the files, on the CPU", Some(same(&config)), || {
        let program = loaded.insert(open_files(source, settings, monitor)?);
        run_on_cpu(program, tokens)
    });
    stages.plans(5, "the plan for each GPU", &prepared);
    let gpu = "the files, on a GPU";
    match &loaded {
        Some(program) => match files::gpu(program) {
            Ok(_) => stages.run(6, gpu, Some(GPU), || run_on_gpu(program, tokens)),
            Err(why) => stages.skip(6, gpu, &why),
        },
        None => stages.skip(6, gpu, "there are no files"),
    }
    Ok(stages.report)
}

/// Whether no weight of the source is quantized.
fn is_dense(source: &dyn ModelSource) -> Result<bool> {
    for name in source.names() {
        if !matches!(source.weight(name)?.encoding, Encoding::Dense(_)) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Differences of float32 sums in another order, which grow with the length of the sums and the
/// number of layers: 1e-4 for a model of 8 layers of width 256, 1e-3 for 31B.
fn same(config: &Config) -> Bound {
    let size = (config.layers.len() as f64 * f64::from(config.hidden_size)).sqrt();
    Bound { divergence: 1e-4, logit: (2e-5 * size) as f32, hidden: 2e-6 * size }
}

fn check_tokens(tokens: &[u32], vocabulary: u32) -> Result<()> {
    let why = match tokens.iter().find(|id| **id >= vocabulary) {
        None if tokens.is_empty() => "the prompt has no tokens".to_owned(),
        None => return Ok(()),
        Some(id) => format!("token {id} is outside the vocabulary of {vocabulary}"),
    };
    Err(Error::Flag { flag: "--ids", why })
}

/// The files that were given, or those of an export.
fn open_files(
    source: &dyn ModelSource,
    settings: &Settings,
    monitor: &Monitor,
) -> Result<std::sync::Arc<LoadedProgram>> {
    let at = |dir: &Path| (dir.join("model.pte"), dir.join("model.ptd"));
    let (pte, ptd) = match &settings.files {
        Some(dir) => at(dir),
        None => {
            let exported = export(source, &settings.options, &settings.scratch, monitor)?;
            (exported.program, exported.data)
        }
    };
    Ok(LoadedProgram::open(&pte, &ptd, &|_, _| {})?.into())
}

/// The stages so far.
struct Stages<'a> {
    /// Number and outcome of the last one that ran.
    before: Option<(u32, Run)>,
    report: Report,
    progress: &'a mut dyn FnMut(&StageReport),
}

impl Stages<'_> {
    /// Runs a stage, unless one before it has failed.
    fn run(
        &mut self,
        number: u32,
        name: &'static str,
        bound: Option<Bound>,
        stage: impl FnOnce() -> Result<Run>,
    ) {
        if self.report.failed() {
            return self.skip(number, name, "a stage before it failed");
        }
        reset_peak();
        let start = Instant::now();
        let mut report = StageReport::new(number, name);
        match stage() {
            Err(error) => report.status = Status::Failed(error.to_string()),
            Ok(run) => {
                report.top = run.top(5);
                if let Some(((before, earlier), bound)) = self.before.as_ref().zip(bound) {
                    let difference = Difference::between(earlier, &run);
                    if let Some(why) = difference.parting(&bound) {
                        report.status = Status::Failed(why);
                    }
                    report.compared = Some((*before, difference));
                }
                self.before = Some((number, run));
            }
        }
        report.seconds = start.elapsed().as_secs_f64();
        report.peak_memory = memory::peak_resident();
        self.add(report);
    }

    /// Makes and checks the plans, which need no weights.
    fn plans(&mut self, number: u32, name: &'static str, prepared: &Prepared) {
        if self.report.failed() {
            return self.skip(number, name, "a stage before it failed");
        }
        reset_peak();
        let start = Instant::now();
        let mut report = StageReport::new(number, name);
        (report.status, report.notes) = plans::check(&prepared.program);
        report.seconds = start.elapsed().as_secs_f64();
        report.peak_memory = memory::peak_resident();
        self.add(report);
    }

    fn skip(&mut self, number: u32, name: &'static str, why: &str) {
        let status = Status::NotRun(why.to_owned());
        self.add(StageReport { status, ..StageReport::new(number, name) });
    }

    fn add(&mut self, report: StageReport) {
        (self.progress)(&report);
        self.report.stages.push(report);
    }
}

/// Makes the largest resident memory that of now, where the system can.
fn reset_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}
