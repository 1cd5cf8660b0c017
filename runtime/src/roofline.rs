//! What a call must read and compute at least, and the time that takes at a device's speed.
//!
//! The roofline model (Williams, Waterman and Patterson 2009): nothing is faster than its bytes at
//! the device's read bandwidth, nor than its operations at the device's rate of multiplying.

use gemma4_format::{Extents, Method, Op, Operand, Program, stats};

/// How fast a device is, measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Bytes a second that it reads from where the weights are.
    pub read: f64,
    /// Multiplications and additions a second: of float32 on the CPU, of bfloat16 with float32
    /// sums on a GPU's tensor cores.
    pub multiply: f64,
}

/// What must be done at least.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Bytes of weights, keys and values to read, each once a call.
    pub bytes: f64,
    /// Multiplications and additions.
    pub operations: f64,
}

impl Work {
    /// A decode step after `depth` tokens. `position_bytes` says how many bytes a position takes in
    /// each of the program's buffers on the device.
    pub fn decode(program: &Program, depth: u32, position_bytes: &[u32]) -> Self {
        Self::call(program, "decode", depth.into(), 1, position_bytes)
    }

    /// Reading `tokens` tokens after `depth` others, in calls of `prefill` as long as they can be.
    pub fn prefill(program: &Program, tokens: u32, depth: u32, position_bytes: &[u32]) -> Self {
        let chunk = program.method("prefill").map_or(1, |method| method.max_rows).max(1);
        let mut work = Self::default();
        let mut done = 0;
        while done < tokens {
            let rows = chunk.min(tokens - done);
            let before = u64::from(depth) + u64::from(done);
            let call = Self::call(program, "prefill", before, rows.into(), position_bytes);
            work.bytes += call.bytes;
            work.operations += call.operations;
            done += rows;
        }
        work
    }

    /// A call of `verify` for `rows` rows after `depth` tokens.
    pub fn verify(program: &Program, rows: u32, depth: u32, position_bytes: &[u32]) -> Self {
        Self::call(program, "verify", depth.into(), rows.into(), position_bytes)
    }

    /// So many times the same.
    pub fn times(self, count: u32) -> Self {
        let count = f64::from(count);
        Self { bytes: self.bytes * count, operations: self.operations * count }
    }

    /// A call of `rows` rows after `before` tokens.
    fn call(
        program: &Program,
        method: &str,
        before: u64,
        rows: u64,
        position_bytes: &[u32],
    ) -> Self {
        let Some(method) = program.method(method) else { return Self::default() };
        let attention = Attention::of(program, method, before, rows, position_bytes);
        let bytes = stats::weight_bytes_per_token(program) + attention.bytes;
        let operations = 2 * products(program, method, rows) + attention.operations;
        Self { bytes: bytes as f64, operations: operations as f64 }
    }

    /// Seconds that it takes at least.
    pub fn seconds(&self, speed: Speed) -> f64 {
        (self.bytes / speed.read).max(self.operations / speed.multiply)
    }

    /// Whether reading takes longer than computing.
    pub fn is_bound_by_memory(&self, speed: Speed) -> bool {
        self.bytes / speed.read > self.operations / speed.multiply
    }
}

/// Products of a weight and an activation in a call of `rows` rows; only the last row has logits.
fn products(program: &Program, method: &Method, mut rows: u64) -> u64 {
    let mut sum = 0;
    for node in &method.nodes {
        match (&node.op, node.args.last()) {
            (Op::LastRow, _) => rows = 1,
            (Op::Linear, Some(Operand::Weight(id))) => {
                let dims = program.weights[*id as usize].dims.iter();
                sum += rows * dims.map(|d| u64::from(*d)).product::<u64>();
            }
            _ => {}
        }
    }
    sum
}

/// What the attention of all layers does in a call.
#[derive(Default)]
struct Attention {
    /// Bytes of keys and values that some row sees.
    bytes: u64,
    /// Two for each product of a query and a key, and two for each of a probability and a value.
    operations: u64,
}

