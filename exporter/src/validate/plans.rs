//! Plans for every architecture, made and checked without a compiler.

use gemma4_format::Program;
use gemma4_format::plan::{self, Plan};

use super::report::Status;
use crate::lower::{self, Fusions, Target, plans_without_code};

/// What the plans are, a line each; [`Status::NotRun`] for a model that has no kernels.
pub(super) fn check(program: &Program) -> (Status, Vec<String>) {
    let mut notes = Vec::new();
    for target in Target::DEFAULT {
        let plan = match plans_without_code(program, &[target], Fusions::default()) {
            Ok(mut plans) => plans.pop(),
            Err(error @ (lower::Error::Graph(_) | lower::Error::Unsupported(_))) => {
                return (Status::NotRun(error.to_string()), notes);
            }
            Err(error) => return (Status::Failed(error.to_string()), notes),
        };
        let Some(plan) = plan else { continue };
        if let Err(why) = faults(&plan, program, target) {
            return (Status::Failed(format!("{target}: {why}")), notes);
        }
        notes.push(describe(&plan));
    }
    (Status::Passed, notes)
}

/// Facts, regions and launches are right, and no block asks for more than its GPU has.
fn faults(plan: &Plan, program: &Program, target: Target) -> Result<(), String> {
    plan::verify(plan, program, 1).map_err(|e| e.to_string())?;
    let room = target.shared_per_block();
    match plan.kernels.iter().find(|kernel| kernel.shared > room) {
        None => Ok(()),
        Some(kernel) => Err(format!(
            "kernel `{}` takes {} bytes of shared memory of {room}",
            kernel.symbol, kernel.shared
        )),
    }
}

fn describe(plan: &Plan) -> String {
    let launches = |method: &str| {
        let lowered = plan.methods.iter().filter(|lowered| lowered.method == method);
        lowered.map(|lowered| lowered.launches.len()).max().unwrap_or(0)
    };
    let packed: u64 = plan.packed.iter().map(|packed| packed.bytes).sum();
    format!(
        "{}: {} launches to decode, {} to prefill; {:.1} MB of packed weights, {:.1} MB of scratch",
        plan.target,
        launches("decode") + plan.sample.len(),
        launches("prefill"),
        packed as f64 / 1e6,
        plan.scratch as f64 / 1e6,
    )
}
