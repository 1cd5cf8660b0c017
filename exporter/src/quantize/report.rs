//! What quantization costs: bits, signal-to-noise ratio and largest error, per weight and per class.

use gemma4_format::Encoding;
use serde::Serialize;

use super::lanes::{LANES, blocks, total};
use super::{EMBEDDING, HEAD};

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
        let (mut signal, mut noise, mut worst) = ([0.0; LANES], [0.0; LANES], [0f32; LANES]);
        blocks(values, |at, values| {
            let lanes = signal.iter_mut().zip(&mut noise).zip(&mut worst);
            for ((value, code), ((signal, noise), worst)) in
                values.iter().zip(&codes[at..]).zip(lanes)
            {
                let error = (value - (f32::from(*code) - zero) * scale).abs();
                *signal += value * value;
                *noise += error * error;
                *worst = if error > *worst { error } else { *worst };
            }
        });
        let max_error = worst.into_iter().fold(0.0, f32::max);
        Self { signal: total(signal).into(), noise: total(noise).into(), max_error }
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
    #[serde(skip)]
    loss: Option<Loss>,
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
            loss: loss.copied(),
        }
    }

    fn elements(&self) -> f64 {
        self.dims.iter().map(|d| f64::from(*d)).product()
    }
}

/// Name of a class, and what the names of its weights end in.
const CLASSES: [(&str, &str); 9] = [
    ("q", "q_proj.weight"),
    ("k", "k_proj.weight"),
    ("v", "v_proj.weight"),
    ("o", "o_proj.weight"),
    ("gate", "gate_proj.weight"),
    ("up", "up_proj.weight"),
    ("down", "down_proj.weight"),
    ("embedding", EMBEDDING),
    ("head", HEAD),
];

/// What became of the weights of one kind in all layers.
#[derive(Clone, Debug, Serialize)]
pub struct ClassReport {
    /// `q`, `k`, `v`, `o`, `gate`, `up`, `down`, `embedding` or `head`; `other` for norms and
    /// scalars.
    pub class: &'static str,
    /// How many.
    pub weights: usize,
    /// Stored bytes of all.
    pub bytes: u64,
    /// Stored bits per number.
    pub bits_per_weight: f64,
    /// Signal-to-noise ratio in decibels of all together; absent if they are stored exactly.
    pub snr_db: Option<f64>,
    /// Largest difference; absent if none was quantized.
    pub max_error: Option<f32>,
}

/// One report for each class that has weights.
pub fn classes(reports: &[TensorReport]) -> Vec<ClassReport> {
    let class_of = |report: &TensorReport| {
        let found = CLASSES.iter().find(|(_, end)| report.name.ends_with(end));
        found.map_or("other", |(class, _)| *class)
    };
    let all = CLASSES.iter().map(|(class, _)| *class).chain(["other"]);
    let class = |class| {
        let members: Vec<_> = reports.iter().filter(|r| class_of(r) == class).collect();
        let mut loss: Option<Loss> = None;
        for one in members.iter().filter_map(|member| member.loss.as_ref()) {
            loss.get_or_insert_default().add(one);
        }
        let (bytes, bits_per_weight) = size(&members);
        (!members.is_empty()).then(|| ClassReport {
            class,
            weights: members.len(),
            bytes,
            bits_per_weight,
            snr_db: loss.as_ref().and_then(Loss::snr_db),
            max_error: loss.map(|loss| loss.max_error),
        })
    };
    all.filter_map(class).collect()
}

/// Bytes of all, and bits per number.
fn size(reports: &[&TensorReport]) -> (u64, f64) {
    let bytes = reports.iter().map(|r| r.bytes).sum();
    let elements: f64 = reports.iter().map(|r| r.elements()).sum();
    (bytes, bytes as f64 * 8.0 / elements)
}

/// A table for people: a line for each class, and the sum of all.
pub fn summary(reports: &[TensorReport]) -> String {
    let mut out = format!(
        "{:9}  {:>7}  {:>9}  {:>6}  {:>6}  {:>9}\n",
        "class", "weights", "MB", "bits", "SNR dB", "max error"
    );
    for class in classes(reports) {
        let ClassReport { class, weights, bytes, bits_per_weight, snr_db, max_error } = class;
        out += &format!(
            "{class:9}  {weights:>7}  {:>9.1}  {bits_per_weight:>6.3}  {:>6}  {:>9}\n",
            bytes as f64 / 1e6,
            snr_db.map_or("exact".to_owned(), |snr| format!("{snr:.2}")),
            max_error.map_or("0".to_owned(), |error| format!("{error:.6}")),
        );
    }
    let quantized = reports.iter().filter(|r| r.max_error.is_some()).count();
    let (bytes, bits) = size(&reports.iter().collect::<Vec<_>>());
    out += &format!(
        "{quantized} weights quantized, {} kept; {:.1} MB, {bits:.3} bits per weight\n",
        reports.len() - quantized,
        bytes as f64 / 1e6,
    );
    out
}

/// A table for people: a line for each quantized weight.
pub fn table(reports: &[TensorReport]) -> String {
    let quantized: Vec<_> = reports.iter().filter(|r| r.max_error.is_some()).collect();
    let width = |text: fn(&TensorReport) -> usize, least: usize| {
        quantized.iter().map(|r| text(r)).max().unwrap_or(0).max(least)
    };
    let name = width(|r| r.name.len(), 6);
    let encoding = width(|r| r.encoding.len(), 8);
    let mut out = format!(
        "{:name$}  {:>16}  {:encoding$}  {:>6}  {:>6}  {:>9}\n",
        "weight", "dims", "encoding", "bits", "SNR dB", "max error"
    );
    for report in &quantized {
        let dims: Vec<_> = report.dims.iter().map(u32::to_string).collect();
        let snr = report.snr_db.map_or("exact".to_owned(), |snr| format!("{snr:.2}"));
        out += &format!(
            "{:name$}  {:>16}  {:encoding$}  {:>6.3}  {snr:>6}  {:>9.6}\n",
            report.name,
            dims.join("x"),
            report.encoding,
            report.bits_per_weight,
            report.max_error.unwrap_or(0.0),
        );
    }
    out
}

/// The same for programs: a JSON object with `recipe`, `bytes`, `bits_per_weight`, `classes` and
/// `weights`.
pub fn json(recipe: &str, reports: &[TensorReport]) -> String {
    let (bytes, bits_per_weight) = size(&reports.iter().collect::<Vec<_>>());
    let report = serde_json::json!({
        "recipe": recipe,
        "bytes": bytes,
        "bits_per_weight": bits_per_weight,
        "classes": classes(reports),
        "weights": reports,
    });
    format!("{report:#}\n")
}
