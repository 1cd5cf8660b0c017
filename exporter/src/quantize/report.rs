//! What quantization costs: bits, signal-to-noise ratio and largest error per weight.

use std::fmt::Write as _;

use gemma4_format::Encoding;
use serde::Serialize;

/// Difference between values and what their codes decode to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    /// Sum of squares of the values.
    pub signal: f64,
    /// Sum of squares of the differences.
    pub noise: f64,
    /// Largest difference.
    pub max_error: f32,
}

impl Loss {
    /// Of a group of values and their codes: a code decodes to `(code − zero) · scale`.
    pub fn of_codes(values: &[f32], codes: &[u8], zero: f32, scale: f32) -> Self {
        // Eight sums at a time, so that the compiler can use vectors.
        let (mut signal, mut noise, mut worst) = ([0f32; 8], [0f32; 8], [0f32; 8]);
        for (values, codes) in values.chunks(8).zip(codes.chunks(8)) {
            for (at, (value, code)) in values.iter().zip(codes).enumerate() {
                let error = (value - (f32::from(*code) - zero) * scale).abs();
                signal[at] += value * value;
                noise[at] += error * error;
                worst[at] = if error > worst[at] { error } else { worst[at] };
            }
        }
        let sum = |sums: [f32; 8]| sums.into_iter().map(f64::from).sum();
        let max_error = worst.into_iter().fold(0.0, f32::max);
        Self { signal: sum(signal), noise: sum(noise), max_error }
    }

    /// Joins the losses of two sets of values.
    pub fn add(&mut self, other: &Self) {
        self.signal += other.signal;
        self.noise += other.noise;
        self.max_error = self.max_error.max(other.max_error);
    }

    /// Signal-to-noise ratio in decibels, or `None` if nothing was lost.
    pub fn snr_db(&self) -> Option<f64> {
        (self.noise > 0.0).then(|| 10.0 * (self.signal / self.noise).log10())
    }
}

/// What became of one weight.
#[derive(Clone, Debug, Serialize)]
pub struct TensorReport {
    /// Canonical name.
    pub name: String,
    /// Extents.
    pub dims: Vec<u32>,
    /// [`Encoding::describe`].
    pub encoding: String,
    /// Stored bytes.
    pub bytes: u64,
    /// Stored bits per number.
    pub bits_per_weight: f64,
    /// Signal-to-noise ratio in decibels; absent if the weight is stored exactly.
    pub snr_db: Option<f64>,
    /// Largest difference; absent if the weight was not quantized.
    pub max_error: Option<f32>,
}

impl TensorReport {
    /// Of a weight that was stored in `encoding`, with that loss if it was quantized.
    pub fn new(name: &str, dims: &[u32], encoding: Encoding, loss: Option<&Loss>) -> Self {
        Self {
            name: name.to_owned(),
            dims: dims.to_vec(),
            encoding: encoding.describe(),
            bytes: encoding.bytes(dims).unwrap_or(0),
            bits_per_weight: encoding.bits_per_weight(dims).unwrap_or(0.0),
            snr_db: loss.and_then(Loss::snr_db),
            max_error: loss.map(|loss| loss.max_error),
        }
    }

    fn elements(&self) -> f64 {
        self.dims.iter().map(|d| f64::from(*d)).product()
    }
}

/// A table for people: a line per quantized weight, and the sum of all.
pub fn table(reports: &[TensorReport]) -> String {
    let quantized: Vec<_> = reports.iter().filter(|r| r.max_error.is_some()).collect();
    let width = |text: fn(&TensorReport) -> usize, least: usize| {
        quantized.iter().map(|r| text(r)).max().unwrap_or(0).max(least)
    };
    let name = width(|r| r.name.len(), 6);
    let encoding = width(|r| r.encoding.len(), 8);
    let mut out = String::new();
    let mut line = |text: std::fmt::Arguments<'_>| {
        // Writing to a string never fails.
        let _ = out.write_fmt(format_args!("{text}\n"));
    };
    line(format_args!(
        "{:name$}  {:>16}  {:encoding$}  {:>6}  {:>6}  {:>9}",
        "weight", "dims", "encoding", "bits", "SNR dB", "max error"
    ));
    for report in &quantized {
        let dims: Vec<_> = report.dims.iter().map(u32::to_string).collect();
        let snr = report.snr_db.map_or("exact".to_owned(), |snr| format!("{snr:.2}"));
        line(format_args!(
            "{:name$}  {:>16}  {:encoding$}  {:>6.3}  {snr:>6}  {:>9.6}",
            report.name,
            dims.join("x"),
            report.encoding,
            report.bits_per_weight,
            report.max_error.unwrap_or(0.0),
        ));
    }
    let bytes: u64 = reports.iter().map(|r| r.bytes).sum();
    let elements: f64 = reports.iter().map(TensorReport::elements).sum();
    line(format_args!(
        "{} weights quantized, {} kept; {:.1} MB, {:.3} bits per weight",
        quantized.len(),
        reports.len() - quantized.len(),
        bytes as f64 / 1e6,
        bytes as f64 * 8.0 / elements,
    ));
    out
}

/// The same for programs: a JSON object with `recipe`, `bytes`, `bits_per_weight`, `weights`.
pub fn json(recipe: &str, reports: &[TensorReport]) -> String {
    let bytes: u64 = reports.iter().map(|r| r.bytes).sum();
    let elements: f64 = reports.iter().map(TensorReport::elements).sum();
    let report = serde_json::json!({
        "recipe": recipe,
        "bytes": bytes,
        "bits_per_weight": bytes as f64 * 8.0 / elements,
        "weights": reports,
    });
    format!("{report:#}\n")
}
