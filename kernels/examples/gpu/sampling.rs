//! `sample` against a plain implementation and against the distribution it claims.

use gemma4_format::plan::state;
use gemma4_kernels::{Arch, Kernel, Sample};

use crate::case::{Case, Outcome};
use crate::device::{Buffer, Function, Gpu, Value};
use crate::numbers::Random;

struct Sampler<'a> {
    gpu: &'a Gpu,
    kernels: [Kernel; 2],
    functions: [Function; 2],
    logits: Buffer,
    maxima: Buffer,
    state: Buffer,
    ring: Buffer,
    table: Buffer,
    stops: Buffer,
}

#[derive(Clone, Copy)]
struct Settings {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    seed: u32,
    position: u32,
}

impl<'a> Sampler<'a> {
    fn new(gpu: &'a Gpu, functions: &[Function], logits: &[f32]) -> Self {
        let sample = Sample { vocabulary: logits.len() as u32 };
        let (state, ring) = (gpu.poisoned(state::WORDS * 4), gpu.poisoned(64));
        Self {
            gpu,
            kernels: [sample.maxima().unwrap(), sample.kernel().unwrap()],
            functions: [functions[0], functions[1]],
            logits: gpu.upload(logits),
            maxima: gpu.poisoned(sample.stretches() as usize * 8),
            state,
            ring,
            table: gpu.upload(&[state.at, ring.at]),
            stops: gpu.upload(&[1u32, 106]),
        }
    }

    fn step(&self) {
        let values = [Value::At(self.logits.at), Value::At(self.maxima.at)];
        self.gpu.launch(&self.kernels[0], self.functions[0], 1, &values);
        let values = [
            Value::At(self.logits.at),
            Value::At(self.maxima.at),
            Value::At(self.table.at),
            Value::U32(0),
            Value::U32(1),
            Value::U32(8),
            Value::At(self.stops.at),
            Value::U32(2),
            Value::U32(1),
        ];
        self.gpu.launch(&self.kernels[1], self.functions[1], 1, &values);
    }

    fn set(&self, s: Settings) {
        let mut words = [0u32; state::WORDS];
        words[state::POSITION] = s.position;
        words[state::SEED] = s.seed;
        words[state::TEMPERATURE] = s.temperature.to_bits();
        words[state::TOP_K] = s.top_k;
        words[state::TOP_P] = s.top_p.to_bits();
        words[state::LIMIT] = 1 << 20;
        self.gpu.write(self.state, &words);
    }

    fn token(&self, settings: Settings) -> u32 {
        self.set(settings);
        self.step();
        self.gpu.download::<u32>(self.state)[state::TOKEN]
    }
}

/// Which tokens may come, with their probabilities: what Hugging Face's warpers keep.
fn distribution(logits: &[f32], s: Settings) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::MIN, f32::max);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    let keep = if s.top_k == 0 { logits.len() } else { s.top_k as usize };
    let threshold = logits[order[keep.min(logits.len()) - 1]];
    let mut mass = vec![0.0; logits.len()];
    let kept: Vec<usize> = order.into_iter().filter(|i| logits[*i] >= threshold).collect();
    for i in &kept {
        mass[*i] = (f64::from(logits[*i] - largest) / f64::from(s.temperature)).exp();
    }
    let total: f64 = mass.iter().sum();
    let mut before = 0.0;
    for i in &kept {
        let own = mass[*i];
        if before / total >= f64::from(s.top_p) {
            mass[*i] = 0.0;
        }
        before += own;
    }
    let total: f64 = mass.iter().sum();
    mass.iter().map(|m| m / total).collect()
}

