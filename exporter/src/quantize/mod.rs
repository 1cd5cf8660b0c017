//! Turns dense weights into codes: which weight gets which encoding ([`Recipe`]), how scales and
//! zero points are chosen ([`Method`]), and how much is lost ([`TensorReport`]).

mod bundle;
mod hqq;
mod min_max;
mod recipe;
mod report;
mod row;

pub use bundle::{Existing, write_bundle};
pub use recipe::{Codes, Group, Layers, Method, Recipe, Rule, Treatment};
pub(crate) use recipe::{EMBEDDING, HEAD, layer_of};
pub use report::{Loss, TensorReport, json, table};
pub(crate) use row::RowQuantizer;
