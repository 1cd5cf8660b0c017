//! Several tokens read at once, with the logits after each, and taken back.

mod common;

use std::sync::atomic::AtomicBool;

use common::{Config, Model, Random};
use gemma4_runtime::cpu::Cpu;
use gemma4_runtime::{Error, Sampling, Session, SessionOptions};

/// The model whose ring is as short as the format allows: 14 rows under a window of 7, for calls
/// of 8 tokens.
fn device() -> Cpu {
    Cpu::new(Model::new(&Config::default()).load()).expect("a device")
}

fn open(cpu: &Cpu, context: u32) -> Session {
    let options = SessionOptions { max_context: Some(context), prefill_chunk: None };
    Session::new(cpu, options).expect("small")
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

/// Logits after each token, decoded one by one.
fn decoded(session: &mut Session, tokens: &[u32]) -> Vec<Vec<u32>> {
    let mut row = |token: &u32| {
        session.decode(*token).expect("fits");
        bits(&session.logits().expect("after a call"))
    };
    tokens.iter().map(&mut row).collect()
}

/// Logits after each token, read at once.
fn verified(session: &mut Session, tokens: &[u32]) -> Vec<Vec<u32>> {
    session.verify(tokens).expect("fits");
    let rows = 0..tokens.len() as u32;
    rows.map(|row| bits(&session.logits_after(row).expect("a row"))).collect()
}

#[test]
fn rows_are_those_of_decode_steps_at_every_position_round_the_ring() {
    let cpu = device();
    let tokens = Random(21).tokens(50, 97);
    let expected = decoded(&mut open(&cpu, 100), &tokens);
    for count in 1..=8 {
        let mut session = open(&cpu, 100);
        let rows: Vec<_> = tokens.chunks(count).flat_map(|t| verified(&mut session, t)).collect();
        assert_eq!(rows, expected, "{count} at once");
        assert_eq!(session.tokens(), tokens);
    }
}

#[test]
fn rejected_tokens_leave_no_trace() {
    let cpu = device();
    let (text, wrong) = (Random(22).tokens(60, 97), Random(23).tokens(8, 97));
    let expected = decoded(&mut open(&cpu, 100), &text);
    for position in 0..40 {
        for accepted in 0..8 {
            let mut session = open(&cpu, 100);
            if position > 0 {
                session.prefill(&text[..position]).expect("fits");
            }
            let draft = [&text[position..position + accepted], &wrong[accepted..]].concat();
            let rows = verified(&mut session, &draft);
            let to = position + accepted;
            assert_eq!(rows[..accepted], expected[position..to]);
            assert!(session.rewind(to as u32), "{accepted} accepted at {position}");
            assert!(matches!(session.logits_after(0), Err(Error::NoLogits)));
            let next = verified(&mut session, &text[to..to + 8]);
            assert_eq!(next, expected[to..to + 8], "{accepted} accepted at {position}");
        }
    }
}

#[test]
fn a_generation_goes_on_from_the_last_row() {
    let cpu = device();
    let text = Random(24).tokens(20, 97);
    let draw = |session: &mut Session| -> Vec<u32> {
        let never = AtomicBool::new(false);
        let generation = session.generate(Sampling::GREEDY, 12, &never).expect("starts");
        generation.map(|token| token.expect("a token")).collect()
    };
    let mut by_prefill = open(&cpu, 100);
    by_prefill.prefill(&text).expect("fits");
    let mut session = open(&cpu, 100);
    session.prefill(&text[..15]).expect("fits");
    let rows = verified(&mut session, &text[15..]);
    assert_eq!(bits(&session.logits().expect("after a call")), rows[4]);
    assert_eq!(draw(&mut session), draw(&mut by_prefill));
    assert!(matches!(session.logits_after(0), Err(Error::NoLogits)));
}

#[test]
fn the_context_may_be_filled_to_its_last_token() {
    let cpu = device();
    let text = Random(25).tokens(20, 97);
    let expected = decoded(&mut open(&cpu, 100), &text);
    // A context of 5 tokens holds fewer than a call may have.
    for context in [5, 20] {
        let mut session = open(&cpu, context);
        let whole = &text[..context as usize];
        let (first, last) = whole.split_at(whole.len().saturating_sub(8));
        if !first.is_empty() {
            session.prefill(first).expect("fits");
        }
        assert_eq!(verified(&mut session, last), expected[first.len()..whole.len()]);
        assert!(matches!(session.verify(&[1]), Err(Error::ContextFull { .. })));
        assert!(session.rewind(context - 2));
        assert!(matches!(session.verify(&[1; 3]), Err(Error::ContextFull { tokens: 3, .. })));
        let rows = verified(&mut session, &whole[whole.len() - 2..]);
        assert_eq!(rows, expected[whole.len() - 2..whole.len()]);
    }
}

#[test]
fn wrong_calls_are_refused_and_change_nothing() {
    let cpu = device();
    let mut session = open(&cpu, 40);
    assert_eq!(session.verify_rows(), 8);
    session.prefill(&[1, 2, 3]).expect("fits");
    let before = bits(&session.logits().expect("after a call"));
    assert!(matches!(session.verify(&[]), Err(Error::EmptyPrompt)));
    let error = session.verify(&[1; 9]).expect_err("too many");
    assert!(matches!(error, Error::Verify { asked: 9, maximum: 8 }));
    assert_eq!(error.class().code(), 2);
    assert!(matches!(session.verify(&[1, 97]), Err(Error::Token { token: 97, .. })));
    assert_eq!(session.position(), 3);
    assert_eq!(bits(&session.logits().expect("still there")), before);
    // A prompt has logits of its last token only.
    assert!(matches!(session.logits_after(1), Err(Error::NoLogits)));
    session.verify(&[4, 5]).expect("fits");
    assert!(matches!(session.logits_after(2), Err(Error::NoLogits)));
}

#[test]
fn a_program_without_the_method_says_so() {
    let mut model = Model::new(&Config::default());
    model.program.methods.retain(|method| method.name != "verify");
    let cpu = Cpu::new(model.load()).expect("a device");
    let mut session = open(&cpu, 40);
    assert_eq!(session.verify_rows(), 0);
    let error = session.verify(&[1]).expect_err("no such method");
    assert!(error.to_string().contains("`verify`"), "{error}");
    session.prefill(&[1]).expect("the others are there");
}
