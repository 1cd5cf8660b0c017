//! Edit scripts: the bytes of an input as changes of a program.

use gemma4_format::encoding::ZeroType;
use gemma4_format::{
    DType, Dim, Encoding, Fact, Method, Node, Offset, Op, Operand, Output, Program,
};

/// Bytes that are read as one decision after another. Behind the end all are 0.
pub(crate) struct Script<'a>(pub(crate) &'a [u8]);

impl Script<'_> {
    pub(crate) fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    /// An index below `length`; 0 of nothing.
    pub(crate) fn index(&mut self, length: usize) -> usize {
        usize::from(self.byte()) % length.max(1)
    }

    /// A number: mostly a small one, else one round a power of two, or any.
    pub(crate) fn number(&mut self) -> u32 {
        match self.byte() {
            small @ 0..=191 => u32::from(small),
            byte @ 192..=254 => {
                let power = 1u32 << (u32::from(byte - 192) / 2).min(31);
                if byte % 2 == 0 { power } else { power - 1 }
            }
            255 => u32::from_le_bytes(std::array::from_fn(|_| self.byte())),
        }
    }

    pub(crate) fn real(&mut self) -> f32 {
        const SPECIAL: [f32; 8] =
            [0.0, -0.0, 1.0, -1.0, f32::MIN_POSITIVE, f32::MAX, f32::INFINITY, f32::NAN];
        match self.byte() {
            byte @ 0..=127 => SPECIAL[usize::from(byte) % 8],
            _ => f32::from_bits(u32::from_le_bytes(std::array::from_fn(|_| self.byte()))),
        }
    }

    fn operand(&mut self) -> Operand {
        match self.byte() % 4 {
            0 | 1 => Operand::Value(self.number()),
            2 => Operand::Weight(self.number()),
            _ => Operand::Buffer(self.number()),
        }
    }

    fn dim(&mut self) -> Dim {
        match self.byte() % 4 {
            0 => Dim::Fixed(self.number()),
            1 => Dim::Rows,
            2 => Dim::Context,
            _ => Dim::Ring(self.number()),
        }
    }

    fn fact(&mut self) -> Fact {
        let real = self.byte().is_multiple_of(2);
        let dims: Vec<Dim> = (0..self.index(6)).map(|_| self.dim()).collect();
        if real { Fact::f32(dims) } else { Fact::u32(dims) }
    }

    fn dtype(&mut self) -> DType {
        [DType::F32, DType::F16, DType::BF16, DType::U8][self.index(4)]
    }

    fn encoding(&mut self) -> Encoding {
        if self.byte().is_multiple_of(4) {
            return Encoding::Dense(self.dtype());
        }
        let offset = match self.byte() % 6 {
            0 => Offset::Symmetric,
            1 => Offset::Minimum(self.dtype()),
            2 => Offset::Zero(ZeroType::Nibble),
            3 => Offset::Zero(ZeroType::U8),
            4 => Offset::Zero(ZeroType::F16),
            _ => Offset::Zero(ZeroType::BF16),
        };
        let bits = [4, 5, 6, 8, self.byte()][self.index(5)];
        let group = [16, 32, 64, self.number()][self.index(4)];
        Encoding::Quantized { bits, group, scale: self.dtype(), offset }
    }

    fn op(&mut self) -> Op {
        match self.byte() % 16 {
            0 => Op::Embed,
            1 => Op::Advance,
            2 => Op::Scale { factor: self.real() },
            3 => Op::ScaleByWeight,
            4 => Op::Add,
            5 => Op::RmsNorm { eps: self.real() },
            6 => Op::Linear,
            7 => Op::SplitHeads { heads: self.number() },
            8 => Op::MergeHeads,
            9 => Op::Rope { base: self.real(), rotated: self.number(), factor: self.real() },
            10 => Op::BufferWrite,
            11 => {
                let window = (!self.byte().is_multiple_of(3)).then(|| self.number());
                Op::Attention { window, scale: self.real() }
            }
            12 => Op::GeGlu,
            13 => Op::LastRow,
            14 => Op::SoftCap { cap: self.real() },
            _ => Op::Sample,
        }
    }

    fn name(&mut self) -> String {
        const NAMES: [&str; 8] =
            ["decode", "prefill", "verify", "tokens", "logits", "token", "position", "x"];
        NAMES[self.index(8)].to_owned()
    }
}

