//! Rules for drawing: penalties, biases, log-probabilities, tokens that are never drawn; and
//! contexts that are taken up again.

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use common::{Config, Model, Random};
use gemma4_runtime::cpu::Cpu;
use gemma4_runtime::{
    Device, DeviceSession, Error, FinishReason, LoadedProgram, LogitRules, Logprobs, Result,
    Sampling, Session, SessionOptions,
};

const VOCABULARY: u32 = 97;
const WARM: Sampling = Sampling { temperature: 1.0, top_k: 20, top_p: 0.95, seed: 17 };
const FREE: Sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 0 };

fn device() -> Cpu {
    Cpu::new(Model::new(&Config::default()).load()).expect("a device")
}

/// A device whose config names these ids for images.
fn device_with_images(image: u32, begin: u32) -> Cpu {
    let mut model = Model::new(&Config::default());
    model.program.source.config =
        format!(r#"{{"image_token_id": {image}, "boi_token_id": {begin}}}"#);
    Cpu::new(model.load()).expect("a device")
}

fn open(cpu: &Cpu) -> Session {
    Session::new(cpu, SessionOptions::default()).expect("small")
}

/// Tokens drawn after a prompt, with what is told of them.
fn draw(
    cpu: &Cpu,
    prompt: &[u32],
    sampling: Sampling,
    rules: &LogitRules,
    count: u32,
) -> (Vec<u32>, Vec<Logprobs>, FinishReason) {
    let mut session = open(cpu);
    session.prefill(prompt).expect("fits");
    let stop = AtomicBool::new(false);
    let mut generation = session.generate_by(sampling, rules, count, &stop).expect("starts");
    let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
    while let Some(token) = generation.next() {
        tokens.push(token.expect("a token"));
        logprobs.extend(generation.logprobs().cloned());
    }
    (tokens, logprobs, generation.reason().expect("ended"))
}

fn logits_after(cpu: &Cpu, tokens: &[u32]) -> Vec<f32> {
    let mut session = open(cpu);
    session.prefill(tokens).expect("fits");
    session.logits().expect("after a call")
}

#[test]
fn the_host_draws_what_the_device_draws() {
    let cpu = device();
    let prompt = Random(1).tokens(9, VOCABULARY);
    let neutral = LogitRules::default();
    let on_host = LogitRules { logprobs: Some(0), ..LogitRules::default() };
    for sampling in [Sampling::GREEDY, WARM, FREE] {
        let device = draw(&cpu, &prompt, sampling, &neutral, 40);
        let host = draw(&cpu, &prompt, sampling, &on_host, 40);
        assert_eq!((device.0, device.2), (host.0, host.2));
    }
}

#[test]
fn a_host_drawn_generation_goes_on_where_it_ended() {
    let cpu = device();
    let rules = LogitRules { repetition_penalty: 1.3, ..LogitRules::default() };
    let prompt = Random(2).tokens(5, VOCABULARY);
    let whole = draw(&cpu, &prompt, WARM, &rules, 20).0;
    let mut session = open(&cpu);
    session.prefill(&prompt).expect("fits");
    let stop = AtomicBool::new(false);
    let mut pieces = Vec::new();
    for count in [1, 0, 12, 7] {
        let generation = session.generate_by(WARM, &rules, count, &stop).expect("starts");
        pieces.extend(generation.map(|token| token.expect("a token")));
    }
    assert_eq!(pieces, whole);
}

#[test]
fn log_probabilities_are_those_of_the_logits() {
    let cpu = device();
    let prompt = Random(3).tokens(6, VOCABULARY);
    let rules = LogitRules {
        logprobs: Some(3),
        // Neither changes what is told.
        bias: vec![(5, 2.0)],
        ..LogitRules::default()
    };
    let (tokens, logprobs, _) = draw(&cpu, &prompt, WARM, &rules, 8);
    assert_eq!(logprobs.len(), tokens.len());
    let mut context = prompt;
    for (token, told) in tokens.iter().zip(&logprobs) {
        let logits = logits_after(&cpu, &context);
        let total: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
        let log = |id: u32| f64::from(logits[id as usize]) - total.ln();
        assert!((log(*token) - f64::from(told.drawn)).abs() < 1e-5);
        let mut order: Vec<u32> = (0..VOCABULARY).collect();
        order.sort_by(|a, b| log(*b).total_cmp(&log(*a)));
        let top: Vec<u32> = told.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(top, order[..3]);
        context.push(*token);
    }
}

#[test]
fn biases_forbid_and_force() {
    let cpu = device();
    let prompt = Random(4).tokens(6, VOCABULARY);
    let greedy = draw(&cpu, &prompt, Sampling::GREEDY, &LogitRules::default(), 10).0;
    let forbid = |id| LogitRules { bias: vec![(id, f32::NEG_INFINITY)], ..LogitRules::default() };
    let without = draw(&cpu, &prompt, Sampling::GREEDY, &forbid(greedy[0]), 10).0;
    assert!(!without.contains(&greedy[0]));
    let logits = logits_after(&cpu, &prompt);
    let second = (0..VOCABULARY).filter(|id| *id != greedy[0]);
    let second = second.max_by(|a, b| logits[*a as usize].total_cmp(&logits[*b as usize]));
    assert_eq!(Some(without[0]), second);
    let force = LogitRules { bias: vec![(42, 1e9)], ..LogitRules::default() };
    assert_eq!(draw(&cpu, &prompt, WARM, &force, 5).0, [42; 5]);
}

/// The formula of the CTRL paper, on logits that were computed anew for each token.
#[test]
fn the_penalty_is_that_of_its_paper() {
    let cpu = device();
    let prompt = Random(5).tokens(12, VOCABULARY);
    let rules = LogitRules { repetition_penalty: 1.7, ..LogitRules::default() };
    let mut context = prompt.clone();
    for token in draw(&cpu, &prompt, Sampling::GREEDY, &rules, 25).0 {
        let mut logits = logits_after(&cpu, &context);
        for id in context.iter().collect::<BTreeSet<_>>() {
            let logit = &mut logits[*id as usize];
            *logit = if *logit > 0.0 { *logit / 1.7 } else { *logit * 1.7 };
        }
        let best = (0..VOCABULARY)
            .rev()
            .max_by(|a, b| logits[*a as usize].total_cmp(&logits[*b as usize]));
        assert_eq!(Some(token), best);
        context.push(token);
    }
}

#[test]
fn min_p_cuts_off_exactly_what_is_less_probable() {
    let cpu = device();
    let prompt = Random(6).tokens(6, VOCABULARY);
    let logits = logits_after(&cpu, &prompt);
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let share = |id: u32| (f64::from(logits[id as usize] - largest) / 4.0).exp();
    let rules = LogitRules { min_p: 0.3, ..LogitRules::default() };
    let mut drawn = BTreeSet::new();
    for seed in 0..2000 {
        let sampling = Sampling { temperature: 4.0, seed, ..FREE };
        drawn.insert(draw(&cpu, &prompt, sampling, &rules, 1).0[0]);
    }
    let allowed: BTreeSet<u32> = (0..VOCABULARY).filter(|id| share(*id) >= 0.3).collect();
    assert!(allowed.len() > 1 && allowed.len() < 97, "{allowed:?}");
    assert_eq!(drawn, allowed);
}

#[test]
fn tokens_of_other_modalities_are_never_drawn() {
    let prompt = Random(7).tokens(6, VOCABULARY);
    let greedy = draw(&device(), &prompt, Sampling::GREEDY, &LogitRules::default(), 30).0;
    let (image, begin) = (greedy[0], greedy[4]);
    let cpu = device_with_images(image, begin);
    let mut expected = prompt.clone();
    for _ in 0..30 {
        let logits = logits_after(&cpu, &expected);
        let others = (0..VOCABULARY).rev().filter(|id| *id != image && *id != begin);
        let best = others.max_by(|a, b| logits[*a as usize].total_cmp(&logits[*b as usize]));
        expected.push(best.expect("some"));
    }
    let on_host = LogitRules { logprobs: Some(1), ..LogitRules::default() };
    for rules in [LogitRules::default(), on_host] {
        let found = draw(&cpu, &prompt, Sampling::GREEDY, &rules, 30).0;
        assert_eq!(found, expected[prompt.len()..]);
        for seed in 0..20 {
            let sampling = Sampling { temperature: 3.0, seed, ..FREE };
            let found = draw(&cpu, &prompt, sampling, &rules, 30).0;
            assert_eq!(found.len(), 30);
            assert!(!found.contains(&image) && !found.contains(&begin));
        }
    }
}

#[test]
fn further_tokens_may_be_suppressed() {
    let cpu = device();
    let mut session = open(&cpu);
    session.suppress((2..VOCABULARY + 5).chain(50..60));
    assert_eq!(session.suppressed(), (2..VOCABULARY).collect::<Vec<_>>());
    session.prefill(&[3, 4]).expect("fits");
    let stop = AtomicBool::new(false);
    let tokens = session.generate(FREE, 10, &stop).expect("starts");
    assert!(tokens.map(|token| token.expect("a token")).all(|token| token < 2));
}

/// Drawing anew gives each token as often as if the suppressed ones had no probability.
#[test]
fn the_other_tokens_are_drawn_in_proportion() {
    let prompt = Random(8).tokens(6, VOCABULARY);
    let logits = logits_after(&device(), &prompt);
    let mut order: Vec<u32> = (0..VOCABULARY).collect();
    order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
    let (image, begin) = (order[0], order[2]);
    let cpu = device_with_images(image, begin);
    let weight = |id: u32| match id == image || id == begin {
        true => 0.0,
        false => f64::from(logits[id as usize]).exp(),
    };
    let total: f64 = (0..VOCABULARY).map(weight).sum();
    let draws = 6000;
    let mut counts = vec![0u32; VOCABULARY as usize];
    let mut session = open(&cpu);
    for seed in 0..draws {
        session.reuse(&prompt);
        session.prefill(&prompt[session.position() as usize..]).expect("fits");
        let stop = AtomicBool::new(false);
        let sampling = Sampling { seed, ..FREE };
        let mut generation = session.generate(sampling, 1, &stop).expect("starts");
        counts[generation.next().expect("one").expect("a token") as usize] += 1;
    }
    let (mut chi_square, mut bins) = (0.0, 0);
    for id in 0..VOCABULARY {
        let expected = weight(id) / total * draws as f64;
        if expected == 0.0 {
            assert_eq!(counts[id as usize], 0);
        } else if expected >= 5.0 {
            chi_square += (f64::from(counts[id as usize]) - expected).powi(2) / expected;
            bins += 1;
        }
    }
    // Six standard deviations above the mean of the distribution.
    let limit = f64::from(bins) + 6.0 * (2.0 * f64::from(bins)).sqrt();
    assert!(bins > 5 && chi_square < limit, "{chi_square} with {bins} bins");
}

#[test]
fn a_suppressed_token_is_drawn_anew_in_the_shortest_rings() {
    let config = Config { ring: 7, chunk: 1, ..Config::default() };
    let mut model = Model::new(&config);
    let cpu = Cpu::new(model.load()).expect("a device");
    let prompt = Random(9).tokens(20, VOCABULARY);
    let greedy = draw(&cpu, &prompt, Sampling::GREEDY, &LogitRules::default(), 3).0;
    model.program.source.config = format!(r#"{{"image_token_id": {}}}"#, greedy[1]);
    let cpu = Cpu::new(model.load()).expect("a device");
    let found = draw(&cpu, &prompt, Sampling::GREEDY, &LogitRules::default(), 12).0;
    let on_host = LogitRules { logprobs: Some(0), ..LogitRules::default() };
    assert_eq!(found, draw(&cpu, &prompt, Sampling::GREEDY, &on_host, 12).0);
    assert_eq!(found[0], greedy[0]);
    assert!(!found.contains(&greedy[1]));
}

/// A device that claims to have run ahead, as a GPU does: so its rings give back fewer tokens.
struct Ahead(Cpu);

struct AheadSession(Box<dyn DeviceSession>);

impl Device for Ahead {
    fn program(&self) -> &Arc<LoadedProgram> {
        self.0.program()
    }

    fn describe(&self) -> String {
        self.0.describe()
    }

    fn open_session(&self, context: u32, chunk: u32) -> Result<Box<dyn DeviceSession>> {
        Ok(Box::new(AheadSession(self.0.open_session(context, chunk)?)))
    }
}

impl DeviceSession for AheadSession {
    fn prefill(&mut self, tokens: &[u32], position: u32) -> Result<()> {
        self.0.prefill(tokens, position)
    }

    fn decode(&mut self, token: u32, position: u32) -> Result<()> {
        self.0.decode(token, position)
    }

    fn verify(&mut self, tokens: &[u32], position: u32) -> Result<()> {
        self.0.verify(tokens, position)
    }

    fn logits(&mut self, row: u32) -> Result<Vec<f32>> {
        self.0.logits(row)
    }

    fn start(&mut self, position: u32, sampling: &Sampling, limit: u32) -> Result<()> {
        self.0.start(position, sampling, limit)
    }

    fn next_token(&mut self) -> Result<u32> {
        self.0.next_token()
    }

    fn finish(&mut self) -> Result<u32> {
        Ok(self.0.finish()? + 4)
    }
}

#[test]
fn a_token_is_drawn_anew_where_nothing_can_be_taken_back() {
    let config = Config { ring: 7, chunk: 1, ..Config::default() };
    let mut model = Model::new(&config);
    let prompt = Random(9).tokens(20, VOCABULARY);
    let cpu = Cpu::new(model.load()).expect("a device");
    let greedy = draw(&cpu, &prompt, Sampling::GREEDY, &LogitRules::default(), 3).0;
    model.program.source.config = format!(r#"{{"image_token_id": {}}}"#, greedy[1]);
    let cpu = Cpu::new(model.load()).expect("a device");
    let expected = draw(&cpu, &prompt, Sampling::GREEDY, &LogitRules::default(), 12).0;
    let ahead = Ahead(cpu);
    let mut session = Session::new(&ahead, SessionOptions::default()).expect("small");
    session.prefill(&prompt).expect("fits");
    session.take_report();
    let stop = AtomicBool::new(false);
    let generation = session.generate(Sampling::GREEDY, 12, &stop).expect("starts");
    let found: Vec<u32> = generation.map(|token| token.expect("a token")).collect();
    assert_eq!(found, expected);
    assert!(session.take_report().prompt_tokens > 20, "all was read again");
    assert_eq!(session.tokens(), [&prompt[..], &expected[..11]].concat());
}

#[test]
fn rules_out_of_range_are_refused() {
    let cpu = device();
    let mut session = open(&cpu);
    session.prefill(&[1, 2]).expect("fits");
    let neutral = LogitRules::default();
    let nan = f32::NAN;
    for rules in [
        LogitRules { min_p: 1.5, ..neutral.clone() },
        LogitRules { min_p: -0.1, ..neutral.clone() },
        LogitRules { min_p: nan, ..neutral.clone() },
        LogitRules { repetition_penalty: 0.0, ..neutral.clone() },
        LogitRules { repetition_penalty: f32::INFINITY, ..neutral.clone() },
        LogitRules { bias: vec![(1, nan)], ..neutral.clone() },
        LogitRules { bias: vec![(1, f32::INFINITY)], ..neutral.clone() },
        LogitRules { bias: vec![(VOCABULARY, 1.0)], ..neutral.clone() },
        LogitRules { logprobs: Some(101), ..neutral.clone() },
    ] {
        let stop = AtomicBool::new(false);
        let refused = session.generate_by(WARM, &rules, 1, &stop).err().expect("refused");
        assert!(matches!(refused, Error::Sampling { .. } | Error::Token { .. }), "{refused}");
    }
}

#[test]
fn a_context_is_reused_as_far_as_it_agrees() {
    let cpu = device();
    let prompt = Random(10).tokens(30, VOCABULARY);
    let mut session = open(&cpu);
    assert_eq!(session.reuse(&prompt), 0);
    session.prefill(&prompt).expect("fits");
    let longer = [&prompt[..], &[3, 4]].concat();
    assert_eq!(session.reuse(&longer), 30);
    // The last token is read again, for its logits.
    assert_eq!(session.reuse(&prompt), 29);
    session.prefill(&prompt[29..]).expect("fits");
    assert_eq!(session.logits().expect("after a call"), logits_after(&cpu, &prompt));
    let other = [&prompt[..26], &[5, 6, 7]].concat();
    assert_eq!(session.reuse(&other), 26);
    session.prefill(&other[26..]).expect("fits");
    assert_eq!(session.logits().expect("after a call"), logits_after(&cpu, &other));
    // Rings of 14 rows under a window of 7 give back 8 tokens, not 20.
    assert_eq!(session.reuse(&prompt[..9]), 0);
}

#[test]
fn a_saved_session_goes_on() {
    let cpu = device();
    for count in [1, 5, 40] {
        let prompt = Random(11).tokens(count, VOCABULARY);
        let mut session = open(&cpu);
        session.prefill(&prompt).expect("fits");
        let mut file = Vec::new();
        session.save(&mut file).expect("a vector");
        let longer = [&prompt[..], &[7, 8]].concat();
        let mut restored = open(&cpu);
        restored.restore(&mut file.as_slice()).expect("the same program");
        assert_eq!(restored.tokens(), prompt);
        assert_eq!(restored.reuse(&longer), prompt.len() as u32);
        restored.prefill(&longer[prompt.len()..]).expect("fits");
        assert_eq!(restored.logits().expect("after a call"), logits_after(&cpu, &longer));
        let mut again = Vec::new();
        let mut restored = open(&cpu);
        restored.restore(&mut file.as_slice()).expect("the same program");
        restored.save(&mut again).expect("a vector");
        assert_eq!(again, file);
    }
}

#[test]
fn a_damaged_or_foreign_session_is_refused() {
    let cpu = device();
    let mut session = open(&cpu);
    session.prefill(&Random(12).tokens(20, VOCABULARY)).expect("fits");
    let mut file = Vec::new();
    session.save(&mut file).expect("a vector");
    let refused = |cpu: &Cpu, file: &[u8]| {
        let mut session = open(cpu);
        session.prefill(&[1]).expect("fits");
        let error = session.restore(&mut &file[..]).expect_err("must be refused");
        assert_eq!(session.position(), 0);
        error.to_string()
    };
    for length in (0..file.len()).step_by(7) {
        refused(&cpu, &file[..length]);
    }
    for at in (0..file.len()).step_by(13).chain(0..80) {
        let mut damaged = file.clone();
        damaged[at] ^= 0x81;
        refused(&cpu, &damaged);
    }
    assert!(refused(&cpu, &[&file[..], &[0]].concat()).contains("checksum"));
    let other = Model::new(&Config { seed: 2, ..Config::default() }).load();
    let other = Cpu::new(Arc::clone(&other)).expect("a device");
    assert!(refused(&other, &file).contains("another program"));
    let options = SessionOptions { max_context: Some(10), prefill_chunk: None };
    let mut short = Session::new(&cpu, options).expect("small");
    let error = short.restore(&mut file.as_slice()).expect_err("too long").to_string();
    assert!(error.contains("20 tokens") && error.contains("context of 10"), "{error}");
}
