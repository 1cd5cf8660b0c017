//! What holds for every program that this crate hands out.
//!
//! [`verify`] runs whenever a `.pte` is read and before one is written. After it succeeds,
//! every id points at something, every value is computed before it is used, every node has the
//! operands that its operation takes, rings are long enough for their windows, names are unique,
//! and dims multiply without overflow. It says nothing about whether the model is a good one.

use std::collections::HashSet;

use crate::dim::{Dim, Extents, Fact};
use crate::op::Op;
use crate::program::{Method, Operand, Program};
use crate::{Error, Result};

/// Longest name of a weight, buffer, method or value, in bytes.
pub const MAX_NAME: usize = 256;
/// Most methods of a program.
pub const MAX_METHODS: usize = 64;
/// Most inputs of a method.
pub const MAX_INPUTS: usize = 64;
/// Most nodes of a method. Placing values takes time in proportion to the square of their number.
pub const MAX_NODES: usize = 1 << 14;
/// Longest context in tokens.
pub const MAX_CONTEXT: u32 = 1 << 24;
/// Most rows of one call.
pub const MAX_ROWS: u32 = 1 << 16;
/// Largest extent of a value or weight.
pub const MAX_EXTENT: u32 = 1 << 28;
/// Most elements of one value or buffer.
pub const MAX_ELEMENTS: u64 = 1 << 40;

/// Checks a program completely.
pub fn verify(program: &Program) -> Result<()> {
    check_header(program)?;
    check_weights(program)?;
    check_buffers(program)?;
    if program.methods.len() > MAX_METHODS {
        return Err(Error::invalid("methods", format!("there are {}", program.methods.len())));
    }
    let mut names = HashSet::new();
    for method in &program.methods {
        check_name(&method.name, "method", &mut names)?;
        check_method(program, method)?;
    }
    for required in ["decode", "prefill"] {
        let method = program
            .method(required)
            .ok_or_else(|| Error::invalid("methods", format!("there is no `{required}`")))?;
        check_signature(program, method, &Method::standard_inputs(), &drawing(program))?;
    }
    if let Some(method) = program.method("verify") {
        let logits = Fact::f32([Dim::Rows, Dim::Fixed(program.vocab_size)]);
        let outputs = [("position", Fact::u32([Dim::Fixed(1)])), ("logits", logits)];
        check_signature(program, method, &Method::standard_inputs()[..2], &outputs)?;
    }
    if program.method("decode").is_some_and(|m| m.max_rows != 1) {
        return Err(Error::invalid("decode", "takes one row a call"));
    }
    Ok(())
}

fn check_header(program: &Program) -> Result<()> {
    let text = &program.text;
    let fail = |why: String| Err(Error::invalid("header", why));
    if program.max_context == 0 || program.max_context > MAX_CONTEXT {
        return fail(format!("a context of {} tokens", program.max_context));
    }
    if program.vocab_size == 0 || program.vocab_size > MAX_EXTENT {
        return fail(format!("a vocabulary of {} tokens", program.vocab_size));
    }
    if !(text.temperature.is_finite() && text.temperature >= 0.0) {
        return fail(format!("temperature {}", text.temperature));
    }
    if !(text.top_p > 0.0 && text.top_p <= 1.0) {
        return fail(format!("top_p {}", text.top_p));
    }
    for id in text.stop_tokens.iter().chain(&text.bos_token) {
        if *id >= program.vocab_size {
            return fail(format!("token {id} is outside the vocabulary"));
        }
    }
    if !text.stop_tokens.is_sorted_by(|a, b| a < b) {
        return fail("stop tokens are not sorted".to_owned());
    }
    Ok(())
}

fn check_weights(program: &Program) -> Result<()> {
    let mut names = HashSet::new();
    for weight in &program.weights {
        check_name(&weight.name, "weight", &mut names)?;
        if weight.dims.iter().any(|d| *d > MAX_EXTENT) {
            return Err(Error::weight(
                &weight.name,
                format!("dims {:?} are too large", weight.dims),
            ));
        }
        weight.encoding.parts(&weight.name, &weight.dims)?;
    }
    Ok(())
}

fn check_buffers(program: &Program) -> Result<()> {
    let mut names = HashSet::new();
    let extents = Extents { rows: 1, context: program.max_context };
    for buffer in &program.buffers {
        check_name(&buffer.name, "buffer", &mut names)?;
        let place = || format!("buffer `{}`", buffer.name);
        let [Dim::Context | Dim::Ring(1..), Dim::Fixed(_), Dim::Fixed(_)] = buffer.dims[..] else {
            return Err(Error::invalid(place(), "is not [rows, heads, head_dim]"));
        };
        check_extent(&Fact::f32(buffer.dims.clone()), extents)
            .map_err(|why| Error::invalid(place(), why))?;
    }
    Ok(())
}