fn greedy(vocabulary: u32, arch: Arch) -> Case {
    let sample = Sample { vocabulary };
    let kernels = vec![sample.maxima().unwrap(), sample.kernel().unwrap()];
    Case::new(format!("sample greedy {vocabulary}"), arch, kernels, move |gpu, functions| {
        let mut random = Random(3);
        let mut wrong = 0.0;
        for _ in 0..20 {
            // Few values: many ties.
            let logits: Vec<f32> =
                (0..vocabulary).map(|_| (random.normal() * 2.0).round()).collect();
            let mut best = 0;
            for (i, x) in logits.iter().enumerate() {
                if *x > logits[best] {
                    best = i;
                }
            }
            let sampler = Sampler::new(gpu, functions, &logits);
            for (temperature, top_k) in [(0.0, 64), (1.0, 1)] {
                let s = Settings { temperature, top_k, top_p: 1.0, seed: 1, position: 4 };
                wrong += f64::from(sampler.token(s) != best as u32);
            }
        }
        Outcome { error: wrong, limit: 0.5 }
    })
}

fn stop(arch: Arch) -> Case {
    let sample = Sample { vocabulary: 1000 };
    let kernels = vec![sample.maxima().unwrap(), sample.kernel().unwrap()];
    Case::new("sample stops".to_owned(), arch, kernels, move |gpu, functions| {
        let mut logits = vec![0.0f32; 1000];
        logits[106] = 3.0;
        let sampler = Sampler::new(gpu, functions, &logits);
        sampler.set(Settings { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 1, position: 4 });
        sampler.step();
        let first: Vec<u32> = gpu.download(sampler.state);
        let ring: Vec<u64> = gpu.download(sampler.ring);
        sampler.step();
        let right = first[..4] == [106, 5, state::STOP_TOKEN, 1]
            && ring[0] == 1 << 32 | 106
            && gpu.download::<u32>(sampler.state) == first
            && gpu.download::<u64>(sampler.ring) == ring;
        Outcome { error: f64::from(!right), limit: 0.5 }
    })
}

/// Largest chi-square over its limit at p = 0.001 (Wilson and Hilferty's approximation).
fn draws(vocabulary: u32, spread: f32, s: Settings, count: u32, arch: Arch) -> Case {
    let sample = Sample { vocabulary };
    let kernels = vec![sample.maxima().unwrap(), sample.kernel().unwrap()];
    let name = format!("sample {vocabulary} T={} k={} p={}", s.temperature, s.top_k, s.top_p);
    Case::new(name, arch, kernels, move |gpu, functions| {
        let logits: Vec<f32> =
            Random(7).normals(vocabulary as usize).iter().map(|x| x * spread).collect();
        let wanted = distribution(&logits, s);
        let sampler = Sampler::new(gpu, functions, &logits);
        let mut counts = vec![0u32; vocabulary as usize];
        for position in 0..count {
            counts[sampler.token(Settings { position, ..s }) as usize] += 1;
        }
        let mut likely: Vec<usize> = (0..wanted.len()).collect();
        likely.sort_by(|a, b| wanted[*b].total_cmp(&wanted[*a]));
        let impossible = likely.iter().filter(|i| wanted[**i] == 0.0 && counts[**i] > 0).count();
        let mut bins: Vec<(f64, f64)> = likely[..likely.len().min(40)]
            .iter()
            .map(|i| (f64::from(counts[*i]), wanted[*i] * f64::from(count)))
            .filter(|bin| bin.1 >= 5.0)
            .collect();
        let (seen, expected) = bins.iter().fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
        let rest = (f64::from(count) - seen, f64::from(count) - expected);
        if rest.1 >= 5.0 {
            bins.push(rest);
        }
        let chi: f64 = bins.iter().map(|(o, e)| (o - e).powi(2) / e).sum();
        let free = (bins.len() as f64 - 1.0).max(1.0);
        let limit = free * (1.0 - 2.0 / (9.0 * free) + 3.09 * (2.0 / (9.0 * free)).sqrt()).powi(3);
        Outcome { error: chi / limit + impossible as f64, limit: 1.0 }
    })
}

pub(crate) fn cases(arch: Arch) -> Vec<Case> {
    let plain = Settings { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 11, position: 0 };
    let usual = Settings { temperature: 0.7, top_k: 64, top_p: 0.95, ..plain };
    vec![
        greedy(262_144, arch),
        greedy(300, arch),
        stop(arch),
        draws(300, 1.0, plain, 4000, arch),
        draws(262_144, 2.0, usual, 4000, arch),
        draws(5000, 3.0, Settings { top_k: 0, ..usual }, 2000, arch),
    ]
}