impl Attention {
    fn of(
        program: &Program,
        method: &Method,
        before: u64,
        rows: u64,
        position_bytes: &[u32],
    ) -> Self {
        let values = program.values(method).unwrap_or_default();
        let one = Extents { rows: 1, context: 1 };
        let mut sum = Self::default();
        for node in &method.nodes {
            let Op::Attention { window, .. } = node.op else { continue };
            let window = window.map_or(u64::MAX, u64::from);
            let mut buffers = Vec::new();
            let mut width = 0;
            for arg in &node.args {
                match arg {
                    Operand::Buffer(id) if !buffers.contains(id) => buffers.push(*id),
                    // The first value is the query, `[rows, heads, head_dim]`.
                    Operand::Value(id) if width == 0 => {
                        let query = values.get(*id as usize);
                        width = query.and_then(|fact| fact.elements(one)).unwrap_or(0);
                    }
                    _ => {}
                }
            }
            let seen = (before + rows).min(window.saturating_add(rows - 1));
            for id in buffers {
                let position = position_bytes.get(id as usize).copied().unwrap_or(0);
                sum.bytes += seen.saturating_mul(position.into());
            }
            let pairs: u64 = (1..=rows).map(|row| (before + row).min(window)).sum();
            sum.operations += 4 * width * pairs;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use gemma4_format::{
        Buffer, DType, Dim, Encoding, Fact, Input, Node, Source, TextDefaults, ValueType, Weight,
    };

    use super::*;

    /// A query of 4 heads of 8 looks through a window of 6 at keys and values of 2 heads, then its
    /// last row is multiplied with a matrix `[100, 32]` in bf16.
    fn program() -> Program {
        let buffer = |name: &str| Buffer {
            name: name.to_owned(),
            dims: vec![Dim::Ring(20), Dim::Fixed(2), Dim::Fixed(8)],
        };
        let node = |op, args: &[Operand]| Node { op, args: args.to_vec(), label: String::new() };
        let query = Fact::f32(vec![Dim::Rows, Dim::Fixed(4), Dim::Fixed(8)]);
        let position = Fact { dtype: ValueType::U32, dims: vec![Dim::Fixed(1)] };
        let method = |name: &str, max_rows| Method {
            name: name.to_owned(),
            max_rows,
            inputs: vec![
                Input { name: "query".to_owned(), fact: query.clone() },
                Input { name: "position".to_owned(), fact: position.clone() },
            ],
            nodes: vec![
                node(
                    Op::Attention { window: Some(6), scale: 1.0 },
                    &[Operand::Value(0), Operand::Buffer(0), Operand::Buffer(1), Operand::Value(1)],
                ),
                node(Op::MergeHeads, &[Operand::Value(2)]),
                node(Op::LastRow, &[Operand::Value(3)]),
                node(Op::Linear, &[Operand::Value(4), Operand::Weight(0)]),
            ],
            outputs: Vec::new(),
        };
        Program {
            source: Source::default(),
            text: TextDefaults::default(),
            vocab_size: 100,
            max_context: 64,
            weights: vec![Weight {
                name: "head".to_owned(),
                dims: vec![100, 32],
                encoding: Encoding::Dense(DType::BF16),
                digest: [0; 32],
            }],
            buffers: vec![buffer("keys"), buffer("values")],
            methods: vec![method("decode", 1), method("prefill", 8)],
            data_header: [0; 32],
            data_length: 0,
        }
    }

    #[test]
    fn a_decode_step_reads_the_weights_and_what_the_window_shows() {
        for (depth, keys) in [(0, 1), (3, 4), (5, 6), (40, 6)] {
            let work = Work::decode(&program(), depth, &[32, 32]);
            assert_eq!(work.bytes, f64::from(6400 + keys * 2 * 16 * 2), "{depth}");
            assert_eq!(work.operations, f64::from(2 * 3200 + 4 * 32 * keys), "{depth}");
        }
    }

    #[test]
    fn a_prefill_is_as_many_calls_as_its_chunks() {
        // Calls of 8 and 2 rows after 3 tokens: 11 keys seen, then 13 at most 6 + 1.
        let work = Work::prefill(&program(), 10, 3, &[64, 16]);
        assert_eq!(work.bytes, f64::from(2 * 6400 + (11 + 7) * (64 + 16)));
        let pairs = (4 + 5 + 6 * 6) + 2 * 6;
        assert_eq!(work.operations, f64::from(2 * 2 * 3200 + 4 * 32 * pairs));
    }

    #[test]
    fn the_slower_of_reading_and_multiplying_is_the_wall() {
        let work = Work { bytes: 100.0, operations: 60.0 };
        let speed = Speed { read: 10.0, multiply: 20.0 };
        assert_eq!(work.seconds(speed), 10.0);
        assert!(work.is_bound_by_memory(speed));
        let speed = Speed { read: 1000.0, multiply: 20.0 };
        assert_eq!(work.seconds(speed), 3.0);
        assert!(!work.is_bound_by_memory(speed));
    }
}
