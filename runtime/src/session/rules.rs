//! What may be changed about logits before a token is drawn, and what is told about them.

use std::collections::BTreeSet;

use crate::{Error, Result, Sampling, sampler};

/// Most alternatives that are reported for a token.
pub const MAX_LOGPROBS: u32 = 100;

/// Rules for drawing that need the logits on the host: on a GPU each token then costs a copy of
/// its row of logits and a decode step that waits for the host.
///
/// They apply in this order: penalty, bias, then temperature, top-k, top-p, min-p.
#[derive(Clone, Debug, PartialEq)]
pub struct LogitRules {
    /// Tokens less probable than this share of the most probable one are not drawn, in `[0, 1]`;
    /// 0 for no such rule. Nguyen et al.: Turning Up the Heat: Min-p Sampling (2024).
    pub min_p: f32,
    /// Divides the positive logits, and multiplies the negative ones, of all tokens that are in
    /// the context; 1 for no such rule. Keskar et al.: CTRL (2019).
    pub repetition_penalty: f32,
    /// What is added to the logits of single tokens; −∞ forbids one.
    pub bias: Vec<(u32, f32)>,
    /// Report the drawn token's log-probability and those of so many most probable ones.
    pub logprobs: Option<u32>,
}

impl Default for LogitRules {
    fn default() -> Self {
        Self { min_p: 0.0, repetition_penalty: 1.0, bias: Vec::new(), logprobs: None }
    }
}

impl LogitRules {
    /// Fails if a rule is outside its range or names a token outside the vocabulary.
    pub fn check(&self, vocabulary: u32) -> Result<()> {
        let refused = |name, value, wanted| Err(Error::Sampling { name, value, wanted });
        if !(0.0..=1.0).contains(&self.min_p) {
            return refused("min_p", self.min_p, "between 0 and 1");
        }
        let penalty = self.repetition_penalty;
        if !(penalty.is_finite() && penalty > 0.0) {
            return refused("repetition_penalty", penalty, "a positive number");
        }
        for (token, bias) in &self.bias {
            if *token >= vocabulary {
                return Err(Error::Token { token: *token, vocabulary });
            }
            if bias.is_nan() || *bias == f32::INFINITY {
                return refused("logit_bias", *bias, "a number or -inf");
            }
        }
        match self.logprobs {
            Some(count) if count > MAX_LOGPROBS => {
                refused("logprobs", count as f32, "between 0 and 100")
            }
            _ => Ok(()),
        }
    }

    /// Whether tokens may be drawn, and stay, on the device.
    pub fn is_neutral(&self) -> bool {
        *self == Self::default()
    }
}

/// Log-probabilities of one drawn token: natural logarithms of what the model itself says, before
/// penalty, bias and temperature.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// That of the drawn token.
    pub drawn: f32,
    /// The most probable tokens, most probable first, the lower id first among equals.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    fn new(logits: &[f32], token: u32, count: u32) -> Self {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exp = |logit: &f32| (f64::from(*logit) - f64::from(largest)).exp();
        let total: f64 = logits.iter().filter(|logit| !logit.is_nan()).map(exp).sum();
        let log = |logit: f32| (f64::from(logit) - f64::from(largest) - total.ln()) as f32;
        let drawn = logits.get(token as usize).map_or(f32::NEG_INFINITY, |logit| log(*logit));
        let top = sampler::most_probable(logits, count as usize);
        Self { drawn, top: top.into_iter().map(|(id, logit)| (id, log(logit))).collect() }
    }
}

/// Draws tokens on the host.
#[derive(Debug)]
pub(super) struct HostDraws {
    sampling: Sampling,
    rules: LogitRules,
    suppressed: Vec<u32>,
    /// Tokens in the context, for the penalty.
    seen: BTreeSet<u32>,
}

impl HostDraws {
    pub(super) fn new(
        sampling: Sampling,
        rules: LogitRules,
        suppressed: Vec<u32>,
        context: &[u32],
    ) -> Self {
        let seen = match rules.repetition_penalty {
            1.0 => BTreeSet::new(),
            _ => context.iter().copied().collect(),
        };
        Self { sampling, rules, suppressed, seen }
    }

    /// Draws the token of position `position`; with its log-probabilities if they are wanted.
    pub(super) fn draw(&mut self, logits: Vec<f32>, position: u32) -> (u32, Option<Logprobs>) {
        let mut changed = logits.clone();
        let LogitRules { min_p, repetition_penalty: penalty, bias, logprobs } = &self.rules;
        for id in &self.seen {
            if let Some(logit) = changed.get_mut(*id as usize) {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
        for (id, bias) in bias {
            if let Some(logit) = changed.get_mut(*id as usize) {
                *logit += bias;
            }
        }
        suppress(&mut changed, &self.suppressed);
        let token = sampler::sample_min_p(&changed, position, &self.sampling, *min_p);
        if *penalty != 1.0 {
            self.seen.insert(token);
        }
        (token, logprobs.map(|count| Logprobs::new(&logits, token, count)))
    }
}

/// Makes tokens impossible.
pub(super) fn suppress(logits: &mut [f32], ids: &[u32]) {
    for id in ids {
        if let Some(logit) = logits.get_mut(*id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// At temperature 0 the token is that of the largest logit by the definition of the rules,
        /// in float64; logits that rounding may exchange are left out.
        #[test]
        fn penalty_bias_and_suppression_follow_their_definition(
            logits in proptest::collection::vec(-8.0f32..8.0, 2..60),
            penalty in 0.5f32..2.0,
            bias in proptest::collection::vec((0u32..60, -4.0f32..4.0), 0..6),
            suppressed in proptest::collection::vec(0u32..60, 0..6),
            context in proptest::collection::vec(0u32..60, 0..20),
            seed in any::<u64>(),
        ) {
            let count = logits.len() as u32;
            let bias: Vec<_> = bias.into_iter().filter(|(id, _)| *id < count).collect();
            let changed = |id: u32| {
                let mut logit = f64::from(logits[id as usize]);
                if context.contains(&id) {
                    let by = f64::from(penalty);
                    logit = if logit > 0.0 { logit / by } else { logit * by };
                }
                logit + bias.iter().filter(|(at, _)| *at == id).map(|(_, b)| f64::from(*b)).sum::<f64>()
            };
            let mut order: Vec<u32> = (0..count).filter(|id| !suppressed.contains(id)).collect();
            prop_assume!(!order.is_empty());
            order.sort_by(|a, b| changed(*b).total_cmp(&changed(*a)).then(a.cmp(b)));
            let clear = order.len() < 2 || changed(order[0]) - changed(order[1]) > 1e-4;
            prop_assume!(clear);
            let rules = LogitRules {
                repetition_penalty: penalty,
                bias: bias.clone(),
                logprobs: Some(1),
                ..LogitRules::default()
            };
            let sampling = Sampling { seed, ..Sampling::GREEDY };
            let mut draws = HostDraws::new(sampling, rules, suppressed.clone(), &context);
            let (token, told) = draws.draw(logits.clone(), 3);
            prop_assert_eq!(token, order[0]);
            // What is told is the model's own.
            let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
            let wanted = f64::from(logits[token as usize]) - total.ln();
            prop_assert!((f64::from(told.unwrap().drawn) - wanted).abs() < 1e-5);
        }
    }
}
