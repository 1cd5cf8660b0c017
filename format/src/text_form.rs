//! A program as text, for people and for snapshot tests.

use std::fmt::{self, Write};

use crate::dim::Fact;
use crate::op::Op;
use crate::program::{Method, Node, Operand, Program};

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Text of a stranger's file reaches no terminal as it is.
        let (architecture, recipe) =
            (self.source.architecture.escape_debug(), self.source.recipe.escape_debug());
        writeln!(f, "program {architecture} ({recipe})")?;
        writeln!(f, "  vocabulary {}, context up to {}", self.vocab_size, self.max_context)?;
        for weight in &self.weights {
            writeln!(
                f,
                "  weight {}: {} {:?}",
                weight.name,
                weight.encoding.describe(),
                weight.dims
            )?;
        }
        for buffer in &self.buffers {
            writeln!(f, "  buffer {}: {}", buffer.name, Fact::f32(buffer.dims.clone()))?;
        }
        for method in &self.methods {
            write_method(f, self, method)?;
        }
        Ok(())
    }
}

fn write_method(f: &mut fmt::Formatter<'_>, program: &Program, method: &Method) -> fmt::Result {
    writeln!(f, "\n{}(T <= {}) {{", method.name, method.max_rows)?;
    for (id, input) in method.inputs.iter().enumerate() {
        writeln!(f, "  %{id} = {}: {}", input.name, input.fact)?;
    }
    let values = program.values(method).map_err(|_| fmt::Error)?;
    let mut next = method.inputs.len();
    for node in &method.nodes {
        let has_result = !matches!(node.op, Op::BufferWrite);
        if has_result {
            write!(f, "  %{next}: {} = ", values[next])?;
            next += 1;
        } else {
            f.write_str("  ")?;
        }
        writeln!(f, "{}", node_text(program, node)?)?;
    }
    for output in &method.outputs {
        writeln!(f, "  return {} = %{}", output.name, output.value)?;
    }
    writeln!(f, "}}")
}

fn node_text(program: &Program, node: &Node) -> Result<String, fmt::Error> {
    let mut text = node.op.name().to_owned();
    let attributes = match &node.op {
        Op::Scale { factor } => format!("factor={factor}"),
        Op::RmsNorm { eps } => format!("eps={eps:e}"),
        Op::SplitHeads { heads } => format!("heads={heads}"),
        Op::Rope { base, rotated, factor } => {
            format!("base={base}, rotated={rotated}, factor={factor}")
        }
        Op::Attention { window: Some(window), scale } => format!("window={window}, scale={scale}"),
        Op::Attention { window: None, scale } => format!("scale={scale}"),
        Op::SoftCap { cap } => format!("cap={cap}"),
        _ => String::new(),
    };
    if !attributes.is_empty() {
        write!(text, "<{attributes}>")?;
    }
    let args: Vec<String> = node
        .args
        .iter()
        .map(|arg| match arg {
            Operand::Value(id) => format!("%{id}"),
            Operand::Weight(id) => {
                program.weights.get(*id as usize).map_or_else(String::new, |w| w.name.clone())
            }
            Operand::Buffer(id) => {
                program.buffers.get(*id as usize).map_or_else(String::new, |b| b.name.clone())
            }
        })
        .collect();
    write!(text, "({})", args.join(", "))?;
    if !node.label.is_empty() {
        write!(text, "  # {}", node.label.escape_debug())?;
    }
    Ok(text)
}
