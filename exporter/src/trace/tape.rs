use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;

use gemma4_format::{Buffer, Dim, Encoding, Fact, Input, Method, Node, Op, Operand, Output};

use super::{Repr, Tensor};

/// The method being recorded. Clones are the same tape.
#[derive(Clone)]
pub struct Tape(Rc<RefCell<Recording>>);

struct Recording {
    inputs: Vec<Input>,
    nodes: Vec<Node>,
    /// For each value that a node computed, the index of the node.
    producers: Vec<usize>,
}

impl Tape {
    /// Starts a method with the given inputs; returns their values.
    pub fn start<const N: usize>(inputs: [(&str, Fact); N]) -> (Self, [Tensor; N]) {
        let declared = inputs
            .iter()
            .map(|(name, fact)| Input { name: (*name).to_owned(), fact: fact.clone() });
        let recording =
            Recording { inputs: declared.collect(), nodes: Vec::new(), producers: Vec::new() };
        let tape = Self(Rc::new(RefCell::new(recording)));
        let mut id = 0;
        let values = inputs.map(|(_, fact)| {
            id += 1;
            Tensor { fact, repr: Repr::Traced(id - 1, tape.clone()) }
        });
        (tape, values)
    }

    /// Ends the method; `outputs` are values of this tape.
    ///
    /// # Panics
    /// If an output is a value of another trace, which is a mistake in the caller.
    pub fn finish(self, name: &str, max_rows: u32, outputs: &[(&str, &Tensor)]) -> Method {
        let outputs = outputs.iter().map(|(name, tensor)| match &tensor.repr {
            Repr::Traced(id, tape) if self.same(tape) => {
                Output { name: (*name).to_owned(), value: *id }
            }
            _ => panic!("output `{name}` is no value of this trace"),
        });
        let outputs = outputs.collect();
        let recording = self.0.borrow();
        Method {
            name: name.to_owned(),
            max_rows,
            inputs: recording.inputs.clone(),
            nodes: recording.nodes.clone(),
            outputs,
        }
    }

    pub(super) fn same(&self, other: &Tape) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Appends a node; returns the id of its result, if it has one.
    pub(super) fn append(&self, op: Op, args: Vec<Operand>, has_result: bool) -> u32 {
        let mut recording = self.0.borrow_mut();
        let node = recording.nodes.len();
        recording.nodes.push(Node { op, args, label: String::new() });
        if has_result {
            recording.producers.push(node);
        }
        (recording.inputs.len() + recording.producers.len()) as u32 - 1
    }

    pub(super) fn label(&self, value: u32, label: &str) {
        let mut recording = self.0.borrow_mut();
        let computed = (value as usize).checked_sub(recording.inputs.len());
        if let Some(node) = computed.and_then(|at| recording.producers.get(at).copied()) {
            label.clone_into(&mut recording.nodes[node].label);
        }
    }
}

impl fmt::Debug for Tape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tape({} nodes)", self.0.borrow().nodes.len())
    }
}

/// Weights and buffers that the methods of one program share, in order of first use.
#[derive(Debug, Default)]
pub struct Tables {
    /// Name, dims and encoding of each weight.
    pub weights: Vec<(String, Vec<u32>, Encoding)>,
    /// The buffers.
    pub buffers: Vec<Buffer>,
    weight_ids: HashMap<String, u32>,
}

impl Tables {
    pub(super) fn weight(&mut self, name: &str, dims: &[u32], encoding: Encoding) -> u32 {
        let next = self.weights.len() as u32;
        *self.weight_ids.entry(name.to_owned()).or_insert_with(|| {
            self.weights.push((name.to_owned(), dims.to_vec(), encoding));
            next
        })
    }

    pub(super) fn buffer(&mut self, name: &str, dims: &[Dim]) -> u32 {
        self.buffers.push(Buffer { name: name.to_owned(), dims: dims.to_vec() });
        self.buffers.len() as u32 - 1
    }
}
