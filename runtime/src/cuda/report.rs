//! What a program on a GPU takes, in memory and in time.

use serde_json::{Value, json};

/// Bytes of the device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Weights, in the form that kernels read.
    pub weights: u64,
    /// Keys and values of all sessions.
    pub buffers: u64,
    /// Everything else that kernels work on: scratch memory, logits, tables.
    pub arena: u64,
    /// What the program was expected to take at most, before any of it was allocated.
    pub predicted: u64,
    /// What it took at most, as far as it was looked at; with the driver's code and graphs.
    pub peak: u64,
}

impl MemoryUse {
    /// The same in JSON.
    pub fn json(&self) -> Value {
        json!({
            "weights_bytes": self.weights,
            "kv_bytes": self.buffers,
            "arena_bytes": self.arena,
            "predicted_bytes": self.predicted,
            "peak_bytes": self.peak,
        })
    }
}

/// Seconds that bringing a program onto a device took. Copying and verifying happen at once.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadTimes {
    /// Loading kernels, and allocating memory.
    pub prepare: f64,
    /// Bringing the weights to the device, verification included.
    pub weights: f64,
    /// Of that, copying from the file's pages into pinned memory.
    pub read: f64,
    /// Of that, waiting for the device, which takes them over and packs them.
    pub upload: f64,
    /// Of that, as long as the threads that verify digests ran; 0 if it was done before.
    pub verify: f64,
}

impl LoadTimes {
    /// The same in JSON.
    pub fn json(&self) -> Value {
        json!({
            "prepare_seconds": self.prepare,
            "weights_seconds": self.weights,
            "read_seconds": self.read,
            "upload_seconds": self.upload,
            "verify_seconds": self.verify,
        })
    }
}

/// A call whose kernels can be timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// A step of a generation: `decode`, and drawing a token.
    Decode,
    /// `prefill` of so many rows, or of as many as one call takes.
    Prefill(u32),
}

/// The kernels of a call, timed one by one.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Rows of the call.
    pub rows: u32,
    /// Tokens before it.
    pub depth: u32,
    /// Seconds of the call as it runs otherwise: as one graph, with kernels that begin early.
    pub whole_seconds: f64,
    /// In the order in which they first run.
    pub kernels: Vec<Timed>,
}

/// Launches of one kernel on weights of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    /// Kernel and what it works on.
    pub name: String,
    /// Launches in a call.
    pub launches: u32,
    /// Seconds of all of them.
    pub seconds: f64,
    /// Bytes of weights, keys and values that they must read.
    pub bytes: u64,
}

impl Profile {
    /// Seconds of all kernels, one after another.
    pub fn seconds(&self) -> f64 {
        self.kernels.iter().map(|timed| timed.seconds).sum()
    }

    /// The same in JSON.
    pub fn json(&self) -> Value {
        let kernels: Vec<Value> = self.kernels.iter().map(|timed| timed.json()).collect();
        json!({
            "rows": self.rows,
            "depth": self.depth,
            "whole_seconds": self.whole_seconds,
            "kernels_seconds": self.seconds(),
            "kernels": kernels,
        })
    }

    /// A table, with the sum of all kernels.
    pub fn markdown(&self) -> String {
        let call =
            if self.rows == 1 { "decode".to_owned() } else { format!("prefill {}", self.rows) };
        let whole = self.seconds();
        let line = |name: &str, launches: u32, seconds: f64, bytes: u64| {
            let rate = match bytes {
                0 => "–".to_owned(),
                bytes => format!("{:.0}", bytes as f64 / seconds / 1e9),
            };
            format!(
                "| {name} | {launches} | {:.1} | {:.2} | {rate} | {:.1} % |",
                1e6 * seconds,
                bytes as f64 / 1e6,
                100.0 * seconds / whole
            )
        };
        let mut lines = vec![
            format!(
                "{call} at depth {}: {:.1} µs as it runs, {:.1} µs kernel by kernel",
                self.depth,
                1e6 * self.whole_seconds,
                1e6 * whole
            ),
            String::new(),
            "| kernel | launches | µs | MB | GB/s | share |".to_owned(),
            "|---|---|---|---|---|---|".to_owned(),
        ];
        let kernels = self.kernels.iter();
        lines.extend(kernels.clone().map(|t| line(&t.name, t.launches, t.seconds, t.bytes)));
        let launches = kernels.clone().map(|timed| timed.launches).sum();
        lines.push(line("all", launches, whole, kernels.map(|timed| timed.bytes).sum()));
        lines.join("\n") + "\n"
    }
}

impl Timed {
    fn json(&self) -> Value {
        json!({
            "kernel": self.name,
            "launches": self.launches,
            "seconds": self.seconds,
            "bytes": self.bytes,
            "bytes_per_second": self.bytes as f64 / self.seconds,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> Profile {
        let timed = |name: &str, launches, seconds, bytes| Timed {
            name: name.to_owned(),
            launches,
            seconds,
            bytes,
        };
        Profile {
            rows: 1,
            depth: 2048,
            whole_seconds: 30e-6,
            kernels: vec![
                timed("linear_few q", 60, 30e-6, 90_000_000),
                timed("rope", 60, 10e-6, 0),
            ],
        }
    }

    #[test]
    fn a_profile_adds_up() {
        let table = profile().markdown();
        let rows: Vec<&str> = table.lines().collect();
        assert_eq!(rows[0], "decode at depth 2048: 30.0 µs as it runs, 40.0 µs kernel by kernel");
        assert_eq!(rows[4], "| linear_few q | 60 | 30.0 | 90.00 | 3000 | 75.0 % |");
        assert_eq!(rows[5], "| rope | 60 | 10.0 | 0.00 | – | 25.0 % |");
        assert_eq!(rows[6], "| all | 120 | 40.0 | 90.00 | 2250 | 100.0 % |");
        let json = profile().json();
        let seconds = json["kernels"].as_array().map(|kernels| {
            kernels.iter().filter_map(|kernel| kernel["seconds"].as_f64()).sum::<f64>()
        });
        assert_eq!(json["kernels_seconds"].as_f64(), seconds);
    }
}
