//! Sessions: generation, its ends, rewinding, isolation.

mod common;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Config, Model, Random};
use gemma4_runtime::cpu::Cpu;
use gemma4_runtime::{
    Error, FinishReason, LoadedProgram, Report, Sampling, Session, SessionOptions,
};

const WARM: Sampling = Sampling { temperature: 1.0, top_k: 20, top_p: 0.95, seed: 17 };

fn program(config: &Config) -> Arc<LoadedProgram> {
    Model::new(config).load()
}

fn device() -> Cpu {
    Cpu::new(program(&Config::default())).expect("a device")
}

fn open(cpu: &Cpu, context: u32) -> Session {
    let options = SessionOptions { max_context: Some(context), prefill_chunk: None };
    Session::new(cpu, options).expect("small")
}

fn generate(session: &mut Session, sampling: Sampling, count: u32) -> (Vec<u32>, FinishReason) {
    let stop = AtomicBool::new(false);
    let mut generation = session.generate(sampling, count, &stop).expect("starts");
    let tokens = generation.by_ref().map(|t| t.expect("a token")).collect();
    (tokens, generation.reason().expect("ended"))
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn generation_is_what_decoding_by_hand_gives() {
    let cpu = device();
    let prompt = Random(1).tokens(19, 97);
    let mut session = open(&cpu, 100);
    session.prefill(&prompt).expect("fits");
    let (tokens, reason) = generate(&mut session, Sampling::GREEDY, 30);
    assert_eq!((tokens.len(), reason), (30, FinishReason::Length));

    let mut by_hand = open(&cpu, 100);
    by_hand.prefill(&prompt).expect("fits");
    for token in &tokens {
        let logits = by_hand.logits().expect("after a call");
        let best = (0..97).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).expect("some");
        assert_eq!(best as u32, *token);
        by_hand.decode(*token).expect("fits");
    }
}

#[test]
fn a_generation_goes_on_where_it_ended() {
    let cpu = device();
    let prompt = Random(2).tokens(5, 97);
    for sampling in [Sampling::GREEDY, WARM] {
        let mut whole = open(&cpu, 100);
        whole.prefill(&prompt).expect("fits");
        let (expected, _) = generate(&mut whole, sampling, 24);
        let mut pieces = open(&cpu, 100);
        pieces.prefill(&prompt).expect("fits");
        let mut found = Vec::new();
        for count in [1, 0, 7, 2, 14] {
            found.extend(generate(&mut pieces, sampling, count).0);
        }
        assert_eq!(found, expected);
        assert_eq!(pieces.tokens(), whole.tokens());
    }
}

#[test]
fn seeds_repeat_and_differ_and_do_not_matter_at_temperature_zero() {
    let cpu = device();
    let run = |sampling| {
        let mut session = open(&cpu, 100);
        session.prefill(&[3, 1, 4]).expect("fits");
        generate(&mut session, sampling, 20).0
    };
    assert_eq!(run(WARM), run(WARM));
    assert_ne!(run(WARM), run(Sampling { seed: 18, ..WARM }));
    let greedy = run(Sampling::GREEDY);
    for seed in 0..20 {
        assert_eq!(run(Sampling { seed, ..Sampling::GREEDY }), greedy);
    }
}

#[test]
fn the_context_may_be_filled_to_its_last_token() {
    let cpu = device();
    for context in [3, 8, 40] {
        let mut session = open(&cpu, context);
        let prompt = Random(4).tokens(context as usize - 2, 97);
        session.prefill(&prompt).expect("fits");
        let (tokens, reason) = generate(&mut session, Sampling::GREEDY, 100);
        assert_eq!((tokens.len(), reason), (2, FinishReason::Length));
        assert_eq!(generate(&mut session, Sampling::GREEDY, 100), (vec![], FinishReason::Length));
    }
    let mut session = open(&cpu, 8);
    session.prefill(&[1; 8]).expect("fills it");
    assert_eq!(generate(&mut session, Sampling::GREEDY, 9), (vec![], FinishReason::Length));
    assert!(matches!(session.decode(1), Err(Error::ContextFull { present: 8, .. })));
}

#[test]
fn a_prompt_that_does_not_fit_is_refused_with_both_numbers() {
    let cpu = device();
    let mut session = open(&cpu, 20);
    session.prefill(&[1; 9]).expect("fits");
    let error = session.prefill(&[1; 12]).expect_err("one too many");
    let text = error.to_string();
    assert!(text.contains("12") && text.contains("20") && text.contains('9'), "{text}");
    assert_eq!(session.position(), 9);
    session.prefill(&[1; 11]).expect("the refused prompt left no trace");
}

