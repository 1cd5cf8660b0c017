//! What an execution computed, and how far two are apart.

use serde::Serialize;

/// What one execution computed for the prompt.
#[derive(Clone, Debug)]
pub struct Run {
    /// Logits of the last token, `[V]`.
    pub logits: Vec<f32>,
    /// Labels and numbers of the residual stream, in order: `embed`, `layers.0`, …, and of the last
    /// row `norm`. Empty where a device does not show them.
    pub hidden: Vec<(String, Vec<f32>)>,
}

impl Run {
    /// The most probable tokens with their probabilities, the most probable first.
    pub fn top(&self, count: usize) -> Vec<(u32, f64)> {
        let probabilities = log_probabilities(&self.logits);
        let mut ids: Vec<u32> = (0..self.logits.len() as u32).collect();
        ids.sort_by(|a, b| {
            let of = |id: &u32| self.logits[*id as usize];
            of(b).total_cmp(&of(a)).then(a.cmp(b))
        });
        ids.truncate(count);
        ids.into_iter().map(|id| (id, probabilities[id as usize].exp())).collect()
    }
}

/// How far two executions may be apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// [`Difference::divergence`].
    pub divergence: f64,
    /// [`Difference::logit`].
    pub logit: f32,
    /// Largest of [`Difference::hidden`].
    pub hidden: f64,
}

/// How far a later execution is from an earlier one.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    /// Kullback–Leibler divergence `Σ p ln(p / q)` of the next token's distributions, `p` of the
    /// earlier.
    pub divergence: f64,
    /// Largest difference of a logit.
    pub logit: f32,
    /// For each label that both show: the norm of the difference by that of the earlier numbers.
    pub hidden: Vec<(String, f64)>,
}

impl Difference {
    /// Of `later` from `earlier`.
    pub fn between(earlier: &Run, later: &Run) -> Self {
        let (p, q) = (log_probabilities(&earlier.logits), log_probabilities(&later.logits));
        let divergence = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum();
        let logit = match earlier.logits.len() == later.logits.len() {
            true => largest(&earlier.logits, &later.logits),
            false => f32::INFINITY,
        };
        let hidden = earlier.hidden.iter().filter_map(|(label, numbers)| {
            let (_, other) = later.hidden.iter().find(|(other, _)| other == label)?;
            Some((label.clone(), relative(numbers, other)))
        });
        Self { divergence, logit, hidden: hidden.collect() }
    }

    /// Why it is beyond the bound, with the first layer that is; `None` if it is within.
    pub fn parting(&self, bound: &Bound) -> Option<String> {
        // What is no number is beyond every bound.
        let beyond = |value: f64, most: f64| value.is_nan() || value > most;
        let first = self.hidden.iter().find(|(_, value)| beyond(*value, bound.hidden));
        let logits = beyond(self.divergence, bound.divergence)
            || beyond(f64::from(self.logit), f64::from(bound.logit));
        match first {
            Some((label, value)) => Some(format!(
                "the first to differ is `{label}`, by {value:.1e} of its size, more than {:.0e}",
                bound.hidden
            )),
            None if logits => Some(format!(
                "logits differ by {:.1e} (at most {:.0e}) and in KL {:.1e} (at most {:.0e}); {}",
                self.logit,
                bound.logit,
                self.divergence,
                bound.divergence,
                self.beginning(bound)
            )),
            None => None,
        }
    }
}

impl Difference {
    /// Where a difference of logits begins that no layer shows.
    fn beginning(&self, bound: &Bound) -> String {
        let steps = self.hidden.windows(2).map(|two| (&two[1].0, two[1].1 - two[0].1));
        match steps.max_by(|a, b| a.1.total_cmp(&b.1)) {
            None => "layers are not shown here".to_owned(),
            // Of executions that should be the same.
            Some(_) if bound.hidden < 0.1 => "no layer does, so it is the head".to_owned(),
            Some((label, step)) => format!("the largest step, {step:.2}, is at `{label}`"),
        }
    }
}

fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shifted = logits.iter().map(|logit| f64::from(*logit) - f64::from(largest));
    let sum: f64 = shifted.clone().map(f64::exp).sum();
    shifted.map(|logit| logit - sum.ln()).collect()
}

fn largest(a: &[f32], b: &[f32]) -> f32 {
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    // `max` would lose what is no number.
    differences.fold(0.0, |most, d| if d > most || d.is_nan() { d } else { most })
}

fn relative(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return f64::INFINITY;
    }
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let size = squares(&mut a.iter().map(|a| f64::from(*a)));
    let difference = squares(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    if difference == 0.0 { 0.0 } else { (difference / size).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(logits: &[f32], layers: &[f32]) -> Run {
        let hidden = layers.iter().enumerate();
        let hidden = hidden.map(|(at, value)| (format!("layers.{at}"), vec![*value; 4])).collect();
        Run { logits: logits.to_vec(), hidden }
    }

    #[test]
    fn divergence_and_largest_difference_are_those_of_the_definition() {
        let (a, b) = (run(&[0.0, 0.0], &[]), run(&[0.0, 3.0f32.ln()], &[]));
        let difference = Difference::between(&a, &b);
        // Halves against a quarter and three quarters.
        let expected = 0.5 * (2.0f64.ln() + (2.0f64 / 3.0).ln());
        assert!((difference.divergence - expected).abs() < 1e-6);
        assert_eq!(difference.logit, 3.0f32.ln());
        assert_eq!(b.top(1)[0].0, 1);
        assert!((b.top(2)[1].1 - 0.25).abs() < 1e-6);
    }

    #[test]
    fn the_first_layer_beyond_the_bound_is_named() {
        let bound = Bound { divergence: 1e-4, logit: 1e-3, hidden: 1e-3 };
        let a = run(&[1.0, 2.0], &[1.0, 2.0, 4.0]);
        let why = |b: &Run| Difference::between(&a, b).parting(&bound);
        assert_eq!(why(&a), None);
        assert!(why(&run(&[1.0, 2.0], &[1.0, 2.1, 5.0])).unwrap().contains("`layers.1`"));
        assert!(why(&run(&[1.0, 2.0], &[1.0, f32::NAN, 4.0])).unwrap().contains("`layers.1`"));
        assert!(why(&run(&[1.0, 2.5], &[1.0, 2.0, 4.0])).unwrap().contains("it is the head"));
        assert!(why(&run(&[f32::NAN, 2.0], &[1.0, 2.0, 4.0])).unwrap().contains("the head"));
        assert!(why(&run(&[1.0], &[1.0, 2.0, 4.0])).is_some());
    }
}
