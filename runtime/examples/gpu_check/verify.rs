//! Several tokens read at once, with the logits after each: against decode steps and the CPU, round
//! the rings, with tokens taken back, and between the turns of another session.

use anyhow::{Context, ensure};
use gemma4_runtime::{Sampling, Session, SessionOptions};

use crate::bundle::{Bundle, Model, Passage, Truth, ids};
use crate::compare::{Difference, same};
use crate::report::Report;
use crate::subject::{Subject, answer, generate, rows};

/// Tokens of the answers that are drafted.
const ANSWER: u32 = 40;
/// Answers of the trained model that are drafted.
const ANSWERS: usize = 20;

pub(crate) fn run(report: &mut Report, bundle: &Bundle, subject: &Subject, truth: &Truth) {
    let most = match subject.session() {
        Ok(session) => session.verify_rows(),
        Err(_) => 0,
    };
    for count in 1..=most {
        report.check(&format!("verify {count}"), || every(subject, truth, count));
    }
    report.check("verify round a ring", || wraps(subject, truth));
    report.check("verify to the last slot", || full(subject, truth));
    report.check("verify in turns", || turns(subject, truth));
    report.check("verify, then generate", || onward(subject, truth.any()));
    if truth.model == Model::Chat {
        report.check("drafted answers", || drafted(bundle, subject));
    }
}

/// A call of each form.
pub(crate) fn quick(report: &mut Report, subject: &Subject, truth: &Truth) {
    report.check("verify", || {
        let passage = truth.any();
        let prompt = &passage.tokens[..passage.prompt];
        let mut cpu = Session::new(&truth.cpu, SessionOptions::default())?;
        let mut session = subject.session()?;
        let mut all = Difference::default();
        cpu.prefill(prompt)?;
        session.prefill(prompt)?;
        for count in [1, 2, 3, session.verify_rows() as usize] {
            let tokens: Vec<u32> = prompt.iter().copied().cycle().take(count).collect();
            let expected = verified(&mut cpu, &tokens)?;
            for (truth, row) in expected.iter().zip(verified(&mut session, &tokens)?) {
                all.add(truth, &row);
            }
        }
        all.within(passage.bound)
    });
}

/// Logits after each of some tokens, read at once.
pub(crate) fn verified(session: &mut Session, tokens: &[u32]) -> anyhow::Result<Vec<Vec<f32>>> {
    session.verify(tokens)?;
    (0..tokens.len() as u32).map(|row| Ok(session.logits_after(row)?)).collect()
}

fn difference(truth: &[Vec<f32>], rows: &[Vec<f32>]) -> anyhow::Result<Difference> {
    ensure!(truth.len() == rows.len(), "{} rows instead of {}", rows.len(), truth.len());
    Ok(Difference::of(truth.iter().zip(rows).map(|(a, b)| (a.as_slice(), b.as_slice()))))
}

/// The whole text, so many tokens at once: against the CPU, against decode steps, and again.
fn every(subject: &Subject, truth: &Truth, count: u32) -> anyhow::Result<String> {
    let text = &truth.every;
    let mut session = subject.session()?;
    let mut read = || -> anyhow::Result<Vec<Vec<f32>>> {
        session.reset();
        let chunks = text.tokens.chunks(count as usize);
        Ok(chunks.map(|t| verified(&mut session, t)).collect::<anyhow::Result<Vec<_>>>()?.concat())
    };
    let found = read()?;
    let again = read()?;
    ensure!(found.iter().zip(&again).all(|(a, b)| same(a, b)), "the second time differs");
    let decoded = rows(&mut session, &text.tokens, 1)?;
    let from_decode = difference(&decoded, &found)?.within(text.bound)?;
    let from_cpu = difference(&text.rows, &found)?.within(text.bound)?;
    Ok(format!("CPU: {from_cpu}; decode: {from_decode}"))
}

/// Across the end of a ring, from every slot before it, with tokens that are taken back.
fn wraps(subject: &Subject, truth: &Truth) -> anyhow::Result<String> {
    let ring = subject.ring().context("no layer has a ring")? as usize;
    let mut session = subject.session()?;
    let most = session.verify_rows() as usize;
    let room = session.context() as usize;
    let text: Vec<u32> = truth.every.tokens.iter().copied().cycle().take(ring + 3 * most).collect();
    ensure!(text.len() <= room, "the context is shorter than a ring");
    let mut cpu = Session::new(&truth.cpu, SessionOptions::default())?;
    let start = ring - most;
    cpu.prefill(&text[..start])?;
    let mut expected = Vec::new();
    for token in &text[start..] {
        cpu.decode(*token)?;
        expected.push(cpu.logits()?);
    }
    let mut all = Difference::default();
    session.prefill(&text[..start])?;
    for at in 0..2 * most {
        let position = start + at;
        for accepted in [0, most / 2, most - 1] {
            let (right, rest) = text[position..position + most].split_at(accepted);
            let wrong = rest.iter().map(|token| token ^ 1);
            let draft: Vec<u32> = right.iter().copied().chain(wrong).collect();
            let found = verified(&mut session, &draft)?;
            for (truth, row) in expected[at..at + accepted].iter().zip(&found) {
                all.add(truth, row);
            }
            ensure!(session.rewind(position as u32), "tokens cannot be taken back");
            for (truth, row) in
                expected[at..].iter().zip(verified(&mut session, &text[position..position + most])?)
            {
                all.add(truth, &row);
            }
            ensure!(session.rewind(position as u32), "tokens cannot be taken back");
        }
        session.decode(text[position])?;
        all.add(&expected[at], &session.logits()?);
    }
    all.within(truth.every.bound)
}

