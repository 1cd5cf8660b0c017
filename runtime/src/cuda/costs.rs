//! What a launch works on, and the bytes that it must read.

use gemma4_format::plan::{Argument, Launch, Place, Plan};
use gemma4_format::{BufferId, Op, Operand, Program};

/// The launches of one call.
pub(super) struct Costs<'a> {
    pub(super) program: &'a Program,
    pub(super) plan: &'a Plan,
    /// Rows of the call.
    pub(super) rows: u32,
    /// Tokens before it.
    pub(super) depth: u32,
}

impl Costs<'_> {
    /// The kernel's name with what it works on: the weight, without the number of its layer, or
    /// the window of an attention.
    pub(super) fn name(&self, launch: &Launch) -> String {
        let symbol = self.symbol(launch);
        let subject = launch.arguments.iter().find_map(|argument| match argument {
            Argument::Address(Place::Packed(id), _) => {
                let pack = self.plan.packs.iter().find(|pack| pack.packed == *id)?;
                let weight = self.program.weights.get(*pack.sources.first()? as usize)?;
                Some(role(&weight.name))
            }
            Argument::BufferRows(id) if reads_keys(symbol) => {
                let window = self.attention(*id)?.0;
                Some(window.map_or("full".to_owned(), |window| format!("window {window}")))
            }
            _ => None,
        });
        match subject {
            Some(subject) => format!("{symbol} {subject}"),
            None => symbol.to_owned(),
        }
    }

    /// Bytes of weights, keys and values that the launch must read.
    pub(super) fn bytes(&self, launch: &Launch) -> u64 {
        let symbol = self.symbol(launch);
        let bytes = |argument: &Argument| match argument {
            Argument::Address(Place::Packed(id), _) => self.packed(*id, symbol == "embed"),
            Argument::Address(Place::Resident(id), _) => {
                let (weight, part) = *self.plan.resident.get(*id as usize)?;
                let weight = self.program.weights.get(weight as usize)?;
                let parts = weight.encoding.parts(&weight.name, &weight.dims).ok()?;
                Some(parts.get(part as usize)?.bytes())
            }
            Argument::BufferRows(id) if reads_keys(symbol) => {
                let (window, buffers) = self.attention(*id)?;
                let most = window.map_or(u64::MAX, |w| u64::from(w) + u64::from(self.rows) - 1);
                let keys = most.min(u64::from(self.depth) + u64::from(self.rows));
                let position = |id: &BufferId| self.plan.position_bytes.get(*id as usize).copied();
                Some(buffers.iter().filter_map(position).map(|bytes| u64::from(bytes) * keys).sum())
            }
            _ => None,
        };
        launch.arguments.iter().filter_map(bytes).sum()
    }

    fn symbol(&self, launch: &Launch) -> &str {
        self.plan.kernels.get(launch.kernel as usize).map_or("", |kernel| &kernel.symbol)
    }

    /// Bytes of a packed weight, or of as many of its rows as the call has.
    fn packed(&self, id: u32, gather: bool) -> Option<u64> {
        let bytes = self.plan.packed.get(id as usize)?.bytes;
        let rows = self.plan.packs.iter().find(|pack| pack.packed == id)?.total_rows;
        Some(if gather { bytes / u64::from(rows.max(1)) * u64::from(self.rows) } else { bytes })
    }

    /// Window and buffers, each once, of the attention that reads a buffer.
    fn attention(&self, buffer: BufferId) -> Option<(Option<u32>, Vec<BufferId>)> {
        let nodes = self.program.methods.iter().flat_map(|method| &method.nodes);
        nodes.filter(|node| node.args.contains(&Operand::Buffer(buffer))).find_map(|node| {
            let Op::Attention { window, .. } = node.op else { return None };
            let buffers = node.args.iter().filter_map(|arg| match arg {
                Operand::Buffer(id) => Some(*id),
                _ => None,
            });
            let mut buffers: Vec<BufferId> = buffers.collect();
            buffers.dedup();
            Some((window, buffers))
        })
    }
}

/// Whether a kernel reads the keys of a buffer that its arguments name; others write them.
fn reads_keys(symbol: &str) -> bool {
    symbol.starts_with("attention")
}

/// A weight's name without the number of its layer.
fn role(name: &str) -> String {
    let words = name.split('.').filter(|word| word.parse::<u32>().is_err() && *word != "weight");
    let words: Vec<&str> = words.filter(|word| *word != "layers").collect();
    words.join(".")
}

#[cfg(test)]
mod tests {
    use gemma4_format::plan::{Count, Pack};
    use gemma4_format::{Method, Node};

    use super::*;
    use crate::cuda::testing::{plan_for, program};

    fn launch(arguments: Vec<Argument>) -> Launch {
        Launch { kernel: 0, grid: [Count::Fixed(1); 3], arguments }
    }

    /// The shared plan, whose kernel has this symbol and whose packed weight is `matrix`.
    fn plan(symbol: &str) -> Plan {
        let mut plan = plan_for("sm_90");
        plan.kernels[0].symbol = symbol.to_owned();
        plan.packs = vec![Pack {
            kernel: 0,
            packed: 0,
            sources: vec![0],
            rows_per_tile: 16,
            first_tile: 0,
            total_rows: 80,
            units_per_tile: 1,
            warps_per_block: 8,
        }];
        plan
    }

    #[test]
    fn a_product_reads_its_whole_weight_and_a_gather_its_rows() {
        let program = program();
        let arguments = vec![
            Argument::Address(Place::Packed(0), 0),
            Argument::Address(Place::Resident(0), 0),
            Argument::BufferRows(0),
        ];
        for (symbol, name, bytes) in [
            ("linear_few", "linear_few matrix", 4096 + 128),
            ("embed", "embed matrix", 3 * (4096 / 80) + 128),
        ] {
            let plan = plan(symbol);
            let costs = Costs { program: &program, plan: &plan, rows: 3, depth: 7 };
            assert_eq!(costs.name(&launch(arguments.clone())), name);
            assert_eq!(costs.bytes(&launch(arguments.clone())), bytes);
        }
    }

    #[test]
    fn attention_reads_the_keys_that_its_window_shows() {
        let mut program = program();
        let node = |window, buffers: [u32; 2]| Node {
            op: Op::Attention { window, scale: 1.0 },
            args: buffers.map(Operand::Buffer).to_vec(),
            label: String::new(),
        };
        program.methods = vec![Method {
            name: "decode".to_owned(),
            max_rows: 1,
            inputs: Vec::new(),
            nodes: vec![node(Some(10), [0, 0]), node(None, [1, 1])],
            outputs: Vec::new(),
        }];
        let plan = plan("attention_few");
        let keys = |id| launch(vec![Argument::BufferRows(id)]);
        let costs = |rows, depth| Costs { program: &program, plan: &plan, rows, depth };
        // A row has 2 heads of 16 numbers of 2 bytes.
        assert_eq!(costs(1, 100).name(&keys(0)), "attention_few window 10");
        assert_eq!(costs(1, 100).name(&keys(1)), "attention_few full");
        assert_eq!(costs(1, 100).bytes(&keys(0)), 10 * 64);
        assert_eq!(costs(1, 4).bytes(&keys(0)), 5 * 64);
        assert_eq!(costs(3, 100).bytes(&keys(0)), 12 * 64);
        assert_eq!(costs(1, 100).bytes(&keys(1)), 101 * 64);
    }

    #[test]
    fn roles_have_no_layer() {
        assert_eq!(role("layers.17.self_attn.q_proj.weight"), "self_attn.q_proj");
        assert_eq!(role("embed_tokens.weight"), "embed_tokens");
    }
}