#[test]
fn wrong_input_is_refused() {
    let cpu = device();
    let mut session = open(&cpu, 20);
    assert!(matches!(session.prefill(&[]), Err(Error::EmptyPrompt)));
    assert!(matches!(session.prefill(&[1, 97]), Err(Error::Token { token: 97, vocabulary: 97 })));
    assert_eq!(session.position(), 0);
    assert!(matches!(session.logits(), Err(Error::NoLogits)));
    let stop = AtomicBool::new(false);
    assert!(matches!(session.generate(WARM, 3, &stop), Err(Error::NoLogits)));
    session.prefill(&[1]).expect("fits");
    for sampling in [
        Sampling { temperature: -1.0, ..WARM },
        Sampling { temperature: f32::NAN, ..WARM },
        Sampling { top_p: 0.0, ..WARM },
        Sampling { top_p: 1.5, ..WARM },
    ] {
        let error = session.generate(sampling, 3, &stop).err().expect("refused");
        assert_eq!(error.class().code(), 2);
    }
    for (max_context, prefill_chunk) in
        [(Some(0), None), (Some(201), None), (None, Some(0)), (None, Some(9))]
    {
        let options = SessionOptions { max_context, prefill_chunk };
        let error = Session::new(&cpu, options).err().expect("refused");
        assert_eq!(error.class().code(), 2);
    }
}

#[test]
fn every_stop_token_stops_and_is_not_handed_out() {
    let mut free = open(&device(), 100);
    free.prefill(&[5, 6, 7]).expect("fits");
    let (tokens, _) = generate(&mut free, Sampling::GREEDY, 12);
    for at in 0..tokens.len() {
        let first = tokens.iter().position(|t| *t == tokens[at]).expect("it is there");
        let mut stops = vec![tokens[at], 90];
        stops.sort_unstable();
        stops.dedup();
        if tokens[..first].contains(&90) {
            continue;
        }
        let config = Config { stop_tokens: stops, ..Config::default() };
        let cpu = Cpu::new(program(&config)).expect("a device");
        let mut session = open(&cpu, 100);
        session.prefill(&[5, 6, 7]).expect("fits");
        let (found, reason) = generate(&mut session, Sampling::GREEDY, 12);
        assert_eq!((&found[..], reason), (&tokens[..first], FinishReason::Stop));
        assert_eq!(session.tokens()[3..], tokens[..first]);
    }
}

#[test]
fn an_interrupted_generation_goes_on_as_if_nothing_had_been() {
    let cpu = device();
    let mut whole = open(&cpu, 100);
    whole.prefill(&[9, 8]).expect("fits");
    let (expected, _) = generate(&mut whole, WARM, 20);
    for cut in 0..12 {
        let mut session = open(&cpu, 100);
        session.prefill(&[9, 8]).expect("fits");
        let stop = AtomicBool::new(false);
        let mut generation = session.generate(WARM, 100, &stop).expect("starts");
        let mut found: Vec<u32> = generation.by_ref().take(cut).map(|t| t.expect("ok")).collect();
        stop.store(true, Ordering::Relaxed);
        assert!(generation.next().is_none());
        assert_eq!(generation.reason(), Some(FinishReason::Interrupted));
        drop(generation);
        found.extend(generate(&mut session, WARM, 20 - cut as u32).0);
        assert_eq!(found, expected, "cut at {cut}");
    }
}

