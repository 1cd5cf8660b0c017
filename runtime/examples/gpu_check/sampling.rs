//! What is drawn: the same where it has to be, and else as often as the logits say.

use std::collections::BTreeSet;

use anyhow::ensure;
use gemma4_runtime::{DeviceChoice, Sampling, sampler};

use crate::bundle::{Passage, Truth};
use crate::compare::{log_softmax, same};
use crate::report::Report;
use crate::subject::{Subject, answer, free, rows};

/// Tokens of each answer.
const TOKENS: u32 = 40;
const DRAWS: u32 = 10_000;
/// Bins of the chi-square test at most. An odd number, so that its degrees of freedom are even.
const BINS: usize = 49;
/// Draws that a bin has to expect at least.
const EXPECTED: f64 = 8.0;
/// Probability of a worse result below which a test fails.
const SIGNIFICANT: f64 = 0.001;
/// Of all draws, those that may differ from the CPU's, which sums in another order and precision.
const UNLIKE: f64 = 0.005;

pub(crate) fn run(report: &mut Report, choice: &DeviceChoice, subject: &Subject, truth: &Truth) {
    let passage = truth.any();
    let prompt = &passage.tokens[..passage.prompt];
    report.check("50 runs, 100 seeds at 0", || {
        let mut session = subject.session()?;
        let cold = |seed| Sampling { temperature: 0.0, ..free(seed) };
        let seeds = (0..50).map(|_| 0).chain(0..100);
        let answers = seeds
            .map(|seed| answer(&mut session, prompt, cold(seed), TOKENS))
            .collect::<anyhow::Result<BTreeSet<_>>>()?;
        ensure!(answers.len() == 1, "{} different answers", answers.len());
        Ok(format!("150 times the same {TOKENS} tokens"))
    });
    report.check("seeds", || {
        let mut session = subject.session()?;
        let mut distinct = BTreeSet::new();
        for seed in 0..20 {
            let first = answer(&mut session, prompt, free(seed), TOKENS)?;
            let second = answer(&mut session, prompt, free(seed), TOKENS)?;
            ensure!(first == second, "seed {seed} gives two answers");
            distinct.insert(first);
        }
        ensure!(distinct.len() == 20, "20 seeds give {} different answers", distinct.len());
        Ok("equal ones equal, 20 different ones different".to_owned())
    });
    report.check("graphs on and off", || without_graphs(choice, subject, passage));
    let usual = Sampling { temperature: 0.7, top_k: 64, top_p: 0.95, seed: 0 };
    let text = &truth.every;
    let least_certain = (0..text.rows.len())
        .max_by(|a, b| entropy(&text.rows[*a]).total_cmp(&entropy(&text.rows[*b])));
    let prompt = &text.tokens[..least_certain.map_or(1, |row| row + 1)];
    report.check("chi-square, plain", || draws(subject, prompt, free(0)));
    report.check("chi-square, 0.7/64/0.95", || draws(subject, prompt, usual));
}

fn without_graphs(
    choice: &DeviceChoice,
    subject: &Subject,
    passage: &Passage,
) -> anyhow::Result<String> {
    let other = Subject::open(choice, subject.program().clone(), false)?;
    let (mut on, mut off) = (subject.session()?, other.session()?);
    let (a, b) = (
        rows(&mut on, &passage.tokens, passage.prompt)?,
        rows(&mut off, &passage.tokens, passage.prompt)?,
    );
    ensure!(a.iter().zip(&b).all(|(a, b)| same(a, b)), "logits differ");
    let prompt = &passage.tokens[..passage.prompt];
    for sampling in [Sampling::GREEDY, free(7)] {
        let a = answer(&mut on, prompt, sampling, TOKENS)?;
        ensure!(a == answer(&mut off, prompt, sampling, TOKENS)?, "tokens differ");
    }
    Ok(format!("{} rows the same bit for bit, and {TOKENS} tokens twice", a.len()))
}

