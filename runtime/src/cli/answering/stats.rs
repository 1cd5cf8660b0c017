//! What is told about a run.

use serde_json::{Value, json};

use super::answer::Answer;
use crate::OpenDevice;
use crate::cli;
use crate::cuda::Calls;

/// What a run has been on.
#[derive(Clone, Debug)]
pub(super) struct Place {
    device: String,
    on_gpu: bool,
    context: u32,
    load_seconds: f64,
    /// On a GPU: how long the steps of loading took, and what the program takes of its memory.
    load: Option<Value>,
    memory: Option<Value>,
}

impl Place {
    pub(super) fn new(device: &OpenDevice, context: u32, load_seconds: f64) -> Self {
        Self {
            device: device.device().describe(),
            on_gpu: matches!(device, OpenDevice::Cuda(_)),
            context,
            load_seconds,
            load: device.cuda().map(|cuda| cuda.load_times().json()),
            memory: device.cuda().map(|cuda| cuda.memory().json()),
        }
    }

    /// The first lines of a report.
    pub(super) fn text(&self) -> String {
        let Self { device, context, load_seconds, .. } = self;
        format!("device: {device}, context {context} tokens\nload: {load_seconds:.2} s\n")
    }
}

/// One answer's figures.
#[derive(Clone, Debug, Default)]
pub(super) struct Stats {
    /// Calls of the GPU's driver between the first token and the last.
    pub(super) calls: Option<Calls>,
    /// Of the random numbers; `None` where nothing is drawn.
    pub(super) seed: Option<u64>,
}

impl Stats {
    /// Lines for people.
    pub(super) fn text(&self, place: &Place, answer: &Answer) -> String {
        let report = &answer.report;
        let reused = match answer.reused_tokens {
            0 => String::new(),
            reused => format!(" and {reused} reused"),
        };
        let mut lines = vec![format!(
            "prompt: {} tokens{reused}, {:.1} tok/s",
            report.prompt_tokens,
            rate(report.prompt_tokens, report.prefill_seconds)
        )];
        if let Some(seconds) = answer.first_token_seconds {
            lines.push(format!("time to first token: {:.1} ms", seconds * 1e3));
        }
        lines.push(format!(
            "generated: {} tokens, {:.1} tok/s, finish reason {}",
            answer.ids.len(),
            rate(report.decode_tokens, report.decode_seconds),
            answer.end.name()
        ));
        if let Some(bytes) = report.peak_memory {
            lines.push(match place.on_gpu {
                true => format!("GPU peak memory usage: {} MiB", bytes.div_ceil(1 << 20)),
                false => format!("peak memory: {}", cli::human_bytes(bytes)),
            });
        }
        if let Some(seed) = self.seed {
            lines.push(format!("seed: {seed}"));
        }
        lines.join("\n") + "\n"
    }

    /// One line for people who chat.
    pub(super) fn line(answer: &Answer) -> String {
        let report = &answer.report;
        format!(
            "[{} tokens read, {} reused; {} generated at {:.1} tok/s; {}]\n",
            report.prompt_tokens,
            answer.reused_tokens,
            answer.ids.len(),
            rate(report.decode_tokens, report.decode_seconds),
            answer.end.name()
        )
    }

    /// As `runtime/OUTPUT.md` has it.
    pub(super) fn json(&self, place: &Place, answer: &Answer) -> Value {
        let report = &answer.report;
        json!({
            "device": place.device,
            "context": place.context,
            "load_seconds": place.load_seconds,
            "prompt_tokens": report.prompt_tokens,
            "reused_tokens": answer.reused_tokens,
            "prefill_seconds": report.prefill_seconds,
            "prefill_tokens_per_second": rate(report.prompt_tokens, report.prefill_seconds),
            "time_to_first_token_seconds": answer.first_token_seconds,
            "generated_tokens": answer.ids.len(),
            "decode_steps": report.decode_tokens,
            "decode_seconds": report.decode_seconds,
            "decode_tokens_per_second": rate(report.decode_tokens, report.decode_seconds),
            "load": place.load,
            "peak_memory_bytes": report.peak_memory,
            "memory": place.memory,
            "driver_calls_between_tokens": self.calls.map(|calls| json!({
                "tokens": answer.ids.len().saturating_sub(1),
                "graph_launches": calls.graphs,
                "kernel_launches": calls.kernels,
                "copies_to_device": calls.to_device,
                "copies_to_host": calls.to_host,
                "synchronisations": calls.synchronisations,
            })),
            "finish_reason": answer.end.name(),
            "seed": self.seed,
        })
    }
}

fn rate(tokens: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}
