//! Checks a device against the CPU device and against transformers.
//!
//! ```text
//! gpu_check DIRECTORY [--kernels sm_90a,sm_90] [--models LIST] [--device cuda] [--quick]
//! gpu_check DIRECTORY --soak SECONDS [--kernels sm_90a,sm_90] [--device cuda]
//! ```
//!
//! The directory is what `make gpu-bundle` packs. Every check prints a line, `ok` or `FAIL`, what
//! was checked and what was found; the exit code is 1 if one failed.

mod bundle;
mod compare;
mod exactness;
mod fusions;
mod generation;
mod lengths;
mod references;
mod report;
mod rules;
mod sampling;
mod sessions;
mod soak;
mod subject;
mod verify;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use gemma4_runtime::{DeviceChoice, cli};

use self::bundle::{Bundle, Model, Truth};
use self::report::Report;
use self::subject::Subject;

/// Check a device against the CPU and against transformers.
#[derive(Parser, Debug)]
#[command(name = "gpu_check")]
struct Arguments {
    /// Programs, weights and golden files, as `make gpu-bundle` packs them
    directory: PathBuf,
    /// Kernel sets: the folders of `programs/` to check
    #[arg(long, value_delimiter = ',', default_value = "sm_90a,sm_90", value_name = "LIST")]
    kernels: Vec<String>,
    /// The device to check: cuda, cuda:N, cuda:GPU-UUID, or cpu
    #[arg(long, default_value = "cuda", value_name = "DEVICE")]
    device: DeviceChoice,
    /// The models of the bundle to check, by name; all that it has unless given
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    models: Vec<String>,
    /// A few short calls of everything, for tools that make programs slow
    #[arg(long)]
    quick: bool,
    /// Instead of the checks, generate for so long and look for drift
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["quick", "models"])]
    soak: Option<u64>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    cli::run(|| {
        let mut report = Report::default();
        let bundle = Bundle::open(&arguments.directory)?;
        if let Some(seconds) = arguments.soak {
            soak::run(&mut report, &bundle, &arguments.device, &arguments.kernels, seconds);
            return Ok(report.finish());
        }
        let known = |name: &String| Model::ALL.iter().any(|model| model.name() == name);
        if let Some(unknown) = arguments.models.iter().find(|name| !known(name)) {
            anyhow::bail!("`--models`: there is no model `{unknown}`");
        }
        for model in Model::ALL.into_iter().filter(|m| !(arguments.quick && m.is_planted())) {
            let named = arguments.models.iter().any(|name| name == model.name());
            let absent = model == Model::Gguf && !bundle.has(model);
            if !named && (absent || !arguments.models.is_empty()) {
                continue;
            }
            let first = arguments.kernels.first().map_or("", String::as_str);
            let program = bundle.program(first, model)?;
            let truth = Truth::new(&bundle, model, program, arguments.quick)?;
            if !arguments.quick && model.has_references() {
                report.set_subject(format!("cpu {}", model.name()));
                report.check("float32 transformers", || {
                    let missing = "no references: see `ci/references/make_references.sh`";
                    bundle.references.as_ref().context(missing)?.check(&truth)
                });
            }
            for kernels in &arguments.kernels {
                let program = bundle.program(kernels, model)?;
                report.set_subject(format!("{kernels} {}", model.name()));
                let Some(subject) = report.value("loads", || {
                    let subject = Subject::open(&arguments.device, program, true)?;
                    let text = subject.describe();
                    Ok((subject, text))
                }) else {
                    continue;
                };
                if arguments.quick {
                    exactness::quick(&mut report, &subject, &truth);
                    verify::quick(&mut report, &subject, &truth);
                    continue;
                }
                exactness::run(&mut report, &bundle, &subject, &truth);
                lengths::run(&mut report, &subject, &truth);
                if model.is_planted() {
                    continue;
                }
                sampling::run(&mut report, &arguments.device, &subject, &truth);
                rules::run(&mut report, &subject, &truth);
                sessions::run(&mut report, &subject, &truth);
                generation::run(&mut report, &bundle, &subject, &truth);
                verify::run(&mut report, &bundle, &subject, &truth);
                if model == Model::Quantized {
                    fusions::run(
                        &mut report,
                        &bundle,
                        (&arguments.device, kernels),
                        &subject,
                        &truth,
                    );
                }
            }
        }
        Ok(report.finish())
    })
}
