//! Long generations, their ends, and what the host does meanwhile.

use std::sync::atomic::AtomicBool;

use anyhow::{Context, ensure};
use gemma4_runtime::cuda::Calls;
use gemma4_runtime::{FinishReason, Sampling, Session, SessionOptions};

use crate::bundle::{Bundle, Model, Passage, Truth, ids};
use crate::compare::{Difference, same};
use crate::report::Report;
use crate::subject::{Subject, free, generate};

/// Tokens of the long generation.
const LONG: u32 = 3000;
/// Tokens between two looks at the logits.
const STRETCH: u32 = 500;
/// Times that the long generation has to go round a ring.
const ROUNDS: u32 = 3;
/// Context of the generation that fills it.
const SHORT: u32 = 150;
/// Tokens between the first and the last count of the driver's calls.
const COUNTED: u64 = 64;

pub(crate) fn run(report: &mut Report, bundle: &Bundle, subject: &Subject, truth: &Truth) {
    report.check("full context", || full(subject, truth));
    report.check("calls between tokens", || calls(subject, truth.any()));
    if truth.model == Model::Chat {
        report.check("3000 tokens", || long(subject, truth));
        report.check("after a stop", || stop(bundle, subject));
    }
}

/// Generates past every ring and compares with the CPU, which is given the same tokens.
fn long(subject: &Subject, truth: &Truth) -> anyhow::Result<String> {
    let mut cpu = Session::new(&truth.cpu, SessionOptions::default())?;
    let mut session = subject.session()?;
    let passage = truth.any();
    session.prefill(&passage.tokens[..passage.prompt])?;
    let start = session.position();
    let mut difference = Difference::default();
    let mut seed = 0;
    while session.position() < start + LONG {
        let before = session.position();
        let mut last = 0;
        while session.position() < before + STRETCH - 1 {
            seed += 1;
            let sampling = Sampling { temperature: 0.8, ..free(seed) };
            let left = before + STRETCH - session.position();
            last = *generate(&mut session, sampling, left)?.0.last().context("no token")?;
        }
        session.decode(last)?;
        cpu.prefill(&session.tokens()[cpu.position() as usize..])?;
        difference.add(&cpu.logits()?, &session.logits()?);
    }
    let ring = subject.ring().context("no layer has a ring")?;
    let rounds = session.position() / ring;
    ensure!(rounds >= ROUNDS, "only {rounds} rounds of a ring");
    let tokens = session.position() - start;
    Ok(format!(
        "{}, {tokens} tokens, {rounds} rounds of {ring}",
        difference.within(truth.every.bound)?
    ))
}

/// Fills a context to its last slot.
fn full(subject: &Subject, truth: &Truth) -> anyhow::Result<String> {
    let text = &truth.every.tokens[..SHORT as usize - 50];
    let mut session = subject.session_with(Some(SHORT), None)?;
    session.prefill(text)?;
    let mut seed = 0;
    let mut drawn = 0;
    // A stop token may be drawn on the way: then it goes on from there.
    while session.position() < SHORT {
        seed += 1;
        let (tokens, reason) = generate(&mut session, free(seed), 2 * SHORT)?;
        drawn += tokens.len();
        let ended = session.position() >= SHORT - 1;
        ensure!(
            (reason == FinishReason::Length) == ended || reason == FinishReason::Stop,
            "ended by {reason:?}"
        );
    }
    ensure!(
        generate(&mut session, free(1), 5)? == (Vec::new(), FinishReason::Length),
        "a token too many"
    );
    ensure!(session.decode(0).is_err() && session.prefill(&[0]).is_err(), "a slot too many");
    let mut cpu =
        Session::new(&truth.cpu, SessionOptions { max_context: Some(SHORT), prefill_chunk: None })?;
    cpu.prefill(session.tokens())?;
    let last = Difference::of([(cpu.logits()?.as_slice(), session.logits()?.as_slice())]);
    Ok(format!("{drawn} tokens drawn, then `length`; last row {}", last.within(truth.every.bound)?))
}

/// Steps that were ahead of a stop token have changed nothing: the conversation goes on as one
/// that was decoded token by token.
fn stop(bundle: &Bundle, subject: &Subject) -> anyhow::Result<String> {
    let chats = bundle.chat["chat"].as_array().map_or(&[][..], Vec::as_slice);
    let (mut session, mut by_hand) = (subject.session()?, subject.session()?);
    let (mut question, mut rounds) = (Vec::new(), 0);
    for chat in chats.iter().take(8) {
        // All in one conversation: the stop token, then the next question without its BOS.
        let prompt = ids(&chat["prompt_ids"]);
        question.extend_from_slice(&prompt[usize::from(rounds > 0)..]);
        session.prefill(&question)?;
        by_hand.prefill(&question)?;
        ensure!(same(&session.logits()?, &by_hand.logits()?), "other logits in round {rounds}");
        let (answer, reason) = generate(&mut session, Sampling::GREEDY, 64)?;
        ensure!(reason == FinishReason::Stop, "ended by {reason:?}");
        let (stop, answer) = answer.split_last().context("no token")?;
        answer.iter().try_for_each(|token| by_hand.decode(*token))?;
        ensure!(session.tokens() == by_hand.tokens(), "the stop token is in the context");
        question = vec![*stop];
        rounds += 1;
    }
    Ok(format!("{rounds} questions in a row, the same bit for bit"))
}

/// Counts calls of the driver between tokens.
fn calls(subject: &Subject, passage: &Passage) -> anyhow::Result<String> {
    let mut session = subject.session()?;
    session.prefill(&passage.tokens[..passage.prompt])?;
    let never = AtomicBool::new(false);
    let mut generation = session.generate(Sampling::GREEDY, 2 * COUNTED as u32, &never)?;
    let mut next = || generation.next().context("the generation has ended")?.context("no token");
    next()?;
    let before = subject.calls();
    for _ in 0..COUNTED {
        next()?;
    }
    let Some((before, after)) = before.zip(subject.calls()) else {
        return Ok("not on a GPU".to_owned());
    };
    let counted = after.since(before);
    ensure!(counted == Calls { graphs: COUNTED, ..Calls::default() }, "{counted:?}");
    Ok(format!("{COUNTED} tokens: {COUNTED} graph launches, no copy, no synchronisation"))
}
