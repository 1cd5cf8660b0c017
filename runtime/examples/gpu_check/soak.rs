//! Generates for a long time and looks whether anything drifts: answers, memory, speed.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use gemma4_runtime::{DeviceChoice, Sampling};

use crate::bundle::{Bundle, Model, Passage, Truth};
use crate::report::Report;
use crate::subject::{Subject, answer, free};

/// Tokens of an answer, unless a stop token comes first.
const TOKENS: u32 = 200;
/// Most bytes by which the host's or the device's memory may grow after the first tenth.
const GROWTH: u64 = 8 << 20;
/// How far the speed of the last tenth may be below that of the first.
const SLOWER: f64 = 0.03;

/// What one round of all subjects took.
struct Round {
    /// Since the start.
    ended: Duration,
    tokens_per_second: f64,
    /// Resident bytes of the process.
    host: u64,
    /// Most bytes of the device that were ever taken.
    device: u64,
}

/// Runs all models of a bundle in turns, two sessions each, for some seconds.
pub(crate) fn run(
    report: &mut Report,
    bundle: &Bundle,
    device: &DeviceChoice,
    kernels: &[String],
    seconds: u64,
) {
    report.set_subject("soak".to_owned());
    report.check("answers, memory, speed", || soak(bundle, device, kernels, seconds));
}

fn soak(
    bundle: &Bundle,
    device: &DeviceChoice,
    kernels: &[String],
    seconds: u64,
) -> anyhow::Result<String> {
    let mut subjects = Vec::new();
    for model in [Model::Dense, Model::Quantized, Model::Chat] {
        for kernels in kernels {
            let program = bundle.program(kernels, model)?;
            let truth = Truth::new(bundle, model, program.clone(), true)?;
            subjects.push((Subject::open(device, program, true)?, truth));
        }
    }
    let started = Instant::now();
    let (mut first, mut rounds) = (None, Vec::<Round>::new());
    let (mut tokens, mut generations) = (0, 0);
    while started.elapsed().as_secs() < seconds {
        let round = Instant::now();
        let mut answers = Vec::new();
        for (subject, truth) in &subjects {
            answers.extend(answers_of(subject, truth.any())?);
        }
        let drawn = answers.iter().map(Vec::len).sum::<usize>();
        rounds.push(Round {
            ended: started.elapsed(),
            tokens_per_second: drawn as f64 / round.elapsed().as_secs_f64(),
            host: resident().context("no /proc/self/statm")?,
            device: subjects.iter().filter_map(|(s, _)| s.peak_memory()).max().unwrap_or(0),
        });
        tokens += drawn;
        generations += answers.len();
        let first = first.get_or_insert_with(|| answers.clone());
        ensure!(answers == *first, "another answer in round {}", rounds.len());
    }
    ensure!(rounds.len() >= 20, "only {} rounds: give it more time", rounds.len());
    let tenth = rounds.len() / 10;
    // The clocks rise and caches fill in the first round.
    let (early, late) = (&rounds[1..=tenth], &rounds[rounds.len() - tenth..]);
    let most = |part: &[Round], of: fn(&Round) -> u64| part.iter().map(of).max().unwrap_or(0);
    let (host, device) =
        ([early, late].map(|p| most(p, |r| r.host)), [early, late].map(|p| most(p, |r| r.device)));
    let speed = [early, late].map(|part| median(part.iter().map(|r| r.tokens_per_second)));
    let said = format!(
        "{tokens} tokens in {generations} answers of {} programs, all equal, in {:.0} s; host {} to \
         {} kB, device {} to {} kB, {:.1} to {:.1} tok/s",
        subjects.len(),
        rounds[rounds.len() - 1].ended.as_secs_f64(),
        host[0] >> 10,
        host[1] >> 10,
        device[0] >> 10,
        device[1] >> 10,
        speed[0],
        speed[1]
    );
    ensure!(host[1] <= host[0] + GROWTH && device[1] <= device[0] + GROWTH, "memory grows: {said}");
    ensure!(speed[1] >= speed[0] * (1.0 - SLOWER), "it slows down: {said}");
    Ok(said)
}

/// The most probable answer, and one drawn with a seed, each in a session of its own.
fn answers_of(subject: &Subject, passage: &Passage) -> anyhow::Result<Vec<Vec<u32>>> {
    let (mut one, mut two) = (subject.session()?, subject.session()?);
    let prompt = &passage.tokens[..passage.prompt];
    Ok(vec![
        answer(&mut one, prompt, Sampling::GREEDY, TOKENS)?,
        answer(&mut two, prompt, free(7), TOKENS)?,
    ])
}

/// Resident bytes of this process.
fn resident() -> Option<u64> {
    let pages = fs::read_to_string("/proc/self/statm").ok()?;
    Some(pages.split(' ').nth(1)?.parse::<u64>().ok()? * 4096)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}
