//! Drawing on the host, and tokens that are never drawn.

use std::sync::atomic::AtomicBool;

use anyhow::ensure;
use gemma4_runtime::{LogitRules, Sampling};

use crate::bundle::{Passage, Truth};
use crate::report::Report;
use crate::subject::{Subject, answer, free, generate};

/// Tokens of each answer.
const TOKENS: u32 = 64;
/// How much less than the best allowed logit the drawn one may be: the logits that a token is drawn
/// from anew are those of a decode step, and the first ones were a prefill's.
const MARGIN: f32 = 0.25;

pub(crate) fn run(report: &mut Report, subject: &Subject, truth: &Truth) {
    report.check("drawn on the host", || host(subject, truth.any()));
    report.check("suppressed tokens", || suppressed(subject, truth.any()));
}

/// The most probable tokens are the same whoever draws them.
fn host(subject: &Subject, passage: &Passage) -> anyhow::Result<String> {
    let prompt = &passage.tokens[..passage.prompt];
    let mut session = subject.session()?;
    let device = answer(&mut session, prompt, Sampling::GREEDY, TOKENS)?;
    session.reset();
    session.prefill(prompt)?;
    let rules = LogitRules { logprobs: Some(1), ..LogitRules::default() };
    let never = AtomicBool::new(false);
    let mut generation = session.generate_by(Sampling::GREEDY, &rules, TOKENS, &never)?;
    let mut drawn = Vec::new();
    while let Some(token) = generation.next() {
        drawn.push(token?);
        let top = generation.logprobs().and_then(|told| told.top.first().copied());
        ensure!(top.map(|(id, _)| id) == drawn.last().copied(), "not the most probable token");
    }
    ensure!(device[..drawn.len()] == drawn, "other tokens");
    Ok(format!("{} tokens, the same", drawn.len()))
}

/// Forbids what the model wants most, again and again.
fn suppressed(subject: &Subject, passage: &Passage) -> anyhow::Result<String> {
    let prompt = &passage.tokens[..passage.prompt];
    let mut session = subject.session()?;
    let mut wanted = answer(&mut session, prompt, Sampling::GREEDY, 8)?;
    wanted.sort_unstable();
    wanted.dedup();
    session.suppress(wanted.iter().copied());
    let greedy = answer(&mut session, prompt, Sampling::GREEDY, TOKENS)?;
    ensure!(!greedy.iter().any(|token| wanted.contains(token)), "a suppressed token");
    let mut by_hand = subject.session()?;
    by_hand.prefill(prompt)?;
    for token in &greedy {
        let logits = by_hand.logits()?;
        let allowed = (0..).zip(&logits).filter(|(id, _)| !wanted.contains(id));
        let best = allowed.map(|(_, logit)| *logit).fold(f32::NEG_INFINITY, f32::max);
        let behind = best - logits[*token as usize];
        ensure!(behind <= MARGIN, "a token {behind} below the best one");
        by_hand.decode(*token)?;
    }
    let mut warm = 0;
    for seed in 0..16 {
        session.reset();
        session.prefill(prompt)?;
        let tokens = generate(&mut session, free(seed), TOKENS)?.0;
        ensure!(!tokens.iter().any(|token| wanted.contains(token)), "a suppressed token");
        warm += tokens.len();
    }
    Ok(format!("{} of them; {} greedy and {warm} drawn tokens without", wanted.len(), greedy.len()))
}
