//! Sessions beside each other, and what taking back, emptying and breaking off leaves behind.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, ensure};
use gemma4_runtime::{FinishReason, Sampling, Session};

use crate::bundle::{Passage, Truth};
use crate::compare::same;
use crate::report::Report;
use crate::subject::{Subject, answer, free, rows};

/// Tokens of each answer.
const TOKENS: u32 = 40;
/// Times that work is broken off.
const BREAKS: u32 = 20;

pub(crate) fn run(report: &mut Report, subject: &Subject, truth: &Truth) {
    let (first, last) = (&truth.passages[0], truth.any());
    report.check("two sessions", || interleaved(subject, [first, last]));
    report.check("reset and rewind", || taken_back(subject, last));
    report.check("broken off", || broken_off(subject, &truth.every));
}

/// Two sessions in turns: tokens of a generation, and logits of decode steps.
fn interleaved(subject: &Subject, passages: [&Passage; 2]) -> anyhow::Result<String> {
    let prompts = passages.map(|p| &p.tokens[..p.prompt]);
    let (mut a, mut b) = (subject.session()?, subject.session()?);
    for sampling in [Sampling::GREEDY, free(11)] {
        let alone = [
            answer(&mut a, prompts[0], sampling, TOKENS)?,
            answer(&mut b, prompts[1], sampling, TOKENS)?,
        ];
        a.reset();
        b.reset();
        a.prefill(prompts[0])?;
        b.prefill(prompts[1])?;
        let never = AtomicBool::new(false);
        let (mut one, mut two) = (Vec::new(), Vec::new());
        let (mut first, mut second) =
            (a.generate(sampling, TOKENS, &never)?, b.generate(sampling, TOKENS, &never)?);
        // Two tokens of one for each of the other.
        while first.reason().is_none() || second.reason().is_none() {
            one.extend(first.next().transpose()?);
            one.extend(first.next().transpose()?);
            two.extend(second.next().transpose()?);
        }
        for (generation, tokens) in [(&first, &mut one), (&second, &mut two)] {
            if generation.reason() == Some(FinishReason::Stop) {
                tokens.extend(generation.last_token());
            }
        }
        ensure!([one, two] == alone, "other tokens than alone");
    }
    let texts = passages.map(|p| &p.tokens[..p.tokens.len().min(p.prompt + TOKENS as usize)]);
    let alone =
        [rows(&mut a, texts[0], passages[0].prompt)?, rows(&mut b, texts[1], passages[1].prompt)?];
    a.reset();
    b.reset();
    a.prefill(prompts[0])?;
    b.prefill(prompts[1])?;
    for step in 0.. {
        for (session, alone, text, prompt) in [
            (&mut a, &alone[0], texts[0], prompts[0].len()),
            (&mut b, &alone[1], texts[1], prompts[1].len()),
        ] {
            if let Some(row) = alone.get(step) {
                ensure!(same(&session.logits()?, row), "other logits than alone");
            }
            if let Some(token) = text.get(prompt + step) {
                session.decode(*token)?;
            }
        }
        if step > alone[0].len().max(alone[1].len()) {
            break;
        }
    }
    Ok(format!("{} tokens and {} rows as alone, bit for bit", 4 * TOKENS, alone.concat().len()))
}

/// A context that was emptied, or shortened, is as if nothing more had been in it.
fn taken_back(subject: &Subject, passage: &Passage) -> anyhow::Result<String> {
    let text = &passage.tokens[..passage.tokens.len().min(60)];
    let (kept, rest) = text.split_at(text.len() / 2);
    let read = |session: &mut Session| -> anyhow::Result<Vec<f32>> {
        session.prefill(rest)?;
        Ok(session.logits()?)
    };
    let mut session = subject.session()?;
    session.prefill(kept)?;
    let expected = read(&mut session)?;
    let mut rounds = 0;
    for extra in [1, 5, 20] {
        abandon(&mut session, extra)?;
        ensure!(session.rewind(kept.len() as u32), "rewinding is refused");
        ensure!(same(&read(&mut session)?, &expected), "other logits after rewinding");
        session.reset();
        session.prefill(kept)?;
        ensure!(same(&read(&mut session)?, &expected), "other logits after a reset");
        rounds += 1;
    }
    Ok(format!("{rounds} rounds, the same bit for bit"))
}

/// Prompts and answers that are broken off anywhere leave a session that works.
fn broken_off(subject: &Subject, passage: &Passage) -> anyhow::Result<String> {
    let text = &passage.tokens;
    let mut session = subject.session_with(None, Some(16))?;
    let expected = rows(&mut session, &text[..100], 90)?;
    let mut random = 1u64;
    let mut below = |n: u64| {
        // A linear congruential generator (Knuth, MMIX).
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) % n
    };
    for round in 0..BREAKS {
        session.reset();
        let (pieces, tokens) = (below(16) as usize, below(30));
        let whole = session.prefill_with(text, |done, _| {
            if done >= pieces * 16 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        ensure!(!whole, "the prompt was not broken off");
        if pieces > 0 {
            let stop = AtomicBool::new(false);
            let mut generation = session.generate(free(u64::from(round)), 100, &stop)?;
            for token in generation.by_ref().take(tokens as usize) {
                token?;
            }
            if round % 2 == 0 && generation.reason().is_none() {
                stop.store(true, Ordering::Relaxed);
                ensure!(generation.next().is_none(), "a token after the interruption");
                ensure!(generation.reason() == Some(FinishReason::Interrupted), "no reason");
            }
        }
        let again = rows(&mut session, &text[..100], 90)?;
        let equal = again.iter().zip(&expected).all(|(a, b)| same(a, b));
        ensure!(equal, "other logits after {pieces} pieces and {tokens} tokens");
    }
    Ok(format!("{BREAKS} times, then right bit for bit"))
}

/// Draws some tokens and lets go of the generation while steps are ahead.
fn abandon(session: &mut Session, tokens: usize) -> anyhow::Result<()> {
    let never = AtomicBool::new(false);
    let room = session.context() - session.position();
    let mut generation = session.generate(Sampling::GREEDY, room, &never)?;
    generation.by_ref().take(tokens).last().context("no token")??;
    Ok(())
}