#[test]
fn a_prompt_cut_short_leaves_a_usable_session() {
    let cpu = device();
    let prompt = Random(6).tokens(60, 97);
    let mut whole = open(&cpu, 100);
    whole.prefill(&prompt).expect("fits");
    let expected = bits(&whole.logits().expect("after prefill"));
    for calls in 0..8 {
        let mut session = open(&cpu, 100);
        let mut left = calls;
        let finished = session.prefill_with(&prompt, |done, all| {
            assert!(done < all && all == 60);
            left -= 1;
            if left < 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(!finished.expect("no error"));
        let position = session.position() as usize;
        assert_eq!(position, calls as usize * 8);
        session.prefill(&prompt[position..]).expect("fits");
        assert_eq!(bits(&session.logits().expect("after prefill")), expected);
    }
}

/// What this process has in memory, in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

#[test]
fn a_hundred_sessions_are_interleaved_and_leave_nothing() {
    let cpu = device();
    let prompt = Random(31).tokens(11, 97);
    let mut alone = open(&cpu, 60);
    alone.prefill(&prompt).expect("fits");
    let expected = generate(&mut alone, WARM, 30).0;
    let round = || {
        let mut sessions: Vec<Session> = (0..100).map(|_| open(&cpu, 60)).collect();
        for session in &mut sessions {
            session.prefill(&prompt).expect("fits");
        }
        let mut answers = vec![Vec::new(); sessions.len()];
        for _ in 0..10 {
            for (session, answer) in sessions.iter_mut().zip(&mut answers) {
                answer.extend(generate(session, WARM, 3).0);
            }
        }
        assert!(answers.iter().all(|answer| *answer == expected));
    };
    round();
    let before = resident();
    (0..5).for_each(|_| round());
    // The allocator keeps pages, and other tests of this process run meanwhile; 500 sessions that
    // were kept would take some 50 MB.
    let after = resident();
    assert!(after < before + (24 << 20), "{before} bytes before, {after} after");
}

#[test]
fn two_sessions_know_nothing_of_each_other() {
    let cpu = device();
    let prompts = [Random(7).tokens(30, 97), Random(8).tokens(17, 97)];
    let alone = prompts.each_ref().map(|prompt| {
        let mut session = open(&cpu, 90);
        session.prefill(prompt).expect("fits");
        generate(&mut session, WARM, 40).0
    });
    let mut sessions = prompts.each_ref().map(|prompt| {
        let mut session = open(&cpu, 90);
        session.prefill(&prompt[..9]).expect("fits");
        session
    });
    for (session, prompt) in sessions.iter_mut().zip(&prompts) {
        session.prefill(&prompt[9..]).expect("fits");
    }
    let mut found = [vec![], vec![]];
    for count in [3, 1, 9, 1, 1, 25] {
        for (session, found) in sessions.iter_mut().zip(&mut found) {
            found.extend(generate(session, WARM, count).0);
        }
    }
    assert_eq!(found, alone);
}

#[test]
fn a_reset_session_is_as_good_as_new() {
    let cpu = device();
    let prompt = Random(10).tokens(13, 97);
    let mut session = open(&cpu, 60);
    let mut answers = Vec::new();
    for junk in [1, 55, 30, 14] {
        session.reset();
        session.prefill(&Random(junk).tokens(junk as usize, 97)).expect("fits");
        session.reset();
        assert_eq!(session.position(), 0);
        session.prefill(&prompt).expect("fits");
        answers.push(generate(&mut session, WARM, 20).0);
    }
    answers.dedup();
    assert_eq!(answers.len(), 1);
}

/// The ring has 14 rows under a window of 7, so 8 tokens can be taken back once it is full.
#[test]
fn rewinding_is_exact_or_refused() {
    let cpu = device();
    let tokens = Random(12).tokens(60, 97);
    for length in [5, 14, 15, 20, 41] {
        for back in 0..=length {
            let mut session = open(&cpu, 100);
            session.prefill(&tokens[..length]).expect("fits");
            let to = length - back;
            let possible = back <= 8 || length <= 14;
            assert_eq!(session.rewind(to as u32), possible, "{length} back by {back}");
            if !possible {
                assert_eq!(session.position(), length as u32);
                continue;
            }
            let rest = &tokens[30..45];
            session.prefill(rest).expect("fits");
            let mut fresh = open(&cpu, 100);
            fresh.prefill(&[&tokens[..to], rest].concat()).expect("fits");
            assert_eq!(
                bits(&session.logits().expect("there")),
                bits(&fresh.logits().expect("there")),
                "{length} back by {back}"
            );
        }
    }
}

#[test]
fn a_second_rewind_counts_from_what_was_written() {
    let cpu = device();
    let tokens = Random(13).tokens(40, 97);
    let mut session = open(&cpu, 100);
    session.prefill(&tokens).expect("fits");
    assert!(session.rewind(36) && session.rewind(32));
    assert!(!session.rewind(31), "positions up to 40 have been written");
    assert!(matches!(session.logits(), Err(Error::NoLogits)));
    assert!(!session.rewind(33), "cannot go forward");
}

#[test]
fn the_report_counts_tokens() {
    let cpu = device();
    let mut session = open(&cpu, 100);
    session.prefill(&[1; 20]).expect("fits");
    generate(&mut session, WARM, 11);
    let report = session.take_report();
    assert_eq!((report.prompt_tokens, report.decode_tokens), (20, 10));
    assert!(report.prefill_seconds > 0.0 && report.decode_seconds > 0.0);
    if cfg!(target_os = "linux") {
        assert!(report.peak_memory.is_some_and(|bytes| bytes > 1 << 20));
    }
    let empty = Report { peak_memory: None, ..session.take_report() };
    assert_eq!(empty, Report::default());
}
