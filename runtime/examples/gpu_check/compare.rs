//! How far logits are from others.

use anyhow::ensure;
use gemma4_runtime::sampler::argmax;

/// Distance between the two largest logits above which nothing may choose another token.
const DECISIVE: f32 = 0.5;

/// How far logits may be from float32.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bound {
    /// Of any logit.
    pub(crate) max: f32,
    /// Of all logits on average.
    pub(crate) mean: f64,
    /// Mean Kullback–Leibler divergence of a row, in nats.
    pub(crate) kl: f64,
}

impl Bound {
    /// The wider of two.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            max: self.max.max(other.max),
            mean: self.mean.max(other.mean),
            kl: self.kl.max(other.kl),
        }
    }
}

/// Distances of rows of logits from float32.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Difference {
    max: f32,
    sum: f64,
    logits: usize,
    kl: f64,
    rows: u32,
    /// Rows whose largest logit is another one although it was decisive.
    wrong: u32,
    /// Rows with a logit that is not a number.
    broken: u32,
}

impl Difference {
    /// Between rows.
    pub(crate) fn of<'a>(rows: impl IntoIterator<Item = (&'a [f32], &'a [f32])>) -> Self {
        let mut difference = Self::default();
        for (truth, row) in rows {
            difference.add(truth, row);
        }
        difference
    }

    /// Adds a row and what it is in float32.
    pub(crate) fn add(&mut self, truth: &[f32], row: &[f32]) {
        self.rows += 1;
        self.broken += u32::from(truth.len() != row.len() || row.iter().any(|x| !x.is_finite()));
        for (a, b) in truth.iter().zip(row) {
            self.max = self.max.max((a - b).abs());
            self.sum += f64::from((a - b).abs());
        }
        self.logits += row.len();
        self.kl += divergence(truth, row);
        let (best, margin) = decision(truth);
        self.wrong += u32::from(margin > DECISIVE && argmax(row) != best);
    }

    /// Mean distance of a logit.
    pub(crate) fn mean(&self) -> f64 {
        self.sum / self.logits.max(1) as f64
    }

    /// Mean Kullback–Leibler divergence from float32, in nats.
    pub(crate) fn kl(&self) -> f64 {
        self.kl / f64::from(self.rows.max(1))
    }

    /// The distances, or an error if they are beyond a bound.
    pub(crate) fn within(&self, bound: Bound) -> anyhow::Result<String> {
        let Self { max, rows, wrong, broken, .. } = *self;
        let found = format!(
            "max {max:.4} of {:.4}, mean {:.5} of {:.5}, KL {:.2e} of {:.2e}, {rows} rows",
            bound.max,
            self.mean(),
            bound.mean,
            self.kl(),
            bound.kl
        );
        ensure!(broken == 0, "{broken} rows hold logits that are no numbers; {found}");
        let near = max <= bound.max && self.mean() <= bound.mean;
        ensure!(near && self.kl() <= bound.kl, "too far: {found}");
        ensure!(wrong == 0, "{wrong} rows choose another token than a decisive one; {found}");
        Ok(found)
    }
}

/// The largest logit and its distance to the second.
pub(crate) fn decision(logits: &[f32]) -> (u32, f32) {
    let best = argmax(logits);
    let others = logits.iter().enumerate().filter(|(id, _)| *id != best as usize);
    let second = others.map(|(_, x)| *x).fold(f32::NEG_INFINITY, f32::max);
    (best, logits[best as usize] - second)
}

/// Whether two rows are the same numbers, bit for bit.
pub(crate) fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Kullback–Leibler divergence of `b` from `a`, in nats.
pub(crate) fn divergence(a: &[f32], b: &[f32]) -> f64 {
    let (a, b) = (log_softmax(a), log_softmax(b));
    a.iter().zip(&b).map(|(a, b)| a.exp() * (a - b)).sum()
}

/// Natural logarithms of the probabilities.
pub(crate) fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let largest = f64::from(logits[argmax(logits) as usize]);
    let sum: f64 = logits.iter().map(|x| (f64::from(*x) - largest).exp()).sum();
    logits.iter().map(|x| f64::from(*x) - largest - sum.ln()).collect()
}