fn check_method(program: &Program, method: &Method) -> Result<()> {
    let place = |node: usize| format!("method `{}`, node {node}", method.name);
    let fail = |why: String| Err(Error::invalid(format!("method `{}`", method.name), why));
    if method.max_rows == 0 || method.max_rows > MAX_ROWS {
        return fail(format!("{} rows a call", method.max_rows));
    }
    if method.inputs.len() > MAX_INPUTS || method.nodes.len() > MAX_NODES {
        let (inputs, nodes) = (method.inputs.len(), method.nodes.len());
        return fail(format!("{inputs} inputs and {nodes} nodes are too many"));
    }
    let mut names = HashSet::new();
    for input in &method.inputs {
        check_name(&input.name, "input", &mut names)?;
    }
    let values = program.values(method).map_err(|(at, why)| Error::invalid(place(at), why))?;
    let extents = Extents { rows: method.max_rows, context: program.max_context };
    for (id, fact) in values.iter().enumerate() {
        if let Err(why) = check_extent(fact, extents) {
            return fail(format!("value %{id}: {why}"));
        }
        if fact.dims.iter().any(|d| matches!(d, Dim::Context | Dim::Ring(_))) {
            return fail(format!("value %{id} is as long as the context"));
        }
    }
    for (at, node) in method.nodes.iter().enumerate() {
        if node.label.len() > MAX_NAME {
            return Err(Error::invalid(place(at), "a label is too long"));
        }
        check_index_operands(method, &node.op, &node.args)
            .and_then(|()| check_rings(program, method, &node.op, &node.args))
            .map_err(|why| Error::invalid(place(at), why))?;
    }
    let mut names = HashSet::new();
    for output in &method.outputs {
        check_name(&output.name, "output", &mut names)?;
        if output.value as usize >= values.len() {
            return fail(format!("output `{}` is no value", output.name));
        }
    }
    Ok(())
}

/// Rows of tables and buffers are addressed by the caller's own tokens and position, which a
/// runtime checks before the call, never by numbers that the program computes.
fn check_index_operands(method: &Method, op: &Op, args: &[Operand]) -> Result<(), String> {
    let (tokens, position) = match op {
        Op::Embed => (args.first(), None),
        Op::Advance => (args.first(), args.get(1)),
        Op::Rope { .. } | Op::BufferWrite | Op::Attention { .. } => (None, args.last()),
        _ => return Ok(()),
    };
    for (name, arg) in [("tokens", tokens), ("position", position)] {
        if let Some(arg) = arg
            && method.input(name).map(Operand::Value) != Some(*arg)
        {
            return Err(format!("{} must read the input `{name}`", op.name()));
        }
    }
    Ok(())
}

/// A call writes its keys before it attends, so a ring must hold the window of its first row and
/// all of its rows: `window + max_rows − 1`. Without a window everything must be there.
///
/// Then the rows of a call may be taken back, all or some: what they have overwritten lies before
/// the window of the call's first row, and so before every later window.
fn check_rings(
    program: &Program,
    method: &Method,
    op: &Op,
    args: &[Operand],
) -> Result<(), String> {
    let needed = match op {
        Op::BufferWrite => u64::from(method.max_rows),
        Op::Attention { window: Some(window), .. } => {
            u64::from(*window) + u64::from(method.max_rows) - 1
        }
        Op::Attention { window: None, .. } => u64::MAX,
        _ => return Ok(()),
    };
    for arg in args {
        let Operand::Buffer(id) = arg else { continue };
        let Some(buffer) = program.buffers.get(*id as usize) else { continue };
        if let Some(Dim::Ring(rows)) = buffer.dims.first()
            && u64::from(*rows) < needed
        {
            return Err(format!("the ring `{}` of {rows} rows is too short", buffer.name));
        }
    }
    Ok(())
}

/// Outputs of a method that draws a token.
fn drawing(program: &Program) -> [(&'static str, Fact); 3] {
    let one = Dim::Fixed(1);
    [
        ("token", Fact::u32([one])),
        ("position", Fact::u32([one])),
        ("logits", Fact::f32([one, Dim::Fixed(program.vocab_size)])),
    ]
}

/// The inputs and outputs that a runtime relies on.
fn check_signature(
    program: &Program,
    method: &Method,
    inputs: &[(&str, Fact)],
    outputs: &[(&str, Fact)],
) -> Result<()> {
    let fail = |why: String| Err(Error::invalid(format!("method `{}`", method.name), why));
    if method.inputs.len() != inputs.len() {
        return fail(format!("has {} inputs instead of {}", method.inputs.len(), inputs.len()));
    }
    for ((name, fact), input) in inputs.iter().zip(&method.inputs) {
        if input.name != *name || !input.fact.same(fact) {
            return fail(format!("input `{}` is not `{name}: {fact}`", input.name));
        }
    }
    let values = program.values(method).map_err(|(_, why)| Error::invalid(&method.name, why))?;
    for (name, fact) in outputs {
        let found = method.output(name).and_then(|id| values.get(id as usize));
        if !found.is_some_and(|f| f.same(fact)) {
            return fail(format!("has no output `{name}: {fact}`"));
        }
    }
    let embeds_beyond = method.nodes.iter().any(|node| match (&node.op, node.args.get(1)) {
        (Op::Embed, Some(Operand::Weight(id))) => {
            program.weights[*id as usize].dims[0] < program.vocab_size
        }
        _ => false,
    });
    if embeds_beyond {
        return fail("an embedding table is shorter than the vocabulary".to_owned());
    }
    Ok(())
}

fn check_extent(fact: &Fact, extents: Extents) -> Result<(), String> {
    if fact.dims.is_empty() || fact.dims.len() > 4 {
        return Err(format!("{} dimensions", fact.dims.len()));
    }
    if fact.dims.iter().any(|d| !(1..=MAX_EXTENT).contains(&d.resolve(extents))) {
        return Err(format!("an extent of {fact} is out of range"));
    }
    match fact.elements(extents) {
        Some(n) if n <= MAX_ELEMENTS => Ok(()),
        _ => Err(format!("{fact} has too many elements")),
    }
}

fn check_name<'a>(name: &'a str, kind: &str, seen: &mut HashSet<&'a str>) -> Result<()> {
    let printable = name.chars().all(|c| c.is_ascii_graphic());
    if name.is_empty() || name.len() > MAX_NAME || !printable || name.starts_with("__") {
        return Err(Error::invalid(kind, format!("{name:?} is no name")));
    }
    if !seen.insert(name) {
        return Err(Error::invalid(kind, format!("`{name}` stands twice")));
    }
    Ok(())
}
