//! Drawing a token from logits, as [`gemma4_format::Op::Sample`] says.

use std::cmp::Ordering;

use gemma4_format::TextDefaults;

use crate::{Error, Result};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most probable token.
    pub temperature: f32,
    /// How many of the most probable tokens may be drawn; 0 for all.
    pub top_k: u32,
    /// Probability mass that may be drawn from, in `(0, 1]`.
    pub top_p: f32,
    /// Key of the random numbers: the same seed draws the same tokens.
    pub seed: u64,
}

impl Sampling {
    /// Always the most probable token, the lowest id among equals.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };

    /// What the checkpoint recommends.
    pub fn recommended(defaults: &TextDefaults, seed: u64) -> Self {
        let TextDefaults { temperature, top_k, top_p, .. } = *defaults;
        Self { temperature, top_k, top_p, seed }
    }

    /// Fails if a parameter is outside its range.
    pub fn check(&self) -> Result<()> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            let (name, value) = ("temperature", self.temperature);
            return Err(Error::Sampling { name, value, wanted: "0 or a positive number" });
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            let (name, value) = ("top_p", self.top_p);
            return Err(Error::Sampling { name, value, wanted: "above 0 and at most 1" });
        }
        Ok(())
    }

    /// The seed as the two words of a program's input `seed`, low word first.
    pub fn seed_words(&self) -> [u32; 2] {
        [self.seed as u32, (self.seed >> 32) as u32]
    }

    /// The parameters that the inputs of a program's method stand for.
    pub(crate) fn from_inputs(temperature: f32, top_k: u32, top_p: f32, seed: [u32; 2]) -> Self {
        let seed = u64::from(seed[1]) << 32 | u64::from(seed[0]);
        Self { temperature, top_k, top_p, seed }
    }
}

/// One block of Philox 4x32-10.
///
/// Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
pub fn philox(mut key: [u32; 2], mut counter: [u32; 4]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// The uniform number, in the open interval (0, 1), with which the token at `position` is drawn:
/// the first two words of a block, the second one above the first, of which a double holds 52 bits.
pub fn uniform(seed: [u32; 2], position: u32) -> f64 {
    let [low, high, ..] = philox(seed, [position, 0, 0, 0]);
    let bits = u64::from(high) << 20 | u64::from(low >> 12);
    (bits as f64 + 0.5) / (1u64 << 52) as f64
}

/// Index of the largest logit, the lowest among equals. NaN is never chosen.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, logit) in logits.iter().enumerate() {
        if *logit > best.1 {
            best = (id, *logit);
        }
    }
    best.0 as u32
}

/// A token that may be drawn, with its probability times some common factor.
#[derive(Clone, Copy)]
struct Candidate {
    logit: f32,
    id: u32,
    weight: f64,
}

/// Most probable first, the lower id first among equals.
fn order(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// Draws the token of position `position`.
///
/// A temperature so small that the largest logit divided by it overflows counts as 0. Logits of
/// −∞ and NaN are never drawn while there is another one.
pub fn sample(logits: &[f32], position: u32, sampling: &Sampling) -> u32 {
    sample_min_p(logits, position, sampling, 0.0)
}

/// As [`sample`], never drawing a token whose probability at this temperature is below the share
/// `min_p` of the most probable one's.
pub fn sample_min_p(logits: &[f32], position: u32, sampling: &Sampling, min_p: f32) -> u32 {
    let best = argmax(logits);
    let largest = logits.get(best as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let temperature = sampling.temperature;
    if temperature == 0.0 || !(largest / temperature).is_finite() {
        return best;
    }
    let mut candidates = top_k(logits, sampling.top_k as usize);
    for candidate in &mut candidates {
        let below = f64::from(candidate.logit) - f64::from(largest);
        candidate.weight = (below / f64::from(temperature)).exp();
    }
    if sampling.top_p < 1.0 {
        top_p(&mut candidates, f64::from(sampling.top_p));
    }
    // Weights are relative to the most probable token's, which is 1.
    candidates.retain(|candidate| candidate.weight >= f64::from(min_p));
    candidates.sort_unstable_by_key(|candidate| candidate.id);
    let total: f64 = candidates.iter().map(|c| c.weight).sum();
    let mut left = uniform(sampling.seed_words(), position) * total;
    for candidate in &candidates {
        left -= candidate.weight;
        if left < 0.0 {
            return candidate.id;
        }
    }
    // Rounding may leave a remainder after the last one.
    candidates.iter().rfind(|c| c.weight > 0.0).map_or(best, |c| c.id)
}

/// The `k` first candidates in [`order`], or all for 0, in no particular order.
fn top_k(logits: &[f32], k: usize) -> Vec<Candidate> {
    let k = if k == 0 { logits.len() } else { k.min(logits.len()) };
    let mut kept: Vec<Candidate> = Vec::new();
    let mut threshold = f32::NEG_INFINITY;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > threshold {
            kept.push(Candidate { logit: *logit, id: id as u32, weight: 0.0 });
            // Later ids need more than the k-th logit so far: among equals the lower id stays.
            if kept.len() >= k.saturating_mul(2).max(64) {
                kept.select_nth_unstable_by(k - 1, order);
                kept.truncate(k);
                threshold = kept[k - 1].logit;
            }
        }
    }
    if kept.len() > k {
        kept.select_nth_unstable_by(k - 1, order);
        kept.truncate(k);
    }
    kept
}

/// The `k` largest logits with their ids, largest first, the lower id first among equals; fewer
/// where others are −∞ or NaN.
pub fn most_probable(logits: &[f32], k: usize) -> Vec<(u32, f32)> {
    if k == 0 {
        return Vec::new();
    }
    let mut candidates = top_k(logits, k);
    candidates.sort_unstable_by(order);
    candidates.into_iter().map(|candidate| (candidate.id, candidate.logit)).collect()
}

/// Keeps the shortest prefix in [`order`] that holds at least the share `p` of all weights.
fn top_p(candidates: &mut Vec<Candidate>, p: f64) {
    let enough = p * candidates.iter().map(|c| c.weight).sum::<f64>();
    let mut sorted = 0;
    let mut mass = 0.0;
    while sorted < candidates.len() {
        // Few of a large vocabulary make up the mass, so the order is found piece by piece.
        let piece = candidates.len().min(sorted * 4 + 256);
        let rest = &mut candidates[sorted..];
        if piece < sorted + rest.len() {
            rest.select_nth_unstable_by(piece - sorted, order);
        }
        candidates[sorted..piece].sort_unstable_by(order);
        for at in sorted..piece {
            mass += candidates[at].weight;
            if mass >= enough {
                candidates.truncate(at + 1);
                return;
            }
        }
        sorted = piece;
    }
}

#[cfg(test)]
mod tests;