/// Makes one change of a program.
pub(crate) fn edit(script: &mut Script<'_>, program: &mut Program) {
    match script.byte() % 16 {
        0 => program.max_context = script.number(),
        1 => program.vocab_size = script.number(),
        2 => {
            let text = &mut program.text;
            match script.byte() % 4 {
                0 => text.stop_tokens.push(script.number()),
                1 => text.bos_token = Some(script.number()),
                2 => text.temperature = script.real(),
                _ => text.top_p = script.real(),
            }
        }
        3 => {
            let at = script.index(program.weights.len());
            let Some(weight) = program.weights.get_mut(at) else { return };
            match script.byte() % 4 {
                0 => weight.dims = (0..script.index(6)).map(|_| script.number()).collect(),
                1 | 2 => {
                    let at = script.index(weight.dims.len());
                    weight.dims.get_mut(at).into_iter().for_each(|dim| *dim = script.number());
                }
                _ => weight.encoding = script.encoding(),
            }
        }
        4 => {
            let at = script.index(program.buffers.len());
            let Some(buffer) = program.buffers.get_mut(at) else { return };
            let at = script.index(buffer.dims.len());
            buffer.dims.get_mut(at).into_iter().for_each(|dim| *dim = script.dim());
        }
        5 => {
            let (from, to) = (script.index(program.methods.len()), script.name());
            let Some(method) = program.methods.get(from) else { return };
            let copy = Method { name: to, ..method.clone() };
            match script.byte() % 3 {
                0 => program.methods[from] = copy,
                1 => program.methods.push(copy),
                _ => drop(program.methods.remove(from)),
            }
        }
        _ => {
            let at = script.index(program.methods.len());
            if let Some(method) = program.methods.get_mut(at) {
                edit_method(script, method);
            }
        }
    }
}

fn edit_method(script: &mut Script<'_>, method: &mut Method) {
    let at = script.index(method.nodes.len() + 1);
    match script.byte() % 12 {
        0 => method.max_rows = script.number(),
        1 => {
            let at = script.index(method.inputs.len());
            let Some(input) = method.inputs.get_mut(at) else { return };
            input.fact = script.fact();
        }
        2 => {
            let at = script.index(method.outputs.len() + 1);
            let output = Output { name: script.name(), value: script.number() };
            match method.outputs.get_mut(at) {
                Some(Output { value, .. }) => *value = output.value,
                None => method.outputs.push(output),
            }
        }
        3 if at < method.nodes.len() => drop(method.nodes.remove(at)),
        4 | 5 => {
            let args = (0..script.index(7)).map(|_| script.operand()).collect();
            method.nodes.insert(at, Node { op: script.op(), args, label: String::new() });
        }
        6 => {
            let other = script.index(method.nodes.len());
            if at < method.nodes.len() {
                method.nodes.swap(at, other);
            }
        }
        7 | 8 => {
            let op = script.op();
            method.nodes.get_mut(at).into_iter().for_each(|node| node.op = op.clone());
        }
        _ => {
            let Some(node) = method.nodes.get_mut(at) else { return };
            let at = script.index(node.args.len() + 1);
            let operand = script.operand();
            match (node.args.get_mut(at), operand) {
                // Mostly another of the same kind, so that more is accepted.
                (Some(Operand::Value(id)), Operand::Value(new)) => *id = new,
                (Some(arg), operand) => *arg = operand,
                (None, operand) => node.args.push(operand),
            }
        }
    }
}