/// Draws the token after a prompt with many seeds and compares how often each came.
fn draws(subject: &Subject, prompt: &[u32], sampling: Sampling) -> anyhow::Result<String> {
    let length = prompt.len() as u32;
    let chunk = subject.program().program().method("prefill").map_or(1, |m| m.max_rows);
    let chunk = chunk.min(length);
    let mut session = subject.device().open_session(length + 1, chunk)?;
    let mut position = 0;
    for piece in prompt.chunks(chunk as usize) {
        session.prefill(piece, position)?;
        position += piece.len() as u32;
    }
    let logits = session.logits(0)?;
    let mut counts = vec![0u32; logits.len()];
    let mut unlike = 0;
    for seed in 0..DRAWS {
        let sampling = Sampling { seed: u64::from(seed) << 20 | 5, ..sampling };
        session.start(position, &sampling, 1)?;
        let token = session.next_token()?;
        session.finish()?;
        unlike += u32::from(token != sampler::sample(&logits, position, &sampling));
        counts[token as usize] += 1;
    }
    let (statistic, freedom) = chi_square(&counts, &probabilities(&logits, &sampling))?;
    let p = survival(statistic, freedom);
    let found = format!(
        "chi-square {statistic:.1}, {freedom} degrees of freedom, p {p:.3}; {DRAWS} draws, {unlike} \
         unlike the CPU's"
    );
    ensure!(p > SIGNIFICANT && f64::from(unlike) <= UNLIKE * f64::from(DRAWS), "{found}");
    Ok(found)
}

/// Entropy of the next token, in nats.
fn entropy(logits: &[f32]) -> f64 {
    log_softmax(logits).iter().map(|log| -log.exp() * log).sum()
}

/// Probability of each token: temperature, then the `top_k` most probable, then the fewest of
/// them that have `top_p` together.
fn probabilities(logits: &[f32], sampling: &Sampling) -> Vec<f64> {
    let scaled: Vec<f32> = logits.iter().map(|x| x / sampling.temperature).collect();
    let mut order: Vec<(usize, f64)> =
        log_softmax(&scaled).into_iter().map(f64::exp).enumerate().collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k as usize);
    }
    let kept: f64 = order.iter().map(|(_, p)| p).sum();
    let mut before = 0.0;
    order.retain(|(_, p)| {
        let keep = sampling.top_p >= 1.0 || before < f64::from(sampling.top_p) * kept;
        before += p;
        keep
    });
    let total: f64 = order.iter().map(|(_, p)| p).sum();
    let mut probabilities = vec![0.0; logits.len()];
    for (id, p) in order {
        probabilities[id] = p / total;
    }
    probabilities
}

/// Pearson's statistic and its degrees of freedom. Each of the most probable tokens has a bin,
/// and the others share one. Fails if a token came that cannot.
fn chi_square(counts: &[u32], probabilities: &[f64]) -> anyhow::Result<(f64, u32)> {
    let total = f64::from(counts.iter().sum::<u32>());
    let mut tokens: Vec<(f64, f64)> =
        probabilities.iter().zip(counts).map(|(p, n)| (p * total, f64::from(*n))).collect();
    let impossible = tokens.iter().any(|(expected, count)| *expected == 0.0 && *count > 0.0);
    ensure!(!impossible, "a token was drawn that the parameters exclude");
    tokens.sort_by(|a, b| b.0.total_cmp(&a.0));
    let own = tokens.iter().take_while(|(expected, _)| *expected >= EXPECTED).count();
    let own = own.min(BINS - 1);
    let (mut bins, rest) = (tokens[..own].to_vec(), &tokens[own..]);
    bins.push(rest.iter().fold((0.0, 0.0), |sum, bin| (sum.0 + bin.0, sum.1 + bin.1)));
    while bins.len() > 1 && (bins.len().is_multiple_of(2) || bins[bins.len() - 1].0 < EXPECTED) {
        if let (Some(a), Some(b)) = (bins.pop(), bins.last_mut()) {
            *b = (a.0 + b.0, a.1 + b.1);
        }
    }
    ensure!(bins.len() >= 3, "the distribution has too few tokens to test");
    let statistic = bins.iter().map(|(e, n)| (n - e) * (n - e) / e).sum();
    Ok((statistic, bins.len() as u32 - 1))
}

/// Probability that a chi-square variable with an even number of degrees of freedom is larger:
/// `exp(−x/2) · Σ (x/2)^j / j!` over `j` below half of them.
fn survival(x: f64, freedom: u32) -> f64 {
    let mut term = (-x / 2.0).exp();
    let mut sum = 0.0;
    for j in 1..=freedom / 2 {
        sum += term;
        term *= x / 2.0 / f64::from(j);
    }
    sum
}
