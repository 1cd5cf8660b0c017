//! Checks every kernel on a GPU against float64, and times the products of a 31B model's step.
//!
//! `gpu compile DIR` (no GPU needed) compiles the kernels; `gpu check DIR`, `gpu bench DIR` and
//! `gpu prefill DIR` run them where there is one. The kernel that quantizes is only compiled: what
//! it makes is compared by the example `quantize_check` of the exporter.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]

mod bench;
mod case;
mod device;
mod layer;
mod linear;
mod many;
mod merged;
mod numbers;
mod prefill;
mod sampling;

use std::path::Path;
use std::sync::Mutex;

use gemma4_kernels::compile::Nvrtc;
use gemma4_kernels::{Arch, Kernel};

use case::{Case, cubin_name};
use device::Gpu;

const ARCHES: [Arch; 2] = [Arch::Sm90, Arch::Sm90a];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for arch in ARCHES {
        cases.extend(linear::cases(arch));
        cases.extend(many::cases(arch));
        cases.extend(merged::cases(arch));
    }
    cases.extend(layer::cases(Arch::Sm90a));
    cases.extend(sampling::cases(Arch::Sm90a));
    cases
}

/// Compiles the kernels of cases whose names contain `filter`, and of the benches so named.
fn compile(directory: &Path, filter: &str) {
    let nvrtc = Nvrtc::find().unwrap_or_else(|error| panic!("{error}"));
    let mut work: Vec<(Arch, Kernel)> = Vec::new();
    for case in cases().into_iter().filter(|case| case.name.contains(filter)) {
        work.extend(case.kernels.into_iter().map(|kernel| (case.arch, kernel)));
    }
    if "bench".contains(filter) {
        work.extend(bench::kernels().into_iter().map(|kernel| (Arch::Sm90a, kernel)));
    }
    if "prefill".contains(filter) {
        work.extend(prefill::kernels());
    }
    if "quantize".contains(filter) {
        work.push((Arch::Sm90, gemma4_kernels::quantize()));
    }
    let work = Mutex::new(work);
    let next = || work.lock().unwrap().pop();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((arch, kernel)) = next() {
                    let path = directory.join(cubin_name(&kernel, arch));
                    if !path.exists() {
                        let module =
                            nvrtc.cubin(&kernel, arch).unwrap_or_else(|error| panic!("{error}"));
                        for r in &module.resources {
                            if r.local > 0 {
                                println!(
                                    "{arch} {} local {} {:?}",
                                    r.symbol, r.local, kernel.defines
                                );
                            }
                        }
                        std::fs::write(&path, module.cubin).unwrap();
                    }
                }
            });
        }
    });
}

fn check(directory: &Path, filter: &str) {
    let gpu = Gpu::open();
    let mut failures = 0;
    for case in cases() {
        if !case.name.contains(filter) {
            continue;
        }
        let functions: Vec<_> = case
            .kernels
            .iter()
            .map(|kernel| gpu.load(&directory.join(cubin_name(kernel, case.arch)), kernel))
            .collect();
        let outcome = (case.run)(&gpu, &functions);
        let good = outcome.error <= outcome.limit;
        failures += u32::from(!good);
        let verdict = if good { "ok  " } else { "FAIL" };
        println!(
            "{verdict} {:.1e} <= {:.1e} {} {}",
            outcome.error, outcome.limit, case.arch, case.name
        );
    }
    println!("{failures} failures");
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = arguments[1..].iter().map(String::as_str).collect();
    match words[..] {
        ["compile", directory] => compile(Path::new(directory), ""),
        ["compile", directory, filter] => compile(Path::new(directory), filter),
        ["check", directory] => check(Path::new(directory), ""),
        ["check", directory, filter] => check(Path::new(directory), filter),
        ["bench", directory] => bench::run(Path::new(directory)),
        ["prefill", directory] => prefill::run(Path::new(directory), ""),
        ["prefill", directory, what] => prefill::run(Path::new(directory), what),
        _ => println!("usage: gpu compile|check|bench|prefill DIR"),
    }
}