/// Up to the last slot of a context, and none beyond it.
fn full(subject: &Subject, truth: &Truth) -> anyhow::Result<String> {
    let text = &truth.every;
    let context = 100;
    let mut session = subject.session_with(Some(context), None)?;
    let most = session.verify_rows();
    let mut all = Difference::default();
    for count in 1..=most {
        let start = (context - count) as usize;
        session.reset();
        session.prefill(&text.tokens[..start])?;
        let tokens = &text.tokens[start..context as usize];
        for (truth, row) in text.rows[start..].iter().zip(verified(&mut session, tokens)?) {
            all.add(truth, &row);
        }
        ensure!(session.verify(&[0]).is_err(), "a slot too many");
    }
    all.within(text.bound)
}

/// Rows stay those of their session while another one works.
fn turns(subject: &Subject, truth: &Truth) -> anyhow::Result<String> {
    let text = &truth.every.tokens;
    let (mut a, mut b) = (subject.session()?, subject.session()?);
    let most = a.verify_rows() as usize;
    let (one, two) = (&text[..most], &text[most..2 * most]);
    let alone = [verified(&mut a, one)?, verified(&mut b, two)?];
    a.reset();
    b.reset();
    a.verify(one)?;
    b.verify(two)?;
    for (row, (first, second)) in alone[0].iter().zip(&alone[1]).enumerate() {
        ensure!(same(&a.logits_after(row as u32)?, first), "row {row} differs");
        ensure!(same(&b.logits_after(row as u32)?, second), "row {row} differs");
    }
    b.decode(one[0])?;
    ensure!(same(&a.logits_after(0)?, &alone[0][0]), "row 0 differs after a decode step");
    Ok(format!("{} rows as alone, bit for bit", 2 * most))
}

/// A generation draws its first token from the last row.
fn onward(subject: &Subject, passage: &Passage) -> anyhow::Result<String> {
    let prompt = &passage.tokens[..passage.prompt];
    let mut session = subject.session()?;
    let most = session.verify_rows() as usize;
    let (first, last) = prompt.split_at(prompt.len().saturating_sub(most));
    if !first.is_empty() {
        session.prefill(first)?;
    }
    session.verify(last)?;
    let best = gemma4_runtime::sampler::argmax(&session.logits()?);
    let (tokens, _) = generate(&mut session, Sampling::GREEDY, 10)?;
    ensure!(tokens.first() == Some(&best), "the first token is not that of the last row");
    Ok(format!("{} tokens after {} at once", tokens.len(), last.len()))
}

/// Greedy answers, drafted by the answer of plain decoding with every fifth token spoilt: what the
/// model accepts is that answer again.
fn drafted(bundle: &Bundle, subject: &Subject) -> anyhow::Result<String> {
    let chats = bundle.chat["chat"].as_array().map_or(&[][..], Vec::as_slice);
    let mut session = subject.session()?;
    let most = session.verify_rows() as usize;
    let (mut equal, mut steps, mut tokens, mut asked) = (0, 0, 0, 0);
    for chat in chats.iter().take(ANSWERS) {
        let prompt = ids(&chat["prompt_ids"]);
        let plain = answer(&mut session, &prompt, Sampling::GREEDY, ANSWER)?;
        let guess = |at: usize| plain.get(at).map(|t| t ^ u32::from(at % 5 == 4));
        session.reset();
        session.prefill(&prompt)?;
        let mut found = vec![gemma4_runtime::sampler::argmax(&session.logits()?)];
        while found.len() < plain.len() {
            let position = session.position();
            let last = found[found.len() - 1];
            let draft: Vec<u32> = (found.len()..).map_while(guess).take(most - 1).collect();
            let rows = verified(&mut session, &[&[last], draft.as_slice()].concat())?;
            steps += 1;
            let best: Vec<u32> = rows.iter().map(|r| gemma4_runtime::sampler::argmax(r)).collect();
            let accepted = best.iter().zip(&draft).take_while(|(a, b)| a == b).count();
            found.extend(&best[..=accepted]);
            ensure!(session.rewind(position + 1 + accepted as u32), "cannot be taken back");
        }
        found.truncate(plain.len());
        equal += usize::from(found == plain);
        tokens += plain.len();
        asked += 1;
    }
    let found = format!("{equal} of {asked} as decoded, {tokens} tokens in {steps} steps");
    // Sums in another order may choose another token where two are as good.
    ensure!(equal + 1 >= asked && steps < tokens, "{found}");
    Ok(found)
}
