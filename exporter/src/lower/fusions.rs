//! What the lowering may do in one launch instead of two.

/// Which fusions are applied: all, but where a test compares a program with one that lacks one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fusions {
    /// `add-norm`: a product joins the residual stream and that is normed for the next product in
    /// one launch. Else the norm is a launch of its own, which reads the stream again.
    pub add_norm: bool,
    /// `split`: whoever makes the few rows that a product reads leaves them in the limbs that it
    /// multiplies. Else they are float32, and every block of the product splits them.
    pub split: bool,
    /// `geglu`: a product of many rows leaves GEGLU of its sums. Else it leaves the sums, and GEGLU
    /// is a launch of its own.
    pub geglu: bool,
}

impl Fusions {
    /// Their names on a command line.
    pub const NAMES: [&str; 3] = ["add-norm", "split", "geglu"];

    /// All but the one of this name.
    ///
    /// # Errors
    /// A sentence with the names, if there is none of this name.
    pub fn without(name: &str) -> Result<Self, String> {
        let mut fusions = Self::default();
        match name {
            "add-norm" => fusions.add_norm = false,
            "split" => fusions.split = false,
            "geglu" => fusions.geglu = false,
            _ => return Err(format!("known are {}", Self::NAMES.join(", "))),
        }
        Ok(fusions)
    }
}

impl Default for Fusions {
    fn default() -> Self {
        Self { add_norm: true, split: true, geglu: true }
    }
}
