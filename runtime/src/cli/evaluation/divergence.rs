//! Kullback-Leibler divergence from another implementation's distributions.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use super::tensors::{File, floats, ids};
use super::{Place, log_softmax, rows};
use crate::cli::Usage;
use crate::sampler::argmax;

#[derive(Args, Debug)]
pub(super) struct Arguments {
    #[command(flatten)]
    place: Place,
    /// safetensors file with `logits`, and `ids` unless --ids is given
    #[arg(long, value_name = "FILE")]
    reference: PathBuf,
    /// Token ids, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "A,B,…")]
    ids: Vec<u32>,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<Value> {
    let path = arguments.reference.display();
    let file = File::read(&arguments.reference)?;
    let refused = |why: String| Usage(format!("`{path}`: {why}"));
    let tensors = file.tensors().map_err(|error| refused(error.to_string()))?;
    let logits = tensors.tensor("logits").map_err(|error| refused(error.to_string()))?;
    let given = match tensors.tensor("ids") {
        _ if !arguments.ids.is_empty() => arguments.ids.clone(),
        Ok(tensor) => ids(&tensor)?,
        Err(_) => return Err(refused("no tensor `ids`; give them with --ids".to_owned()).into()),
    };
    let device = arguments.place.open()?;
    let vocabulary = device.device().program().program().vocab_size as usize;
    let (count, width) = match *logits.shape() {
        [count, width] => (count, width),
        [width] => (1, width),
        _ => (0, 0),
    };
    if width != vocabulary || count == 0 || count > given.len() {
        let why = format!(
            "`logits` has shape {:?}, which is not up to {} rows of {vocabulary} tokens",
            logits.shape(),
            given.len()
        );
        return Err(refused(why).into());
    }
    let reference = floats(&logits)?;
    let mut session = arguments.place.session(&device)?;
    let mut distances = Distances::default();
    let mut theirs = reference.chunks_exact(width);
    rows(&mut session, &given, given.len() - count + 1, |ours| {
        distances.add(theirs.next().unwrap_or_default(), &ours);
    })?;
    Ok(distances.report())
}

/// How far apart two implementations are, row by row.
#[derive(Debug, Default)]
pub(super) struct Distances {
    /// In nats.
    divergences: Vec<f64>,
    agreed: usize,
    largest: f64,
    total: f64,
    logits: usize,
}

impl Distances {
    /// Compares one row of logits with the reference's.
    pub(super) fn add(&mut self, theirs: &[f32], ours: &[f32]) {
        let (p, q) = (log_softmax(theirs), log_softmax(ours));
        // A term with probability 0 counts nothing, whatever its logarithm.
        let term = |(p, q): (&f64, &f64)| if p.exp() > 0.0 { p.exp() * (p - q) } else { 0.0 };
        self.divergences.push(p.iter().zip(&q).map(term).sum());
        self.agreed += usize::from(argmax(theirs) == argmax(ours));
        for (theirs, ours) in theirs.iter().zip(ours) {
            let distance = f64::from((theirs - ours).abs());
            self.largest = self.largest.max(distance);
            self.total += distance;
            self.logits += 1;
        }
    }

    /// The largest difference of two logits.
    pub(super) fn largest(&self) -> f64 {
        self.largest
    }

    /// Mean and tail of the divergences, and how often the most probable tokens agree.
    pub(super) fn report(&self) -> Value {
        let mut sorted = self.divergences.clone();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len().max(1);
        // The smallest value that this share of all does not exceed.
        let tail = |share: f64| {
            let rank = (share * count as f64).ceil() as usize;
            sorted.get(rank.clamp(1, count) - 1).copied().unwrap_or_default()
        };
        json!({
            "rows": self.divergences.len(),
            "mean_kl": self.divergences.iter().sum::<f64>() / count as f64,
            "median_kl": tail(0.5),
            "p90_kl": tail(0.9),
            "p99_kl": tail(0.99),
            "max_kl": tail(1.0),
            "top1_agreement": self.agreed as f64 / count as f64,
            "max_logit_difference": self.largest,
            "mean_logit_difference": self.total / self.logits.max(1) as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Distances;

    #[test]
    fn divergences_are_those_of_the_definition() {
        let logits = |p: [f64; 3]| p.map(|p| (p.ln() + 5.0) as f32);
        let (p, q) = ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]);
        let mut distances = Distances::default();
        distances.add(&logits(p), &logits(q));
        distances.add(&logits(p), &logits(p));
        let report = distances.report();
        let expected = 0.5 * 2f64.ln() - 0.25 * 2f64.ln();
        let near = |name: &str, value: f64| {
            let found = report[name].as_f64().expect(name);
            assert!((found - value).abs() < 1e-6, "{name}: {found} is not {value}");
        };
        near("mean_kl", expected / 2.0);
        near("max_kl", expected);
        near("median_kl", 0.0);
        near("top1_agreement", 0.5);
        near("max_logit_difference", 2f64.ln());
    }

    #[test]
    fn impossible_tokens_of_the_reference_count_nothing() {
        let mut distances = Distances::default();
        distances.add(&[0.0, f32::NEG_INFINITY], &[0.0, -700.0]);
        assert_eq!(distances.report()["mean_kl"].as_f64(), Some(0.0));
    }
}
